"""A put of a tree that is cut off goes on when it is run again, and its notes never lie."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from pathlib import Path
from random import Random
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk import sqlite_databases
from pipegrid.tree import upload_journal, upload_queue
from pipegrid.tree.backup import backup_database
from pipegrid.tree.local_walk import FileMet
from pipegrid.tree.tree_grid import Trees
from pipegrid.tree.tree_upload import NOTES_NAME, TreeReports, TreeResult
from pipegrid.tree.upload_journal import NoUnfinishedPut, UploadJournal, unfinished_put
from tests.locks import failing_locks
from tests.scratch import scratch_directory
from tests.simulation.grid_budgets import warm_up
from tests.simulation.grid_world import CLIENT, GridWorld

RTT_S = 0.1
FILES = 300


class UnfinishedTests(SynchronousTestCase):
    """Ten servers, 100 ms away; files that were made long ago, and notes that are written at once."""

    def setUp(self) -> None:
        self.scratch = scratch_directory()
        self.addCleanup(shutil.rmtree, self.scratch, True)
        self.root = self.scratch / "root"
        random = Random(1)
        for number in range(FILES):
            path = self.root / f"d{number // 30}" / f"f{number:03}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(random.randbytes(1000))
        self.world = GridWorld(latency_s=RTT_S / 2)
        self.addCleanup(self.world.close)
        self.client = self.world.client()
        warm_up(self.world, self.client)
        grid: Any = self.client.grid
        self.cache = self.scratch / "cache"
        self.cache.mkdir()
        grid.config = attrs.evolve(grid.config, caches=(self.cache,))
        self.grid = grid
        self.trees = Trees(grid)
        self.patch(backup_database, "RACY_NS", -(1 << 62))
        self.patch(upload_journal, "MAX_UNWRITTEN", 1)
        self.patch(upload_queue, "MAX_OBJECTS", 64)  # so that not all is stored at one moment

    def start(self, **options: Any) -> Deferred[TreeResult]:
        """Begin to store the directory."""
        return self.trees.put_tree(self.root, **options)

    def sent_bytes(self, since: int) -> int:
        """Return how much went to servers since an entry of the network's log."""
        log = list(self.world.network.log)[since:]
        return sum(sent.size_bytes for sent in log if sent.to_host != CLIENT)

    def cut(self) -> None:
        """Begin, and end it when a third of all is stored."""
        stored: list[str] = []
        note = UploadJournal.file_stored

        def noting(notes: UploadJournal, met: FileMet, cap: Any) -> None:
            stored.append(met.path)
            note(notes, met, cap)

        self.patch(UploadJournal, "file_stored", noting)
        running = self.start()
        running.addErrback(lambda failure: failure.trap(CancelledError))
        while len(stored) < FILES // 3:
            self.world.clock.advance(0.005)
        running.cancel()
        self.world.clock.advance(1)

    def noted(self) -> int:
        """Return how many files are noted."""
        (path,) = (self.cache / NOTES_NAME).glob("*.sqlite")
        with sqlite3.connect(path) as connection:
            found: int = connection.execute("SELECT count(*) FROM files").fetchone()[0]
        connection.close()
        return found

    def test_cut_and_rerun(self) -> None:
        """What was stored is asked about, and not sent again; then nothing is left of the notes."""
        self.cut()
        noted = self.noted()
        self.assertGreaterEqual(noted, FILES // 3)
        self.assertLess(noted, FILES)
        since = len(self.world.network.log)
        result = self.world.run(self.start())
        again = self.sent_bytes(since)
        self.assertEqual(result.counts.checked, noted)
        self.assertEqual(result.counts.sent_files, FILES - noted)
        self.assertEqual(os.listdir(self.cache / NOTES_NAME), [])
        fresh = self.world.run(self.start())
        self.assertEqual(fresh.cap, result.cap)
        self.assertEqual(fresh.counts.checked, 0)
        self.assertEqual(fresh.counts.already_stored, FILES + fresh.counts.sent_directories)
        since = len(self.world.network.log)
        self.world.run(self.start(convergence=b"other"))
        whole = self.sent_bytes(since)
        self.assertLess(again, whole * (1 - noted / FILES) + whole / 8)

    def test_a_grid_that_has_lost_it(self) -> None:
        """What was noted and is gone is sent again: a cap that is printed reads something."""
        self.cut()
        for server in self.world.servers:
            shares = Path(server.root) / "shares"
            for path in [each for each in shares.rglob("*") if each.is_file()]:
                path.unlink()
        result = self.world.run(self.start())
        self.assertEqual(result.counts.sent_files, FILES)
        summary = self.world.run(self.trees.check_tree(result.cap))
        self.assertEqual((summary.objects, summary.healthy), (FILES + 11, FILES + 11))

    def test_what_has_changed(self) -> None:
        """A file that was changed since is read and sent; other options have notes of their own."""
        self.cut()
        noted = self.noted()
        for path in self.root.rglob("f*"):
            path.write_bytes(path.read_bytes() + b"!")
        result = self.world.run(self.start())
        self.assertEqual((result.counts.checked, result.counts.sent_files), (0, FILES))
        self.cut()
        self.assertEqual(self.world.run(self.start(happy=10)).counts.checked, 0)
        self.assertGreater(noted, 0)

    def test_damaged_notes(self) -> None:
        """They are of no use, and in nobody's way."""
        self.cut()
        (path,) = (self.cache / NOTES_NAME).glob("*.sqlite")
        path.write_bytes(b"garbage" * 1000)
        result = self.world.run(self.start())
        self.assertEqual((result.counts.checked, result.counts.sent_files), (0, FILES))

    def test_a_quick_put_writes_nothing(self) -> None:
        """Notes are begun after a while only."""
        self.patch(upload_journal, "MAX_UNWRITTEN", 10_000)
        self.patch(upload_journal, "WRITTEN_AFTER_S", 1e9)
        running = self.start()
        self.world.clock.advance(0.15)
        self.assertEqual(os.listdir(self.cache / NOTES_NAME), [])
        self.world.run(running)

    def test_two_at_once(self) -> None:
        """The second does without notes, and takes nothing away from the first."""
        first = unfinished_put(self.grid, self.root, {})
        first._open()  # type: ignore[union-attr]
        second = unfinished_put(self.grid, self.root, {})
        second.forget()
        second.close()
        self.assertEqual(len(list((self.cache / NOTES_NAME).glob("*.sqlite"))), 1)
        first.forget()
        first.close()
        self.assertEqual(os.listdir(self.cache / NOTES_NAME), [])

    def test_old_notes(self) -> None:
        """Those that nobody came back for go after a week."""
        notes = self.cache / NOTES_NAME
        notes.mkdir()
        (notes / "x.sqlite").write_bytes(b"")
        os.utime(notes / "x.sqlite", (1, 1))
        unfinished_put(self.grid, self.root, {})
        self.assertEqual(os.listdir(notes), [])

    def test_a_put_of_weeks(self) -> None:
        """Others do not take its notes for old ones, whenever something was noted last."""
        running = unfinished_put(self.grid, self.root, {})
        running._open()  # type: ignore[union-attr]

        def left_by_another() -> list[str]:
            for path in (self.cache / NOTES_NAME).iterdir():
                os.utime(path, (1, 1))
            unfinished_put(self.grid, self.scratch / "another", {})
            return sorted(os.listdir(self.cache / NOTES_NAME))

        before = sorted(os.listdir(self.cache / NOTES_NAME))
        self.assertEqual(left_by_another(), before)
        running.close()
        self.assertEqual(left_by_another(), [])

    def test_a_put_of_weeks_that_was_killed(self) -> None:
        """What it has noted last may be in another file than the first."""
        notes = self.cache / NOTES_NAME
        notes.mkdir()
        for name in ("x.sqlite", "x.sqlite-wal", "x.sqlite.lock"):
            (notes / name).write_bytes(b"")
            os.utime(notes / name, (1, 1))
        os.utime(notes / "x.sqlite-wal")
        unfinished_put(self.grid, self.root, {})
        self.assertEqual(len(os.listdir(notes)), 3)

    def test_a_lock_that_was_cleaned_away(self) -> None:
        """The next put does without notes while the first has them; then another has them."""
        self.patch(sqlite_databases, "TIMEOUT_S", 0.05)
        first = unfinished_put(self.grid, self.root, {})
        first._open()  # type: ignore[union-attr]
        (lock,) = (self.cache / NOTES_NAME).glob("*.lock")
        lock.unlink()
        second = unfinished_put(self.grid, self.root, {})
        second._open()  # type: ignore[union-attr]
        self.assertTrue(second._off)  # type: ignore[union-attr]
        second.forget()
        second.close()
        self.assertEqual(len(list((self.cache / NOTES_NAME).glob("*.sqlite"))), 1)
        first.forget()
        first.close()
        third = unfinished_put(self.grid, self.root, {})
        self.assertFalse(third._off)  # type: ignore[union-attr]
        third.forget()
        third.close()
        self.assertEqual(os.listdir(self.cache / NOTES_NAME), [])

    def test_a_file_system_without_locks(self) -> None:
        """Nothing is noted, and nothing left; what is old goes."""
        notes = self.cache / NOTES_NAME
        notes.mkdir()
        (notes / "x.sqlite").write_bytes(b"")
        os.utime(notes / "x.sqlite", (1, 1))
        with failing_locks(errno.ENOLCK):
            unlocked = unfinished_put(self.grid, self.root, {})
            unlocked._open()  # type: ignore[union-attr]
            self.assertEqual(os.listdir(notes), [])
            unlocked.forget()
            unlocked.close()

    def test_notes_within_the_tree(self) -> None:
        """Whoever stores a home does not store what is being written there."""
        grid: Any = self.grid
        inside = self.root / ".pipegrid"
        inside.mkdir()
        grid.config = attrs.evolve(grid.config, caches=(inside,))
        left_out: list[str] = []
        reports = TreeReports(lambda path, why: left_out.append(path))
        result = self.world.run(self.start(reports=reports))
        self.assertEqual((left_out, result.counts.files), ([], FILES))

    def test_no_place(self) -> None:
        """A client that may write nowhere notes nothing."""
        grid: Any = self.grid
        grid.config = attrs.evolve(grid.config, caches=())
        self.assertIsInstance(unfinished_put(grid, self.root, {}), NoUnfinishedPut)
        self.assertEqual(self.world.run(self.start()).counts.sent_files, FILES)
