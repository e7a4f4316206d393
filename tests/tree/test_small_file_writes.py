"""Small files of a tree are written in groups, each with its own outcome."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import struct
from collections.abc import Callable
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk.atomic_write import current_umask, sync_directory
from pipegrid.disk.part_file import PartInUse, TargetExists
from pipegrid.errors import SinkError, UsageError
from pipegrid.tree import small_file_writes
from pipegrid.tree.extended_metadata import ACCESS_LIST, DEFAULT_LIST, StoredMetadata
from pipegrid.tree.file_metadata import RestoredMetadata, restored
from pipegrid.tree.local_directory_descriptor import DirectoryFd
from pipegrid.tree.local_files import TreePart, UnnamedFile, stops_all
from pipegrid.tree.metadata_restore import ExtendedRestore, RestoredExtended
from pipegrid.tree.small_file_writes import (
    GROUP_BYTES,
    GROUP_FILES,
    GROUPS_AT_ONCE,
    WholeFile,
    WriteGroups,
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

        self.patch(small_file_writes, "sync_directory", failing)
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


class UnnamedTests(WriteTestCase):
    """The same in directories that this run has made, where a file has no name until it is complete."""

    def setUp(self) -> None:
        super().setUp()
        self.sync = "once"
        self.patch(small_file_writes, "unnamed_sync", lambda fd: self.sync)
        for home in self.homes:
            home.is_new = True

    def refuse(self, name: str, number: int) -> Any:
        """Let a call of the system fail for files, as it would on another file system."""
        real = getattr(os, name)

        def refusing(path: Any, *arguments: Any, **options: Any) -> Any:
            flags = arguments[0] if name == "open" and arguments else 0
            if name != "open" or flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(number, os.strerror(number))
            return real(path, *arguments, **options)

        return self.patch(os, name, refusing)

    def log(self, *names: str) -> list[str]:
        """Return a list to which the calls of these functions of ``os`` are added."""
        calls: list[str] = []
        fstat = os.fstat

        def noted(name: str, real: Any) -> Any:
            def noting(*arguments: Any, **options: Any) -> Any:
                is_names = name == "fsync" and stat.S_ISDIR(fstat(arguments[0]).st_mode)
                calls.append("fsync of names" if is_names else name)
                return real(*arguments, **options)

            return noting

        for name in names:
            self.patch(os, name, noted(name, getattr(os, name)))
        return calls

    def test_content_mode_and_time(self) -> None:
        """Files come out as from parts, whatever their mode, and no part is made."""
        modes = (0o640, 0o400, 0o755, 0o4755, 0o1644, None)
        files = [self.file(f"f{n}", bytes([n]) * 1000 * n, n % 2) for n in range(len(modes))]
        for file, mode in zip(files, modes, strict=True):
            file.kept = RestoredMetadata(mode, WHEN_NS)
        calls = self.log("unlink")
        self.assertEqual(write_group(files), [""] * len(files))
        self.assertEqual((calls, [home.is_new for home in self.homes]), ([], [True, True]))
        self.assertEqual(len(self.names()), len(files))
        for file, mode in zip(files, modes, strict=True):
            with open(file.path, "rb") as written:
                self.assertEqual(written.read(), file.data)
            found = os.stat(file.path)
            wanted = 0o666 & ~current_umask() if mode is None else mode
            self.assertEqual((stat.S_IMODE(found.st_mode), found.st_mtime_ns), (wanted, WHEN_NS))
            self.assertEqual(file.identity, (found.st_dev, found.st_ino))

    def test_few_calls_for_each_file(self) -> None:
        """Each costs a system call, and makes the threads compete for the interpreter."""
        of_each = ("open", "fstat", "pwritev", "utime", "fsync", "link", "close")
        others: tuple[str, ...] = (
            "stat",
            "lstat",
            "fchmod",
            "chown",
            "unlink",
            "rename",
            "replace",
            "ftruncate",
        )
        others += ("listxattr", "removexattr", "getxattr", "pathconf", "statvfs", "readlink")
        calls = self.log(*of_each, *others)
        self.patch(fcntl, "flock", lambda fd, kind: calls.append("flock"))
        owners = {"st_uid": os.geteuid(), "st_gid": os.getegid()}
        for sync, more in (("once", 0), ("twice", GROUP_FILES)):
            self.sync = sync
            files = [self.file(f"{sync}{n}") for n in range(GROUP_FILES)]
            for file in files:
                extended = ExtendedRestore().of(owners, {})
                file.kept = RestoredMetadata(0o600, WHEN_NS, extended=extended)
            calls.clear()
            self.assertEqual(write_group(files), [""] * GROUP_FILES)
            for name in of_each:
                count = calls.count(name) - (more if name == "fsync" else 0)
                is_of_directory = name in ("open", "fstat", "close")
                self.assertEqual(count, GROUP_FILES + is_of_directory, name)
            rest = sorted(name for name in calls if name not in of_each)
            self.assertEqual(rest, ["fsync of names", "listxattr", "stat", "stat"])

    def test_order_of_syncs(self) -> None:
        """All bytes are synced before the first name, and all names before the group has ended."""
        files = [self.file(f"f{n}", home=n // 3) for n in range(6)]
        calls = self.log("fsync", "link")
        write_group(files)
        self.assertEqual(calls, ["fsync"] * 6 + ["link"] * 6 + ["fsync of names"] * 2)
        calls.clear()
        self.sync = "twice"
        write_group([self.file(f"g{n}", home=n // 3) for n in range(6)])
        again = (["fsync"] * 3 + ["fsync of names"]) * 2
        self.assertEqual(calls, ["fsync"] * 6 + ["link"] * 6 + again)

    def test_a_list_that_is_inherited(self) -> None:
        """It goes from a file that had none, and the file has its mode; without owners it only has that."""
        entries = ((1, 7, -1), (2, 6, 1234), (4, 5, -1), (16, 7, -1), (32, 5, -1))
        inherited = struct.pack("<I", 2) + b"".join(
            struct.pack("<HHI", kind, bits, number & 0xFFFFFFFF) for kind, bits, number in entries
        )
        os.setxattr(self.homes[0].path, DEFAULT_LIST, inherited)
        files = [self.file("a"), self.file("b"), self.file("c", home=1)]
        for file in files[::2]:
            file.kept = RestoredMetadata(0o640, extended=ExtendedRestore().of({}, {}))
        self.assertEqual(write_group(files), [""] * 3)
        lists = [os.listxattr(file.path) for file in files]
        self.assertEqual(lists, [[], [ACCESS_LIST], []])
        self.assertEqual([stat.S_IMODE(os.stat(file.path).st_mode) for file in files], [0o640] * 3)

    def test_a_mask_without_write_permission(self) -> None:
        """Until a file is complete its owner may write to it: otherwise it would accept no attributes."""
        masked = os.umask(0o277)
        self.addCleanup(os.umask, masked)
        modes: list[int] = []
        setxattr = os.setxattr

        def noting(fd: int, *arguments: Any) -> None:
            modes.append(stat.S_IMODE(os.fstat(fd).st_mode))
            setxattr(fd, *arguments)

        self.patch(os, "setxattr", noting)
        files = [self.file("a"), self.file("b")]
        for file, mode in zip(files, (0o400, 0o640), strict=True):
            stored = StoredMetadata((("user.comment", b"hello"),))
            file.kept = RestoredMetadata(mode, extended=RestoredExtended(stored, False))
        self.assertEqual(write_group(files), ["", ""])
        self.assertEqual(modes, [0o600, 0o640])
        after = [stat.S_IMODE(os.stat(file.path).st_mode) for file in files]
        self.assertEqual(after, [0o400, 0o640])

    def test_where_there_are_none(self) -> None:
        """A part is made for each file, and from then on other files of the directory have parts, too."""
        for name, number in (
            ("open", errno.EOPNOTSUPP),
            ("open", errno.EISDIR),
            ("link", errno.ENOENT),
            ("link", errno.EPERM),
        ):
            self.setUp()
            with self.subTest(name=name, number=number):
                refusal = self.refuse(name, number)
                self.assertEqual(write_group([self.file("a"), self.file("b", b"")]), ["", ""])
                refusal.restore()
                self.assertEqual(self.names(), ["one/a", "one/b"])
                self.assertEqual((self.here / "one/a").read_bytes(), b"data")
                self.assertEqual([home.is_new for home in self.homes], [False, True])

    def test_those_before_one_that_is_refused(self) -> None:
        """They are synced again when they have their names, although it needs a part."""
        self.sync = "twice"
        begin = UnnamedFile.__init__

        def refusing(part: UnnamedFile, path: str, *arguments: Any) -> None:
            if path.endswith("b"):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            begin(part, path, *arguments)

        self.patch(UnnamedFile, "__init__", refusing)
        calls = self.log("fsync", "link")
        self.assertEqual(write_group([self.file("a"), self.file("b")]), ["", ""])
        of_part, again = ["fsync", "link"], ["fsync", "fsync of names"]
        self.assertEqual(calls, ["fsync", "link", *of_part, *again])

    def test_a_file_system_that_loses_them(self) -> None:
        """They are not used where a power cut could leave the name without the bytes."""
        self.sync = "never"
        self.refuse("open", errno.EIO)
        self.assertEqual(write_group([self.file("a"), self.file("b")]), ["", ""])
        self.assertEqual(self.names(), ["one/a", "one/b"])

    def test_an_older_directory(self) -> None:
        """There may be parts of an earlier run: they are used, and none is left."""
        (self.here / "one/.a.pipegrid-part").write_bytes(b"older and longer")
        self.homes[0].is_new = False
        self.assertEqual(write_group([self.file("a"), self.file("b", home=1)]), ["", ""])
        self.assertEqual(self.names(), ["one/a", "two/b"])
        self.assertEqual((self.here / "one/a").read_bytes(), b"data")

    def test_what_has_the_name(self) -> None:
        """It stays, also a link that leads nowhere; a file that may be replaced is."""
        (self.here / "one/taken").write_bytes(b"mine")
        (self.here / "one/link").symlink_to(self.here / "nowhere")
        (self.here / "one/replaced").write_bytes(b"old")
        names = ("taken", "link", "a", "a")
        files = [self.file(name) for name in names] + [self.file("replaced", replace=True)]
        outcomes = write_group(files)
        kinds = [type(each) for each in outcomes]
        self.assertEqual(kinds, [TargetExists, TargetExists, str, TargetExists, str])
        self.assertIn("exists already", str(outcomes[0]))
        self.assertEqual((self.here / "one/taken").read_bytes(), b"mine")
        self.assertEqual((self.here / "one/replaced").read_bytes(), b"data")
        self.assertFalse((self.here / "nowhere").exists())

    def test_a_disk_that_fails(self) -> None:
        """A file whose bytes were not written or synced gets no name."""
        for name, number in (("pwritev", errno.ENOSPC), ("fsync", errno.EIO)):
            with self.subTest(name=name):
                calls: list[int] = []

                def failing(
                    fd: int, *_: Any, calls: list[int] = calls, number: int = number
                ) -> None:
                    calls.append(fd)
                    raise OSError(number, os.strerror(number))

                patched = self.patch(os, name, failing)
                outcomes = write_group([self.file("a"), self.file("b")])
                patched.restore()
                for outcome in outcomes:
                    assert isinstance(outcome, SinkError)
                    self.assertIn(os.strerror(number), str(outcome))
                    self.assertEqual(stops_all(outcome), number == errno.ENOSPC)
                self.assertEqual((len(calls), self.names()), (2, []))

    def test_a_directory_that_is_replaced(self) -> None:
        """What comes there instead gets no file, and no file that is elsewhere counts as written."""
        for owner, name in ((UnnamedFile, "publish"), (DirectoryFd, "check")):
            self.setUp()
            original = getattr(owner, name)

            def swapping(part: Any, original: Any = original) -> None:
                if not (self.here / "moved").exists():
                    (self.here / "one").rename(self.here / "moved")
                    (self.here / "one").mkdir()
                original(part)

            patched = self.patch(owner, name, swapping)
            outcomes = write_group([self.file("a"), self.file("b"), self.file("c", home=1)])
            patched.restore()
            kinds = [type(each) for each in outcomes]
            self.assertEqual(kinds, [SinkError, SinkError, str])
            self.assertIn("another directory has replaced", str(outcomes[0]))
            self.assertEqual(os.listdir(self.here / "one"), [])
            self.assertRaises(SinkError, self.homes[0].check_again)
            self.homes[1].check_again()


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
