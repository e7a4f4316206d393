"""
The operations that FUSE calls in its own threads; each runs in the reactor's thread, and the FUSE thread
waits.

Each operation ends within a time limit, with a result or a system error. After the grid could not read a
path, operations on the same path fail at once for some seconds, so that programs that retry do not occupy all
threads.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.interfaces import IReactorFromThreads, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from pipegrid.core.hashes import Buffer
from pipegrid.core.text import printable
from pipegrid.errors import PipegridError
from pipegrid.mount.file_reads import FileContents, OpenedFile
from pipegrid.mount.mounted_tree import MountedPath, MountedTree

T = TypeVar("T")
log = Logger()

OPERATION_S = 60.0
"""Time limit of an operation, after which it fails."""

FAILED_S = 5.0
"""How long operations on a path fail at once after the grid could not read the path."""

MOST_HANDLES = 4096
"""Maximum number of open files."""

MESSAGES_S = 10.0
"""At most one failure is reported in this time; further failures are counted."""

_MOST_FAILURES = 1000
_THREAD_S = 10.0


class FileInfo(Protocol):
    """FUSE's structure for an open file."""

    fh: int
    flags: int
    keep_cache: int


@attrs.define(eq=False)
class _Call:
    """One operation, whose FUSE thread waits for ``ended``."""

    path: str
    ended: threading.Event = attrs.field(factory=threading.Event)
    running: Deferred[Any] | None = None
    result: Any = None
    error: int = 0


class FailureReports:
    """
    Prints sentences about failures, at most one every ``MESSAGES_S``.

    Args:
        say: prints a sentence.
        clock: returns the time in seconds.
    """

    def __init__(self, say: Callable[[str], object], clock: Callable[[], float]) -> None:
        self._say = say
        self._clock = clock
        self._last = float("-inf")
        self._untold = 0

    def add(self, path: str, reason: str) -> None:
        """Report that a path could not be read, and why."""
        now = self._clock()
        if now - self._last < MESSAGES_S:
            self._untold += 1
            return
        more = f"; so did {self._untold} other operations" if self._untold else ""
        self._last, self._untold = now, 0
        self._say(f"{printable(path)[:300]} cannot be read: {reason}{more}")


