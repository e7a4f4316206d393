"""Changes of a range of an MDMF file: the same file as if it were written whole, and little travels."""

from __future__ import annotations

import random
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.mutable.encoder import EncodedVersion
from pipegrid.core.mutable.mutable_share import MutableShare
from pipegrid.core.mutable.range_update import MAX_GROWING_SEGMENTS, RangeUpdate
from pipegrid.core.mutable.versions import MAX_MUTABLE_BYTES, Format, Version
from pipegrid.errors import CorruptionError, UsageError
from tests.core.mutable.support import book, key, make, reader_of, shares_of, write_into

EXAMPLES = settings(max_examples=100, deadline=None, derandomize=True)


class Servers:
    """Shares that can be read and written, and what that took."""

    def __init__(self, encoded: EncodedVersion) -> None:
        self.shares = {n: bytearray(share) for n, share in shares_of(encoded).items()}
        self.read_bytes = 0

    def open(self, update: RangeUpdate, with_blocks: Iterable[int]) -> None:
        """Give an update all that it asks for."""
        for number, data in self.shares.items():
            share = MutableShare(number)
            share.answered(0, 123, bytes(data[:123]))
            update.add_share(share)
            while gaps := update.missing(number, number in with_blocks):
                for start, end in gaps:
                    share.answered(start, end - start, bytes(data[start:end]))
                    self.read_bytes += end - start

    def change(self, update: RangeUpdate, data: bytes, sequence_number: int = 2) -> EncodedVersion:
        """Let an update do its work, and write what it made."""
        while (job := update.next_job()) is not None:
            update.finish(job.run())
        assert update.is_ready
        salts = random.Random(repr(data))
        encoded = update.encode(
            data, sequence_number, key(), [salts.randbytes(16) for _ in update.touched]
        )
        for number, share in self.shares.items():
            write_into(share, encoded, number)
        return encoded

    def content(self, numbers: Iterable[int]) -> tuple[Version, bytes | None]:
        """Return the version and contents that these shares hold now."""
        shares = {n: bytes(share) for n, share in self.shares.items()}
        reader = reader_of(shares, numbers, book(format=Format.MDMF), key().readkey)
        made = reader.whole()
        assert not reader.corrupt, reader.corrupt
        return reader.version, made


@st.composite
def changes(draw: st.DrawFn) -> tuple[int, int, int, bytes, list[tuple[int, bytes]]]:
    """Return k, n, segment size, contents and some changes of a file."""
    n = draw(st.integers(1, 5))
    k = draw(st.integers(1, n))
    segment = k * draw(st.integers(1, 6))
    size = draw(st.integers(0, 9 * segment))
    made = []
    longest = size
    for _ in range(draw(st.integers(1, 3))):
        offset = draw(st.integers(0, longest))
        length = draw(st.integers(1, 3 * segment))
        longest = max(longest, offset + length)
        made.append((offset, draw(st.binary(min_size=length, max_size=length))))
    return k, n, segment, bytes(i & 0xFF for i in range(size)), made


