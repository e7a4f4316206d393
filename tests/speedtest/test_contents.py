"""What the speed test stores, and the comparison of what comes back."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import CorruptionError
from pipegrid.speedtest.benchmark_clients import Comparing, Contents


class ContentsTests(SynchronousTestCase):
    """``Contents``."""

    def test_files_are_fresh_and_follow_from_the_seed(self) -> None:
        """Two runs with one seed store the same; no file is stored twice in a run."""
        first, second = Contents(7), Contents(7)
        files = first.files([200, 200]) + first.files([200])
        self.assertEqual(len(set(files)), 3)
        self.assertEqual(second.files([200, 200, 200]), files)
        self.assertNotEqual(Contents(8).files([200]), files[:1])


class ComparingTests(SynchronousTestCase):
    """``Comparing``."""

    def test_wrong_bytes_give_no_figure(self) -> None:
        """What comes back is compared, to its last byte."""
        for pieces, good in (
            ((b"exp", bytearray(b"ect"), memoryview(b"ed")), True),
            ((b"expect",), False),
            ((b"expected", b"more"), False),
            ((b"eXpected",), False),
            ((b"detcepxe",), False),
        ):
            sink = Comparing(b"expected")
            try:
                for piece in pieces:
                    sink.write(piece)
                sink.check()
            except CorruptionError:
                self.assertFalse(good, pieces)
            else:
                self.assertTrue(good, pieces)
