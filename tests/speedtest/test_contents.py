"""What the speed test stores, and the comparison of what comes back."""

from __future__ import annotations

from random import Random

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import CorruptionError
from pipegrid.speedtest.benchmark_clients import Comparing, new_files


class ContentsTests(SynchronousTestCase):
    """``new_files``."""

    def test_files_are_fresh_and_follow_from_the_seed(self) -> None:
        """Two runs with one seed store the same; no file is stored twice in a run."""
        first, second = Random(7), Random(7)
        files = new_files(first, [200, 200]) + new_files(first, [200])
        self.assertEqual(len(set(files)), 3)
        self.assertEqual(new_files(second, [200, 200, 200]), files)
        self.assertNotEqual(new_files(Random(8), [200]), files[:1])


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
