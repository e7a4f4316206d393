"""Backups of a directory on a grid in virtual time: what is sent, remembered and listed."""

from __future__ import annotations

import base64
import errno
import io
import json
import os
import shutil
import sqlite3
import stat
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import attrs
from twisted.internet.defer import Deferred, fail
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import ChkCap, DirectoryCap, LitCap, parse_cap
from pipegrid.core.packed_directory import PackedChild, directory_cap, pack_immutable
from pipegrid.errors import (
    CapError,
    DirectoryError,
    GridError,
    NotEnoughSharesError,
    PipegridError,
    RollbackError,
    SinkError,
    UnhappyError,
    UsageError,
)
from pipegrid.tree import local_walk
from pipegrid.tree.backup import backup_database as database_module
from pipegrid.tree.backup import backup_run, catalogue
from pipegrid.tree.backup import backup_state_directory as machines
from pipegrid.tree.backup.backup_database import (
    LATEST_S,
    RACY_NS,
    SOONEST_S,
    Signature,
    is_due,
    is_unchanged,
    signature_of,
)
from pipegrid.tree.backup.backup_run import BackupOptions, BackupResult, Backups, check_name
from pipegrid.tree.backup.backup_state_directory import this_machine
from pipegrid.tree.backup.backup_stream import BackupStream
from pipegrid.tree.backup.catalogue import (
    BackupRun,
    Machine,
    entry_of,
    runs_of,
    shown_time,
)
from pipegrid.tree.backup.catalogue_store import CatalogueChange
from pipegrid.tree.backup.prune_records import SentObjects
from pipegrid.tree.backup.retention import Retention, reasons
from pipegrid.tree.backup.run_paths import choose_run
from pipegrid.tree.directory import Directory
from pipegrid.tree.directory_reading import unpack
from pipegrid.tree.file_selection import TreeSelection
from pipegrid.tree.grid_paths import resolve
from pipegrid.tree.retry_queue import RetryQueue
from pipegrid.tree.tree_upload import TreeCounts, TreeReports
from pipegrid.tree.upload_store import GridFiles, Health
from tests.locks import failing_locks
from tests.scratch import scratch_directory
from tests.simulation.grid_budgets import warm_up
from tests.simulation.grid_world import Client, GridWorld
from tests.tree.test_file_metadata import status

RTT = 0.1
DAY_S = 86400.0


class ChangesTests(SynchronousTestCase):
    """What counts as unchanged, and when something is looked for."""

    def found(self) -> Any:
        """A file's state."""
        return status(mtime_ns=10 * 10**9)

    def recorded(self, read_ns: int, **changes: int) -> tuple[Signature, int]:
        """The same file as it was recorded."""
        same = Signature(5, 10 * 10**9, 9, 77)
        return same._replace(**changes), read_ns

    def test_unchanged(self) -> None:
        """All of it must be as it was."""
        later = 10 * 10**9 + RACY_NS + 1
        found = os.stat_result(
            (0o100644, 77, 1, 1, 0, 0, 5, 1, 10, 0),
            {"st_mtime_ns": 10 * 10**9, "st_ctime_ns": 9},
        )
        self.assertTrue(is_unchanged(*self.recorded(later), found))
        for change in ({"size": 6}, {"mtime_ns": 1}, {"ctime_ns": 8}, {"inode": 1}):
            self.assertFalse(is_unchanged(*self.recorded(later, **change), found))

    def test_racily_clean(self) -> None:
        """What was changed just before it was read may have been changed just after it as well."""
        found = os.stat_result(
            (0o100644, 77, 1, 1, 0, 0, 5, 1, 10, 0),
            {"st_mtime_ns": 10 * 10**9, "st_ctime_ns": 9},
        )
        self.assertFalse(is_unchanged(*self.recorded(10 * 10**9 + RACY_NS), found))
        self.assertFalse(is_unchanged(*self.recorded(10 * 10**9 - 1), found))

    def test_a_time_in_the_future(self) -> None:
        """Of a camera whose clock is wrong, say: that file is not read and sent anew every night."""
        read_ns = 10 * 10**9
        for ahead_ns, unchanged in ((RACY_NS + 1, True), (10**18, True), (RACY_NS, False)):
            found = status(mtime_ns=read_ns + ahead_ns)
            self.assertEqual(is_unchanged(signature_of(found), read_ns, found), unchanged, ahead_ns)
        found = os.stat_result(
            (0o100644, 77, 1, 1, 0, 0, 5, 1, 10, 0),
            {"st_mtime_ns": 10**18, "st_ctime_ns": read_ns - 1},
        )
        self.assertFalse(is_unchanged(signature_of(found), read_ns, found))

    def test_beyond_64_bits(self) -> None:
        """Inodes without a sign, and years that 64 bits of nanoseconds do not reach, are as good as any."""
        for inode, mtime_ns in ((1 << 63, 1), ((1 << 64) - 1, 1), (77, 1 << 63), (77, 10**19)):
            fields = (0o100644, inode, 1, 1, 0, 0, 5, 1, 10, 0)
            found = os.stat_result(fields, {"st_mtime_ns": mtime_ns, "st_ctime_ns": 9})
            signature = signature_of(found)
            for number in signature:
                self.assertTrue(-(1 << 63) <= number < 1 << 63, number)
            self.assertTrue(is_unchanged(signature, 10 * RACY_NS, found))
            other = signature._replace(inode=signature.inode ^ 1)
            self.assertFalse(is_unchanged(other, 10 * RACY_NS, found))

    def test_due(self) -> None:
        """Each at an age of its own, none earlier or later than said."""
        ages = []
        for n in range(200):
            cap = f"URI:CHK:{n}"
            self.assertFalse(is_due(cap, 0.0, SOONEST_S - 1))
            self.assertTrue(is_due(cap, 0.0, LATEST_S + 1))
            ages.append(sum(not is_due(cap, 0.0, day * DAY_S) for day in range(30)))
        self.assertGreater(len(set(ages)), 10)
        self.assertTrue(is_due("URI:CHK:x", 100 * DAY_S, 0.0))  # the clock was set back


