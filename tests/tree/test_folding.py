"""Whether a file system folds the cases of names, found out by a file that nobody keeps."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.tree.local_directory_descriptor import DirectoryFd
from pipegrid.tree.local_files import folds_names


class FoldingTests(SynchronousTestCase):
    """``folds_names``."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.home = DirectoryFd(str(self.directory))

    def test_nothing_stays(self) -> None:
        """Not even what a process has left that was killed in between."""
        (self.directory / ".pipegrid-a.pipegrid-part").touch(0o600)
        self.assertFalse(folds_names(self.home))
        self.assertEqual(os.listdir(self.directory), [])

    def test_one_that_folds(self) -> None:
        """There the other name leads to the file."""
        stat = os.stat

        def folding(name: object, **options: object) -> os.stat_result:
            return stat(str(name).replace("-A.", "-a."), **options)  # type: ignore[arg-type]

        self.patch(os, "stat", folding)
        self.assertTrue(folds_names(self.home))
        self.assertEqual(os.listdir(self.directory), [])

    def test_another_process_takes_the_file_away(self) -> None:
        """Then neither name tells anything, and it is tried again."""
        stat, seen = os.stat, list[str]()

        def taking(name: object, **options: object) -> os.stat_result:
            seen.append(str(name))
            if len(seen) == 1:
                (self.directory / ".pipegrid-a.pipegrid-part").unlink()
            return stat(str(name), **options)  # type: ignore[arg-type]

        self.patch(os, "stat", taking)
        self.assertFalse(folds_names(self.home))
        self.assertEqual(len([name for name in seen if name.startswith(".pipegrid-")]), 4)
