"""Operations in FUSE's threads: their results, errors, and time limits."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, LitCap
from pipegrid.core.packed_directory import PackedChild, pack_immutable
from pipegrid.errors import GridError
from pipegrid.mount.block_cache import BlockCache
from pipegrid.mount.file_reads import FileContents
from pipegrid.mount.fuse_operations import (
    FAILED_S,
    MESSAGES_S,
    OPERATION_S,
    FailureReports,
    FuseOperations,
)
from pipegrid.mount.mounted_tree import MountedNode, MountedTree
from tests.scratch import scratch_path
from tests.transfer.world import content


class ThreadlessClock(Clock):
    """A clock whose reactor's thread is every thread."""

    def callFromThread(self, call: Callable[..., object], *arguments: Any) -> None:
        """Call at once."""
        call(*arguments)


class FilesGrid:
    """
    A grid of files that are known by their caps.

    Attributes:
        seen: ranges that were read: the first byte of the file's key, start, and length.
        answer: returns what a read gives; None: the file's bytes at once.
    """

    def __init__(self) -> None:
        self.clock = ThreadlessClock()
        self.files: dict[Cap, bytes] = {}
        self.seen: list[tuple[int, int, int | None]] = []
        self.answer: Callable[[], Deferred[bytes] | None] = lambda: None

    def add(self, size: int) -> ChkCap:
        """Return the cap of a new file."""
        cap = ChkCap(bytes([len(self.files)]) * 16, bytes(32), 3, 10, size)
        self.files[cap] = content(size, len(self.files))
        return cap

    def read(self, cap: ChkCap, start: int = 0, length: int | None = None) -> Deferred[bytes]:
        """Fetch a range."""
        self.seen.append((cap.key[0], start, length))
        found = self.answer()
        end = None if length is None else start + length
        return succeed(self.files[cap][start:end]) if found is None else found

    def get(self, cap: ChkCap, sink: Any, start: int = 0) -> Deferred[None]:
        """Begin a download, which gives everything at once."""
        self.seen.append((cap.key[0], start, None))
        sink.write(self.files[cap][start:])
        return succeed(None)


class OperationsTestCase(SynchronousTestCase):
    """A tree with two files of each size."""

    cache_bytes = 8 << 20

    def setUp(self) -> None:
        self.grid = FilesGrid()
        self.said: list[str] = []
        self.sizes = {"tiny": 60, "small": 1000, "middle": 200_000, "large": 3_000_000}
        caps = {name: self.grid.add(size) for name, size in self.sizes.items()}
        self.content = {name: self.grid.files[cap] for name, cap in caps.items()}
        children = [PackedChild(name, cap) for name, cap in caps.items()]
        children.append(PackedChild("literal", LitCap(b"in its cap")))
        children.append(PackedChild("link", LitCap(b"x"), {"pipegrid": {"link": "small"}}))
        self.operations = self.mounted(children)

    def mounted(self, children: list[PackedChild]) -> FuseOperations:
        """Return the operations on a directory."""
        node = MountedNode("directory", 0o555, cap=DirectoryCap(LitCap(pack_immutable(children))))

        async def root() -> MountedNode:
            return node

        grid: Any = self.grid
        self.tree = MountedTree(grid, root)
        self.cache = None
        if self.cache_bytes:
            self.cache = BlockCache(scratch_path(self), self.cache_bytes, self.said.append)
            self.addCleanup(self.cache.close)
        self.contents = FileContents(grid, self.tree.views, self.cache, grid.clock.callFromThread)
        self.addCleanup(self.contents.close)
        reports = FailureReports(self.said.append, grid.clock.seconds)
        return FuseOperations(grid.clock, self.tree, self.contents, reports, lambda: None)

    def open(self, name: str, flags: int = os.O_RDONLY) -> Any:
        """Open a file."""
        info: Any = SimpleNamespace(fh=0, flags=flags, keep_cache=0)
        self.operations.open(f"/{name}", info)
        return info

    def read(self, name: str, size: int, offset: int) -> bytes:
        """Open, read and close a file."""
        info = self.open(name)
        data = self.operations.read(f"/{name}", size, offset, info)
        self.operations.release(f"/{name}", info)
        return data

    def errno_of(self, call: Callable[..., object], *arguments: Any) -> int | None:
        """Return the number of the error that a call raises."""
        number: int | None = self.assertRaises(OSError, call, *arguments).errno
        return number

    def in_thread(self, call: Callable[..., object], *arguments: Any) -> Callable[[], Any]:
        """Begin a call that waits; returns what returns its result, or its error's number."""
        found: list[Any] = []

        def work() -> None:
            try:
                found.append(call(*arguments))
            except OSError as error:
                found.append(error.errno)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        until = time.monotonic() + 10
        while not self.operations._calls and thread.is_alive() and time.monotonic() < until:
            time.sleep(0.001)

        def result() -> Any:
            thread.join(10)
            return found[0]

        return result


