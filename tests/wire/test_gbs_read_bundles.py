"""Read bundles as bytes: what is packed is unpacked, and nothing else is taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.wire import cbor, gbs_bundles
from pipegrid.wire.gbs_bundles import (
    MAX_READ_BUNDLE_BYTES,
    MAX_READ_BYTES,
    MAX_READS,
    READ_ANSWER_BYTES,
    BundledRead,
)

INDEX = b"i" * 16

reads = st.builds(
    BundledRead,
    st.binary(min_size=16, max_size=16),
    st.integers(0, 300),
    st.integers(1, MAX_READ_BYTES // 8),
)


class ReadsTests(SynchronousTestCase):
    """What a server reads."""

    @given(st.lists(reads, max_size=8))
    def test_there_and_back(self, asked: list[BundledRead]) -> None:
        """Whatever is asked arrives."""
        body = gbs_bundles.pack_reads(asked)
        self.assertEqual(gbs_bundles.unpack_reads(body), asked)

    def test_the_longest(self) -> None:
        """The longest bundle fits."""
        longest = [BundledRead(INDEX, (1 << 63) - 1, MAX_READ_BYTES // MAX_READS)] * MAX_READS
        body = gbs_bundles.pack_reads(longest)
        self.assertLess(len(body), MAX_READ_BUNDLE_BYTES)
        self.assertEqual(gbs_bundles.unpack_reads(body), longest)

    def test_refused(self) -> None:
        """Everything else is refused with the place."""
        for value, what in (
            ([[INDEX, 0, 1]] * (MAX_READS + 1), "more than 257 items"),
            ([0] * (MAX_READS + 1), "the bundle has"),
            ([[INDEX, 0, MAX_READ_BYTES], [INDEX, 1, 1]], "more than 262144 bytes"),
            ({}, "the bundle is not an array"),
            ([[INDEX, 0]], "a read has 2 fields"),
            ([[INDEX[1:], 0, 1]], "storage index"),
            ([[INDEX, -1, 1]], "number"),
            ([[INDEX, 0, 0]], "no bytes"),
            ([[INDEX, 0, MAX_READ_BYTES + 1]], "length"),
            ([[INDEX, True, 1]], "number"),
        ):
            with self.assertRaisesRegex(ValueError, what):
                gbs_bundles.unpack_reads(cbor.dumps(value))
        with self.assertRaises(ValueError):
            gbs_bundles.unpack_reads(bytes(MAX_READ_BUNDLE_BYTES + 1))


class AnswersTests(SynchronousTestCase):
    """What a client reads."""

    def test_there_and_back(self) -> None:
        """Whatever is answered arrives, and an item is not larger than is said."""
        asked = [BundledRead(INDEX, number, MAX_READ_BYTES // 4) for number in range(4)]
        answered: list[bytes | int] = [bytes(MAX_READ_BYTES // 4), 404, b"", b"abc"]
        body = gbs_bundles.pack_read_answers(answered)
        self.assertEqual(gbs_bundles.unpack_read_answers(body, asked), answered)
        size = sum(len(each) for each in answered if isinstance(each, bytes))
        self.assertLessEqual(len(body), size + (1 + len(asked)) * READ_ANSWER_BYTES)

    def test_refused(self) -> None:
        """A server that answers other than it was asked says nothing."""
        asked = [BundledRead(INDEX, 0, 3)]
        for value, what in (
            ([b"abcd"], "more bytes than"),
            (["abc"], "not a byte string"),
            ([99], "status"),
            ([b"abc", b"abc"], "2 "),
            ([], "0 "),
            ({}, "not an array"),
        ):
            with self.assertRaisesRegex(ValueError, what):
                gbs_bundles.unpack_read_answers(cbor.dumps(value), asked)
