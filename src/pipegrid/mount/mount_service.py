"""
One mounted tree, from its mount to its end.

It uses ``mfusepy``, which is pure Python and runs in threads of its own: ``pyfuse3`` has to be compiled
against libfuse's headers, and brings an event loop of its own.
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
"""Operations that run at once; each takes a thread."""

MOST_IDLE_THREADS = 10
"""Threads that stay when nothing runs."""

FRESH_S = 3.0
"""How long the kernel takes names and attributes to be as they were."""

ENDING_S = 5.0
"""How long a tree that is being unmounted is waited for; files that programs have open are not."""

_FIRST_WITH_MOST_THREADS = (3, 12)


@attrs.frozen
class MountSettings:
    """
    How a tree is mounted.

    Attributes:
        directory: an absolute path, as ``check_mount_point`` returns it.
        cache_directory: for the cache.
        cache_bytes: of the cache; 0: none.
        allow_other: other users have access, too.
    """

    directory: str
    cache_directory: Path
    cache_bytes: int
    allow_other: bool = False


def directory_root(cap: DirectoryCap) -> Callable[[], Awaitable[MountedNode]]:
    """Return what gives the root of a mounted directory of the grid."""
    node = MountedNode("directory", 0o555, cap=cap)

    async def root() -> MountedNode:
        return node

    return root


def backups_root(
    grid: Grid,
    runs: Callable[[], Coroutine[Any, Any, Sequence[BackupRun]]],
    say: Callable[[str], object],
) -> Callable[[], Awaitable[MountedNode]]:
    """Return what gives the root of mounted backups."""
    return BackupsRoot(runs, grid.clock, wall_time, say).node


class Mount:
    """
    A tree that is mounted until it is unmounted; call it in the reactor's thread.

    Args:
        reactor: the real one.
        root: returns the node of the mount point.
        say: called with sentences, in any thread.

    Raises:
        SinkError: there can be no cache.
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
        Mount it; returns when it can be used.

        Raises:
            UsageError: the system refuses.
        """
        logging.getLogger("fuse").addHandler(logging.NullHandler())  # what fails is reported here
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
        with suppress(OSError):  # there may be no thread for it, and it is mounted without it
            await self._grid.workers.run_blocking(lambda _: mount_point_checks.set_read_ahead(path))

    def _mounted(self) -> None:
        self._is_mounted = True
        self._begun.fire(None)

    def _serve(self) -> None:
        """In a thread: answer FUSE until it is unmounted."""
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
            # Without the second one, some versions print that its default is invalid.
            options |= {"max_threads": MOST_THREADS, "max_idle_threads": MOST_IDLE_THREADS}
        if self._settings.allow_other:
            options |= {"allow_other": True, "default_permissions": True}
        with suppress(BaseException):  # the system prints why
            # As ``os.fsdecode`` does, which makes the names of the tree.
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
        """Return when it was unmounted, or the caller is cancelled, as by SIGTERM and Ctrl-C."""
        if self.is_running:
            with suppress(CancelledError):
                await self._ended.wait()

    async def stop(self) -> bool:
        """
        Unmount it, fail what is being read, and free the cache.

        Returns:
            False: programs still have files open; their next read fails when this process has ended.
        """
        self._operations.close()
        self._tree.close()
        self._contents.close()
        idle = True
        if self.is_running and not self._is_mounted:
            # It was interrupted before, and cannot be unmounted yet.
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
