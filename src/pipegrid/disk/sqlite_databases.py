"""SQLite databases that survive a full disk, because no memory is shared through a file."""

from __future__ import annotations

import sqlite3
from pathlib import Path

TIMEOUT_S = 5.0
"""How long a statement waits for another process."""


def open_database(path: str | Path, *, shared: bool = False) -> sqlite3.Connection:
    """
    Open or create a database; every statement is a transaction, unless one was begun.

    SQLite's WAL maps its index, ``NAME-shm``, into memory. On a full disk whose blocks are smaller than a
    page, the map may have space for a part of a page only, and a process that touches the rest is killed
    (SIGBUS). So neither mode maps a file:

    * one process: WAL with ``locking_mode=EXCLUSIVE``, whose index is in the process's own memory. A commit
      costs no sync, and committed data survives a crash of the machine.
    * several processes: a rollback journal without syncs, which would cost more than WAL: after a power cut
      the database may be damaged, which its user must detect.

    Args:
        shared: other processes use it at the same time; else they wait ``TIMEOUT_S`` and fail.

    Raises:
        sqlite3.OperationalError: the disk is full or fails, or another process uses the database.
        sqlite3.DatabaseError: it is damaged.
    """
    database = sqlite3.connect(
        path, timeout=TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    try:
        database.execute("PRAGMA mmap_size = 0")
        if not shared:
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            return database
        if _is_wal(path):  # made by an earlier version; convert it without using the shared index
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
            database.execute("PRAGMA journal_mode = DELETE")
            database.execute("PRAGMA locking_mode = NORMAL")
        database.execute("PRAGMA journal_mode = DELETE")
        database.execute("PRAGMA synchronous = OFF")
    except BaseException:
        database.close()
        raise
    return database


def _is_wal(path: str | Path) -> bool:
    """Return whether the header of a database says that it uses a write-ahead log."""
    try:
        with open(path, "rb") as file:
            return file.read(20)[18:20] == b"\2\2"
    except OSError:  # the first statement creates it, or SQLite reports the error
        return False
