"""Files without a name: who can have them, and how they get one."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from unittest import mock

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk import atomic_write
from pipegrid.disk.atomic_write import can_name, give_name, open_unnamed, unnamed_sync
from pipegrid.disk.mount_table import mounted_file_systems
from tests.descriptors import open_files


class UnnamedTests(SynchronousTestCase):
    """A directory, and files of its file system."""

    def setUp(self) -> None:
        self.place = Path(self.mktemp()).absolute()
        self.place.mkdir()
        self.before = open_files()

    def names(self) -> list[str]:
        """Return what is in the directory."""
        return os.listdir(self.place)

    def test_a_name_for_a_whole_file(self) -> None:
        """Nobody sees it before; then it is a file like any other."""
        fd = open_unnamed(str(self.place))
        os.write(fd, b"whole")
        self.assertEqual(self.names(), [])
        give_name(fd, str(self.place / "file"))
        os.close(fd)
        self.assertEqual((self.place / "file").read_bytes(), b"whole")
        self.assertEqual((self.place / "file").stat().st_nlink, 1)

    def test_what_is_there_stays(self) -> None:
        """A name that something has is not taken from it."""
        (self.place / "file").write_bytes(b"first")
        fd = open_unnamed(str(self.place))
        self.addCleanup(os.close, fd)
        self.assertRaises(FileExistsError, give_name, fd, str(self.place / "file"))
        self.assertRaises(FileNotFoundError, give_name, fd, str(self.place / "no" / "file"))
        self.assertEqual((self.place / "file").read_bytes(), b"first")

    def test_trying(self) -> None:
        """This machine can do it, and nothing is left of finding out."""
        self.assertTrue(can_name(str(self.place)))
        self.assertRaises(FileNotFoundError, can_name, str(self.place / "no"))
        self.assertEqual((self.names(), open_files()), ([], self.before))

    def test_who_cannot(self) -> None:
        """A file system that has no such files, one that gives them no names, and another system."""
        refusal = OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        for name in ("open", "link"):
            with mock.patch(f"os.{name}", side_effect=refusal):
                self.assertFalse(can_name(str(self.place)))
        flag, there = os.O_TMPFILE, open_files()
        del os.O_TMPFILE
        self.addCleanup(setattr, os, "O_TMPFILE", flag)
        self.assertFalse(can_name(str(self.place)))
        self.assertEqual((self.names(), there), ([], self.before))

    def test_who_cannot_now(self) -> None:
        """A disk that is full or fails, and too many open files, say nothing of the file system."""
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.EIO, errno.EROFS):
            for name in ("open", "link"):
                with mock.patch(f"os.{name}", side_effect=OSError(number, os.strerror(number))):
                    error = self.assertRaises(OSError, can_name, str(self.place))
                self.assertEqual(error.errno, number)
        self.assertEqual((self.names(), open_files()), ([], self.before))
        self.assertTrue(can_name(str(self.place)))

    def test_in_an_open_directory(self) -> None:
        """A file is made and named there, whatever has the path of the directory meanwhile."""
        inside = os.open(self.place, os.O_DIRECTORY)
        self.addCleanup(os.close, inside)
        moved = self.place.with_name("moved " + self.place.name)
        self.place.rename(moved)
        self.place.mkdir()
        fd = open_unnamed(".", 0o600, inside)
        self.addCleanup(os.close, fd)
        give_name(fd, "file", inside)
        self.assertRaises(FileExistsError, give_name, fd, "file", inside)
        self.assertEqual((self.names(), os.listdir(moved)), ([], ["file"]))

    def test_where_they_are_durable(self) -> None:
        """That is known of a few file systems; of others, and of what cannot be asked, it is not assumed."""
        kinds = {0x01021994: "once", 0x58465342: "once", 0xEF53: "twice", 0x9123683E: "never"}
        for kind, expected in {**kinds, 0: "never"}.items():
            with mock.patch.object(atomic_write, "_fstatfs", lambda kind=kind: lambda fd: kind):
                self.assertEqual(unnamed_sync(0), expected)
        with mock.patch.object(atomic_write, "_fstatfs", return_value=None):
            self.assertEqual(unnamed_sync(0), "never")
        self.assertEqual(unnamed_sync(-1), "never")
        names = {
            "tmpfs": "once",
            "devtmpfs": "once",
            "xfs": "once",
            "ext4": "twice",
            "ext3": "twice",
            "ext2": "twice",
        }
        for mounted in mounted_file_systems():
            with contextlib.suppress(OSError):
                fd = os.open(mounted.path, os.O_DIRECTORY)
                self.addCleanup(os.close, fd)
                if os.fstat(fd).st_dev == mounted.device:
                    self.assertEqual(unnamed_sync(fd), names.get(mounted.kind, "never"), mounted)