class ReadingTests(OperationsTestCase):
    """Ranges of files."""

    def test_everything(self) -> None:
        """In sequence, as the kernel reads, and twice: the second time nothing comes from the grid."""
        for _ in range(2):
            for name, expected in self.content.items():
                info = self.open(name)
                pieces = [
                    self.operations.read(f"/{name}", 128 << 10, at, info)
                    for at in range(0, len(expected) + 1, 128 << 10)
                ]
                self.operations.release(f"/{name}", info)
                self.assertEqual(b"".join(pieces), expected)
                self.assertTrue(info.keep_cache)
            seen, self.grid.seen = self.grid.seen, []
        self.assertEqual(seen, [])
        self.assertEqual(self.read("literal", 100, 3), b"its cap")

    def test_ranges(self) -> None:
        """At random, over the edges of blocks and the end; the same from the cache."""
        expected = self.content["large"]
        for offset, size in (
            (2_999_000, 5000),
            (131_071, 2),
            (1_000_000, 300_000),
            (900_000, 600_000),
            (3_000_000, 1),
            (3_000_001, 10),
            (0, 1),
        ):
            for _ in range(2):
                self.assertEqual(self.read("large", size, offset), expected[offset : offset + size])
        self.assertEqual(sum(1 for _ in self.grid.seen), 5)

    def test_neighbours(self) -> None:
        """Small files are fetched in advance, once each, while they are opened in order."""
        caps = [self.grid.add(500) for _ in range(40)]
        self.operations = self.mounted([PackedChild(f"{n:02}", cap) for n, cap in enumerate(caps)])
        self.grid.seen.clear()
        for number, cap in enumerate(caps):
            data = self.read(f"{number:02}", 1000, 0)
            self.assertEqual(data, self.grid.files[cap])
            if number == 4:
                self.assertGreater(len(self.grid.seen), 15)
        self.assertEqual(len(self.grid.seen), 40)

    def test_who_needs_what_is_being_fetched(self) -> None:
        """Waits for it; if that fails, it is fetched again."""
        caps = [self.grid.add(500) for _ in range(3)]
        self.operations = self.mounted([PackedChild(str(n), cap) for n, cap in enumerate(caps)])
        held: list[Deferred[bytes]] = []

        def hold() -> Deferred[bytes] | None:
            held.append(Deferred())
            return held[-1]

        self.grid.answer = hold
        self.open("0")
        self.assertEqual(len(held), 2)
        self.grid.answer = lambda: None
        info = self.open("1")
        result = self.in_thread(self.operations.read, "/1", 500, 0, info)
        held[0].callback(self.grid.files[caps[1]])
        self.assertEqual(result(), self.grid.files[caps[1]])
        info = self.open("2")
        result = self.in_thread(self.operations.read, "/2", 500, 0, info)
        held[1].errback(GridError("no servers"))
        self.assertEqual(result(), self.grid.files[caps[2]])


class UncachedTests(OperationsTestCase):
    """Without a cache."""

    cache_bytes = 0

    def test_ranges(self) -> None:
        """They are the same, and nothing is fetched in advance."""
        self.open("tiny")
        self.assertEqual(self.grid.seen, [])
        for name, expected in self.content.items():
            for offset in (0, 100, 150_000):
                self.assertEqual(self.read(name, 500, offset), expected[offset : offset + 500])