class FuseOperations:
    """
    The operations on a mounted tree; FUSE's threads call the methods without an underscore, except ``close``.

    Args:
        reactor: the tree is used in its thread.
        reports: prints messages about failures.
        ready: called in the reactor's thread when the tree is mounted.
    """

    use_ns = True

    def __init__(
        self,
        reactor: Any,
        tree: MountedTree,
        contents: FileContents,
        reports: FailureReports,
        ready: Callable[[], object],
    ) -> None:
        self._threads: IReactorFromThreads = reactor
        self._clock: IReactorTime = reactor
        self._tree = tree
        self._contents = contents
        self._reports = reports
        self._ready = ready
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()
        self._failed: OrderedDict[str, float] = OrderedDict()
        self._handles: dict[int, OpenedFile] = {}
        self._last_handle = 0
        self._closed = False
        # A descriptor, not a path: the path may lead into the mounted tree, which does not respond before
        # ``init``.
        self._working_directory = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    # The operations.

    def init(self, _path: str) -> None:
        """
        Note that the tree is mounted, and restore the working directory, which libfuse has changed to ``/``.
        """
        os.fchdir(self._working_directory)
        self._threads.callFromThread(self._ready)

    def getattr(self, path: str, _info: FileInfo | None = None) -> dict[str, int]:
        """Return what ``stat`` shows; times are in nanoseconds."""
        return self._call(path, lambda: self._tree.attributes(_names(path)))

    def readlink(self, path: str) -> str:
        """Return the target of a symbolic link."""
        place = self._call(path, lambda: self._tree.locate(_names(path)))
        if place.node.kind != "link":
            raise _system_error(errno.EINVAL)
        return os.fsdecode(place.node.target)

    def readdir(self, path: str, _handle: int) -> Iterator[tuple[str, dict[str, int], int]]:
        """Yield the names in a directory, with types and inode numbers."""
        found = self._call(path, lambda: self._tree.list_directory(_names(path)))
        yield ".", {"st_mode": stat.S_IFDIR}, 0
        yield "..", {"st_mode": stat.S_IFDIR}, 0
        for name, place in found:
            yield name, {"st_mode": place.node.full_mode, "st_ino": place.inode}, 0

    def open(self, path: str, info: FileInfo) -> int:
        """Open a file for reading."""
        if info.flags & (os.O_WRONLY | os.O_RDWR):
            raise _system_error(errno.EROFS)
        with self._lock:
            if len(self._handles) >= MOST_HANDLES:
                raise _system_error(errno.ENFILE)

        async def work() -> OpenedFile:
            return await self._contents.open(await self._tree.locate(_names(path)))

        file = self._call(path, work)
        with self._lock:
            self._last_handle += 1
            info.fh = self._last_handle
            self._handles[info.fh] = file
        info.keep_cache = file.is_fixed
        return 0

    def read(self, path: str, size: int, offset: int, info: FileInfo) -> bytes:
        """Return a range of an open file."""
        file = self._handles.get(info.fh)
        if file is None:
            raise _system_error(errno.EBADF)

        def fetch(start: int, length: int) -> Sequence[Buffer]:
            return self._call(path, partial(self._contents.fetch, file, start, length))

        return self._contents.read(file, offset, size, fetch)

    def release(self, _path: str, info: FileInfo) -> int:
        with self._lock:
            file = self._handles.pop(info.fh, None)
        if file is not None:
            self._threads.callFromThread(self._contents.release, file)
        return 0

    def statfs(self, _path: str) -> dict[str, int]:
        """Return statistics of the file system: no free space, read-only, and the maximum length of names."""
        return {"f_bsize": 4096, "f_frsize": 4096, "f_namemax": 255, "f_flag": os.ST_RDONLY}

    # Calls from FUSE's threads to the reactor's thread.

    def _call(self, path: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """
        Run a coroutine in the reactor's thread, wait for it, and return its result.

        Raises:
            OSError: the coroutine failed or took too long, another has failed for this path within
                ``FAILED_S``, or the tree is being unmounted.
        """
        call = _Call(path)
        with self._lock:
            if self._closed:
                raise _system_error(errno.EIO)
            self._calls.add(call)
        self._threads.callFromThread(self._begin, call, work)
        ended = call.ended.wait(OPERATION_S + _THREAD_S)
        with self._lock:
            self._calls.discard(call)
        if not ended:  # the reactor is too busy to end the operation
            call.ended.set()
            raise _system_error(errno.EIO)
        if call.error:
            raise _system_error(call.error)
        found: T = call.result
        return found

    def _begin(self, call: _Call, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        if self._closed or self._failed_lately(call.path):
            call.error = errno.EIO
            call.ended.set()
            return
        call.running = Deferred.fromCoroutine(work())
        call.running.addTimeout(OPERATION_S, self._clock)
        call.running.addCallbacks(
            self._succeeded, self._fail, callbackArgs=(call,), errbackArgs=(call,)
        )

    def _succeeded(self, result: Any, call: _Call) -> None:
        if call.ended.is_set() and isinstance(result, OpenedFile):
            self._contents.release(result)  # its FUSE thread does not wait any more
            return
        call.result = result
        call.ended.set()

    def _fail(self, failure: Failure, call: _Call) -> None:
        error = failure.value
        call.error = errno.EIO
        if isinstance(error, OSError) and error.errno:
            call.error = error.errno
        elif not isinstance(error, CancelledError):
            self._failed[call.path] = self._clock.seconds() + FAILED_S
            while len(self._failed) > _MOST_FAILURES:
                self._failed.popitem(last=False)
            self._reports.add(call.path, _reason(failure))
        call.ended.set()

    def _failed_lately(self, path: str) -> bool:
        if self._clock.seconds() < self._failed.get(path, 0.0):
            return True
        self._failed.pop(path, None)
        return False

    def close(self) -> None:
        """Make all running and all later operations fail; call this in the reactor's thread."""
        with self._lock:
            self._closed = True
            calls = list(self._calls)
        for call in calls:
            if call.running is not None:
                call.running.cancel()
            if not call.ended.is_set():
                call.error = errno.EIO
                call.ended.set()

    def __del__(self) -> None:
        os.close(self._working_directory)


def _names(path: str) -> MountedPath:
    return tuple(name for name in path.split("/") if name)


def _reason(failure: Failure) -> str:
    if isinstance(failure.value, DeferredTimeout):
        return f"the grid did not return it within {OPERATION_S:.0f} seconds"
    if isinstance(failure.value, PipegridError):
        return str(failure.value)
    log.failure("an operation failed unexpectedly", failure)
    return "the mount failed unexpectedly; -v shows details"


def _system_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))
