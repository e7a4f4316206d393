"""Records of verified files, so that an unchanged file need not be hashed again."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from stat import S_ISREG

from pipegrid.mirror.archive_file import ArchiveFile

TYPE_CHECKING = False  # the same as ``typing.TYPE_CHECKING``, without the slow import
if TYPE_CHECKING:
    import sqlite3

    from pipegrid.mirror.stat_cache import StatCache

ATTRIBUTE = "user.pipegrid.verified"
_VERSION = b"2"
_SIZE = 2**48
_TIME = 2**64

LIBREPO = "user.Librepo.checksum."
"""The prefix of attributes in which librepo, the library of dnf, records verified files."""


def proof(wanted: ArchiveFile, status: os.stat_result) -> bytes:
    """
    Return the record of a verified file: 47 bytes with SHA-256.

    The record is in an extended attribute of the file: hash, size and time of last change. Any write to the
    file changes its time, and another file under the same name has no such attribute. The size and the time
    are needed since an attribute may reach the disk before the bytes do: after a power cut, 4,536 of 6,649
    files had a wrong attribute, and size and time revealed each of them.

    The record is short because ext4 has space for 48 bytes under this name in the inode itself. For a longer
    one, ext4 takes a block of 4 KiB for each file, and syncs the block.
    """
    return b"%s%s%s%s" % (
        _VERSION,
        (status.st_size % _SIZE).to_bytes(6, "big"),
        (status.st_mtime_ns % _TIME).to_bytes(8, "big"),
        wanted.digest,  # the hash's length shows the algorithm
    )


def note(fd: int, wanted: ArchiveFile) -> bool:
    """Record that the open file is right; return False if the file system has no attributes."""
    try:
        os.setxattr(fd, ATTRIBUTE, proof(wanted, os.fstat(fd)))
    except (OSError, AttributeError):
        return False
    return True


def is_noted(fd: int, wanted: ArchiveFile, status: os.stat_result) -> bool:
    """Return whether an open file is recorded as the wanted one, and is unchanged since."""
    try:
        return os.getxattr(fd, ATTRIBUTE) == proof(wanted, status)
    except (OSError, AttributeError):
        return False


def is_noted_at(
    directory: int, name: str, wanted: ArchiveFile, seen: StatCache | None = None
) -> bool:
    """
    Return the same as ``is_noted`` for a file in an open directory, without opening the file, at half the
    cost.

    False means that the file must be opened and checked. A symbolic link is not followed. If another file
    gets the name between the two system calls, the size and time from the first call do not match the
    attribute from the second.

    Args:
        seen: if it has the status of the file, the file's attribute is not read; otherwise the status is
            added once the attribute matches.
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
    Return whether dnf has verified an open file as the wanted one, and the file is unchanged since.

    The caller must have compared the file's size, which librepo does not record.
    """
    try:
        if os.getxattr(fd, LIBREPO + "mtime") != b"%d" % status.st_mtime_ns:
            return False
        return os.getxattr(fd, LIBREPO + wanted.algorithm) == wanted.digest.hex().encode("ascii")
    except (OSError, AttributeError):
        return False


def _removed(fd: int, name: str) -> bool:
    """Remove an attribute of an open file; return whether the file has no attribute of that name now."""
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
    Records of verified files by path in a small database, for file systems without attributes.

    A ledger is for one thread at a time; processes that fetch and verify at the same time share the database.
    The ledger only saves time, so its errors are not reported. On a full or read-only disk it records
    nothing. A damaged database is renamed, and a new one begun; files that were recorded in the damaged one
    are hashed again.
    """

    def __init__(self, path: str) -> None:
        import sqlite3  # few file systems need this module

        self._path = path
        self._database: sqlite3.Connection | None = None
        with suppress(sqlite3.Error, OSError):
            try:
                self._database = self._open()
            except sqlite3.OperationalError:
                raise  # not a damaged database: it is kept
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
        """
        Rename the database, and remove its journals, which would otherwise be applied to a new database.
        """
        self.close()
        for suffix in ("-journal", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(self._path + suffix)
        os.replace(self._path, self._path + ".damaged")

    def note(self, entries: Iterable[tuple[str, bytes]]) -> bool:
        """Record paths and their proofs in one transaction; return whether that succeeded."""
        return self._change("INSERT OR REPLACE INTO verified VALUES (?, ?)", entries)

    def find(self, path: str) -> bytes | None:
        """Return the recorded proof of a path; None if there is none."""
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
        """Remove the records of files in one transaction; return whether that succeeded."""
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
        path: of the ledger, which is made when the first record is written to it.
        seen: also records the status of the files.
    """

    def __init__(self, path: str, seen: StatCache) -> None:
        self._path = path
        self.seen = seen
        self._ledger: Ledger | None = None

    def is_known(self, fd: int, wanted: ArchiveFile, status: os.stat_result) -> bool:
        """Return whether an open file is recorded as right, and is unchanged since."""
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

        When a disk loses data, the file's times stay the same. Without this call, the next run would accept
        the file again, after a ``paranoid`` run has found it wrong. If a record cannot be removed, the file
        gets another time, which the record does not match.

        Returns:
            Whether that succeeded. After False the next run may accept the wrong file.
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
                os.utime(fd)  # no record matches the new time
        except OSError:
            return False
        return True

    def forget(self, path: str) -> None:
        """
        Remove the ledger's record of a file that is removed; an attribute is removed together with the file.
        """
        if self._ledger is not None:
            self._ledger.forget([path])

    def forked(self) -> None:
        """Adapt to a fork: this process is the child, and must not use its parent's ledger."""
        self._parents, self._ledger = self._ledger, None  # not closed: the parent uses it
        self.seen.forked()

    def close(self) -> None:
        """Write the rows of ``seen``, and close the ledger if there is one."""
        self.seen.keep()
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None
