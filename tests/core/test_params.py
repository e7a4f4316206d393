"""The numbers that follow from a file's size."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.encoding_parameters import Geometry, Params, round_up
from pipegrid.errors import UsageError
from tests import vectors


class ParamsTests(SynchronousTestCase):
    """Parameters and geometry."""

    def test_refuses_impossible_counts(self) -> None:
        """Counts outside 1 <= k <= n <= 256 are refused, given or read."""
        for k, n in ((0, 10), (-1, 10), (11, 10), (3, 257), (257, 257), (0, 0)):
            self.assertRaises(UsageError, Params, k, n)
            self.assertRaises(UsageError, Geometry, 100, k, n, 100)
        Params(1, 1)
        Params(256, 256)

    def test_refuses_impossible_segments(self) -> None:
        """A segment is at least a byte per block, and cut into equal blocks."""
        self.assertRaises(UsageError, Params, 3, 10, 0)
        for segment_bytes in (0, -3, 100):
            self.assertRaises(UsageError, Geometry, 1000, 3, 10, segment_bytes)

    def test_refuses_the_empty_file(self) -> None:
        """A file without bytes has no shares."""
        self.assertRaises(UsageError, Params().geometry, 0)
        self.assertRaises(UsageError, Params().geometry, -1)

    def test_recorded_files(self) -> None:
        """Segments of the recorded files have the recorded sizes."""
        for case in vectors.load("immutable")["cases"]:
            if case["format"] == "lit":
                continue
            size = len(vectors.plaintext(case["plaintext"]))
            geometry = Params(case["k"], case["n"], case["max_segment_size"]).geometry(size)
            self.assertEqual(geometry.segment_bytes, case["segment_size"], case["name"])

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(
        st.integers(1, 1 << 50), st.integers(1, 256), st.integers(0, 255), st.integers(1, 1 << 22)
    )
    def test_parts_make_the_whole(self, size: int, k: int, more: int, segment: int) -> None:
        """Segments cover the file without gap, and k blocks cover a segment."""
        geometry = Params(k, min(256, k + more), segment).geometry(size)
        last = geometry.num_segments - 1
        self.assertEqual(last * geometry.segment_bytes + geometry.tail_bytes, size)
        self.assertTrue(1 <= geometry.tail_bytes <= geometry.segment_bytes)
        self.assertEqual(geometry.padded_tail_bytes, round_up(geometry.tail_bytes, k))
        self.assertEqual(geometry.segment_length(last), geometry.tail_bytes)
        self.assertEqual(geometry.block_length(last) * k, geometry.padded_tail_bytes)
        self.assertEqual(geometry.share_data_bytes, -(-size // k))
        if last:
            self.assertEqual(geometry.segment_length(0), geometry.segment_bytes)
            self.assertEqual(geometry.block_length(0) * k, geometry.segment_bytes)
