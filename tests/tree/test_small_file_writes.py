"""Small files of a tree are written in groups, each with its own outcome."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk.atomic_write import sync_directory
from pipegrid.disk.part_file import PartInUse, TargetExists
from pipegrid.disk.private_files import current_umask
from pipegrid.errors import SinkError, UsageError
from pipegrid.tree import local_files
from pipegrid.tree.directory_descriptor import DirectoryFd
from pipegrid.tree.file_metadata import RestoredMetadata, restored
from pipegrid.tree.local_files import (
    GROUP_BYTES,
    GROUP_FILES,
    GROUPS_AT_ONCE,
    TreePart,
    WholeFile,
    WriteGroups,
    stops_all,
    write_group,
)
from tests.descriptors import left_open, open_files
from tests.scratch import scratch_directory

WHEN_NS = 1_600_000_000_123_456_789


class WriteTestCase(SynchronousTestCase):
    """Two directories, and no descriptor left open."""

    def setUp(self) -> None:
        before = open_files()
        self.addCleanup(lambda: self.assertEqual(left_open(before), []))
        self.here = scratch_directory()
        self.addCleanup(shutil.rmtree, self.here, ignore_errors=True)
        self.homes = []
        for name in ("one", "two"):
            (self.here / name).mkdir()
            self.homes.append(DirectoryFd(str(self.here / name)))

    def file(
        self, name: str, data: bytes = b"data", home: int = 0, replace: bool = False
    ) -> WholeFile:
        """Return a file to be written into one of the directories."""
        directory = self.homes[home]
        return WholeFile(
            directory,
            os.path.join(directory.path, name),
            data,
            replace,
            RestoredMetadata(0o640, WHEN_NS),
        )

    def names(self) -> list[str]:
        """Return the names of all files, hidden ones included."""
        return sorted(
            str(each.relative_to(self.here)) for each in self.here.rglob("*") if each.is_file()
        )


class GroupTests(WriteTestCase):
    """What one call writes."""

    def test_content_mode_and_time(self) -> None:
        """Files of several directories come out whole, and nothing else is left."""
        files = [self.file(f"f{n}", bytes([n]) * 1000 * n, n % 2) for n in range(6)]
        self.assertEqual(write_group(files), [""] * 6)
        self.assertEqual(self.names(), ["one/f0", "one/f2", "one/f4", "two/f1", "two/f3", "two/f5"])
        for file in files:
            with open(file.path, "rb") as written:
                self.assertEqual(written.read(), file.data)
            found = os.stat(file.path)
            self.assertEqual((stat.S_IMODE(found.st_mode), found.st_mtime_ns), (0o640, WHEN_NS))

    def test_the_umask_stays(self) -> None:
        """It is not exchanged even for a moment: other threads create files meanwhile."""
        os.close(os.open(self.here / "one/.b.pipegrid-part", os.O_CREAT | os.O_WRONLY, 0o666))
        masks: list[int] = []

        def noting_umask(mask: int) -> int:
            masks.append(mask)
            return 0o022

        self.patch(os, "umask", noting_umask)
        self.assertEqual(write_group([self.file("a"), self.file("b")]), ["", ""])
        self.assertEqual(restored({"st_mode": 0o100777}, "umask").mode, 0o777 & ~current_umask())
        self.assertEqual(masks, [])

    def test_few_looks_at_each_file(self) -> None:
        """A new file is examined four times by name, and four times by its descriptor."""
        looks: list[str] = []
        for call in (os.stat, os.fstat):

            def counting(*arguments: Any, look: Any = call, **options: Any) -> Any:
                looks.append(look.__name__)
                return look(*arguments, **options)

            self.patch(os, call.__name__, counting)
        files = [self.file(f"f{n}") for n in range(10)]
        self.assertEqual(write_group(files), [""] * 10)
        self.assertLessEqual(looks.count("stat"), 4 * 10)
        self.assertLessEqual(looks.count("fstat"), 4 * 10 + 1)
        for file in files:
            found = os.lstat(file.path)
            self.assertEqual(file.identity, (found.st_dev, found.st_ino))

    def test_order_of_syncs(self) -> None:
        """Each file is synced before it gets its name, each directory once and after all its names."""
        log: list[str] = []
        fsync, link = os.fsync, os.link

        def noting_fsync(fd: int) -> None:
            log.append("names" if stat.S_ISDIR(os.fstat(fd).st_mode) else "bytes")
            fsync(fd)

        def noting_link(*arguments: Any, **options: Any) -> None:
            log.append("link")
            link(*arguments, **options)

        self.patch(os, "fsync", noting_fsync)
        self.patch(os, "link", noting_link)
        write_group([self.file(f"f{n}", home=n // 3) for n in range(6)])
        self.assertEqual(log, ["bytes", "link"] * 6 + ["names"] * 2)

    def test_one_that_fails(self) -> None:
        """It has its own error; the others are written."""
        taken = self.here / "one/taken"
        taken.write_bytes(b"mine")
        (self.here / "one/replaced").write_bytes(b"old")
        (self.here / "two").rename(self.here / "was two")
        (self.here / "two").mkdir()
        outcomes = write_group(
            [
                self.file("a"),
                self.file("taken"),
                self.file("b", home=1),
                self.file("replaced", replace=True),
                self.file("a"),
            ]
        )
        kinds = [type(each) for each in outcomes]
        self.assertEqual(kinds, [str, TargetExists, SinkError, str, PartInUse])
        self.assertIn("another directory has replaced", str(outcomes[2]))
        self.assertEqual(self.names(), ["one/a", "one/replaced", "one/taken"])
        self.assertEqual(taken.read_bytes(), b"mine")
        self.assertEqual((self.here / "one/replaced").read_bytes(), b"data")

    def test_a_full_disk(self) -> None:
        """What was not written leaves no part, and the cause of its error stays known."""
        write = TreePart.write_pieces

        def full(part: TreePart, pieces: Any) -> None:
            if part.path.endswith("b"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(part, pieces)

        self.patch(TreePart, "write_pieces", full)
        good, bad = write_group([self.file("a"), self.file("b")])
        self.assertEqual(good, "")
        assert isinstance(bad, SinkError)
        self.assertIn("cannot write", str(bad))
        self.assertTrue(stops_all(bad))
        self.assertEqual(self.names(), ["one/a"])

    def test_names_that_cannot_be_synced(self) -> None:
        """No file of that directory counts as written."""

        def failing(fd: int) -> bool:
            if os.readlink(f"/proc/self/fd/{fd}").endswith("one"):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return sync_directory(fd)

        self.patch(local_files, "sync_directory", failing)
        a, b, c = write_group([self.file("a"), self.file("b"), self.file("c", home=1)])
        self.assertEqual(([type(a), type(b)], c), ([SinkError, SinkError], ""))

    def test_few_descriptors(self) -> None:
        """Where only one file may be open at a time, all are written nevertheless."""
        begin = TreePart.__init__
        left = [1]

        def limited(part: TreePart, *arguments: Any) -> None:
            if not left[0]:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            begin(part, *arguments)
            left[0] -= 1

        leave = TreePart.leave

        def left_one(part: TreePart) -> str | None:
            left[0] = 1
            return leave(part)

        self.patch(TreePart, "__init__", limited)
        self.patch(TreePart, "leave", left_one)
        self.assertEqual(write_group([self.file(f"f{n}") for n in range(3)]), [""] * 3)
        self.assertEqual(self.names(), ["one/f0", "one/f1", "one/f2"])


class HeldWorkers:
    """
    Threads that do nothing until they are told.

    Attributes:
        jobs: what waits to be run, with its Deferred.
        sizes: how many files each job had.
        refuses: an error to raise instead.
    """

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Deferred[Any]]] = []
        self.sizes: list[int] = []
        self.refuses: Exception | None = None

    def run(self, function: Any, files: list[WholeFile]) -> Deferred[Any]:
        """Keep a job."""
        if self.refuses is not None:
            raise self.refuses
        self.sizes.append(len(files))
        self.jobs.append((lambda: function(files), Deferred()))
        return self.jobs[-1][1]

    def end_one(self) -> None:
        """Run the first job."""
        job, done = self.jobs.pop(0)
        done.callback(job())


class WriteGroupsTests(WriteTestCase):
    """What is written together, and when."""

    def setUp(self) -> None:
        super().setUp()
        self.workers = HeldWorkers()
        workers: Any = self.workers
        self.groups = WriteGroups(workers)

    def test_groups_gather_while_others_are_written(self) -> None:
        """The first files are written at once; later ones together, few enough and in order."""
        files = [self.file(f"f{n:02}") for n in range(GROUPS_AT_ONCE + GROUP_FILES + 5)]
        written = [self.groups.write(each) for each in files]
        self.assertEqual(self.workers.sizes, [1] * GROUPS_AT_ONCE)
        self.workers.end_one()
        self.assertTrue(written[0].called)
        self.assertEqual(self.workers.sizes[GROUPS_AT_ONCE:], [GROUP_FILES])
        while self.workers.jobs:
            self.workers.end_one()
        self.assertEqual(self.workers.sizes[GROUPS_AT_ONCE:], [GROUP_FILES, 5])
        self.assertEqual([self.successResultOf(each) for each in written], [""] * len(files))
        self.assertEqual(self.names(), [f"one/f{n:02}" for n in range(len(files))])

    def test_bytes_of_a_group(self) -> None:
        """A group ends with the file that fills it."""
        size = GROUP_BYTES // 2
        for number in range(GROUPS_AT_ONCE + 5):
            self.groups.write(self.file(f"f{number}", bytes(size)))
        while self.workers.jobs:
            self.workers.end_one()
        self.assertEqual(self.workers.sizes[GROUPS_AT_ONCE:], [2, 2, 1])

    def test_cancelled(self) -> None:
        """A file that waits is not written; one whose group has begun is, and is not reported."""
        files = [self.file(f"f{n}") for n in range(GROUPS_AT_ONCE + 2)]
        written = [self.groups.write(each) for each in files]
        for each in (written[0], written[-1]):
            each.cancel()
            self.failureResultOf(each, CancelledError)
        while self.workers.jobs:
            self.workers.end_one()
        for each in written[1:-1]:
            self.assertEqual(self.successResultOf(each), "")
        self.assertEqual(self.names(), [f"one/f{n}" for n in range(GROUPS_AT_ONCE + 1)])

    def test_threads_that_have_ended(self) -> None:
        """Then every file fails, those that wait included."""
        written = [self.groups.write(self.file(f"f{n}")) for n in range(GROUPS_AT_ONCE + 1)]
        self.workers.refuses = UsageError("these workers have been stopped")
        self.workers.jobs.pop()[1].errback(CancelledError())
        self.failureResultOf(written[GROUPS_AT_ONCE - 1], CancelledError)
        self.failureResultOf(written[-1], UsageError)
        self.workers.end_one()
        self.assertEqual(self.successResultOf(written[0]), "")
