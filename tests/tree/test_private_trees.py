"""What nobody else may read in a tree, nobody else can read while it comes, or after that was cut off."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import SinkError
from pipegrid.tree.file_metadata import RestoredMetadata
from pipegrid.tree.local_directory_descriptor import DirectoryFd
from pipegrid.tree.local_files import TreePart, begin_tree, finish_directory, make_directory


class PrivateTests(SynchronousTestCase):
    """Modes on the way."""

    def setUp(self) -> None:
        self.addCleanup(os.umask, os.umask(0o022))
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.home = DirectoryFd(str(self.directory))

    def mode(self, name: str) -> int:
        """Return who may do what with a file or directory."""
        return stat.S_IMODE((self.directory / name).stat().st_mode)

    def test_a_part(self) -> None:
        """It has no more readers than the file, also if an earlier one has left it."""
        for wanted, on_its_way in ((0o600, 0o600), (0o440, 0o640), (0o755, 0o755), (None, 0o644)):
            for left in (False, True):
                part = self.directory / ".file.pipegrid-part"
                if left:
                    part.write_bytes(b"x")
                path = str(self.directory / "file")
                file = TreePart(self.home, path, False, RestoredMetadata(wanted, 10**18))
                self.assertEqual(self.mode(part.name), on_its_way)
                file.begin(1)
                file.write(b"x")
                file.publish()
                self.assertEqual(self.mode("file"), 0o644 if wanted is None else wanted)
                self.assertEqual((self.directory / "file").stat().st_mtime_ns, 10**18)
                (self.directory / "file").unlink()

    def test_directories(self) -> None:
        """Nobody may enter them before all is there who may not do so then; their owner may write."""
        for wanted, on_its_way in ((0o700, 0o700), (0o550, 0o750), (0o755, 0o755), (None, 0o755)):
            root, _ = begin_tree(
                str(self.directory / "root"), None, RestoredMetadata(wanted), False
            )
            made, _ = make_directory(
                root, str(self.directory / "root/d"), RestoredMetadata(wanted), False
            )
            for name in ("root", "root/d"):
                self.assertEqual(self.mode(name), on_its_way)
            finish_directory(made, RestoredMetadata(wanted), None)
            self.assertEqual(self.mode("root/d"), 0o755 if wanted is None else wanted)
            (self.directory / "root/d").rmdir()
            (self.directory / "root").rmdir()

    def test_a_time_that_cannot_be_set(self) -> None:
        """That is no reason to leave the mode away."""
        (self.directory / "d").mkdir()
        finish_directory(
            DirectoryFd(str(self.directory / "d")), RestoredMetadata(0o700, 1 << 100), None
        )
        self.assertEqual(self.mode("d"), 0o700)

    def test_a_mode_that_cannot_be_set(self) -> None:
        """A file does not appear with more readers than it should have, unless there are no modes at all."""
        for number, fails in ((errno.ENOSPC, True), (errno.EIO, True), (errno.EPERM, False)):

            def fchmod(fd: int, mode: int, number: int = number) -> None:
                raise OSError(number, os.strerror(number))

            patch = self.patch(os, "fchmod", fchmod)
            file = TreePart(self.home, str(self.directory / "file"), False, RestoredMetadata(0o600))
            file.begin(1)
            file.write(b"x")
            if fails:
                self.assertRaises(SinkError, file.publish)
            else:
                file.publish()
            file.leave()
            patch.restore()
            self.assertEqual((self.directory / "file").exists(), not fails)