class RetentionTests(SynchronousTestCase):
    """Which runs are kept."""

    def runs(self, *times: str, name: str = "home") -> list[BackupRun]:
        """Runs at these times."""
        cap = DirectoryCap(LitCap(b""))
        return [BackupRun(name, f"2026-{time}:00:00Z", cap) for time in times]

    def kept(self, runs: list[BackupRun], **rules: Any) -> list[str]:
        """Times of what is kept."""
        return [run.time[5:13] for run in _kept(runs, Retention(**rules))]

    def test_rules(self) -> None:
        """The newest, the newest of each day, the newest of each week."""
        runs = self.runs("11-01_01", "11-02_01", "11-02_23", "11-03_05", "11-09_01")
        self.assertEqual(len(self.kept(runs)), 5)
        self.assertEqual(self.kept(runs, last=2), ["11-03_05", "11-09_01"])
        self.assertEqual(self.kept(runs, daily=3), ["11-02_23", "11-03_05", "11-09_01"])
        self.assertEqual(self.kept(runs, weekly=2), ["11-03_05", "11-09_01"])
        self.assertEqual(self.kept(runs, weekly=3), ["11-01_01", "11-03_05", "11-09_01"])
        self.assertEqual(self.kept(runs, last=1, daily=2), ["11-03_05", "11-09_01"])

    def test_the_newest_always_stays(self) -> None:
        """Of every backup, whatever the rules."""
        runs = self.runs("11-01_01", "11-02_01") + self.runs("10-01_01", name="etc")
        self.assertEqual(self.kept(runs, last=0), ["11-02_01", "10-01_01"])

    def test_machines_of_one_name(self) -> None:
        """Each keeps its own; what nobody noted the machine of is the only one's, or a series of its own."""
        times = ("11-01_01", "11-02_01", "11-03_01", "11-04_01")
        a, b, unknown = Machine("a"), Machine("b"), Machine()
        for owners, expected in (
            ((a, b, a, b), ["11-03_01", "11-04_01"]),
            ((b, a, a, a), ["11-01_01", "11-04_01"]),
            ((unknown, unknown, a, a), ["11-04_01"]),
            ((unknown, unknown, a, b), ["11-02_01", "11-03_01", "11-04_01"]),
        ):
            runs = [
                attrs.evolve(run, machine=machine)
                for run, machine in zip(self.runs(*times), owners, strict=True)
            ]
            self.assertEqual(self.kept(runs, last=1), expected)
        stay = _kept(runs, Retention(last=1), machine=b)
        self.assertEqual([run.time[5:13] for run in stay], ["11-02_01", "11-03_01", "11-04_01"])
        runs = [attrs.evolve(run, machine=a) for run in runs]
        self.assertEqual(_kept(runs, Retention(last=1), machine=b), runs)

    def test_runs_of_nothing(self) -> None:
        """A disk that was not mounted for nights has no run forgotten that has files."""
        full = [attrs.evolve(run, files=3) for run in self.runs("11-01_01", "11-02_01", "11-03_01")]
        empty = self.runs("11-04_01", "11-05_01", "11-06_01", "11-07_01")
        for rules, expected in (
            ({"last": 2}, ["11-02_01", "11-03_01", "11-06_01", "11-07_01"]),
            ({"daily": 1}, ["11-03_01", "11-07_01"]),
            ({"last": 3}, ["11-01_01", "11-02_01", "11-03_01", "11-05_01", "11-06_01", "11-07_01"]),
        ):
            self.assertEqual(self.kept([*full, *empty], **rules), expected)

    def test_a_disk_that_fails_in_part(self) -> None:
        """The newest run in which least is left out stays, for what no later one could read."""
        days = [f"11-{day:02}_01" for day in range(1, 9)]
        for left_out, last in (
            ((2, 2, 2, 9, 9, 9, 9, 9), "11-03_01"),
            ((0, 2, 2, 2, 2, 9, 9, 9), "11-01_01"),
            ((9, 9, 2, 2, 2, 2, 2, 2), "11-07_01"),
            ((0, 1, 2, 3, 4, 5, 6, 0), "11-07_01"),
        ):
            runs = [
                attrs.evolve(run, files=3, left_out=count)
                for run, count in zip(self.runs(*days), left_out, strict=True)
            ]
            expected = sorted({last, "11-07_01", "11-08_01"})
            self.assertEqual(self.kept(runs, last=2), expected, left_out)

    def test_what_claims_to_be_later(self) -> None:
        """Stays, and counts for no rule: the newest of what is not later stay beside it."""
        runs = self.runs("11-01_01", "11-02_01", "11-03_01", "12-01_01", "12-02_01")
        for rules in (Retention(last=2), Retention(daily=2)):
            stay = [run.time[5:13] for run in _kept(runs, rules, runs[2].time)]
            self.assertEqual(stay, ["11-02_01", "11-03_01", "12-01_01", "12-02_01"])


class CatalogueTests(SynchronousTestCase):
    """The list of runs."""

    def test_a_list_is_taken_apart_once(self) -> None:
        """However often one run asks what is in it; what each asker is given is its own."""
        asked: list[bytes] = []

        def note(cap: DirectoryCap, content: bytes, limits: Any) -> Any:
            asked.append(content)
            return unpack(cap, content, limits)

        self.patch(catalogue, "unpack", note)
        cap = DirectoryCap(LitCap(b"an odd one"))
        ours = {"pipegrid": {"backup": {"name": "odd"}}}
        content = pack_immutable([PackedChild("odd 2026-11-01_10:00:00Z", cap, ours)])
        first = runs_of(cap, content)
        self.assertEqual([run.name for run in first], ["odd"])
        first.clear()
        self.assertEqual(len(runs_of(cap, bytes(bytearray(content)))), 1)
        self.assertEqual(asked, [content])
        self.assertRaises(DirectoryError, runs_of, cap, b"no directory")
        self.assertRaises(DirectoryError, runs_of, cap, b"no directory")

    def test_directories_that_cannot_be(self) -> None:
        """What a list says, which others may have written, is no path for sure."""
        private = scratch_directory()
        self.addCleanup(shutil.rmtree, private, True)
        for directory in ("/a\0b", "/\ud800", "/" + "x" * 5000):
            run = BackupRun("home", "2026-11-01_10:00:00Z", DirectoryCap(LitCap(b"")))
            there = attrs.evolve(run, directory=directory)
            backup_run.check_owner([there], "home", "/home", this_machine(private))


class MachineTests(SynchronousTestCase):
    """Which machine this is."""

    def test_the_systems_word(self) -> None:
        """Its id is known by a hash alone, and is the same for every directory."""
        first, second, system = (scratch_directory() for _ in range(3))
        for path in (first, second, system):
            self.addCleanup(shutil.rmtree, path, True)
        self.patch(machines, "SYSTEM_FILES", (str(system / "no"), str(system / "id")))
        (system / "id").write_text("0123456789abcdef" * 2 + "\n")
        found = this_machine(first)
        self.assertEqual(found, this_machine(second))
        self.assertEqual((len(found.id), found.name), (16, os.uname().nodename))
        self.assertNotIn(found.id, "0123456789abcdef" * 3)
        self.assertEqual(os.listdir(first), [])

    def test_without_it(self) -> None:
        """A random id is kept beside what backups remember."""
        first, second = scratch_directory(), scratch_directory()
        for path in (first, second):
            self.addCleanup(shutil.rmtree, path, True)
        (second / "id").write_text("uninitialized\n")
        self.patch(machines, "SYSTEM_FILES", (str(second / "id"),))
        found = this_machine(first)
        self.assertEqual(found, this_machine(first))
        self.assertNotEqual(found, this_machine(second))
        (first / "machine").write_bytes(b"damaged")
        self.assertNotEqual(found, this_machine(first))


