"""
SQLite databases that survive a full disk: no memory is shared through a file.

SQLite's WAL keeps its index in ``NAME-shm``, which is mapped into memory. On a file system whose blocks are
smaller than a page the map may have space for a part of a page only: a process that touches the rest on a
full disk is killed (SIGBUS), and no error can be reported. So there are two ways, and neither maps a file:

* **one process**: WAL with ``locking_mode=EXCLUSIVE``, whose index is in the process's own memory. A commit
  costs no sync, and what was committed before a crash of the machine stays whole.
* **several processes**: a rollback journal. Syncing each transaction would cost more than
  WAL did, so none is synced: after a power cut the database may be damaged, which its user must notice.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

TIMEOUT_S = 5.0
"""That long a statement waits for another process's."""


def open_database(path: str | Path, *, shared: bool = False) -> sqlite3.Connection:
    """
    Open or make a database; every statement is a transaction, unless one was begun.

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
        if _is_wal(path):  # made by an earlier version; without the index that is shared
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
    """Return whether the header of a database says that it has a write-ahead log."""
    try:
        with open(path, "rb") as file:
            return file.read(20)[18:20] == b"\2\2"
    except OSError:  # it is made by the first statement; or what SQLite says counts
        return False