class UpdateTests(SynchronousTestCase):
    """Partial updates."""

    @EXAMPLES
    @given(changes(), st.randoms(use_true_random=False))
    def test_the_file_is_what_it_should_be(
        self,
        case: tuple[int, int, int, bytes, list[tuple[int, bytes]]],
        rng: random.Random,
    ) -> None:
        """After any changes any k shares restore the contents, with every tree as a whole write makes it."""
        k, n, segment, content, made = case
        encoded = make(content, Format.MDMF, k, n, segment)
        servers = Servers(encoded)
        expected = bytearray(content)
        version = encoded.version
        for sequence_number, (offset, data) in enumerate(made, 2):
            update = RangeUpdate(version, offset, len(data), key().readkey)
            servers.open(update, rng.sample(range(n), k))
            version = servers.change(update, data, sequence_number).version
            expected[offset : offset + len(data)] = data
        for numbers in (rng.sample(range(n), k), range(n)):
            self.assertEqual(servers.content(numbers), (version, bytes(expected)))

    def test_little_travels(self) -> None:
        """A kilobyte in the middle of 2000 segments: two blocks of k shares, paths of all, and no more."""
        segment, k, n = 64, 2, 4
        content = random.Random(2).randbytes(2000 * segment)
        encoded = make(content, Format.MDMF, k, n, segment)
        servers = Servers(encoded)
        update = RangeUpdate(encoded.version, 1000 * segment + 10, segment, key().readkey)
        self.assertEqual(update.segments_to_read, (1000, 1001))
        self.assertFalse(update.moves_tree)
        servers.open(update, range(k))
        path = 2 * 64 * 11 + 32 + 2 * 34
        # The reader of blocks gets its part of a large tree; the others only paths.
        self.assertLess(servers.read_bytes, n * path + k * (2 * 48 + 80_000))
        changed = servers.change(update, b"!" * segment)
        written = sum(write.length for writes in changed.writes.values() for write in writes)
        self.assertLess(written, n * (123 + 256 + 34 * 2 + 2 * (32 + 16) + 2 * 32 * 12))
        expected = bytearray(content)
        expected[1000 * segment + 10 : 1001 * segment + 10] = b"!" * segment
        self.assertEqual(servers.content([1, 3])[1], bytes(expected))

    def test_append(self) -> None:
        """Appending at a segment's end reads no block at all; within one, the last."""
        for size, to_read in ((40, ()), (41, (4,)), (0, ())):
            content = bytes(range(size))
            encoded = make(content, Format.MDMF, 2, 3, 10)
            servers = Servers(encoded)
            update = RangeUpdate(encoded.version, size, 25, key().readkey)
            self.assertEqual(update.segments_to_read, to_read)
            self.assertTrue(update.moves_tree)
            servers.open(update, [1, 2])
            servers.change(update, b"x" * 25)
            self.assertEqual(servers.content([0, 2])[1], content + b"x" * 25)

    def test_whole_segments_are_not_read(self) -> None:
        """What is overwritten from end to end is not read before, nor the end of the file that goes."""
        encoded = make(bytes(95), Format.MDMF, 1, 1, 10)
        for offset, length, to_read in (
            (10, 20, ()),
            (10, 21, (3,)),
            (9, 21, (0,)),
            (9, 22, (0, 3)),
            (90, 5, ()),
            (90, 4, (9,)),
            (0, 95, ()),
            (12, 3, (1,)),
        ):
            update = RangeUpdate(encoded.version, offset, length, key().readkey)
            self.assertEqual(update.segments_to_read, to_read, (offset, length))

    def test_refusals(self) -> None:
        """Gaps, nothing, SDMF and files that are too long are refused with a sentence."""
        mdmf, sdmf = make(bytes(50), Format.MDMF).version, make(bytes(50)).version
        for version, offset, length in (
            (mdmf, 51, 1),
            (mdmf, -1, 1),
            (mdmf, 5, 0),
            (mdmf, 50, MAX_MUTABLE_BYTES),
            (mdmf, 50, (MAX_GROWING_SEGMENTS + 1) << 17),
            (sdmf, 0, 1),
        ):
            error = self.assertRaises(UsageError, RangeUpdate, version, offset, length, bytes(16))
            self.assertNotIn("\n", str(error))

    def test_all_shares_are_needed(self) -> None:
        """Without one of the shares the new version cannot be made, and the update says which."""
        encoded = make(bytes(50), Format.MDMF, 1, 3, 10)
        update = RangeUpdate(encoded.version, 0, 10, key().readkey)
        self.assertEqual(update.lacking_shares, {0, 1, 2})
        for number in (0, 2):
            update.add_share(MutableShare.of(number, encoded.share(number)))
        self.assertEqual(update.lacking_shares, {1})
        self.assertFalse(update.is_ready)
        update.add_share(MutableShare.of(1, encoded.share(1)))
        self.assertTrue(update.is_ready)

    def test_lying_trees_are_found(self) -> None:
        """Old nodes that a server made up do not get into the new version: the share is named instead."""
        for moving, bad_node in ((False, 1), (False, 4), (True, 7), (True, 0)):
            encoded = make(bytes(80), Format.MDMF, 1, 2, 10)
            servers = Servers(encoded)
            header = MutableShare.of(1, encoded.share(1)).header
            assert header is not None
            servers.shares[1][header.sections.tree[0] + 32 * bad_node] ^= 1
            offset = 80 if moving else 30
            update = RangeUpdate(encoded.version, offset, 10, key().readkey)
            servers.open(update, [0])
            error = self.assertRaises(CorruptionError, servers.change, update, b"x" * 10)
            self.assertEqual(error.share_number, 1)
            self.assertEqual(update.lacking_shares, {1})
            self.assertEqual(len(update.corrupt), 1)

    def test_lying_blocks_are_found(self) -> None:
        """An old block that is wrong makes its share lacking; another copy of it does."""
        encoded = make(bytes(80), Format.MDMF, 1, 2, 10)
        servers = Servers(encoded)
        header = MutableShare.of(0, encoded.share(0)).header
        assert header is not None
        servers.shares[0][header.sections.data[0] + 20] ^= 1
        update = RangeUpdate(encoded.version, 2, 3, key().readkey)
        servers.open(update, [0])
        job = update.next_job()
        assert job is not None
        self.assertFalse(update.finish(job.run()))
        self.assertEqual(update.lacking_shares, {0})
        update.add_share(MutableShare.of(0, encoded.share(0)))
        job = update.next_job()
        assert job is not None
        self.assertTrue(update.finish(job.run()))
        self.assertTrue(update.is_ready)

    def test_a_share_that_ends_early(self) -> None:
        """A share cut off within its tree is named, and lacking."""
        encoded = make(bytes(80), Format.MDMF, 1, 2, 10)
        update = RangeUpdate(encoded.version, 80, 3, key().readkey)
        update.add_share(MutableShare.of(0, encoded.share(0)[:-40]))
        update.add_share(MutableShare.of(1, encoded.share(1)))
        self.assertFalse(update.is_ready)
        self.assertEqual(update.missing(0), [])
        self.assertEqual(update.lacking_shares, {0})
        self.assertIn("ends at byte", str(update.corrupt[0]))
        self.assertEqual(update.missing(0), [])
