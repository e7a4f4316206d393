"""The database of stored files, which shows a backup which files are unchanged."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from pipegrid.core.caps import ChkCap, LitCap, parse_cap
from pipegrid.disk.file_system_calls import FULL
from pipegrid.disk.private_files import open_private
from pipegrid.disk.sqlite_databases import open_database
from pipegrid.errors import CapError, SinkError, UsageError
from pipegrid.tree.backup.prune_records import SentObjects
from pipegrid.tree.local_walk import FileMet
from pipegrid.tree.upload_store import KnownObject, KnownObjects

# This part decides which files are unchanged since they were stored, and when an object must be checked on
# the grid again. It does no input or output.
#
# A file is unchanged if its size, inode, ``mtime`` and ``ctime`` are the same. Programs cannot set ``ctime``
# back, so changes by ``touch`` and ``cp -p`` are noticed. One gap remains: file times advance in steps, so a
# file looks unchanged if it is written twice within one step and read between the two writes. So the next run
# reads a file again if it changed less than ``RACY_NS`` before it was read (git calls such a file **racily
# clean**). An ``mtime`` in the future is ignored here: a program or another machine set it, since a write
# would have set the present time.

RACY_NS = 2_000_000_000
"""The coarsest file times (FAT) have steps of two seconds; those of Linux have steps of ten milliseconds."""

_DAY_S = 86400.0

SOONEST_S = 12 * _DAY_S
LATEST_S = 24 * _DAY_S
"""
An object is checked, and its leases are renewed, 12 to 24 days after the last check. The exact age depends on
the object, so objects that were stored in the same night are not all due in the same night. Servers of
Tahoe-LAFS keep leases for 31 days, so a weekly backup renews the leases in time.
"""


class Signature(NamedTuple):
    """The numbers that differ when a file has changed, as signed 64-bit integers for SQLite."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


def signature_of(found: os.stat_result) -> Signature:
    """Return the signature of a file from its status."""
    return Signature(
        found.st_size, _kept(found.st_mtime_ns), _kept(found.st_ctime_ns), _kept(found.st_ino)
    )


def _kept(number: int) -> int:
    """
    Return a number as a signed 64-bit integer; a larger number wraps around.

    Inodes are unsigned, and network and FUSE file systems use all 64 bits. File times can be later than 2262,
    the limit of 64-bit nanoseconds.
    """
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def is_unchanged(signature: Signature, read_ns: int, found: os.stat_result) -> bool:
    """
    Return whether a file certainly has the content that was stored.

    Args:
        signature: the signature of the file when it was stored.
        read_ns: when the stored content was read, in nanoseconds since 1970.
        found: the status of the file now.
    """
    changed_ns = signature.ctime_ns
    if signature.mtime_ns <= read_ns + RACY_NS:
        changed_ns = max(changed_ns, signature.mtime_ns)
    return read_ns - changed_ns > RACY_NS and signature_of(found) == signature


def is_due(cap: str, checked_s: float, now_s: float) -> bool:
    """
    Return whether an object must be checked now.

    Args:
        checked_s: when the object was last found healthy, in seconds since 1970.
    """
    age_s = now_s - checked_s
    if 0 <= age_s <= SOONEST_S:
        return False  # the usual case; skips the hash below
    digest = hashlib.sha256(cap.encode("ascii", "replace")).digest()
    spread = int.from_bytes(digest[:4], "big") / (1 << 32)
    # If the clock was set back, the last check is in the future; the next one must not wait for years.
    return age_s < -_DAY_S or age_s > SOONEST_S + (LATEST_S - SOONEST_S) * spread


# The database of a client's backups records the cap of each file, and when each cap was last found healthy on
# the grid.
#
# It is one SQLite file in WAL mode, written in small transactions. If the process is killed, only the last
# records are lost, and their files are read and stored again. Only stored objects are recorded.
# ``BackupPlace.locked`` ensures that one process at a time uses the database. A damaged database is renamed
# and replaced by a new one, which only costs time.
#
# Paths, names and caps are secrets, so only the owner may read the file. Two threads use the database
# alternately: the walk's thread reads, and the reactor's thread writes.

VERSION = 2

COMMIT_ROWS = 200
COMMIT_S = 1.0
COMMIT_BYTES = 1 << 20
"""Records are committed after at most about this many bytes of files: a killed process loses few records."""