class FailureTests(OperationsTestCase):
    """What fails, takes too long, or is not permitted."""

    def test_absent_servers(self) -> None:
        """Reading fails with EIO and one sentence; others work; it is tried again some seconds later."""
        self.grid.answer = lambda: fail(GridError("too few servers have it"))
        info = self.open("small")
        self.assertEqual(self.errno_of(self.operations.read, "/small", 10, 0, info), errno.EIO)
        self.grid.answer = lambda: None
        seen = len(self.grid.seen)
        self.assertEqual(self.errno_of(self.operations.read, "/small", 10, 0, info), errno.EIO)
        self.assertEqual(len(self.grid.seen), seen)
        self.assertEqual(self.read("middle", 10, 0), self.content["middle"][:10])
        self.grid.clock.advance(FAILED_S)
        self.assertEqual(self.operations.read("/small", 10, 0, info), self.content["small"][:10])
        self.assertEqual(self.said, ["/small cannot be read: too few servers have it"])

    def test_reports_are_bounded(self) -> None:
        """One sentence in some seconds, which counts the others."""
        reports = FailureReports(self.said.append, self.grid.clock.seconds)
        for number in range(100):
            reports.add(f"/{number}\n", "why")
        self.grid.clock.advance(MESSAGES_S)
        reports.add("/b", "why")
        self.assertEqual(
            self.said,
            ["/0\\n cannot be read: why", "/b cannot be read: why; so did 99 other operations"],
        )

    def test_a_server_that_never_answers(self) -> None:
        """The operation ends when its time is over."""
        self.grid.answer = Deferred
        info = self.open("small")
        result = self.in_thread(self.operations.read, "/small", 10, 0, info)
        self.grid.clock.advance(OPERATION_S)
        self.assertEqual(result(), errno.EIO)
        self.assertIn("within 60 seconds", self.said[0])

    def test_unmounted_meanwhile(self) -> None:
        """What waits fails at once, and what comes later, too."""
        self.grid.answer = Deferred
        info = self.open("small")
        result = self.in_thread(self.operations.read, "/small", 10, 0, info)
        self.operations.close()
        self.assertEqual(result(), errno.EIO)
        self.assertEqual(self.errno_of(self.operations.getattr, "/small"), errno.EIO)

    def test_not_permitted(self) -> None:
        """Writing, reading a directory, and what does not exist."""
        for flags in (os.O_WRONLY, os.O_RDWR):
            self.assertEqual(self.errno_of(self.open, "small", flags), errno.EROFS)
        self.assertEqual(self.errno_of(self.open, ""), errno.EISDIR)
        self.assertEqual(self.errno_of(self.open, "none"), errno.ENOENT)
        self.assertEqual(self.errno_of(self.operations.readlink, "/small"), errno.EINVAL)
        self.assertEqual(self.operations.readlink("/link"), "small")
        info: Any = SimpleNamespace(fh=77)
        self.assertEqual(self.errno_of(self.operations.read, "/small", 1, 0, info), errno.EBADF)
        self.assertEqual(self.operations.release("/small", info), 0)

    def test_an_unexpected_error(self) -> None:
        """It ends the operation alone, and is logged."""
        self.grid.answer = lambda: fail(KeyError("a mistake"))
        info = self.open("small")
        self.assertEqual(self.errno_of(self.operations.read, "/small", 1, 0, info), errno.EIO)
        self.assertEqual(len(self.flushLoggedErrors(KeyError)), 1)
        self.assertIn("unexpectedly", self.said[0])

    def test_names(self) -> None:
        """A directory lists types and numbers, as its entries' own attributes show them."""
        listed = {name: attributes for name, attributes, _ in self.operations.readdir("/", 0)}
        self.assertEqual(sorted(listed)[:2], [".", ".."])
        for name in ("small", "link"):
            shown = self.operations.getattr(f"/{name}")
            self.assertEqual(listed[name], {key: shown[key] for key in ("st_mode", "st_ino")})
        self.assertEqual(self.operations.statfs("/")["f_namemax"], 255)
