"""Where measurements and soaks make their files."""

from __future__ import annotations

import argparse
from pathlib import Path

from misc.scratch import scratch_directory
from twisted.trial.unittest import SynchronousTestCase


class ScratchTests(SynchronousTestCase):
    """``--scratch DIR``."""

    def test_it_is_made(self) -> None:
        """With its parents, and one that is there is taken as it is."""
        wanted = Path(self.mktemp(), "a", "b")
        for _ in range(2):
            self.assertEqual(scratch_directory(str(wanted)), wanted)
            self.assertTrue(wanted.is_dir())

    def test_it_cannot_be_made(self) -> None:
        """Is a sentence."""
        file = Path(self.mktemp())
        file.write_text("")
        with self.assertRaises(argparse.ArgumentTypeError) as caught:
            scratch_directory(str(file))
        self.assertIn("cannot be made: File exists", str(caught.exception))
