"""Directories and file systems that cannot be synced: one rule everywhere."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk import durability
from pipegrid.disk.atomic_write import create_file, replace_file, sync_path, syncs_names
from pipegrid.disk.durability import Disk, commit_group
from pipegrid.disk.part_file import PartFile
from pipegrid.errors import SinkError

CANNOT = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def failing(number: int) -> Any:
    """Have the sync of every directory fail so."""
    fsync = os.fsync

    def sync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(fd)

    return patch.object(os, "fsync", sync)


class FakeShare:
    """A complete share that notes what is done to it."""

    share_bytes = 1
    opened = 0
    resumed = gone = False
    device = 1

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.descriptor = os.open(directory, os.O_RDONLY)
        self.done: list[str] = []

    def sync(self) -> None:
        self.done.append("sync")

    def publish(self) -> tuple[str, ...]:
        self.done.append("publish")
        return (self.directory,)

    def discard(self) -> None:
        self.done.append("discard")


class SyncDirectoryTests(SynchronousTestCase):
    """A file system that cannot is no error; a disk that fails is one."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()

    def part(self, name: str) -> None:
        with PartFile(str(self.directory / name)) as part:
            part.write(b"x")

    @property
    def calls(self) -> dict[str, Callable[[str], object]]:
        """Everything that syncs a directory, by its name."""
        return {
            "server": lambda name: Disk().sync_directories([str(self.directory)]),
            "replace": lambda name: replace_file(self.directory / name, b"x"),
            "create": lambda name: create_file(self.directory / name, b"x"),
            "path": lambda name: sync_path(self.directory),
            "download": self.part,
        }

    def test_a_file_system_that_cannot(self) -> None:
        """All of them go on."""
        for number in CANNOT:
            with failing(number):
                for name, call in self.calls.items():
                    call(f"{name}{number}")

    def test_a_disk_that_fails(self) -> None:
        """All of them say so."""
        for name, call in self.calls.items():
            with failing(errno.EIO):
                self.assertRaises((OSError, SinkError), call, name)

    def test_whether_it_can(self) -> None:
        """A server asks that when it starts; what it cannot look at it says nothing of."""
        self.assertTrue(syncs_names(self.directory))
        self.assertTrue(syncs_names(self.directory / "none"))
        with failing(errno.EINVAL):
            self.assertFalse(syncs_names(self.directory))

    def test_without_a_call_for_all(self) -> None:
        """Where syncfs is rejected, each share and each directory is synced, and it is not tried again."""
        tried: list[int] = []

        def reject(fd: int) -> None:
            tried.append(fd)
            raise OSError(errno.ENOSYS, "no such call")

        with patch.object(durability, "load_syncfs", lambda: reject):
            disk = Disk()
        disk._syncfs = reject
        shares = [FakeShare(str(self.directory)) for _ in range(2)]
        for share in shares:
            self.addCleanup(os.close, share.descriptor)
        synced: list[str] = []
        with patch.object(disk, "sync_directories", synced.extend):
            outcomes = commit_group(shares, "batch", disk)
        self.assertEqual(outcomes, [None, None])
        self.assertEqual([share.done for share in shares], [["sync", "publish"]] * 2)
        self.assertEqual((synced, len(tried)), ([str(self.directory)], 1))
        self.assertFalse(disk.has_one_call)
