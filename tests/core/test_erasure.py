"""Any k of n blocks are the segment."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core import erasure
from pipegrid.core.erasure import STRIPE_BYTES, WIDE_STRIPE_BYTES, decode, encode_stripe, stripes
from pipegrid.core.hashes import Buffer


def encode(segment: bytes, required_shares: int, total_shares: int) -> dict[int, Buffer]:
    """Return all blocks of a segment, padded here, coded as one stripe."""
    size = -(-len(segment) // required_shares)
    padded = segment.ljust(size * required_shares, b"\0")
    primary = [padded[j * size : (j + 1) * size] for j in range(required_shares)]
    numbers = tuple(range(required_shares, total_shares))
    parity = encode_stripe(primary, numbers, required_shares, total_shares)
    blocks: dict[int, Buffer] = dict(enumerate(primary))
    blocks.update(zip(numbers, parity, strict=True))
    return blocks


class StripesTests(SynchronousTestCase):
    """How a block is cut."""

    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(st.integers(1, 5 * STRIPE_BYTES))
    def test_stripes_cover_the_block(self, block_bytes: int) -> None:
        """They follow each other from start to end, none too long."""
        for limit in (STRIPE_BYTES, WIDE_STRIPE_BYTES):
            cut = list(stripes(block_bytes, limit))
            self.assertEqual((cut[0][0], cut[-1][1]), (0, block_bytes))
            for (_, end), (start, _) in pairwise(cut):
                self.assertEqual(end, start)
            self.assertTrue(all(0 < end - start <= limit for start, end in cut))

    def test_stripes_are_as_long_as_suits_the_library(self) -> None:
        """What is coded quickly is worth fewer turns; a short block needs no library for that."""
        for library, limit in ((None, STRIPE_BYTES), (object(), WIDE_STRIPE_BYTES)):
            self.patch(erasure, "load_isal", lambda library=library: library)
            self.assertEqual(list(stripes(2 * limit)), [(0, limit), (limit, 2 * limit)])
        self.patch(erasure, "load_isal", lambda: self.fail("loaded for a short block"))
        self.assertEqual(list(stripes(STRIPE_BYTES)), [(0, STRIPE_BYTES)])

    def test_no_stripe_is_tiny(self) -> None:
        """One byte more than a stripe becomes two halves."""
        first, second = stripes(STRIPE_BYTES + 1, STRIPE_BYTES)
        self.assertLess(abs((first[1] - first[0]) - (second[1] - second[0])), 128)


class CodingTests(SynchronousTestCase):
    """Encoding and decoding are each other's inverse."""

    def test_any_k_of_n_blocks_restore_the_segment(self) -> None:
        """Whichever blocks are left, in whatever order they came."""
        segment = bytes(random.Random(1).randbytes(50))
        for k, n in ((1, 1), (1, 3), (2, 3), (3, 6), (4, 4), (3, 10)):
            blocks = encode(segment, k, n)
            for numbers in combinations(reversed(range(n)), k):
                chosen = {number: blocks[number] for number in numbers}
                restored = b"".join(decode(chosen, k, n, len(segment)))
                self.assertEqual(restored, segment, f"{numbers} of {k}/{n}")

    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(st.data())
    def test_the_largest_codes_work(self, data: st.DataObject) -> None:
        """Up to 256 shares, with any blocks missing."""
        k, n = data.draw(st.sampled_from([(71, 255), (101, 256), (255, 256), (256, 256)]))
        segment = random.Random(data.draw(st.integers(0, 99))).randbytes(1000)
        blocks = encode(segment, k, n)
        numbers = data.draw(st.permutations(range(n)))[:k]
        chosen = {number: blocks[number] for number in numbers}
        self.assertEqual(b"".join(decode(chosen, k, n, len(segment))), segment)

    def test_stripes_and_whole_blocks_agree(self) -> None:
        """Every byte is coded with those of its own column only, so cuts change nothing."""
        segment = random.Random(2).randbytes(5 * STRIPE_BYTES + 17)
        blocks = encode(segment, 2, 4)
        views = [memoryview(blocks[0]), memoryview(blocks[1])]
        pieces = [
            encode_stripe([view[start:end] for view in views], (3, 2), 2, 4)
            for start, end in stripes(len(blocks[0]), STRIPE_BYTES)
        ]
        self.assertGreater(len(pieces), 2)
        self.assertEqual(b"".join(piece[0] for piece in pieces), blocks[3])
        self.assertEqual(b"".join(piece[1] for piece in pieces), blocks[2])
        parity: dict[int, Buffer] = {3: memoryview(blocks[3]), 2: bytearray(blocks[2])}
        self.assertEqual(b"".join(decode(parity, 2, 4, len(segment))), segment)

    def test_primary_blocks_are_handed_on_uncopied(self) -> None:
        """When they are all there, decoding costs nothing, whatever else is there too."""
        blocks = encode(bytes(range(90)), 3, 10)
        pieces = decode(blocks, 3, 10, 90)
        self.assertEqual(len(pieces), 3)
        for number, piece in enumerate(pieces):
            self.assertIs(piece, blocks[number])

    def test_padding_is_cut_off(self) -> None:
        """Even where it takes up whole blocks."""
        for length in range(1, 12):
            segment = bytes(range(1, length + 1))
            blocks = encode(segment, 5, 8)
            for numbers in ((0, 1, 2, 3, 4), (3, 4, 5, 6, 7)):
                chosen = {number: blocks[number] for number in numbers}
                self.assertEqual(b"".join(decode(chosen, 5, 8, length)), segment)

    def test_too_few_or_uneven_blocks_are_refused(self) -> None:
        """Blocks were checked before they come here, so this is a broken invariant."""
        blocks = encode(bytes(90), 3, 10)
        self.assertRaises(AssertionError, decode, {0: blocks[0], 1: blocks[1]}, 3, 10, 90)
        uneven = {0: blocks[0], 1: blocks[1], 9: b"short"}
        self.assertRaises(AssertionError, decode, uneven, 3, 10, 90)
