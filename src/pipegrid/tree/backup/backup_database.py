"""The database of stored files, by which a backup finds what has not changed."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

import attrs

from pipegrid.core.caps import ChkCap, LitCap, parse_cap
from pipegrid.disk.file_system_calls import FULL
from pipegrid.disk.private_files import open_private
from pipegrid.disk.sqlite_databases import open_database
from pipegrid.errors import CapError, SinkError, UsageError
from pipegrid.tree.local_walk import FileMet
from pipegrid.tree.upload_target import KnownObject, KnownObjects

# What has not changed since it was stored, and when it has to be looked for on the grid again; pure.
#
# A file is unchanged if size, inode, and the times of its last change (``mtime``) and of the last change
# of its inode (``ctime``) are what they were. ``ctime`` cannot be set back by programs, so neither
# ``touch`` nor ``cp -p`` deceive. One hole is left: times advance in steps, so a file that is written
# twice within one step, and read in between, looks as it did when it was read. So what was **racily
# clean**, changed less than ``RACY_NS`` before it was read, is read once more by the next run, as git
# does with its index. A ``mtime`` that was in the future by then is no such change: a program or another
# machine has set it, and a write would have made it the present.

RACY_NS = 2_000_000_000
"""The coarsest steps in which file systems keep time (FAT) have two seconds; Linux' own ten milliseconds."""

_DAY_S = 86400.0

SOONEST_S = 12 * _DAY_S
LATEST_S = 24 * _DAY_S
"""
An object is checked, and its leases are renewed, when it was not for 12 to 24 days, each at an age of its
own, so that what was stored in one night is not due in one night. Tahoe-LAFS's servers keep leases for 31
days: a weekly backup renews them in time.
"""


