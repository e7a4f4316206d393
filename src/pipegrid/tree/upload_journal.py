"""
The upload journal lists what an unfinished ``put -r`` has stored, so that the next one of the same directory
resumes.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipegrid.core.caps import ChkCap, LitCap
from pipegrid.disk.safe_open import CannotLock, names_file, open_locked
from pipegrid.errors import PipegridError
from pipegrid.grid.file_grid import Grid
from pipegrid.tree.backup.backup_database import BackupDatabase
from pipegrid.tree.local_walk import FileMet
from pipegrid.tree.tree_upload import NOTES_NAME
from pipegrid.tree.upload_store import KnownObject, KnownObjects

WRITTEN_AFTER_S = 1.0
MAX_UNWRITTEN = 100
MAX_UNWRITTEN_BYTES = 1 << 20
"""The journal is written after this many bytes of stored files, even before ``WRITTEN_AFTER_S``."""

_LOCK = ".lock"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT

KEPT_S = 7 * 86400.0
"""How long a journal is kept after the last write; servers keep unfinished uploads equally long."""


def unfinished_put(
    grid: Grid,
    directory: str | os.PathLike[str],
    options: Mapping[str, Any],
) -> UploadJournal | NoUnfinishedPut:
    """
    Return the journal of a directory, which lists the objects that earlier puts have stored; the new put adds
    its own objects.

    Args:
        options: the options of ``Grid.put``; objects stored with other options do not count.
    """
    config = grid.config
    if not config.caches:
        return NoUnfinishedPut()
    params = options.get("params") or config.params
    numbers = (params.required_shares, params.total_shares, params.max_segment_bytes)
    happy = options.get("happy") or min(config.happy, params.total_shares)
    convergence = options.get("convergence")
    if options.get("random_key"):
        convergence = b"random"
    elif convergence is None:
        convergence = config.convergence
    context = repr((numbers, happy)).encode() + convergence
    root = os.path.realpath(directory)
    notes = config.caches[0] / NOTES_NAME
    with suppress(OSError):  # created now, so that the walk can skip it
        notes.mkdir(mode=0o700, exist_ok=True)
    _forget_stale(notes, time.time())
    return UploadJournal(notes, context, root)


class NoUnfinishedPut(KnownObjects):
    """Used instead of a journal if the client has no place for one."""

    def forget(self) -> None:
        """Do nothing: no journal exists."""

    def close(self) -> None:
        """Do nothing: no journal is open."""


class UploadJournal(KnownObjects):
    """
    The journal of one directory. Close it at the end.

    The journal lists stored objects, and is removed when a put of the directory has succeeded. A put of a few
    small files that succeeds within ``WRITTEN_AFTER_S`` writes nothing. A put that resumes checks each listed
    object on the grid (in surveys, without fetching its bytes), and sends missing ones again. The journal is
    a database like that of backups (``backup.backup_database``).

    At most one put at a time uses the journal of a directory; a second put runs without one. A put locks a
    file next to the journal, and only the owner of this lock removes the journal. So a put that runs for a
    week keeps its journal, and a put whose lock file was deleted does not remove the journal of the next put.
    On file systems without locks, no journal is used.

    Args:
        notes: the directory of journals.
        context: the encoding parameters and the convergence secret.
        root: absolute path of the directory that is stored.
    """

    def __init__(self, notes: Path, context: bytes, root: str) -> None:
        digest = hashlib.sha256(context + b"\0" + os.fsencode(root)).hexdigest()[:32]
        self._path = notes / f"{digest}.sqlite"
        self._context = context
        self._root = root
        self._began_s = time.time()
        self._unwritten: list[Callable[[KnownObjects], None]] = []
        self._unwritten_bytes = 0
        self._database: BackupDatabase | None = None
        self._lock = -1
        self._off = False
        if self._path.exists():
            self._open()

    def file(self, path: str, found: os.stat_result) -> KnownObject | None:
        """
        Return the record of a regular file, marked for a check on the grid; None if the file has changed or
        is not recorded.
        """
        return None if self._database is None else _due(self._database.file(path, found))

    def directory(self, packed: bytes) -> KnownObject | None:
        """
        Return the record of a directory with exactly these bytes, marked for a check on the grid; None if it
        is not recorded.
        """
        return None if self._database is None else _due(self._database.directory(packed))

    def file_stored(self, met: FileMet, cap: ChkCap | LitCap) -> None:
        """Record that a file was read and stored."""
        if isinstance(cap, ChkCap):
            met = met._replace(content=None)
            self._unwritten_bytes += cap.size
            self._note(lambda memory: memory.file_stored(met, cap))

    def directory_stored(self, packed: bytes, cap: ChkCap) -> None:
        if self._database is not None:  # written now, since directories are few and large
            self._database.directory_stored(packed, cap)

    def forget(self) -> None:
        """Remove the journal; called when the put has succeeded."""
        self._off = True
        self._unwritten.clear()
        self._close_database()
        if self._lock >= 0 and names_file(f"{self._path}{_LOCK}", self._lock):
            for suffix in ("", "-wal", "-shm", _LOCK):
                with suppress(OSError):
                    os.unlink(f"{self._path}{suffix}")

    def close(self) -> None:
        """Write the remaining records, unless the put has succeeded, and unlock the journal."""
        if self._unwritten and not self._off:
            self._write()
        self._off = True
        self._close_database()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _note(self, write: Callable[[KnownObjects], None]) -> None:
        if self._off:
            return
        if self._database is not None:
            write(self._database)
            return
        self._unwritten.append(write)
        early = 0 <= time.time() - self._began_s < WRITTEN_AFTER_S
        much = self._unwritten_bytes >= MAX_UNWRITTEN_BYTES
        if much or len(self._unwritten) >= MAX_UNWRITTEN or not early:
            self._write()

    def _write(self) -> None:
        self._open()
        for write in self._unwritten:
            if self._database is not None:
                write(self._database)
        self._unwritten.clear()

    def _open(self) -> None:
        if self._off or self._database is not None:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = open_locked(f"{self._path}{_LOCK}", _LOCK_FLAGS, mode=0o600)
            if lock is None:
                raise BlockingIOError
            self._lock = lock
            self._database = BackupDatabase(self._path, self._context, self._root)
        except (OSError, PipegridError) as error:
            # Either another put uses the journal, or it cannot be written; in both cases, this put runs
            # without one.
            self._off = True
            if isinstance(error, CannotLock):
                with suppress(OSError):
                    os.unlink(f"{self._path}{_LOCK}")
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    def _close_database(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()


def _due(known: KnownObject | None) -> KnownObject | None:
    return known if known is None or isinstance(known.cap, LitCap) else KnownObject(known.cap, True)


def _forget_stale(notes: Path, now_s: float) -> None:
    """Remove the journals in which nothing was written for ``KEPT_S``."""
    files: dict[str, list[os.DirEntry[str]]] = {}
    with suppress(OSError), os.scandir(notes) as entries:
        for entry in entries:
            files.setdefault(entry.name.partition(".")[0], []).append(entry)
    for stem, each in files.items():
        with suppress(OSError):
            written_s = max(entry.stat(follow_symlinks=False).st_mtime for entry in each)
            if now_s - written_s > KEPT_S:
                _remove(str(notes / f"{stem}.sqlite{_LOCK}"), [entry.path for entry in each])


def _remove(lock_path: str, paths: list[str]) -> None:
    """Remove a journal, unless a running put uses it."""
    try:
        lock = open_locked(lock_path, _LOCK_FLAGS, mode=0o600)
        if lock is None:
            return
    except CannotLock:
        lock = -1
    for path in (*paths, lock_path):
        with suppress(OSError):
            os.unlink(path)
    if lock >= 0:
        os.close(lock)
