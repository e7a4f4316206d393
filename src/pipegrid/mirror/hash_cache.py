"""Records of verified files, so that a file need not be hashed again while it is unchanged."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from stat import S_ISREG

from pipegrid.mirror.archive_file import ArchiveFile

TYPE_CHECKING = False  # as in ``typing``, which is slow to import
if TYPE_CHECKING:
    import sqlite3

    from pipegrid.mirror.stat_cache import StatCache

ATTRIBUTE = "user.pipegrid.verified"
_VERSION = b"2"
_SIZE = 2**48
_TIME = 2**64

LIBREPO = "user.Librepo.checksum."
"""The prefix of attributes in which librepo, which dnf is built on, records the same."""


def proof(wanted: ArchiveFile, status: os.stat_result) -> bytes:
    """
    Return the record of a verified file: 47 bytes with SHA-256.

    The record is in an extended attribute of the file: hash, size and time of last change. Any write to the
    file changes its time, and another file of that name has no such attribute. All three are needed: an
    attribute may reach the disk before the bytes do. After a power cut 4,536 of 6,649 files had a wrong
    one; size and time revealed each.

    It is short because ext4 has space for 48 bytes with this name in the inode itself. For more it takes a
    block of 4 KiB for each file, and syncs it.
    """
    return b"%s%s%s%s" % (
        _VERSION,
        (status.st_size % _SIZE).to_bytes(6, "big"),
        (status.st_mtime_ns % _TIME).to_bytes(8, "big"),
        wanted.digest,  # its length gives the algorithm
    )


def note(fd: int, wanted: ArchiveFile) -> bool:
    """Record that the open file is right; returns False without attributes."""
    try:
        os.setxattr(fd, ATTRIBUTE, proof(wanted, os.fstat(fd)))
    except (OSError, AttributeError):
        return False
    return True


def is_noted(fd: int, wanted: ArchiveFile, status: os.stat_result) -> bool:
    """Return whether an open file is recorded as the wanted one, and has not changed since."""
    try:
        return os.getxattr(fd, ATTRIBUTE) == proof(wanted, status)
    except (OSError, AttributeError):
        return False


def is_noted_at(
    directory: int, name: str, wanted: ArchiveFile, seen: StatCache | None = None
) -> bool:
    """
    Return the same for a file in an open directory, without opening it, at half the cost.

    False means that it must be opened. A symbolic link is not followed. If another file gets the name
    between the two system calls, size and time of the first do not match the attribute of the second.

    Args:
        seen: may know a file without its attribute, and records the others.
    """
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not S_ISREG(status.st_mode) or wanted.size not in (None, status.st_size):
            return False
        if seen is not None and seen.holds(wanted.digest, status):
            return True
        path = f"/proc/self/fd/{directory}/{name}"
        if os.getxattr(path, ATTRIBUTE, follow_symlinks=False) != proof(wanted, status):
            return False
    except (OSError, AttributeError):
        return False
    if seen is not None:
        seen.add(wanted.digest, status)
    return True


def is_noted_by_librepo(fd: int, wanted: ArchiveFile, status: os.stat_result) -> bool:
    """
    Return whether dnf has verified an open file as the wanted one, and it has not changed since.

    The caller must have compared the file's size, which librepo does not record.
    """
    try:
        if os.getxattr(fd, LIBREPO + "mtime") != b"%d" % status.st_mtime_ns:
            return False
        return os.getxattr(fd, LIBREPO + wanted.algorithm) == wanted.digest.hex().encode("ascii")
    except (OSError, AttributeError):
        return False


def _removed(fd: int, name: str) -> bool:
    """Remove an attribute of an open file; returns whether it has none of that name."""
    try:
        os.getxattr(fd, name)
    except (OSError, AttributeError):
        return True
    try:
        os.removexattr(fd, name)
    except OSError:
        return False
    return True


class Ledger:
    """
    The same records by path in a small database, for file systems without attributes.

    For one thread at a time; processes that fetch and verify at the same time share it. It only saves time,
    so its errors are not reported. On a full or read-only disk it records nothing. A damaged one is
    renamed, and a new one begun: its files are hashed again.
    """

    def __init__(self, path: str) -> None:
        import sqlite3  # few file systems need it

        self._path = path
        self._database: sqlite3.Connection | None = None
        with suppress(sqlite3.Error, OSError):
            try:
                self._database = self._open()
            except sqlite3.OperationalError:
                raise  # the existing database is good
            except sqlite3.DatabaseError:
                self.set_aside()
                self._database = self._open()

    def _open(self) -> sqlite3.Connection:
        import sqlite3

        from pipegrid.disk.sqlite_databases import open_database

        database = open_database(self._path, shared=True)
        try:
            database.execute(
                "CREATE TABLE IF NOT EXISTS verified (path TEXT PRIMARY KEY, proof BLOB) WITHOUT ROWID"
            )
        except sqlite3.DatabaseError:
            database.close()
            raise
        return database

    def set_aside(self) -> None:
        """Rename the database and its other files, which would otherwise be applied to the next one."""
        self.close()
        for suffix in ("-journal", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(self._path + suffix)
        os.replace(self._path, self._path + ".damaged")

    def note(self, entries: Iterable[tuple[str, bytes]]) -> bool:
        """Record paths and their proofs, in one transaction; returns whether that succeeded."""
        return self._change("INSERT OR REPLACE INTO verified VALUES (?, ?)", entries)

    def find(self, path: str) -> bytes | None:
        """Return the proof of a path."""
        import sqlite3

        if self._database is None:
            return None
        try:
            found = self._database.execute(
                "SELECT proof FROM verified WHERE path = ?", (path,)
            ).fetchone()
        except sqlite3.OperationalError:
            return None
        except sqlite3.DatabaseError:
            with suppress(OSError):
                self.set_aside()
            return None
        return found[0] if found is not None and isinstance(found[0], bytes) else None

    def forget(self, paths: Iterable[str]) -> bool:
        """Remove the records of files, in one transaction; returns whether that succeeded."""
        return self._change("DELETE FROM verified WHERE path = ?", ((path,) for path in paths))

    def _change(self, statement: str, rows: Iterable[tuple[object, ...]]) -> bool:
        import sqlite3

        if self._database is None:
            return False
        try:
            with self._database:
                self._database.execute("BEGIN")
                self._database.executemany(statement, rows)
        except sqlite3.Error:
            return False
        return True

    def close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()


class HashCache:
    """
    The records of a mirror's files: in attributes, or in a ``Ledger`` on file systems without them.

    Args:
        path: of the ledger, which is made with the first record.
        seen: records the file status as well.
    """

    def __init__(self, path: str, seen: StatCache) -> None:
        self._path = path
        self.seen = seen
        self._ledger: Ledger | None = None

    def is_known(self, fd: int, wanted: ArchiveFile, status: os.stat_result) -> bool:
        """Return whether an open file is recorded as right, and has not changed."""
        if is_noted(fd, wanted, status) or self._is_in_ledger(wanted, status):
            self.seen.add(wanted.digest, status)
            return True
        if wanted.size is not None and is_noted_by_librepo(fd, wanted, status):
            self.note(fd, wanted)
            return True
        return False

    def _is_in_ledger(self, wanted: ArchiveFile, status: os.stat_result) -> bool:
        return self._ledger is not None and self._ledger.find(wanted.path) == proof(wanted, status)

    def note(self, fd: int, wanted: ArchiveFile) -> None:
        """Record that the open file is right."""
        if not note(fd, wanted):
            if self._ledger is None:
                self._ledger = Ledger(self._path)
            self._ledger.note([(wanted.path, proof(wanted, os.fstat(fd)))])

    def withdraw(self, fd: int, wanted: ArchiveFile, status: os.stat_result) -> bool:
        """
        Remove all records of an open file that was hashed and is wrong.

        A disk that loses data does not change times. Without this, the next run would take the file for
        right again, after a ``paranoid`` one has found it wrong. If the attribute cannot be removed, the
        file gets another time.

        Returns:
            Whether that succeeded; False: the next run may accept the wrong file.
        """
        if self._ledger is None and os.path.exists(self._path):
            self._ledger = Ledger(self._path)
        done = [_removed(fd, name) for name in (ATTRIBUTE, LIBREPO + wanted.algorithm)]
        if self._ledger is not None and not self._ledger.forget([wanted.path]):
            try:
                self._ledger.set_aside()
            except OSError:
                done.append(False)
        done.append(self.seen.withdraw(wanted.digest, status))
        try:
            if not all(done):
                os.utime(fd)  # every record has a time
        except OSError:
            return False
        return True

    def forget(self, path: str) -> None:
        """Remove the record of a file that is removed; an attribute goes with the file."""
        if self._ledger is not None:
            self._ledger.forget([path])

    def forked(self) -> None:
        """Adapt to a fork: this new process must not use its parent's ledger."""
        self._parents, self._ledger = self._ledger, None  # not closed in this process
        self.seen.forked()

    def close(self) -> None:
        """Write the records, and close the ledger, if there is one."""
        self.seen.keep()
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None