@attrs.frozen
class Signature:
    """What tells one state of a file from another: numbers of 64 bits with a sign, as SQLite keeps them."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


@attrs.frozen
class Recorded:
    """
    A file as it was when it was stored.

    Attributes:
        read_ns: when it was read, in nanoseconds since 1970.
    """

    signature: Signature
    read_ns: int


def signature_of(found: os.stat_result) -> Signature:
    """Return what is compared of a file."""
    return Signature(
        found.st_size, _kept(found.st_mtime_ns), _kept(found.st_ctime_ns), _kept(found.st_ino)
    )


def _kept(number: int) -> int:
    """
    Return the number of 64 bits that stands for one that may have more.

    Inodes have no sign, and network and FUSE file systems use all of their bits; files may be of years that
    64 bits of nanoseconds do not reach (2262).
    """
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def is_unchanged(recorded: Recorded, found: os.stat_result) -> bool:
    """Return whether a file holds what it held when it was stored, beyond doubt."""
    signature = recorded.signature
    changed_ns = signature.ctime_ns
    if signature.mtime_ns <= recorded.read_ns + RACY_NS:
        changed_ns = max(changed_ns, signature.mtime_ns)
    return recorded.read_ns - changed_ns > RACY_NS and signature_of(found) == signature


def is_due(cap: str, checked_s: float, now_s: float) -> bool:
    """Return whether something has to be looked for, which was found whole at a time (since 1970)."""
    age_s = now_s - checked_s
    if 0 <= age_s <= SOONEST_S:
        return False  # nearly all of them, each time
    digest = hashlib.sha256(cap.encode("ascii", "replace")).digest()
    spread = int.from_bytes(digest[:4], "big") / (1 << 32)
    # A clock that was set back must not make objects fresh for years.
    return age_s < -_DAY_S or age_s > SOONEST_S + (LATEST_S - SOONEST_S) * spread


# What a client remembers of its backups: which files had which cap, and when each cap was last found on the
# grid.
#
# One SQLite file, written in WAL mode and in small transactions, so that a process that is killed loses a
# window of what it had learned and nothing else: what is missing is read and stored again. What is recorded
# was stored before. One process uses it at a time, which ``BackupPlace.lock`` ensures.
# A database that is damaged is set aside, and a new one begun: nothing is lost but time.
#
# Paths, names and caps are secrets; the file is nobody else's to read. Two threads use it, one after the
# other: one reads while the walk asks, the reactor's writes.

VERSION = 1

COMMIT_ROWS = 200
COMMIT_S = 1.0
COMMIT_BYTES = 1 << 20
"""What a process that is killed forgets at most; bytes of files."""

_FORGET_S = 120 * 86400.0
"""What nobody has met for so long is not there any more: everything that is met is checked within 24 days."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    path BLOB PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, ctime_ns INTEGER NOT NULL,
    inode INTEGER NOT NULL, read_ns INTEGER NOT NULL, context BLOB NOT NULL, cap TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS directories (digest BLOB PRIMARY KEY, cap TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS objects (cap TEXT PRIMARY KEY, checked REAL NOT NULL) WITHOUT ROWID;
"""


class Database(KnownObjects):
    """
    The memory of one client's backups.

    Args:
        path: where it is; made if missing.
        context: how files are encoded and keyed; what was stored otherwise counts as not stored.
        root: absolute path of the directory that is stored.
        now: seconds since 1970.
        say: told if a damaged database was set aside.

    Raises:
        UsageError: it was made by a later PipeGrid, or cannot be opened.
        SinkError: its disk is full, or does not do what databases need; what is there stays.
    """

    def __init__(
        self,
        path: Path,
        context: bytes,
        root: str,
        *,
        now: Callable[[], float] = time.time,
        say: Callable[[str], None] = lambda sentence: None,
        read_only: bool = False,
    ) -> None:
        self._path = path
        self._context = hashlib.sha256(b"pipegrid backup" + context).digest()[:16]
        self._above = os.path.join(os.fsencode(root), b"")
        self._now = now
        self._say = say
        self._read_only = read_only
        self._rows = self._bytes = 0
        self._committed_s = now()
        self._broken = False
        self._busy = Lock()  # the thread that asks, and the reactor's
        try:
            try:
                self._open()
            except sqlite3.OperationalError:
                raise  # its disk is full or not to be written to: what is there is good
            except sqlite3.DatabaseError as error:
                self._close_connections()
                self._set_aside(error)
                self._open()
        except sqlite3.Error as error:
            self._close_connections()
            raise SinkError(
                f"cannot use the database {path}: {error}; check that its disk has space, is local, and is "
                "writable"
            ) from error

    def _open(self) -> None:
        try:
            os.close(open_private(str(self._path), os.O_RDWR))
        except OSError as error:
            text = f"cannot open {self._path}: {error.strerror}"
            if error.errno in FULL:
                raise SinkError(f"{text}; free some space, and run the backup again") from error
            raise UsageError(text) from error
        self._connection = open_database(self._path)
        version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            self._connection.close()
            raise UsageError(
                f"{self._path} was made by a later PipeGrid; use that one, or move the file away"
            )
        damage = self._connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if damage != "ok":
            raise sqlite3.DatabaseError(damage)
        self._connection.executescript(_SCHEMA)
        self._connection.execute(f"PRAGMA user_version={VERSION}")

    # Memory, as uploads ask it.

    def file(self, path: str, found: os.stat_result) -> KnownObject | None:
        """Return what is known of a regular file, if it is unchanged."""
        row = self._ask(
            "SELECT size, mtime_ns, ctime_ns, inode, read_ns, files.cap, checked FROM files "
            "LEFT JOIN objects ON objects.cap = files.cap WHERE path = ? AND context = ?",
            (self._key(path), self._context),
        )
        if row is None or not is_unchanged(Recorded(Signature(*row[:4]), row[4]), found):
            return None
        return self._known(row[5], row[6])

    def directory(self, packed: bytes) -> KnownObject | None:
        """Return what is known of a directory of exactly these bytes."""
        row = self._ask(
            "SELECT directories.cap, checked FROM directories "
            "LEFT JOIN objects ON objects.cap = directories.cap WHERE digest = ?",
            (self._digest(packed),),
        )
        return None if row is None else self._known(*row)

    def file_stored(self, met: FileMet, cap: ChkCap | LitCap) -> None:
        """A file was read, and is stored."""
        signature = signature_of(met.found)
        text = str(cap)
        self._write(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                self._key(met.path),
                signature.size,
                signature.mtime_ns,
                signature.ctime_ns,
                signature.inode,
                met.began_ns,
                self._context,
                text,
            ),
        )
        self._bytes += signature.size
        self.checked(cap)

    def directory_stored(self, packed: bytes, cap: ChkCap) -> None:
        self._write(
            "INSERT OR REPLACE INTO directories VALUES (?, ?)", (self._digest(packed), str(cap))
        )
        self.checked(cap)

    def checked(self, cap: ChkCap | LitCap) -> None:
        """What this cap reads is whole now."""
        self._write("INSERT OR REPLACE INTO objects VALUES (?, ?)", (str(cap), self._now()))

    def doubt(self) -> None:
        """Have all that is remembered looked for before it counts as stored."""
        long_ago = self._now() - LATEST_S - 1
        self._write("UPDATE objects SET checked = ? WHERE checked > ?", (long_ago, long_ago))
        self._commit()

    # The end.

    def finish(self) -> None:
        """A run has ended well: forget what nobody has met for long."""
        before = (self._now() - _FORGET_S,)
        old = "(SELECT cap FROM objects WHERE checked < ?)"
        self._write(f"DELETE FROM files WHERE cap IN {old}", before)
        self._write(f"DELETE FROM directories WHERE cap IN {old}", before)
        self._write("DELETE FROM objects WHERE checked < ?", before)

    def close(self) -> None:
        """Write down what was learned."""
        self._commit()
        self._close_connections()
        if self._broken:
            self._set_aside(None)

    def _close_connections(self) -> None:
        connection = getattr(self, "_connection", None)
        if connection is not None:
            connection.close()

    # Within.

    def _known(self, text: str, checked: float | None) -> KnownObject | None:
        try:
            cap = parse_cap(text)
        except CapError:
            return None
        if not isinstance(cap, (ChkCap, LitCap)):
            return None
        due = isinstance(cap, ChkCap) and is_due(text, checked or 0.0, self._now())
        return KnownObject(cap, due)

    def _key(self, path: str) -> bytes:
        return self._above + os.fsencode(path)

    def _digest(self, packed: bytes) -> bytes:
        return hashlib.sha256(self._context + packed).digest()

    def _ask(self, statement: str, values: tuple[object, ...]) -> tuple[Any, ...] | None:
        if self._broken:
            return None
        try:
            with self._busy:
                row: tuple[Any, ...] | None = self._connection.execute(statement, values).fetchone()
        except sqlite3.OperationalError as error:
            self._stop_writing(error)
            return None
        except sqlite3.DatabaseError:
            self._broken = True  # what is not remembered is read and stored again
            return None
        return row

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        if self._broken or self._read_only:
            return
        try:
            with self._busy:
                if not self._connection.in_transaction:
                    self._connection.execute("BEGIN")
                self._connection.execute(statement, values)
        except sqlite3.OperationalError as error:  # the disk is full: what is there is good
            self._stop_writing(error)
            return
        except sqlite3.DatabaseError:
            self._broken = True
            return
        self._rows += 1
        now_s = self._now()
        much = self._rows >= COMMIT_ROWS or self._bytes >= COMMIT_BYTES
        if much or not 0 <= now_s - self._committed_s < COMMIT_S:
            self._commit()

    def _commit(self) -> None:
        self._rows = self._bytes = 0
        self._committed_s = self._now()
        try:
            with self._busy:
                if self._connection.in_transaction:
                    self._connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            self._stop_writing(error)
        except sqlite3.DatabaseError:
            self._broken = True

    def _stop_writing(self, error: Exception) -> None:
        if not self._read_only:
            self._read_only = True
            self._say(
                f"cannot use {self._path} ({error}); what is stored now will be read again next time"
            )

    def _set_aside(self, error: Exception | None) -> None:
        """Move a database away that cannot be used; of those that were before nobody needs to know."""
        for earlier in self._path.parent.glob(f"{self._path.name}.damaged-*"):
            with suppress(OSError):
                earlier.unlink()
        aside = self._path.with_name(f"{self._path.name}.damaged-{int(self._now())}")
        for suffix in ("", "-wal", "-shm"):
            if os.path.lexists(f"{self._path}{suffix}"):
                os.replace(f"{self._path}{suffix}", f"{aside}{suffix}")
        why = f" ({error})" if error is not None else ""
        self._say(
            f"the database of backups was damaged{why} and was moved to {aside}; nothing is lost, but every "
            "file is read once more"
        )