_FORGET_S = 120 * 86400.0
"""
Records of objects whose last check is this long ago are removed: no run meets these objects any longer, since
a run checks every object that it meets at least every 24 days.
"""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    path BLOB PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, ctime_ns INTEGER NOT NULL,
    inode INTEGER NOT NULL, read_ns INTEGER NOT NULL, context BLOB NOT NULL, cap TEXT NOT NULL,
    extended TEXT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS directories (digest BLOB PRIMARY KEY, cap TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS objects (cap TEXT PRIMARY KEY, checked REAL NOT NULL) WITHOUT ROWID;
"""


class BackupDatabase(KnownObjects):
    """
    The database of one client's backups.

    Args:
        path: the file of the database; created if missing.
        context: the encoding parameters and the convergence secret; files stored with a different context
            count as not stored.
        root: absolute path of the directory that is stored.
        now: returns the seconds since 1970.
        say: called with a sentence if a damaged database was renamed, or cannot be written.
        read_only: whether nothing is recorded.
        sent: records objects before they are stored; None: they are not recorded.

    Raises:
        UsageError: a later version of PipeGrid made the database, or it cannot be opened.
        SinkError: the disk is full or unsuitable for databases; an existing database stays.
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
        sent: SentObjects | None = None,
    ) -> None:
        self._sent = sent
        self._path = path
        self._context = hashlib.sha256(b"pipegrid backup" + context).digest()[:16]
        self._above = os.path.join(os.fsencode(root), b"")
        self._now = now
        self._say = say
        self._read_only = read_only
        self._rows = self._bytes = 0
        self._committed_s = now()
        self._broken = False
        self._busy = Lock()  # used by the walk's and the reactor's thread
        try:
            try:
                self._open()
            except sqlite3.OperationalError:
                raise  # the disk is full or read-only; the database itself is intact
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
        columns = self._connection.execute("PRAGMA table_info(files)").fetchall()
        if "extended" not in {column[1] for column in columns}:  # a database of version 1
            self._connection.execute("ALTER TABLE files ADD COLUMN extended TEXT")
        self._connection.execute(f"PRAGMA user_version={VERSION}")

    # Queries and records of uploads.

    def file(self, path: str, found: os.stat_result) -> KnownObject | None:
        """Return the record of a regular file; None if the file has changed or is not recorded."""
        row = self._ask(
            "SELECT size, mtime_ns, ctime_ns, inode, read_ns, files.cap, checked, extended FROM files "
            "LEFT JOIN objects ON objects.cap = files.cap WHERE path = ? AND context = ?",
            (self._key(path), self._context),
        )
        if row is None or not is_unchanged(Signature(*row[:4]), row[4], found):
            return None
        return self._known(row[5], row[6], row[7])

    def directory(self, packed: bytes) -> KnownObject | None:
        """Return the record of a directory with exactly these bytes; None if it is not recorded."""
        row = self._ask(
            "SELECT directories.cap, checked FROM directories "
            "LEFT JOIN objects ON objects.cap = directories.cap WHERE digest = ?",
            (self._digest(packed),),
        )
        return None if row is None else self._known(*row)

    def sending(self, cap: ChkCap) -> None:
        if self._sent is not None:
            self._sent.add(cap)

    def file_stored(self, met: FileMet, cap: ChkCap | LitCap) -> None:
        """Record that a file was read and stored."""
        signature = signature_of(met.found)
        self._write(
            "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                self._key(met.path),
                *signature,
                met.began_ns,
                self._context,
                str(cap),
                _extended_text(met.extended),
            ),
        )
        self._bytes += signature.size
        self.checked(cap)

    def extended_read(self, met: FileMet) -> None:
        self._write(
            "UPDATE files SET extended = ? WHERE path = ?",
            (_extended_text(met.extended), self._key(met.path)),
        )

    def directory_stored(self, packed: bytes, cap: ChkCap) -> None:
        self._write(
            "INSERT OR REPLACE INTO directories VALUES (?, ?)", (self._digest(packed), str(cap))
        )
        self.checked(cap)

    def checked(self, cap: ChkCap | LitCap) -> None:
        """Record that the object of this cap is healthy now."""
        self._write("INSERT OR REPLACE INTO objects VALUES (?, ?)", (str(cap), self._now()))

    def require_check(self) -> None:
        """Make every recorded object due for a check, so that none counts as stored before it is checked."""
        long_ago = self._now() - LATEST_S - 1
        self._write("UPDATE objects SET checked = ? WHERE checked > ?", (long_ago, long_ago))
        self._commit()

    # The end.

    def finish(self) -> None:
        """
        Remove the records of objects whose last check is ``_FORGET_S`` ago; called when everything is stored.
        """
        before = (self._now() - _FORGET_S,)
        old = "(SELECT cap FROM objects WHERE checked < ?)"
        self._write(f"DELETE FROM files WHERE cap IN {old}", before)
        self._write(f"DELETE FROM directories WHERE cap IN {old}", before)
        self._write("DELETE FROM objects WHERE checked < ?", before)

    def succeeded(self) -> None:
        """
        Remove the objects that this run sent from the prune candidates, unless some records could not be
        written to the database; called when the run is in the catalogue.
        """
        self._commit()
        if self._sent is not None and not (self._broken or self._read_only):
            self._sent.succeeded()

    # The methods below are for ``prune``. Unlike the methods above, they raise the errors of the database.

    def stored_caps(self) -> Iterator[str]:
        """
        Yield the caps of all objects that the database knows.

        Raises:
            SinkError: the database cannot be read.
        """
        tables = ("objects", "files", "directories")
        every = " UNION ".join(f"SELECT cap FROM {table}" for table in tables)
        with self._raising():
            for row in self._connection.execute(every):
                yield row[0]

    def forget(self, caps: Iterable[str]) -> None:
        """
        Forget objects durably, before they are removed from the grid, so that they no longer count as stored.

        Raises:
            SinkError: the database cannot be written; no object is forgotten.
        """
        connection = self._connection
        with self._raising():
            self._commit()
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("CREATE TEMP TABLE gone (cap TEXT PRIMARY KEY) WITHOUT ROWID")
            connection.execute("BEGIN")
            try:
                rows = ((cap,) for cap in caps)
                connection.executemany("INSERT OR IGNORE INTO gone VALUES (?)", rows)
                for table in ("files", "directories", "objects"):
                    connection.execute(f"DELETE FROM {table} WHERE cap IN (SELECT cap FROM gone)")
                connection.execute("COMMIT")
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            finally:
                connection.execute("DROP TABLE gone")

    @contextmanager
    def _raising(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise SinkError(
                f"cannot use the database {self._path}: {error}; nothing was released"
            ) from error

    def close(self) -> None:
        """Write the last records and close the file."""
        self._commit()
        if self._sent is not None:
            self._sent.close()
        self._close_connections()
        if self._broken:
            self._set_aside(None)

    def _close_connections(self) -> None:
        connection = getattr(self, "_connection", None)
        if connection is not None:
            connection.close()

    # Internal.

    def _known(
        self, text: str, checked: float | None, extended: str | None = None
    ) -> KnownObject | None:
        try:
            cap = parse_cap(text)
        except CapError:
            return None
        if not isinstance(cap, (ChkCap, LitCap)):
            return None
        due = isinstance(cap, ChkCap) and is_due(text, checked or 0.0, self._now())
        return KnownObject(cap, due, _extended_of(extended))

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
        except sqlite3.DatabaseError as error:
            self._note_failure(error)
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
        except sqlite3.DatabaseError as error:
            self._note_failure(error)
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
        except sqlite3.DatabaseError as error:
            self._note_failure(error)

    def _note_failure(self, error: sqlite3.DatabaseError) -> None:
        if not isinstance(error, sqlite3.OperationalError):
            self._broken = True  # the next run again reads and stores files that have no record
        elif not self._read_only:  # the disk is full; the database itself is intact
            self._read_only = True
            self._say(
                f"cannot use {self._path} ({error}); what is stored now will be read again next time"
            )

    def _set_aside(self, error: Exception | None) -> None:
        """Rename an unusable database, and remove those that were renamed earlier."""
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


def _extended_text(extended: dict[str, Any] | None) -> str | None:
    """Return extended metadata as text for a record: empty if the file has none, None if it is unknown."""
    return None if extended is None else json.dumps(extended) if extended else ""


def _extended_of(text: str | None) -> dict[str, Any] | None:
    if not text:
        return None if text is None else {}
    try:
        extended = json.loads(text)
    except ValueError:
        return None
    return extended if isinstance(extended, dict) else None
