"""
What is known to be good: a file that was hashed once need not be read again to know that it is right.

The proof stands in an extended attribute of the file itself: hash, size and time of last change. Whoever
writes to the file changes its time, whoever replaces it has another file. All three count: an attribute
may reach the disk before the bytes do, and after a power cut 4,536 of 6,649 files had one that lied; size
and time gave away each.

Where a file system has no attributes a small database beside the files knows the same by path.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from stat import S_ISREG

from pipegrid.mirror.archive_file import ArchiveFile

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    import sqlite3

    from pipegrid.mirror.quick_check import StatCache

ATTRIBUTE = "user.pipegrid.verified"
_VERSION = b"2"
_SIZE = 2**48
_TIME = 2**64

LIBREPO = "user.Librepo.checksum."
"""What attributes begin with in which librepo, on which dnf stands, keeps the same."""


def proof(wanted: ArchiveFile, status: os.stat_result) -> bytes:
    """
    Return what is written down of a file that was hashed and is right: 47 bytes with SHA-256.

    So few, because ext4 has room for 48 beside that name in the inode itself, and takes a block of 4 KiB
    for each file, and syncs it, where they are more.
    """
    return b"%s%s%s%s" % (
        _VERSION,
        (status.st_size % _SIZE).to_bytes(6, "big"),
        (status.st_mtime_ns % _TIME).to_bytes(8, "big"),
        wanted.digest,  # its length tells the algorithm
    )


def note(fd: int, wanted: ArchiveFile) -> bool:
    """Write down that the open file is right; returns False where there are no attributes."""
    try:
        os.setxattr(fd, ATTRIBUTE, proof(wanted, os.fstat(fd)))
    except (OSError, AttributeError):
        return False
    return True


def is_noted(fd: int, wanted: ArchiveFile, status: os.stat_result) -> bool:
    """Return whether an open file is known to be what is wanted, and has not changed since."""
    try:
        return os.getxattr(fd, ATTRIBUTE) == proof(wanted, status)
    except (OSError, AttributeError):
        return False


def is_noted_at(
    directory: int, name: str, wanted: ArchiveFile, seen: StatCache | None = None
) -> bool:
    """
    Return the same of a file in an open directory, without opening it: half of what that costs.

    False says nothing: it is to be opened then. A symbolic link is not followed. If another file gets the
    name between the two looks, size and time of the first do not stand in the attribute of the second.

    Args:
        seen: knows of some without a second look, and is told of the others.
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
    Return whether dnf has hashed an open file, found it to be what is wanted, and it has not changed since.

    The file's size, of which librepo notes nothing, must be that of the index already.
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
    The same, by path, for file systems without attributes. One thread at a time; processes that fetch and
    verify side by side share it.

    It saves time, and no more, so whatever is wrong with it is no reason to fail. On a disk that is full, or
    not to be written to, it takes no notes, and knows nothing. One that is damaged is moved away and begun
    anew: what it knew is hashed again.
    """

    def __init__(self, path: str) -> None:
        import sqlite3  # which few file systems need

        self._path = path
        self._database: sqlite3.Connection | None = None
        with suppress(sqlite3.Error, OSError):
            try:
                self._database = self._open()
            except sqlite3.OperationalError:
                raise  # what is there is good
            except sqlite3.DatabaseError:
                self.set_aside()
                self._database = self._open()

    def _open(self) -> sqlite3.Connection:
        import sqlite3

        from pipegrid.disk.databases import open_database

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
        """Believe nothing of it; what belongs to it goes, too, or the next one would be made of that."""
        self.close()
        for suffix in ("-journal", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.unlink(self._path + suffix)
        os.replace(self._path, self._path + ".damaged")

    def note(self, entries: Iterable[tuple[str, bytes]]) -> bool:
        """Write down paths and their proofs, in one transaction; returns whether that is done."""
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
        """Forget files, all of them in one transaction; returns whether that is done."""
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
        """Let go of the file."""
        database, self._database = self._database, None
        if database is not None:
            database.close()


class HashCache:
    """
    What is known of a mirror's files: noted at each, or in a ledger where the file system takes no notes.

    Args:
        path: of the ledger, made with its first note.
        seen: how they looked then.
    """

    def __init__(self, path: str, seen: StatCache) -> None:
        self._path = path
        self.seen = seen
        self._ledger: Ledger | None = None
        self._parents: Ledger | None = None

    def is_known(self, fd: int, wanted: ArchiveFile, status: os.stat_result) -> bool:
        """Return whether an open file was found to be right, and has not changed."""
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
        """Write down that the open file is right."""
        if not note(fd, wanted):
            if self._ledger is None:
                self._ledger = Ledger(self._path)
            self._ledger.note([(wanted.path, proof(wanted, os.fstat(fd)))])

    def withdraw(self, fd: int, wanted: ArchiveFile, status: os.stat_result) -> bool:
        """
        An open file was hashed and is wrong: whatever says that it is right is believed no more.

        A disk that forgets changes no time. Who found that with ``paranoid`` would have the next look take
        the file for right again. Where a disk does not let go of a note, the file gets another time.

        Returns:
            Whether that is done; False: the next look may believe what this one has found to be wrong.
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
                os.utime(fd)  # all of them say of which time they are
        except OSError:
            return False
        return True

    def forget(self, path: str) -> None:
        """Forget a file that is removed; a note at the file goes with it."""
        if self._ledger is not None:
            self._ledger.forget([path])

    def forked(self) -> None:
        """This is another process now, which must not touch the ledger of the one that it comes from."""
        self._parents, self._ledger = self._ledger, None  # to be closed by nobody here
        self.seen.forked()

    def close(self) -> None:
        """Write down what was seen, and close the ledger, if there is one."""
        self.seen.keep()
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None
