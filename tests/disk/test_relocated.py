"""A directory that gets another place, while other versions and processes use it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.tree.backup.backup_state_directory import relocated


class RelocatedTests(SynchronousTestCase):
    """From one directory to another."""

    def setUp(self) -> None:
        top = Path(self.mktemp()).absolute()
        self.old, self.new = top / "cache/node/backup", top / "data/nodes/node/backup"
        self.old.mkdir(parents=True, mode=0o700)
        (self.old / "catalogue.cap").write_text("cap")
        (self.old / "catalogue.cap").chmod(0o600)

    def relocated(self) -> Path:
        return relocated(self.old, self.new)

    def assert_moved(self) -> None:
        """All is in the new place, for nobody else, and versions of before find it."""
        self.assertEqual(self.relocated(), self.new)
        self.assertEqual((self.new / "catalogue.cap").read_text(), "cap")
        for path, mode in ((self.new, 0o700), (self.new / "catalogue.cap", 0o600)):
            self.assertEqual(stat.S_IMODE(path.stat().st_mode), mode)
        self.assertTrue(self.old.is_symlink())
        self.assertTrue(os.path.samefile(self.old / "lock", self.new / "lock"))
        self.assertEqual(sorted(os.listdir(self.new)), ["catalogue.cap", "lock"])
        self.assertEqual(os.listdir(self.new.parent), ["backup"])

    def test_it_is_moved(self) -> None:
        """Once; and what empties the old place takes nothing with it."""
        self.assert_moved()
        self.assert_moved()
        self.old.unlink()
        self.assertEqual(self.relocated(), self.new)
        self.assertEqual((self.new / "catalogue.cap").read_text(), "cap")

    def test_nothing_to_move(self) -> None:
        """The new place is meant, and not made."""
        (self.old / "catalogue.cap").unlink()
        self.old.rmdir()
        self.assertEqual(self.relocated(), self.new)
        self.assertFalse(self.new.parent.exists())

    def test_both_are_there(self) -> None:
        """As after an older version began anew: the new one counts, and the other stays as it is."""
        self.new.mkdir(parents=True)
        self.assertEqual(self.relocated(), self.new)
        self.assertEqual(os.listdir(self.new), [])
        self.assertEqual((self.old / "catalogue.cap").read_text(), "cap")

    def test_while_it_is_used(self) -> None:
        """It stays until whoever has the lock, be it an older version, has ended."""
        fd = os.open(self.old / "lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(fd, fcntl.LOCK_EX)
        self.assertEqual(self.relocated(), self.old)
        self.assertFalse(self.new.exists())
        os.close(fd)
        self.assert_moved()

    def test_two_at_once(self) -> None:
        """One of them moves it, whenever the other one comes to the lock."""
        locked = fcntl.flock

        def late(fd: int, kind: int) -> None:
            self.patch(fcntl, "flock", locked)
            self.assertEqual(self.relocated(), self.new)  # the other process
            locked(fd, kind)

        self.patch(fcntl, "flock", late)
        self.assertEqual(self.relocated(), self.new)
        self.assert_moved()

    def test_to_another_file_system(self) -> None:
        """It is copied, appears when all of it is there, and goes where it was when that is on the disk."""
        steps: list[str] = []
        renamed, synced, removed = os.rename, os.fsync, shutil.rmtree

        def across(old: Any, new: Any) -> None:
            if Path(old) == self.old:
                raise OSError(errno.EXDEV, "Invalid cross-device link")
            self.assertEqual((Path(old) / "catalogue.cap").read_text(), "cap")
            renamed(old, new)
            steps.append("named")

        def fsync(fd: int) -> None:
            synced(fd)
            steps.append(f"synced {os.path.basename(os.readlink(f'/proc/self/fd/{fd}'))}")

        def rmtree(path: Any, **options: Any) -> None:
            if Path(path) == self.old:
                steps.append("removed")
            removed(path, **options)

        self.patch(os, "rename", across)
        self.patch(os, "fsync", fsync)
        self.patch(shutil, "rmtree", rmtree)
        left = self.new.with_name(".backup.pipegrid-part")  # by a process that was killed
        left.mkdir(parents=True)
        (left / "half").write_text("c")
        self.assert_moved()
        self.assertEqual(
            steps[-4:], ["synced .backup.pipegrid-part", "named", "synced node", "removed"]
        )

    def test_a_place_that_cannot_be_had(self) -> None:
        """It stays where it is, whole, and is used there."""
        self.new.parent.parent.parent.mkdir()
        self.new.parent.parent.write_text("in the way")
        self.assertEqual(self.relocated(), self.old)
        self.assertEqual((self.old / "catalogue.cap").read_text(), "cap")
