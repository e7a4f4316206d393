"""
A mirror's directory that is not changed: for a dry run, or a user who may only read.

Nothing is made in it, not even the directory, and nothing is recorded. The lock of writers is shared, if it
exists and can be opened, so that no process writes meanwhile, and several may read.

A dry run fetches into a directory for temporary files, which replaces ``HIDDEN``. It is locked while the
run lasts, so that the next run can remove that of an interrupted one.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from pipegrid.disk import file_system_calls as disk
from pipegrid.mirror import HIDDEN
from pipegrid.mirror.archive_file import MirrorError
from pipegrid.mirror.destination import Destination, Directories, make_directory
from pipegrid.mirror.hash_cache import HashCache
from pipegrid.mirror.stat_cache import StatCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipegrid.mirror.archive_file import ArchiveFile

_SCRATCH = "pipegrid-mirror-"
"""The prefix of directories for temporary files."""

_LEFT_S = 3600.0
"""The age at which an unlocked one is removed: a new one is not locked yet."""

_COPIED = ("compressed", "filters", "checked", "reindexed")
"""Files in ``HIDDEN`` that are read; some get new entries."""


class ReadOnlyDestination(Destination):
    """
    Like ``Destination``, but it need not exist.

    Attributes:
        unnoted_files: how many files were hashed and could have been recorded.
    """

    def _open(self, hidden: str) -> None:
        self._scratch: str | None = None
        self._directories = _Directories(
            self.path, lambda: self._hidden, lambda: self._scratch or "TMPDIR"
        )
        seen = _Seen(os.path.join(hidden, "seen"), self.manifest)
        self._verified = self._unnoted = _Verified(os.path.join(hidden, "verified.sqlite"), seen)

    def _begin(self, lock: str) -> bool:
        self.folds = self._directories.folds(HIDDEN)
        try:
            self._lock = disk.open_locked(lock, os.O_RDONLY, shared=True)
        except OSError:
            return True  # there is no mirror yet, or this user may not open its lock
        return self._lock is not None

    @property
    def unnoted_files(self) -> int:  # type: ignore[override]
        """Counted where a writer would record a file."""
        return self._unnoted.files

    @cached_property
    def _hidden(self) -> int:  # type: ignore[override]
        from shutil import copyfile  # which a check does not need
        from tempfile import gettempdir, mkdtemp

        remove_left(gettempdir())
        self._scratch = mkdtemp(prefix=_SCRATCH)
        fd = os.open(self._scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):  # without locks none is taken for unused
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self.device = os.fstat(fd).st_dev
        for name in _COPIED:
            with suppress(OSError):
                copyfile(f"{self.path}/{HIDDEN}/{name}", f"{self._scratch}/{name}")
        return fd

    @cached_property
    def _incoming(self) -> int:  # type: ignore[override]
        return make_directory(self._hidden, "incoming")

    def close(self) -> None:
        """Close all files, and remove the fetched ones."""
        super().close()
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            from shutil import rmtree

            rmtree(scratch, ignore_errors=True)

    def where(self, path: str) -> str:
        if self._scratch is not None and path.startswith(f"{HIDDEN}/"):
            return self._scratch + path[len(HIDDEN) :]
        return super().where(path)

    def leftovers(self) -> dict[bytes, str]:
        """See ``Destination``; files of an interrupted run are left for the next one that fetches."""
        return {}


def remove_left(directory: str) -> None:
    """Remove the unused temporary directories of this user's dry runs."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(_SCRATCH):
                _remove_if_left(entry.path)


def _remove_if_left(path: str) -> None:
    with suppress(OSError):
        fd = disk.open_locked(path, os.O_RDONLY | os.O_DIRECTORY)
        if fd is None:
            return
        try:
            found = os.fstat(fd)
            if found.st_uid == os.geteuid() and time.time() - found.st_mtime > _LEFT_S:
                from shutil import rmtree

                rmtree(path, ignore_errors=True)
        finally:
            os.close(fd)


class _Directories(Directories):
    """
    The directories below a root, none of which is made except in ``scratch``, which replaces ``HIDDEN``.
    """

    def __init__(self, path: str, hidden: Callable[[], int], scratch: Callable[[], str]) -> None:
        super().__init__(path, make=False)
        self._hidden = hidden
        self._scratch = scratch

    def full(self, what: str) -> MirrorError:
        """See ``Directories``; only the directory for temporary files can be full."""
        return MirrorError(
            f"{self._scratch()} cannot {what}: the disk is full; free some space, or name another directory "
            "with "
            "TMPDIR"
        )

    def directory(self, path: str, make: bool) -> int | None:
        if path == HIDDEN:
            return self._hidden()
        return super().directory(path, make and path.startswith(f"{HIDDEN}/"))


class _Seen(StatCache):
    """Rows that are only read."""

    def _start_over(self) -> None:
        pass

    def keep(self) -> None:
        self._new = []


class _Verified(HashCache):
    """Records that are only read."""

    files = 0

    def note(self, fd: int, wanted: ArchiveFile) -> None:
        self.files += 1

    def withdraw(self, fd: int, wanted: ArchiveFile, status: os.stat_result) -> bool:
        self.files += 1
        return self.seen.withdraw(wanted.digest, status)

    def forget(self, path: str) -> None:
        """Do nothing: no file was recorded."""
