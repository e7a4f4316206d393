"""ISA-L computes what zfec does, and without it zfec does all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import erasure
from pipegrid.core.hashes import Buffer

CODES = ((2, 3), (3, 6), (3, 10), (4, 4), (7, 10), (10, 10), (1, 5), (16, 40), (71, 255))
LONG = erasure.QUICK_BYTES


def blocks_of(k: int, size: int, seed: int = 1) -> list[bytes]:
    """Return k random blocks."""
    chance = random.Random(seed)
    return [chance.randbytes(size) for _ in range(k)]


class IsalTests(SynchronousTestCase):
    """Beside zfec."""

    def setUp(self) -> None:
        self.assertIsNotNone(
            erasure.load_isal(), "install ISA-L; on Debian: apt-get install libisal2"
        )
        self.clear()
        self.addCleanup(self.clear)

    def clear(self) -> None:
        """Forget the matrices that were made."""
        erasure._encoding.cache_clear()
        erasure._decoding.cache_clear()

    def both(self, compute: Any) -> tuple[Any, Any]:
        """Return what is computed with ISA-L, and without."""
        self.clear()
        quick = compute()
        self.clear()
        self.patch(erasure, "load_isal", lambda: None)
        slow = compute()
        self.clear()
        self.patch(erasure, "load_isal", type(self).load)
        return quick, slow

    load = staticmethod(erasure.load_isal)

    def note_uses(self) -> list[int]:
        """Return a list of the lengths of blocks that ISA-L codes from now on."""
        used: list[int] = []
        call = erasure.Multiplier.__call__

        def noting(multiplier: erasure.Multiplier, blocks: Sequence[Buffer]) -> list[Buffer]:
            used.append(len(blocks[0]))
            return call(multiplier, blocks)

        self.patch(erasure.Multiplier, "__call__", noting)
        return used

    def test_encoding(self) -> None:
        """The same parity, whatever the code, the blocks that are wanted, and the length."""
        for k, n in CODES:
            for size in (LONG, LONG + 1, LONG + 63):
                primary = blocks_of(k, size)
                for numbers in (tuple(range(k, n)), tuple(range(k, n))[::-3]):
                    quick, slow = self.both(
                        lambda p=primary, w=numbers, k=k, n=n: [
                            bytes(each) for each in erasure.encode_stripe(p, w, k, n)
                        ]
                    )
                    self.assertEqual(quick, slow, f"{numbers} of {k}/{n}, {size} bytes")

    def test_decoding(self) -> None:
        """Any k blocks give the segment."""
        for k, n in ((2, 4), (3, 6)):
            primary = blocks_of(k, LONG + 5)
            parity = erasure.encode_stripe(primary, tuple(range(k, n)), k, n)
            blocks: dict[int, Buffer] = dict(enumerate([*primary, *parity]))
            segment = b"".join(primary)
            for numbers in combinations(range(n), k):
                chosen = {number: blocks[number] for number in numbers}
                found = b"".join(erasure.decode(chosen, k, n, len(segment)))
                self.assertTrue(found == segment, f"{numbers} of {k}/{n}")

    def test_it_is_used(self) -> None:
        """For long blocks alone."""
        used = self.note_uses()
        for size in (LONG - 1, LONG):
            erasure.encode_stripe(blocks_of(3, size), (3, 4), 3, 5)
        self.assertEqual([size for size in used if size >= LONG - 1], [LONG])

    def test_shorter_blocks(self) -> None:
        """Once it has coded a long block it codes shorter ones, too, but not the shortest."""
        short = blocks_of(3, erasure.LOADED_BYTES)
        slow = [bytes(each) for each in erasure.encode_stripe(short, (3, 4), 3, 5)]
        self.assertEqual(erasure._encoding.cache_info().currsize, 0)
        erasure.encode_stripe(blocks_of(3, LONG), (3, 4), 3, 5)
        used = self.note_uses()
        self.assertEqual([bytes(x) for x in erasure.encode_stripe(short, (3, 4), 3, 5)], slow)
        erasure.encode_stripe([each[1:] for each in short], (3, 4), 3, 5)
        self.assertEqual(used, [erasure.LOADED_BYTES])

    def test_every_kind_of_buffer(self) -> None:
        """Read-only or not, whole or a part of something; they are left as they are, and free again."""
        whole = bytearray(random.Random(2).randbytes(3 * LONG + 100))
        view = memoryview(whole)
        primary: list[Buffer] = [
            bytes(view[:LONG]),
            bytearray(view[LONG : 2 * LONG]),
            view[2 * LONG + 1 : 3 * LONG + 1].toreadonly(),
        ]
        before = bytes(whole)
        quick, slow = self.both(
            lambda: [bytes(each) for each in erasure.encode_stripe(primary, (3, 4, 5), 3, 6)]
        )
        self.assertEqual(quick, slow)
        self.assertEqual(bytes(whole), before)
        primary.clear()
        view.release()
        whole.clear()  # fails while anybody borrows it

    def test_blocks_of_different_lengths(self) -> None:
        """They are refused, and nothing stays borrowed."""
        short = bytearray(LONG - 1)
        with self.assertRaises(ValueError):
            erasure.encode_stripe([bytes(LONG), short], (2,), 2, 3)
        short.clear()

    def test_a_library_that_computes_something_else(self) -> None:
        """It is not used, and one is told."""
        quick = erasure.load_isal()

        class Wrong:
            def ec_init_tables(self, k: int, rows: int, given: bytes, tables: Any) -> None:
                quick.ec_init_tables(k, rows, bytes([given[0] ^ 1]) + given[1:], tables)

            ec_encode_data = quick.ec_encode_data

        self.patch(erasure, "load_isal", Wrong)
        primary = blocks_of(3, LONG)
        right = [bytes(each) for each in erasure._encoder(3, 5).encode(tuple(primary), (3, 4))]
        found = self.assertWarns(
            RuntimeWarning,
            "ISA-L computes other blocks than zfec, so zfec is used; update ISA-L",
            erasure.__file__,
            erasure.encode_stripe,
            primary,
            (3, 4),
            3,
            5,
        )
        self.assertEqual([bytes(each) for each in found], right)