class BackupTests(SynchronousTestCase):
    """Whole runs."""

    def setUp(self) -> None:
        self.root = scratch_directory()
        self.private = scratch_directory()
        for path in (self.root, self.private):
            self.addCleanup(shutil.rmtree, path, True)
        self.world = GridWorld(latency_s=RTT / 2)
        self.addCleanup(self.world.close)
        self.client = self.start_client()
        warm_up(self.world, self.client)
        self.random = Random(1)
        self.said: list[str] = []
        self.left_out: list[str] = []
        self.days = 1.0
        self.machine: Machine | None = None
        self.base_s = float(int(time.time()))  # runs of one day are of one second
        self.opened: list[str] = []
        really_open = local_walk._open_regular

        def noting(fd: int, name: str) -> Any:
            directory = os.readlink(f"/proc/self/fd/{fd}")
            path = os.path.join(directory, name)
            self.opened.append(os.path.relpath(path, os.path.realpath(self.root)))
            return really_open(fd, name)

        self.patch(local_walk, "_open_regular", noting)

    def start_client(self) -> Client:
        """Another process of the same client."""
        client = self.world.client()
        client.grid.config = attrs.evolve(client.grid.config, caches=(self.private,))
        return client

    def write(self, path: str, size: int = 500) -> None:
        """Make a file, or another one in its place."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(self.random.randbytes(size))

    def write_many(self, count: int = 200) -> None:
        """Make files in directories."""
        for n in range(count):
            self.write(f"d{n // 10}/f{n}")

    def backups(self) -> Backups:
        """Begin a run, some days from now, so that nothing is racily clean."""
        now_s = self.base_s + self.days * DAY_S
        return Backups(
            self.client.grid, say=self.said.append, now=lambda: now_s, machine=self.machine
        )

    def start(self, name: str = "home", **options: Any) -> Deferred[BackupResult]:
        """Begin a run."""
        self.opened.clear()
        reports = TreeReports(lambda path, why: self.left_out.append(f"{path}: {why}"))
        run = self.backups().run(str(self.root), name, BackupOptions(**options), reports)
        return Deferred.fromCoroutine(run)

    def run_backup(self, name: str = "home", **options: Any) -> BackupResult:
        """Make a run."""
        return self.world.run(self.start(name, **options))

    def names_in(self, cap: DirectoryCap) -> list[str]:
        """List a directory."""
        data = self.world.run(self.client.grid.read(cap.file))
        return [each.name for each in unpack(cap, data).entries]

    def test_no_file_any_more(self) -> None:
        """A run without a file, as of a disk that is not mounted, is stored with a warning."""
        self.root.joinpath("empty").mkdir()
        self.run_backup()
        self.assertEqual(self.said, [])
        self.write("file")
        before = self.run_backup().run.time
        self.root.joinpath("file").unlink()
        self.days += 1
        self.assertEqual(self.run_backup().run.files, 0)
        (said,) = self.said
        self.assertIn(
            f"this run of 'home' has no file, and that of {before} has 1: mount the disk", said
        )
        self.assertIn(f"'--at {before}'", said)

    def test_nothing_changed(self) -> None:
        """Nothing is opened, nothing but a line of the list is sent: one round trip, in new processes too."""
        self.write_many()
        first = self.run_backup()
        self.assertEqual(first.counts.sent_files, 200)
        self.days += 1
        self.client = self.start_client()
        warm_up(self.world, self.client)
        again = self.run_backup()
        self.assertEqual(self.opened, [])
        self.assertEqual((again.counts.sent_files, again.counts.sent_directories), (0, 0))
        self.assertEqual(again.run.cap, first.run.cap)
        self.assertLessEqual(again.elapsed_s, 1.1 * RTT)
        self.assertEqual(again.catalogue, first.catalogue)
        self.assertEqual(len(self.names_in(again.catalogue)), 2)

    def test_tags_that_cannot_be_listed(self) -> None:
        """Are refused before anything is sent: a run that cannot be listed would hinder all later ones."""
        for tags in (("x" * 201,), ("\udce9",), ("a\nb",), (" ",), tuple(map(str, range(21)))):
            with self.assertRaises(UsageError):
                self.run_backup(tags=tags)
        result = self.run_backup(tags=("before the upgrade", "é"))
        self.assertEqual(result.run.tags, ("before the upgrade", "é"))

    def test_what_a_stream_sends(self) -> None:
        """Is noted before it is stored, as that of a directory is, so that 'prune' finds it."""
        noted: list[bytes] = []
        self.patch(SentObjects, "add", lambda _, cap: noted.append(cap.storage_index))
        source = BackupStream("dump", io.BytesIO(self.random.randbytes(5000)))
        backups = self.backups()
        result = self.world.run(Deferred.fromCoroutine(backups.run(source, "dump")))
        self.assertEqual(len(noted), 2)
        assert isinstance(result.run.cap.file, ChkCap)
        self.assertEqual(noted[1], result.run.cap.file.storage_index)
        with closing(sqlite3.connect(backups.place.database)) as database:
            known = [parse_cap(cap) for (cap,) in database.execute("SELECT cap FROM objects")]
        self.assertEqual({getattr(cap, "storage_index", b"") for cap in known}, set(noted))

    def test_what_is_known_shows_nothing_of_servers(self) -> None:
        """None is asked for it: it is no sign that they are in reach, for which others would wait."""
        self.write_many(30)
        signs: list[object] = []

        def note(_: object, place: object) -> bool:
            signs.append(place)
            return False

        self.patch(RetryQueue, "succeeded", note)
        self.run_backup()
        self.assertEqual(len(signs), 34)  # root and directories, too
        signs.clear()
        self.days += 1
        self.run_backup()
        self.assertEqual(signs, [])

    def test_how_far_it_has_come(self) -> None:
        """What is unchanged counts as done when it is met or found, so that the bar of a second run moves."""
        self.write_many(30)
        size = 30 * 500
        told: list[tuple[int, int, int]] = []

        def progress(counts: TreeCounts) -> None:
            told.append((counts.unchanged_bytes, counts.sent_bytes, counts.bytes))

        def run() -> TreeCounts:
            told.clear()
            backup = self.backups().run(
                str(self.root), "home", None, TreeReports(progress=progress)
            )
            return self.world.run(Deferred.fromCoroutine(backup)).counts

        self.assertEqual(run().unchanged_bytes, 0)
        for days, checked in ((1, 0), (25, 34)):
            self.days += days
            counts = run()
            self.assertEqual((counts.checked, counts.sent_files), (checked, 0))
            self.assertEqual(told[-1], (size, 0, size))
        self.write("d0/f0")
        self.days += 1
        run()
        self.assertEqual(told[-1][::2], (size - 500, size))

    def test_a_file_of_a_far_year(self) -> None:
        """Is stored and remembered as any other; one such file, be it a camera's, cost the whole run."""
        self.write("a")
        self.write("b")
        far_ns = 13_569_465_600 * 10**9  # in 2400
        os.utime(self.root / "b", ns=(far_ns, far_ns))
        self.assertEqual(self.run_backup().counts.sent_files, 2)
        self.days += 1
        self.assertEqual(self.run_backup().counts.sent_files, 0)
        self.assertEqual(self.opened, [])
        self.assertEqual((self.said, self.left_out), ([], []))

    def test_a_directory_that_was_moved(self) -> None:
        """Is read once more; what was stored is not stored twice, and the run after that reads nothing."""
        self.write("d/a", 3000)
        self.write("d/b", 200_000)
        self.run_backup()
        stored = sorted(self.share_files())
        (self.root / "d").rename(self.root / "e")
        self.days += 1
        self.run_backup()
        self.assertEqual(sorted(self.opened), ["e/a", "e/b"])
        new = [path for path in self.share_files() if path not in stored]
        self.assertEqual(len(new), 10)  # the root, in which a name is another
        self.days += 1
        self.run_backup()
        self.assertEqual(self.opened, [])

    def share_files(self) -> list[str]:
        """All files of shares that servers have, but for unfinished ones."""
        return [
            str(path)
            for server in self.world.servers
            for path in (server.root / "shares").rglob("*")
            if path.is_file() and "incoming" not in path.parts
        ]

    def test_ten_files_changed(self) -> None:
        """They are read and sent, with the directories above them, and the list: two round trips."""
        self.write_many()
        self.run_backup()
        for n in range(0, 200, 20):
            self.write(f"d{n // 10}/f{n}")
        self.days += 1
        again = self.run_backup()
        self.assertEqual(len(self.opened), 10)
        self.assertEqual((again.counts.sent_files, again.counts.sent_directories), (10, 11))
        self.assertLessEqual(again.elapsed_s, 2.1 * RTT)

    def test_what_was_just_written_is_read_again(self) -> None:
        """Its time stamp cannot tell whether it changed after it was read."""
        self.write("a")
        self.days = 0.0
        self.run_backup()
        self.run_backup()
        self.assertEqual(self.opened, ["a"])

    def test_what_was_not_checked_for_long(self) -> None:
        """Is looked for, its leases are renewed, and what is missing is stored again, unread files unread."""
        self.write_many(30)
        first = self.run_backup()
        self.days += 10
        self.assertEqual(self.run_backup().counts.checked, 0)
        self.days += 15
        again = self.run_backup()
        self.assertEqual((again.counts.checked, self.opened), (34, []))
        self.assertEqual(self.run_backup().counts.checked, 0)
        for server in self.world.servers[:6]:
            shutil.rmtree(server.root / "shares")
        self.days += 25
        mended = self.run_backup()
        self.assertEqual((mended.counts.checked, len(self.opened)), (34, 30))
        self.assertEqual(mended.run.cap, first.run.cap)
        for server in self.world.servers[6:]:
            server.host.crash()
        self.assertEqual(len(self.names_in(first.run.cap)), 3)

    def test_servers_that_give_no_leases(self) -> None:
        """Are asked again by the next run, and not some weeks later, when leases have ended."""
        self.write_many(30)
        self.run_backup()
        self.days += 25
        self.patch(GridFiles, "_judge", lambda store, outcome: Health(True, leased=False))
        refused = self.run_backup()
        self.assertEqual((refused.counts.checked, refused.counts.unleased), (34, 34))
        self.assertEqual((refused.counts.sent_files, self.opened), (0, []))
        self.patch(GridFiles, "_judge", lambda store, outcome: Health(True))
        given = self.run_backup()
        self.assertEqual((given.counts.checked, given.counts.unleased), (34, 0))
        self.assertEqual(self.run_backup().counts.checked, 0)

    def test_catalogue(self) -> None:
        """The cap that is printed lists all runs of all backups, from the grid alone, and does not write."""
        self.write("a")
        self.run_backup("home")
        self.days += 1
        last = self.run_backup("etc")
        self.assertEqual(self.kept_cap().readonly(), last.catalogue)
        self.assertNotEqual(self.kept_cap(), last.catalogue)
        names = self.names_in(last.catalogue)
        self.assertEqual([name.split()[0] for name in names], ["etc", "home"])
        shutil.rmtree(self.private / "backup")
        runs = self.listed(last.catalogue)
        self.assertEqual([run.name for run in runs], ["home", "etc"])
        self.assertEqual(runs[1], last.run)
        self.assertEqual(runs[1].metadata, last.run.metadata)

    def kept_cap(self) -> DirectoryCap:
        """What the client keeps."""
        cap = parse_cap((self.private / "backup/catalogue.cap").read_text().strip())
        assert isinstance(cap, DirectoryCap)
        return cap

    def listed(self, cap: DirectoryCap) -> list[BackupRun]:
        """The runs in a catalogue on the grid."""
        store = self.backups().catalogues
        return runs_of(cap, self.world.run(Deferred.fromCoroutine(store.load(cap))))

    def test_the_list_is_fetched(self) -> None:
        """If what was kept of it is damaged, the grid has it; no run is forgotten."""
        self.write("a")
        self.run_backup()
        (self.private / "backup/catalogue.json").write_text("{}")
        self.days += 1
        self.assertEqual(len(self.names_in(self.run_backup().catalogue)), 2)
        self.assertIn("damaged", self.said[0])

    def test_an_old_catalogue(self) -> None:
        """One that can never change is read, and taken over by the next run; it lists what it did."""
        self.write("a")
        first = self.run_backup()
        link = entry_of(first.run)
        packed = pack_immutable([PackedChild(link.name, link.cap, link.metadata or {})])
        old = directory_cap(self.world.run(self.client.grid.put(packed)).cap)
        for with_list in (True, False):
            (self.private / "backup/catalogue.cap").write_text(f"{old}\n")
            note = {"cap": str(old), "packed": base64.b64encode(packed).decode()}
            if with_list:
                (self.private / "backup/catalogue.json").write_text(json.dumps(note))
            else:
                (self.private / "backup/catalogue.json").unlink()
            self.days += 1
            last = self.run_backup()
            self.assertNotEqual(last.catalogue, first.catalogue)
            self.assertEqual(self.listed(last.catalogue), [first.run, last.run])
            self.assertEqual(self.listed(old), [first.run])

    def test_two_machines(self) -> None:
        """That share a catalogue lose nothing of each other's, nor what the second listed before."""
        self.write("a")
        self.run_backup("one")
        cap = (self.private / "backup/catalogue.cap").read_text()
        here, self.private = self.private, scratch_directory()
        self.addCleanup(shutil.rmtree, self.private, True)
        self.client, first = self.start_client(), self.client
        self.run_backup("before")
        (self.private / "backup/catalogue.cap").write_text(cap)
        self.days += 1
        self.run_backup("two")
        (self.private, self.client) = here, first
        self.days += 1
        last = self.run_backup("one")
        names = [run.name for run in self.listed(last.catalogue)]
        self.assertEqual(names, ["before", "one", "two", "one"])
        runs = self.world.run(Deferred.fromCoroutine(self.backups().runs()))
        self.assertEqual([run.name for run in runs], names)

    def start_machine(self, name: str) -> None:
        """Go on as another machine, with the catalogue of the one before."""
        cap = (self.private / "backup/catalogue.cap").read_text()
        self.private = scratch_directory()
        self.addCleanup(shutil.rmtree, self.private, True)
        self.client = self.start_client()
        (self.private / "backup").mkdir()
        (self.private / "backup/catalogue.cap").write_text(cap)
        self.machine = Machine(name * 16, f"host-{name}")

    def test_two_machines_and_one_name(self) -> None:
        """The second is refused until somebody has said that it is meant; none has the other's forgotten."""
        self.write("a")
        rules = Retention(last=1)
        options: dict[str, Any] = {"retention": rules, "name_was_chosen": False}
        self.machine = Machine("a" * 16, "host-a")
        firsts = [self.run_backup("src", name_was_chosen=False).run for _ in range(2)]
        here, client = self.private, self.client
        self.start_machine("b")
        for _ in range(2):  # also when it knows the list
            self.days += 1
            with self.assertRaises(UsageError) as caught:
                self.run_backup("src", **options)
            said = f"'src' is the backup of {self.root} on 'host-a', another machine: choose a name"
            self.assertIn(said, str(caught.exception))
            self.assertEqual(self.opened, [])
            self.run_backup("other", **options)
        there = self.run_backup("src", retention=rules)
        self.assertEqual(there.forgotten, ())
        self.days += 1
        again = self.run_backup("src", **options)  # it has come to stay
        self.assertEqual(again.forgotten, (there.run,))
        self.private, self.client, self.machine = (
            here,
            client,
            Machine("a" * 16, "now-another-name"),
        )
        self.days += 1
        last = self.run_backup("src", **options)
        self.assertEqual(last.forgotten, tuple(firsts))
        listed = [run for run in self.listed(last.catalogue) if run.name == "src"]
        self.assertEqual(listed, [again.run, last.run])
        self.assertEqual([run.machine.name for run in listed], ["host-b", "now-another-name"])

    def test_two_machines_in_one_second(self) -> None:
        """Both runs stay; the second has the next second in the list."""
        self.write("a")
        self.machine = Machine("a" * 16, "host-a")
        first = self.run_backup("src")
        self.start_machine("b")
        (self.root / "a").write_bytes(b"another" * 100)
        second = self.run_backup("src")
        self.assertEqual(self.listed(second.catalogue), [first.run, second.run])
        self.assertNotEqual(first.run.time, second.run.time)

    def test_a_place_in_the_list(self) -> None:
        """Of runs that could not be listed before none takes the second of another, however it is tried."""
        a, b = Machine("a"), Machine("b")
        times = [f"2026-11-01_00:00:0{second}Z" for second in range(4)]
        caps = [DirectoryCap(LitCap(bytes([n]))) for n in range(3)]
        theirs = BackupRun("src", times[0], caps[0], machine=b)
        ours = [BackupRun("src", times[n], caps[n + 1], machine=a) for n in (0, 1)]
        change = CatalogueChange(tuple(ours))
        listed = change.done([theirs]).runs
        self.assertEqual([run.cap for run in listed], [caps[0], caps[2], caps[1]])
        self.assertEqual([run.time for run in listed], times[:3])
        self.assertEqual(change.done(listed).runs, listed)

    def test_runs_of_nobody_knows_which_machine(self) -> None:
        """Versions of old noted none: their runs are those of the one machine that goes on with them."""
        self.write("a")
        options: dict[str, Any] = {"retention": Retention(last=1), "name_was_chosen": False}
        self.machine = Machine()
        old = self.run_backup("src", **options)
        self.machine = Machine("a" * 16, "host-a")
        self.days += 1
        self.assertEqual(self.run_backup("src", **options).forgotten, (old.run,))

    def test_another_directory_of_that_name(self) -> None:
        """Has no run of the first one forgotten, unless somebody has said that both are one backup."""
        for parent in ("here", "there"):
            self.write(f"{parent}/src/{parent}")
        rules = Retention(last=1)

        def back_up(parent: str, chosen: bool = False) -> BackupResult:
            self.days += 1
            options = BackupOptions(retention=rules, name_was_chosen=chosen)
            run = self.backups().run(str(self.root / parent / "src"), "src", options)
            return self.world.run(Deferred.fromCoroutine(run))

        first = back_up("here")
        error = self.assertRaises(UsageError, back_up, "there")
        self.assertIn(f"'src' is the backup of {self.root}/here/src: choose a name", str(error))
        self.assertEqual(self.listed(first.catalogue), [first.run])
        again = back_up("here")
        self.assertEqual(self.listed(again.catalogue), [again.run])
        (self.root / "here").rename(self.root / "moved")
        moved = back_up("moved")
        self.assertEqual((moved.forgotten, moved.run.cap), ((again.run,), again.run.cap))
        os.symlink("moved", self.root / "here")  # another way to the same one
        back_up("here")
        self.assertEqual(len(back_up("there", chosen=True).forgotten), 1)

    def test_the_list_cannot_be_changed(self) -> None:
        """The run is stored, the result says what is wrong, and the next run lists both."""
        self.write("a")
        first = self.run_backup()
        self.days += 1
        for server in self.world.servers[:7]:
            server.host.crash()
        second = self.run_backup()
        self.assertEqual(len(second.problems), 1)
        for server in self.world.servers[:7]:
            server.host.restart()
        self.days += 1
        self.client = self.start_client()
        third = self.run_backup()
        self.assertEqual(third.problems, ())
        self.assertEqual(self.listed(third.catalogue), [first.run, second.run, third.run])

    def lose_everything(self) -> None:
        """Have servers hold nothing, as those of another grid do."""
        for server in self.world.servers:
            shutil.rmtree(server.root / "shares")

    def test_another_grid(self) -> None:
        """What is remembered of one grid is not taken for stored on another, nor on one that was lost."""
        self.write_many(30)
        first = self.run_backup()
        self.lose_everything()
        self.days += 1
        again = self.run_backup()
        self.assertIn("no server has the list of backups", self.said[0])
        self.assertEqual([type(each) for each in again.problems], [NotEnoughSharesError])
        self.assertEqual((again.run.cap, again.counts.sent_files), (first.run.cap, 30))
        self.assertEqual(len(self.names_in(again.run.cap)), 3)
        self.days += 1
        last = self.run_backup()  # as long as there is no list
        self.assertEqual(last.counts.checked, 34)
        said = str(last.problems[0])
        self.assertIn(f"if this one has lost it, move {self.private}/backup away", said)
        old = (self.private / "backup/catalogue.cap").read_text()
        (self.private / "backup").rename(self.private / "elsewhere")
        new = self.run_backup()
        self.assertEqual((new.problems, new.run.cap), ((), first.run.cap))
        self.assertEqual(self.listed(new.catalogue), [new.run])
        self.days += 1
        self.assertEqual(self.run_backup().problems, ())
        self.assertEqual((self.private / "elsewhere/catalogue.cap").read_text(), old)

    def test_a_grid_that_takes_nothing(self) -> None:
        """And has lost all: the run is not said to be stored, nor noted to be listed some day."""
        self.write_many(30)
        self.run_backup()
        self.lose_everything()
        self.days += 1

        def refused(store: GridFiles, *file: Any) -> Deferred[Any]:
            return fail(UnhappyError("no room", 0, 7))

        self.patch(GridFiles, "put", refused)
        self.assertRaises(GridError, self.run_backup)
        self.assertEqual(self.backups().place.noted().unlisted, ())

    def test_a_list_of_another_grid(self) -> None:
        """Begun anew, or put into the place of the old one: what is remembered is looked for first."""
        self.write_many(30)
        first = self.run_backup()
        self.start_machine("b")
        self.run_backup("other")
        theirs = (self.private / "backup/catalogue.cap").read_text()
        for cap in ("", theirs):
            self.lose_everything()
            for name in ("catalogue.cap", "catalogue.json")[: 1 if cap else 2]:
                (self.private / "backup" / name).unlink()
            if cap:
                (self.private / "backup/catalogue.cap").write_text(cap)
            self.days += 1
            again = self.run_backup()
            self.assertEqual((again.run.cap, again.counts.sent_files), (first.run.cap, 30), cap)
            self.days += 1
            if not cap:
                self.assertEqual(self.run_backup().counts.checked, 0)

    def shares(self) -> list[Path]:
        """Copies of what all servers hold now."""
        copies = []
        for server in self.world.servers:
            copies.append(scratch_directory())
            self.addCleanup(shutil.rmtree, copies[-1], True)
            shutil.copytree(server.root / "shares", copies[-1], dirs_exist_ok=True)
        return copies

    def go_to(self, copies: list[Path]) -> None:
        """Have servers hold what they held when this was copied."""
        for server, copy in zip(self.world.servers, copies, strict=True):
            shutil.rmtree(server.root / "shares")
            shutil.copytree(copy, server.root / "shares")

    def test_servers_go_back(self) -> None:
        """An older list than was seen is written anew from what is remembered here; no run is lost."""
        self.write("a")
        runs = [self.run_backup().run]
        before = self.shares()
        self.days += 1
        runs.append(self.run_backup().run)
        self.go_to(before)
        self.days += 1
        last = self.run_backup()
        self.assertEqual(last.problems, ())
        self.assertIn("older list", self.said[-1])
        self.assertEqual(self.listed(last.catalogue), [*runs, last.run])

    def test_servers_go_back_behind_another_machine(self) -> None:
        """What it has listed is not written over, since it may come back; and then all is listed."""
        self.write("a")
        self.run_backup("one")
        before = self.shares()
        here, client = self.private, self.client
        self.private = scratch_directory()
        self.addCleanup(shutil.rmtree, self.private, True)
        self.client = self.start_client()
        (self.private / "backup").mkdir()
        shutil.copy(here / "backup/catalogue.cap", self.private / "backup")
        self.days += 1
        self.run_backup("two")
        after = self.shares()
        self.private, self.client = here, client
        self.assertEqual(len(self.world.run(Deferred.fromCoroutine(self.backups().runs()))), 2)
        self.go_to(before)
        self.days += 1
        (problem,) = self.run_backup("one").problems
        self.assertIsInstance(problem, RollbackError)
        self.go_to(after)
        self.days += 1
        last = self.run_backup("one")
        self.assertEqual(last.problems, ())
        names = [run.name for run in self.listed(last.catalogue)]
        self.assertEqual(names, ["one", "two", "one", "one"])

    def test_without_servers(self) -> None:
        """The list is shown as it was last."""
        self.write("a")
        first = self.run_backup()
        for server in self.world.servers:
            server.host.crash()
        runs = self.world.run(Deferred.fromCoroutine(self.backups().runs()))
        self.assertEqual(runs, (first.run,))
        self.assertIn("that this client saw last", self.said[-1])

    def test_under_an_alias(self) -> None:
        """Archives and Latest are as Tahoe-LAFS has them; forgotten runs are taken out, others' are not."""
        self.write("a")
        root = self.world.run(self.client.grid.create_mutable(b"")).cap
        archives = (str(DirectoryCap(root)), ("backups", "photos"))
        results = []
        for n in range(3):
            self.days += 1
            self.write("a")
            results.append(self.run_backup(archives=archives, retention=Retention(last=2)))
            if n == 0:
                to = self.child(DirectoryCap(root), "backups", "photos")
                inner = Directory(self.client.grid, self.child(to, "Archives"))
                self.world.run(inner.link("2020-01-01_00:00:00Z", results[0].run.cap))
        self.assertEqual([each.problems for each in results], [(), (), ()])
        self.assertEqual(self.names_in(to), ["Archives", "Latest"])
        names = self.names_in(self.child(to, "Archives"))
        times = [each.run.time for each in results]
        self.assertEqual(names, ["2020-01-01_00:00:00Z", *times[1:]])
        self.assertEqual(self.child(to, "Latest"), results[-1].run.cap)
        self.assertEqual(self.child(to, "Archives", times[-1]), results[-1].run.cap)
        self.days += 1
        again = self.run_backup(archives=archives)
        self.assertLessEqual(again.elapsed_s, 6.1 * RTT)

    def test_one_second_under_an_alias(self) -> None:
        """Of two machines' runs both stay, and each forgets its own."""
        root = self.world.run(self.client.grid.create_mutable(b"")).cap
        archives = (str(DirectoryCap(root)), ())
        runs = []
        for _ in range(2):
            self.write("a")
            runs.append(self.run_backup(archives=archives).run)
            self.private = scratch_directory()
            self.addCleanup(shutil.rmtree, self.private, True)
            self.client, before = self.start_client(), self.client
        self.assertEqual(runs[0].time, runs[1].time)
        times = [runs[0].time, shown_time(runs[0].at.timestamp() + 1)]
        kept = self.child(DirectoryCap(root), "Archives")
        self.assertEqual(self.names_in(kept), times)
        self.assertEqual([self.child(kept, time) for time in times], [run.cap for run in runs])
        self.private = Path(before.grid.config.caches[0])
        self.client = before
        self.days += 1
        self.write("a")
        last = self.run_backup(archives=archives, retention=Retention(last=1))
        self.assertEqual([run.time for run in last.forgotten], [runs[1].time])
        self.assertEqual(self.names_in(kept), [times[0], last.run.time])

    def test_an_alias_that_cannot_be_changed(self) -> None:
        """Ends the run before all is sent, with a sentence."""
        self.write("a")
        root = self.world.run(self.client.grid.create_mutable(b"")).cap
        running = self.start(archives=(str(DirectoryCap(root.readonly())), ("x",)))
        self.world.clock.advance(2)
        self.failureResultOf(running, CapError)
        self.run_backup()

    def child(self, cap: DirectoryCap, *names: str) -> DirectoryCap:
        """What a path leads to."""
        found = self.world.run(Deferred.fromCoroutine(resolve(self.client.grid, cap, names)))
        found_cap = found.best or found.cap
        assert isinstance(found_cap, DirectoryCap)
        return found_cap

    def test_a_list_that_cannot_be_read(self) -> None:
        """Ends the run: a new list without the old runs would be a lie."""
        self.write("a", 1)
        self.run_backup()
        (self.private / "backup/catalogue.json").unlink()
        (self.private / "backup/catalogue.cap").write_text("URI:DIR2-CHK:nonsense\n")
        running = self.start()
        self.world.clock.advance(1)
        self.failureResultOf(running, PipegridError)

    def test_its_own_database(self) -> None:
        """Is not stored, wherever it lies: each run would find it changed."""
        self.write("a")
        inside = self.root / "private"
        self.client.grid.config = attrs.evolve(self.client.grid.config, caches=(inside,))
        self.run_backup()
        self.days += 1
        self.run_backup()
        self.days += 1
        self.assertEqual(self.names_in(self.run_backup().run.cap), ["a", "private"])
        self.assertEqual(self.opened, [])

    def test_two_in_one_second(self) -> None:
        """Both stay, and tell which came first."""
        runs = []
        for content in (b"one", b"two", b"three"):
            (self.root / "a").write_bytes(content * 100)
            runs.append(self.run_backup())
        listed = self.world.run(Deferred.fromCoroutine(self.backups().runs()))
        self.assertEqual([run.cap for run in listed], [each.run.cap for each in runs])
        self.assertEqual(len({run.time for run in listed}), 3)

    def test_retention(self) -> None:
        """Runs are forgotten in the list, and only there."""
        self.write("a")
        results = []
        for _ in range(4):
            self.days += 1
            results.append(self.run_backup(retention=Retention(last=2)))
        self.assertEqual(len(self.names_in(results[-1].catalogue)), 2)
        self.assertEqual([run.time for run in results[-1].forgotten], [results[1].run.time])

    def test_a_clock_that_was_set_back(self) -> None:
        """What is stored then is listed, though other runs claim to be newer, and that is said."""
        self.write("a")
        self.days = 400
        for _ in range(3):
            self.days += 1
            self.run_backup(retention=Retention(last=2))
        self.assertEqual(self.said, [])
        self.days = 1
        times = []
        for _ in range(3):
            self.days += 1
            result = self.run_backup(retention=Retention(last=2))
            times.append(result.run.time)
            listed = self.world.run(Deferred.fromCoroutine(self.backups().runs()))
            self.assertEqual([run.time for run in listed][:-2], times[-2:])
            self.assertEqual(len(listed), len(times[-2:]) + 2)
            self.assertIn("some clock is or was wrong", self.said.pop())

    def test_a_damaged_database(self) -> None:
        """Is set aside; everything is read again, and the tree has the same cap."""
        self.write_many(20)
        first = self.run_backup()
        path = self.private / "backup/database.sqlite"
        data = bytearray(path.read_bytes())
        for damage in (b"", b"not a database" * 100, bytes(data[:-5000]) + bytes(5000)):
            path.write_bytes(damage)
            self.said.clear()
            self.days += 1
            again = self.run_backup()
            self.assertEqual(again.run.cap, first.run.cap)
            self.assertEqual(len(self.opened), 20)
            if damage:
                self.assertIn("damaged", self.said[0])
            self.days += 1
            self.assertEqual(self.run_backup().counts.sent_files, 0)
        self.assertEqual(len(list(path.parent.glob("*.damaged-*"))), 1)  # the latest

    def test_a_disk_that_is_full(self) -> None:
        """Damages no database: it stays, a sentence names the reason, and later the run goes on with it."""
        self.write_many(20)
        first = self.run_backup()
        before = sorted(os.listdir(self.private / "backup"))

        class Full(sqlite3.Connection):
            def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
                if any(word in statement for word in full):
                    raise sqlite3.OperationalError("database or disk is full")
                return super().execute(statement, *values)

        self.patch(sqlite3, "connect", partial(sqlite3.connect, factory=Full))
        full = ["journal_mode"]
        error = self.failureResultOf(self.start(), SinkError).value
        self.assertIn("database or disk is full", str(error))
        self.assertEqual(self.said, [])
        self.assertEqual(sorted(os.listdir(self.private / "backup")), before)
        refused = OSError(errno.ENOSPC, "No space left on device")

        def refuses(*_: object) -> None:
            raise refused

        patch = self.patch(database_module, "open_private", refuses)
        error = self.failureResultOf(self.start(), SinkError).value  # it could not be made
        patch.restore()
        self.assertIn("No space left on device; free some space", str(error))
        self.days += 1
        full[:] = ["SELECT", "INSERT"]
        again = self.run_backup()
        self.assertEqual((again.run.cap, len(self.opened)), (first.run.cap, 20))
        self.assertEqual(len(self.said), 1)
        self.assertIn("database or disk is full", self.said[0])
        full.clear()
        self.days += 1
        self.run_backup()
        self.assertEqual(self.opened, [])
        self.assertEqual(sorted(os.listdir(self.private / "backup")), before)

    def test_secrets(self) -> None:
        """Nobody else can read what is remembered."""
        self.write("a")
        self.run_backup()
        for path in (self.private / "backup").iterdir():
            self.assertEqual(stat.S_IMODE(path.stat().st_mode) & 0o077, 0, path)
        self.assertEqual(stat.S_IMODE((self.private / "backup").stat().st_mode), 0o700)

    def test_two_at_once(self) -> None:
        """The second one says so, and the first one goes on."""
        self.write_many(20)
        first = self.start()
        error = self.failureResultOf(self.start(), UsageError).value
        self.assertIn("another backup", str(error))
        self.world.run(first)
        self.world.run(self.start())

    def test_a_file_system_without_locks(self) -> None:
        """Is named: there is no other backup to wait for."""
        with failing_locks(errno.ENOLCK):
            error = self.failureResultOf(self.start(), SinkError).value
        self.assertIn("No locks available; a backup needs locks", str(error))
        self.world.run(self.start())

    def test_killed_at_any_moment(self) -> None:
        """What was recorded is stored, and what is listed is whole; the next run sends the rest."""
        self.write_many(300)
        whole_bytes = 300 * 500
        sent = 0
        for round_number in range(6):
            running = self.start()
            self.world.clock.advance(RTT * (0.3 + 0.3 * round_number))
            if running.called:
                self.successResultOf(running)
                break
            # What a killed process leaves: its transactions that were committed, and no more.
            copy = scratch_directory()
            self.addCleanup(shutil.rmtree, copy, True)
            shutil.copytree(self.private, copy, dirs_exist_ok=True)
            running.cancel()
            self.world.clock.advance(1)
            self.failureResultOf(running)
            shutil.rmtree(self.private)
            shutil.copytree(copy, self.private)
            self.check_database()
        self.days += 1
        last = self.run_backup()
        sent = last.counts.sent_bytes
        self.assertLess(sent, 2 * whole_bytes)
        listed = self.listed(last.catalogue)
        self.assertEqual(listed[-1], last.run)
        for run in listed:  # those that were killed when all was stored, too
            self.assertEqual(len(self.names_in(run.cap)), 30)
        self.check_database()

    def check_database(self) -> None:
        """Every cap that is recorded can be read."""
        database = sqlite3.connect(self.private / "backup/database.sqlite")
        caps = [cap for (cap,) in database.execute("SELECT cap FROM objects")]
        database.close()
        for cap in caps[:40]:
            self.assertTrue(self.world.run(self.client.grid.check(cap)).recoverable, cap)

    def test_a_file_that_cannot_be_read(self) -> None:
        """The run is listed, and says that something was left out."""
        self.write("a")
        self.write("bad")
        os.mkfifo(self.root / "pipe")  # which nothing stores; it does not count
        really_read = os.pread

        def failing(fd: int, length: int, offset: int) -> bytes:
            if os.readlink(f"/proc/self/fd/{fd}").endswith("/bad"):
                raise OSError(errno.EIO, "no")
            return really_read(fd, length, offset)

        self.patch(os, "pread", failing)
        result = self.run_backup()
        self.assertEqual(result.run.left_out, 1)
        self.assertEqual(self.names_in(result.run.cap), ["a"])

    def test_dry_run(self) -> None:
        """Says what would be sent, and neither reads, sends nor records anything."""
        self.write_many(20)

        def would() -> Any:
            self.opened.clear()
            return self.world.run(Deferred.fromCoroutine(self.backups().would_send(str(self.root))))

        before = would()
        self.assertEqual((before.objects, self.opened), (23, []))
        first = self.run_backup()
        self.assertEqual(before.bytes, first.counts.sent_bytes)
        self.days += 1
        self.assertEqual(would().objects, 0)
        self.write("d0/f0")
        changed = would()
        self.assertEqual(changed.objects, 3)
        self.assertEqual(changed.bytes, self.run_backup().counts.sent_bytes)

    def test_a_dry_run_under_anothers_name(self) -> None:
        """Is refused as the run itself would be, and notes nothing, not even which machine this is."""
        self.write("a")
        self.run_backup("src", name_was_chosen=False)
        (self.root / "inner").mkdir()
        self.patch(machines, "SYSTEM_FILES", ())
        (self.private / "backup/machine").unlink(missing_ok=True)
        for was_chosen, refused in ((False, True), (True, False)):
            options = BackupOptions(name_was_chosen=was_chosen)
            waiting = Deferred.fromCoroutine(
                self.backups().would_send(str(self.root / "inner"), options, name="src")
            )
            if refused:
                with self.assertRaisesRegex(UsageError, "'src' is the backup of"):
                    self.world.run(waiting)
            else:
                self.world.run(waiting)
        self.assertFalse((self.private / "backup/machine").exists())

    def test_selection(self) -> None:
        """What is excluded is not in the tree, and does not count as left out."""
        self.write("a")
        self.write("b.tmp")
        result = self.run_backup(selection=lambda _: TreeSelection(["*.tmp"]))
        self.assertEqual((self.names_in(result.run.cap), result.run.left_out), (["a"], 0))

    def test_names(self) -> None:
        """A name that could not be listed is refused before anything is read."""
        wrong = (
            "",
            "a/b",
            "a\nb",
            "x" * 500,
            " ",
            "\u3000",
            ".",
            "..",
            "-_.",
            " a",
            "a ",
            "a\u202eb",
            "a\udc80",
        )
        for name in wrong:
            error = self.failureResultOf(self.start(name), UsageError).value
            self.assertIn("choose one with --as", str(error))
            would = self.backups().would_send(str(self.root), name=name)
            self.failureResultOf(Deferred.fromCoroutine(would), UsageError)
        for name in ("a", "My photos", "写真", "2026", ".config", "\N{CAMERA}", "a.b-c_d"):
            self.assertEqual(check_name(name), name)

    def test_a_name_of_old(self) -> None:
        """One that is listed already, since versions of old took it, goes on."""
        self.write("a")
        self.patch(backup_run, "_is_sensible", lambda name: True)
        self.run_backup("photos ")
        self.patch(backup_run, "_is_sensible", lambda name: False)
        self.days += 1
        result = self.run_backup("photos ", retention=Retention(last=1))
        self.assertEqual(self.listed(result.catalogue), [result.run])
        self.failureResultOf(self.start("photos"), UsageError)

    def test_a_name_that_is_not_composed(self) -> None:
        """Is that under which it is listed, so its runs are those of one backup, and can be restored."""
        for parent in ("here", "there"):
            self.write(f"{parent}/f")
        results = []
        for name in ("caf\u00e9", "cafe\u0301"):
            self.days += 1
            results.append(self.run_backup(name, retention=Retention(last=1)))
        self.assertEqual(self.listed(results[1].catalogue), [results[1].run])
        found = choose_run([results[1].run], "cafe\u0301", None, 2e9)
        self.assertEqual(found.run, results[1].run)

    def test_times(self) -> None:
        """As Tahoe-LAFS names its archives."""
        self.assertEqual(shown_time(1_700_000_000.9), "2023-11-14_22:13:20Z")


def _kept(
    runs: list[BackupRun], rules: Retention, now: str | None = None, machine: Machine | None = None
) -> list[BackupRun]:
    """The runs that a rule keeps, in the given order."""
    why = reasons(runs, rules, now, machine)
    return [run for run in runs if why[run]]
