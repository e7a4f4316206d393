"""SQLite databases that survive a full disk, since they share no memory through a mapped file."""

from __future__ import annotations

import sqlite3
from pathlib import Path

TIMEOUT_S = 5.0
"""How long a statement waits while another process has locked the database."""


def open_database(path: str | Path, *, shared: bool = False) -> sqlite3.Connection:
    """
    Open or create a database; every statement is a transaction, unless a transaction was begun.

    In its WAL mode, SQLite maps the index ``NAME-shm`` into memory. On a full disk whose blocks are smaller
    than a page, only a part of a mapped page may have disk space, and a process that touches the rest is
    killed (SIGBUS). So the two modes used map no file:

    * one process: WAL with ``locking_mode=EXCLUSIVE``, whose index is in the process's own memory. A commit
      needs no sync, and committed data survives a crash of the process; a power cut may lose the last
      commits, but does not damage the database.
    * several processes: a rollback journal without syncs, since syncs would cost more than WAL. After a power
      cut the database may be damaged, which its user must detect.

    Args:
        shared: whether several processes may use the database at the same time; otherwise a second process
            waits ``TIMEOUT_S`` and fails.

    Raises:
        sqlite3.OperationalError: the disk is full or fails, or another process uses the database.
        sqlite3.DatabaseError: the database is damaged.
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
        if _is_wal(path):  # an earlier version used WAL; convert it without the mapped index
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
    except OSError:  # missing (SQLite creates the file), or SQLite reports the error
        return False
