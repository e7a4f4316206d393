"""Databases on disks that are full, and in several processes."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk import sqlite_databases
from pipegrid.disk.sqlite_databases import open_database
from tests.images import fill, mounted_ext4

_WRITER = """
import sqlite3, sys
from pipegrid.disk.sqlite_databases import open_database
shared = sys.argv[2] == "shared"
try:
    database = open_database(sys.argv[1], shared=shared)
    database.execute("CREATE TABLE IF NOT EXISTS t (a)")
    for _ in range(5000):
        database.execute("INSERT INTO t VALUES (?)", (b"x" * 1000,))
except sqlite3.OperationalError as error:
    print(error)
"""


class DatabaseTests(SynchronousTestCase):
    """Both kinds."""

    def setUp(self) -> None:
        directory = Path(self.mktemp())
        directory.mkdir()
        self.path = directory / "database"

    def opened(self, shared: bool) -> sqlite3.Connection:
        """Open it until the end of the test."""
        database = open_database(self.path, shared=shared)
        self.addCleanup(database.close)
        return database

    def test_a_full_disk(self) -> None:
        """With blocks smaller than a page, and space for part of one: an error, and no signal (SIGBUS)."""
        place = mounted_ext4(self, 1024, block=1024)
        for kind in ("alone", "shared"):
            for free_kib in (0, 3, 7, 13, 14, 26, 30, 41, 45):
                for name in os.listdir(place):
                    if name != "lost+found":
                        os.unlink(place / name)
                fill(place, free_kib << 10)
                done = subprocess.run(
                    [sys.executable, "-c", _WRITER, str(place / "database"), kind],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                self.assertEqual((done.returncode, done.stderr), (0, ""), (kind, free_kib))
                self.assertEqual(done.stdout, "database or disk is full\n", (kind, free_kib))

    def test_no_shared_memory(self) -> None:
        """No file is mapped, also where an earlier version has used one."""
        for shared in (False, True):
            self.path.unlink(missing_ok=True)
            before = sqlite3.connect(self.path, isolation_level=None)
            before.execute("PRAGMA journal_mode = WAL")
            before.execute("CREATE TABLE t (a)")
            before.execute("INSERT INTO t VALUES (1)")
            self.assertTrue(os.path.exists(f"{self.path}-shm"))
            before.close()
            database = self.opened(shared)
            database.execute("INSERT INTO t VALUES (2)")
            self.assertEqual(database.execute("SELECT count(*) FROM t").fetchone(), (2,))
            self.assertFalse(os.path.exists(f"{self.path}-shm"))

    def test_two_processes(self) -> None:
        """They share the one kind; of the other kind the second is refused, and the first goes on."""
        first = self.opened(True)
        first.execute("CREATE TABLE t (a)")
        second = self.opened(True)
        for number, each in enumerate((first, second, first, second)):
            each.execute("INSERT INTO t VALUES (?)", (number,))
        self.assertEqual(first.execute("SELECT count(*) FROM t").fetchone(), (4,))
        first.close()
        second.close()
        self.patch(sqlite_databases, "TIMEOUT_S", 0.05)
        alone = self.opened(False)
        alone.execute("INSERT INTO t VALUES (4)")
        with self.assertRaises(sqlite3.OperationalError) as refused:
            self.opened(False).execute("SELECT * FROM t")
        self.assertIn("locked", str(refused.exception))
        alone.execute("INSERT INTO t VALUES (5)")

    def test_a_process_that_is_killed(self) -> None:
        """What was committed is there for the next one."""
        for kind in ("alone", "shared"):
            self.path.unlink(missing_ok=True)
            script = (
                "import os, sys\n"
                "from pipegrid.disk.sqlite_databases import open_database\n"
                "database = open_database(sys.argv[1], shared=sys.argv[2] == 'shared')\n"
                "database.execute('CREATE TABLE t (a)')\n"
                "database.execute('INSERT INTO t VALUES (1)')\n"
                "database.execute('BEGIN')\n"
                "database.execute('INSERT INTO t VALUES (2)')\n"
                "os.kill(os.getpid(), 9)\n"
            )
            done = subprocess.run([sys.executable, "-c", script, str(self.path), kind], check=False)
            self.assertEqual(done.returncode, -9)
            database = open_database(self.path, shared=kind == "shared")
            self.assertEqual(database.execute("SELECT a FROM t").fetchall(), [(1,)])
            database.close()
