"""
One mounted tree, from mount to unmount.

``mfusepy`` is used: it is pure Python, and runs in its own threads. ``pyfuse3`` would have to be compiled
with libfuse's headers, and has its own event loop.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import attrs
import mfusepy
from twisted.internet.defer import CancelledError

from pipegrid.core.caps import DirectoryCap
from pipegrid.core.text import printable
from pipegrid.errors import UsageError
from pipegrid.mount import mount_point_checks
from pipegrid.mount.block_cache import BlockCache
from pipegrid.mount.file_reads import FileContents
from pipegrid.mount.fuse_operations import FailureReports, FuseOperations
from pipegrid.mount.mounted_tree import BackupsRoot, MountedNode, MountedTree
from pipegrid.reactor.deferreds import Waiters, timeout_or
from pipegrid.reactor.process_settings import start_thread, wall_time
from pipegrid.tree.backup.catalogue import BackupRun
from pipegrid.tree.tree_grid import Grid

MOST_THREADS = 64
"""How many operations run at the same time; each needs a thread."""

MOST_IDLE_THREADS = 10
"""How many threads are kept when no operation runs."""

FRESH_S = 3.0
"""How long the kernel caches names and attributes."""

ENDING_S = 5.0
"""How long ``stop`` waits until the tree is unmounted, if no program has files open."""

_FIRST_WITH_MOST_THREADS = (3, 12)


@attrs.frozen
class MountSettings:
    """
    How and where a tree is mounted.

    Attributes:
        directory: absolute path of the mount point, as ``check_mount_point`` returns it.
        cache_directory: directory of the cache's files.
        cache_bytes: size of the cache; 0: no cache.
        allow_other: whether other users have access.
    """

    directory: str
    cache_directory: Path
    cache_bytes: int
    allow_other: bool = False


def directory_root(cap: DirectoryCap) -> Callable[[], Awaitable[MountedNode]]:
    """Return a function that returns the root node for a mounted directory of the grid."""
    node = MountedNode("directory", 0o555, cap=cap)

    async def root() -> MountedNode:
        return node

    return root


def backups_root(
    grid: Grid,
    runs: Callable[[], Coroutine[Any, Any, Sequence[BackupRun]]],
    say: Callable[[str], object],
) -> Callable[[], Awaitable[MountedNode]]:
    """Return a function that returns the root node for mounted backups."""
    return BackupsRoot(runs, grid.clock, wall_time, say).node


class Mount:
    """
    A mounted tree; call the methods in the reactor's thread.

    Args:
        reactor: the running reactor.
        root: returns the node of the mount point.
        say: called with sentences about problems, in the reactor's thread.

    Raises:
        SinkError: the cache cannot be created.
    """

    def __init__(
        self,
        reactor: Any,
        grid: Grid,
        root: Callable[[], Awaitable[MountedNode]],
        settings: MountSettings,
        say: Callable[[str], object],
    ) -> None:
        self._reactor = reactor
        self._grid = grid
        self._settings = settings
        self._cache: BlockCache | None = None
        if settings.cache_bytes:
            say_later = partial(reactor.callFromThread, say)
            self._cache = BlockCache(settings.cache_directory, settings.cache_bytes, say_later)
        self._tree = MountedTree(grid, root)
        self._contents = FileContents(grid, self._tree.views, self._cache, reactor.callFromThread)
        reports = FailureReports(say, reactor.seconds)
        self._operations = FuseOperations(
            reactor, self._tree, self._contents, reports, self._mounted
        )
        self._begun: Waiters[None] = Waiters()
        self._ended: Waiters[None] = Waiters()
        self.is_running = False
        self._is_mounted = False

    async def start(self) -> None:
        """
        Mount the tree; return when it can be used.

        Raises:
            UsageError: the system refuses the mount.
        """
        logging.getLogger("fuse").addHandler(logging.NullHandler())  # failures are reported here
        logging.getLogger("fuse").propagate = False
        begun = self._begun.wait()
        self.is_running = True
        if not start_thread(Thread(target=self._serve, name="pipegrid-fuse", daemon=True)):
            self.is_running = False
            raise UsageError(
                "nothing can be mounted, since the system gives no more threads; see 'ulimit -u'"
            )
        await begun
        path = self._settings.directory
        with suppress(OSError):  # read-ahead is optional
            await self._grid.workers.run_blocking(lambda _: mount_point_checks.set_read_ahead(path))

    def _mounted(self) -> None:
        self._is_mounted = True
        self._begun.fire(None)

    def _serve(self) -> None:
        """Answer FUSE until the tree is unmounted; runs in its own thread."""
        options: dict[str, Any] = {
            "foreground": True,
            "ro": True,
            "nosuid": True,
            "nodev": True,
            "fsname": mount_point_checks.FILE_SYSTEM,
            "subtype": mount_point_checks.FILE_SYSTEM,
            "use_ino": True,
            "attr_timeout": FRESH_S,
            "entry_timeout": FRESH_S,
        }
        version = mfusepy.fuse_version_major, mfusepy.fuse_version_minor
        if version >= _FIRST_WITH_MOST_THREADS:
            # Without ``max_idle_threads``, some versions print that its default is invalid.
            options |= {"max_threads": MOST_THREADS, "max_idle_threads": MOST_IDLE_THREADS}
        if self._settings.allow_other:
            options |= {"allow_other": True, "default_permissions": True}
        with suppress(BaseException):  # libfuse has printed the reason
            # The same encoding as ``os.fsdecode``, with which the tree's names are made.
            options |= {
                "encoding": sys.getfilesystemencoding(),
                "errors": sys.getfilesystemencodeerrors(),
            }
            mfusepy.FUSE(self._operations, self._settings.directory, raw_fi=True, **options)
        self._reactor.callFromThread(self._has_ended)

    def _has_ended(self) -> None:
        self.is_running = False
        shown = printable(self._settings.directory)
        self._begun.fail(
            UsageError(
                f"the system does not mount anything on {shown}; the message above says why (in a container, "
                "it takes --device /dev/fuse --cap-add SYS_ADMIN)"
            )
        )
        self._ended.fire(None)

    async def wait(self) -> None:
        """
        Return when the tree is unmounted, or the caller is cancelled, for example by SIGTERM and Ctrl-C.
        """
        if self.is_running:
            with suppress(CancelledError):
                await self._ended.wait()

    async def stop(self) -> bool:
        """
        Make running operations fail, unmount the tree, and free the cache.

        Returns:
            False: programs use the tree, so it was only detached; most of their further reads fail.
        """
        self._operations.close()
        self._tree.close()
        self._contents.close()
        idle = True
        if self.is_running and not self._is_mounted:
            # ``start`` was interrupted, so the tree is still being mounted and cannot be unmounted yet.
            with suppress(UsageError):
                await timeout_or(self._begun.wait(), ENDING_S, self._reactor)
        if self.is_running:
            ended = self._ended.wait()
            path = self._settings.directory
            idle = await self._grid.workers.run_blocking(lambda _: mount_point_checks.unmount(path))
            if not idle:
                await self._grid.workers.run_blocking(
                    lambda _: mount_point_checks.unmount(path, lazy=True)
                )
            if self.is_running:
                await timeout_or(ended, ENDING_S if idle else 0.5, self._reactor)
        if self._cache is not None:
            self._cache.close()
        return idle
