"""Which runs are kept and why; and what ``prune`` releases, on a grid in virtual time."""

from __future__ import annotations

import errno
import io
import os
import sqlite3
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import attrs
from twisted.internet.defer import Deferred, maybeDeferred, succeed
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import ChkCap, DirectoryCap, LitCap, parse_cap
from pipegrid.disk.safe_open import CannotLock
from pipegrid.errors import CannotReach, CapError, SinkError, UsageError
from pipegrid.grid import lease_release_lock
from pipegrid.grid.lease_release_lock import StoringLock
from pipegrid.storage.share_store import ShareStore
from pipegrid.testing.grid import EPOCH_S
from pipegrid.transport.gbs.client import GbsServer
from pipegrid.tree import prune_roots
from pipegrid.tree.backup.backup_stream import BackupStream
from pipegrid.tree.backup.catalogue import BackupRun, Machine, entry_of, runs_of, shown_time
from pipegrid.tree.backup.forget import ForgetRequest, judge
from pipegrid.tree.backup.prune import PruneResult
from pipegrid.tree.backup.retention import Retention, parse_duration, reasons
from pipegrid.tree.backup.run_paths import run_path_text, whole_run
from pipegrid.tree.backup.space import occupied_space
from pipegrid.tree.directory import Directory
from pipegrid.tree.directory_reading import read_listing
from pipegrid.wire.storage_messages import Released
from tests.tree.prune_world import PruneClient, PruneWorld, content, run_history

FIRST_SEED = int(os.environ.get("PRUNE_SEED", "7001"))
HISTORIES = 20
EMPTY = DirectoryCap(LitCap(b""))


class RetentionReasonTests(SynchronousTestCase):
    """Rules beyond those of earlier versions, and the reasons."""

    def kept(self, *times: str, **rules: Any) -> dict[str, str]:
        """Return the reasons of runs at these times that are kept."""
        runs = [BackupRun("home", f"{time}:00:00Z", EMPTY, tags=(time[:4],)) for time in times]
        found = reasons(runs, Retention(**rules))
        return {run.time[:13]: "; ".join(why) for run, why in found.items() if why}

    def test_periods(self) -> None:
        """The newest of each; the newest of all stays anyway, and says both."""
        times = (
            "2024-12-31_22",
            "2025-01-01_01",
            "2026-01-15_03",
            "2026-02-01_04",
            "2026-02-01_05",
        )
        newest = times[-1]
        self.assertEqual(
            self.kept(*times, yearly=2),
            {times[1]: "last of year 2025", newest: "the newest; last of year 2026"},
        )
        self.assertEqual(
            self.kept(*times, monthly=2),
            {times[2]: "last of month 2026-01", newest: "the newest; last of month 2026-02"},
        )
        self.assertEqual(
            self.kept(*times, hourly=2),
            {
                times[3]: "last of hour 2026-02-01 04h",
                newest: "the newest; last of hour 2026-02-01 05h",
            },
        )
        self.assertEqual(self.kept(*times, weekly=2)[times[2]], "last of week 2026-W03")

    def test_within_and_tags(self) -> None:
        """Counted from the newest run, so that a clock that jumped forgets nothing."""
        times = ("2025-03-31_12", "2026-02-27_12", "2026-02-28_11", "2026-03-31_12")
        self.assertEqual(list(self.kept(*times, within=parse_duration("1m"))), [times[3]])
        self.assertEqual(list(self.kept(*times, within=parse_duration("1m2d"))), list(times[1:]))
        self.assertEqual(list(self.kept(*times, within=parse_duration("1y"))), list(times))
        self.assertEqual(self.kept(*times, tags={"2025"})[times[0]], "tag '2025'")

    def test_durations(self) -> None:
        """Of the calendar; without end if they begin before all time."""
        at = datetime(2026, 3, 31, 12, tzinfo=timezone.utc)
        for text, expected in (
            ("1m", "2026-02-28 12"),
            ("1y1m", "2025-02-28 12"),
            ("2w1d3h", "2026-03-16 09"),
            ("25m", "2024-02-29 12"),
            ("9999y", "0001-01-01 00"),
            ("99999d", "1752-06-16 12"),
        ):
            self.assertEqual(f"{parse_duration(text).before(at):%Y-%m-%d %H}".zfill(13), expected)
        for text in ("", "7", "d", "7x", "1d1y", "-1d", "1.5d", "1" * 50 + "d"):
            self.assertRaises(UsageError, parse_duration, text)

    def test_without_rules(self) -> None:
        """All are kept, and say so."""
        self.assertEqual(self.kept("2026-01-01_01"), {"2026-01-01_01": "no rule was given"})

    def test_tags_in_the_catalogue(self) -> None:
        """They are listed with the run; what is no text is ignored."""
        from pipegrid.core.packed_directory import PackedChild, pack_immutable

        run = BackupRun("home", "2026-01-01_01:00:00Z", EMPTY, tags=("a", "ä b"))
        link = entry_of(run)
        packed = pack_immutable([PackedChild(link.name, link.cap, link.metadata or {})])
        self.assertEqual(runs_of(EMPTY, packed)[0].tags, ("a", "ä b"))
        assert link.metadata is not None
        link.metadata["pipegrid"]["backup"]["tags"] = ["a", 5, None]
        packed = pack_immutable([PackedChild(link.name, link.cap, link.metadata)])
        self.assertEqual(runs_of(EMPTY, packed)[0].tags, ("a",))


class JudgeTests(SynchronousTestCase):
    """What a request is about."""

    def setUp(self) -> None:
        times = ("2026-01-01_01:00:00Z", "2026-01-01_02:00:00Z", "2026-01-02_01:00:00Z")
        self.runs = [BackupRun(name, time, EMPTY) for name in ("etc", "home") for time in times]

    def forgotten(
        self, *which: str, zone: timezone | None = timezone.utc, **rules: Any
    ) -> list[str]:
        """Return the runs that would be forgotten."""
        request = ForgetRequest(which, Retention(**rules), "2026-06-01_00:00:00Z", Machine(), zone)
        judged = judge(self.runs, request)
        self.assertTrue(all(each.reasons for each in judged))
        return [f"{each.run.name}@{each.run.time[8:13]}" for each in judged if not each.keeps]

    def test_which(self) -> None:
        """A backup by rules, one run by its time, day or minute, or both."""
        self.assertEqual(self.forgotten("home", last=1), ["home@01_01", "home@01_02"])
        self.assertEqual(len(self.forgotten(last=1)), 4)
        self.assertEqual(self.forgotten("home@2026-01-02"), ["home@02_01"])
        self.assertEqual(self.forgotten("etc@2026-01-01T02:00", last=1), ["etc@01_02"])

    def test_local_times(self) -> None:
        """A time means the same as in a path: local unless it has a zone; never another run instead."""
        ahead = timezone(timedelta(hours=1))
        self.assertEqual(self.forgotten("home@2026-01-01_02:00", zone=ahead), ["home@01_01"])
        self.assertEqual(self.forgotten("home@2026-01-01_02:00Z", zone=ahead), ["home@01_02"])
        for run in self.runs:
            for zone in (ahead, timezone.utc):
                for path in (run_path_text(run, zone), run_path_text(run, zone)[:-1]):
                    expected = [f"{run.name}@{run.time[8:13]}"]
                    self.assertEqual(self.forgotten(path, zone=zone), expected, path)
        self.assertEqual(self.forgotten("home@latest"), ["home@02_01"])
        for text in ("home@2026-01-03", "home@now", "home@2026-01-02:x"):
            self.assertRaises(UsageError, self.forgotten, text)

    def test_whole_runs(self) -> None:
        """The colon after a time may be left out; paths of other kinds stay."""
        for text in (
            "home@2026-01-02_03:04:05Z",
            "a b@2026-01-02",
            "a@b@3d",
            "a@2026-01-02_03:04+01:00",
        ):
            self.assertEqual(whole_run(text), f"{text}:")
        for text in (
            "home:x@2026-01-02",
            "a/b@2026-01-02",
            "@3d",
            "home@x",
            "URI:CHK:a@3d",
            "a@3d:x",
        ):
            self.assertEqual(whole_run(text), text)

    def test_what_is_refused(self) -> None:
        """Nothing given; all runs of a backup; what is not there, or not unique."""
        for which in ((), ("home",), ("nosuch",), ("home@",), ("home@2026-01-01",), ("home@2025",)):
            self.assertRaises(UsageError, self.forgotten, *which)

    def test_a_tag_that_no_run_has(self) -> None:
        """A mistyped tag would keep nothing, so it is refused."""
        self.runs[1] = attrs.evolve(self.runs[1], tags=("kept",))
        self.assertNotIn("etc@01_02", self.forgotten(tags={"kept"}))
        with self.assertRaises(UsageError) as caught:
            self.forgotten(last=1, tags={"kept", "kpet"})
        self.assertIn("no run has the tag 'kpet'", str(caught.exception))

    def test_other_machines_and_the_future(self) -> None:
        """Rules leave them alone."""
        self.runs = [
            attrs.evolve(self.runs[0], machine=Machine("b", "b")),
            *(attrs.evolve(run, machine=Machine("a", "a")) for run in self.runs[1:3]),
            attrs.evolve(self.runs[0], time="2027-01-01_01:00:00Z", machine=Machine("a", "a")),
        ]
        request = ForgetRequest((), Retention(last=1), "2026-06-01_00:00:00Z", Machine("a", "a"))
        judged = judge(self.runs, request)
        self.assertEqual([each.keeps for each in judged], [True, False, True, True])
        self.assertEqual(judged[0].reasons, ("made on another machine",))
        self.assertEqual(judged[3].reasons, ("its time is in the future",))


class PruneTests(SynchronousTestCase):
    """One client that has forgotten a run with a file of its own, and another with the same catalogue."""

    def setUp(self) -> None:
        self.world = PruneWorld(1)
        self.addCleanup(self.world.close)
        self.client = self.world.clients[0]
        (self.client.files / "old").write_bytes(content(1))
        self.world.begin()
        self.old = self.world.runs()[0].cap
        (self.client.files / "old").unlink()
        self.pass_time()
        self.do(lambda grid: self.client.backup(grid, retention=Retention(last=1)))
        self.pass_time()
        self.index = self.storage_index(content(1))

    def pass_time(self) -> None:
        """Let an hour pass."""
        self.world.grid.clock.advance(3600)

    def do(self, start: Callable[[Any], Deferred[Any]], client: PruneClient | None = None) -> Any:
        """Do something in a process of its own."""
        grid = (client or self.client).start()
        try:
            return self.world.grid.run(start(grid))
        finally:
            self.world.end(grid)

    def prune(self, client: PruneClient | None = None) -> PruneResult:
        """Prune."""
        result = self.do((client or self.client).prune, client)
        assert isinstance(result, PruneResult)
        return result

    def storage_index(self, data: bytes) -> bytes:
        """Return where a file would be, without storing it."""
        found = self.world.stored()
        other = self.world.clients[1].start()
        cap = self.world.grid.run(other.put(data)).cap
        self.world.end(other)
        assert isinstance(cap, ChkCap)
        self.assertIn(cap.storage_index, found)
        # The other client has a lease by now: remove it, as it had none.
        self.pass_time()
        for server in self.world.grid.servers:
            secrets = self.others_secret(cap.storage_index, server.name)
            server.store.release_lease(cap.storage_index, secrets, server.store.now)
        return cap.storage_index

    def others_secret(self, index: bytes, server: str) -> bytes:
        """Return the other client's cancel secret."""
        grid = self.world.clients[1].start()
        peer = next(each for each in grid._peers if each.name == server)
        secrets = grid._means.secrets.for_file(index).for_server(peer.identity.lease_seed)
        self.world.end(grid)
        return bytes(secrets.cancel)

    def is_stored(self) -> bool:
        """Return whether servers have the old file."""
        return self.index in self.world.stored()

    def test_a_forgotten_run(self) -> None:
        """Its file goes; what is listed stays, and the next prune has nothing to do."""
        result = self.prune()
        self.assertFalse(self.is_stored())
        self.assertEqual(result.undone, 0)
        self.assertGreater(result.released.freed_bytes, 0)
        self.world.check_reachable()
        self.assertEqual(self.prune().objects, 0)

    def test_a_dry_run(self) -> None:
        """Says the same, and changes nothing."""
        grid = self.client.start()
        pruning = self.client.pruning(grid)
        would = self.world.grid.run(Deferred.fromCoroutine(pruning.run(dry_run=True)))
        self.world.end(grid)
        self.assertTrue(self.is_stored())
        done = self.prune()
        self.assertEqual((would.objects, would.share_bytes), (done.objects, done.share_bytes))
        self.assertFalse(self.is_stored())

    def test_stored_again(self) -> None:
        """The next backup of the same file sends it: nothing remembers that it was stored."""
        self.prune()
        (self.client.files / "old").write_bytes(content(1))
        self.do(self.client.backup)
        self.assertTrue(self.is_stored())
        self.world.check_reachable()

    def test_what_an_alias_reaches(self) -> None:
        """Stays, until it is unlinked."""
        self.do(lambda grid: self.client.link(grid, "keep", self.old))
        result = self.prune()
        self.assertEqual((result.objects, result.kept), (0, 2))
        self.assertGreater(result.kept_bytes, 0)
        self.world.check_reachable()
        self.assertTrue(self.is_stored())
        self.do(lambda grid: Directory(grid, self.client.home(), self.client.now).unlink("keep"))
        self.prune()
        self.assertFalse(self.is_stored())

    def test_what_a_pin_reaches(self) -> None:
        """Stays, until it is unpinned; the file of pins is private."""
        prune_roots.add_pin(self.client.directory, "old", self.old)
        path = self.client.state / prune_roots.PINS_NAME
        self.assertEqual(path.stat().st_mode & 0o777, 0o600)
        self.assertEqual(self.prune().objects, 0)
        self.world.check_reachable()
        prune_roots.remove_pin(self.client.directory, "old")
        self.prune()
        self.assertFalse(self.is_stored())

    def test_what_other_programs_keep(self) -> None:
        """A cap in any file of ``private``, and what ``tahoe backup`` counts as stored."""
        accounts = self.client.state / "accounts"
        accounts.write_text(f"alice secret {self.old}\n")
        self.assertEqual(self.prune().objects, 0)
        accounts.unlink()
        base = sqlite3.connect(self.client.state / "backupdb.sqlite")
        base.execute("CREATE TABLE caps (fileid INTEGER, filecap VARCHAR)")
        base.execute("CREATE TABLE directories (dirhash VARCHAR, dircap VARCHAR)")
        base.execute("INSERT INTO caps VALUES (1, ?)", (str(self.cap_of_old()),))
        base.commit()
        base.close()
        self.prune()
        self.assertTrue(self.is_stored())
        (self.client.state / "backupdb.sqlite").unlink()
        self.prune()
        self.assertFalse(self.is_stored())

    def cap_of_old(self) -> Any:
        """Return the cap of the old file."""
        listing: Any = self.do(lambda grid: Deferred.fromCoroutine(read_listing(grid, self.old)))
        return next(each.cap for each in listing.entries if each.name == "old")

    def test_another_machines_lease(self) -> None:
        """A client that has found the file has a lease of its own: it stays for that one."""
        other = self.world.clients[1]
        (other.files / "same").write_bytes(content(1))
        self.do(other.backup, other)
        self.pass_time()
        self.prune()
        self.assertTrue(self.is_stored())
        self.world.check_reachable()

    def test_two_puts_at_the_same_time(self) -> None:
        """Of one file by two clients: each has leases, also on shares that the other has stored."""
        ann, bob = self.world.clients
        grids = [ann.start(), bob.start()]
        putting = [grid.put(content(40)) for grid in grids]
        cap, _ = [self.world.grid.run(each).cap for each in putting]
        self.pass_time()
        for grid, other in (grids, grids[::-1]):
            for peer in grid._peers:
                secrets = grid._means.secrets.for_file(cap.storage_index)
                server = self.world.grid[peer.name]
                server.store.release_lease(
                    cap.storage_index,
                    secrets.for_server(peer.identity.lease_seed).cancel,
                    server.store.now,
                )
            health = self.world.grid.run(other.check(cap))
            self.assertEqual(health.recoverable, other is grids[1])
        for grid in grids:
            self.world.end(grid)

    def refused(self, error: type[Exception] = CannotReach) -> str:
        """Check that a prune releases nothing; return what it said."""
        before = self.world.stored()
        with self.assertRaises(error) as caught:
            self.prune()
        self.assertIn("nothing was released", str(caught.exception))
        self.assertEqual(self.world.stored(), before)
        return str(caught.exception)

    def test_an_absent_server(self) -> None:
        """May have a newer version of what is kept."""
        host = self.world.grid.servers[0].host
        host.crash()
        self.refused()
        host.restart()
        self.prune()
        self.assertFalse(self.is_stored())

    def test_what_cannot_be_read(self) -> None:
        """A run of the catalogue that is lost, a damaged cap of an alias, a file that cannot be read."""
        aliases = self.client.state / "aliases"
        text = aliases.read_text()
        aliases.write_text(f"{text}broken: URI:DIR2:aaaa\n")
        self.refused()
        aliases.write_text(f"{text}future: URI:NEW:aaaa\n")
        self.refused()
        aliases.write_text(f"{text}checks: {self.client.home().verifier()}\n")
        self.refused()
        aliases.write_text(text)
        listed = self.world.runs()[-1].cap
        assert listed.storage_index is not None
        for server in self.world.grid.servers:
            for number in server.store.list_shares(listed.storage_index):
                os.unlink(server.share_path(listed.storage_index, number))
        run = self.world.runs()[-1]
        self.assertIn(f"the run {run.name} {run.time} cannot be read as a whole", self.refused())

    def test_without_a_catalogue(self) -> None:
        """Everything would seem to be unreachable."""
        for name in ("catalogue.cap", "catalogue.json"):
            (self.client.state / "backup" / name).unlink()
        self.refused(UsageError)

    def test_another_catalogue(self) -> None:
        """What an earlier one lists stays: its cap may be kept anywhere."""
        made = self.do(lambda grid: Deferred.fromCoroutine(_made(grid)))
        for name in ("catalogue.json", "forgotten"):
            (self.client.state / "backup" / name).unlink(missing_ok=True)
        (self.client.state / "backup/catalogue.cap").write_text(f"{made}\n")
        self.prune()
        self.world.check_reachable()

    def test_a_backup_that_runs(self) -> None:
        """It may count on what would be released."""
        grid = self.client.start()
        place = self.client.backups(grid).place
        with place.locked():
            self.assertRaises(UsageError, self.prune)
        self.world.end(grid)
        self.prune()

    def test_a_put_that_runs(self) -> None:
        """A prune waits for it, but not without end; and a put waits for a prune."""
        lock = StoringLock((self.client.state,), self.world.grid.clock)
        self.world.grid.run(Deferred.fromCoroutine(lock.share()))
        self.refused(UsageError)
        self.world.grid.clock.callLater(20, lock.release)
        self.prune()
        self.assertFalse(self.is_stored())
        self.world.grid.run(Deferred.fromCoroutine(lock.exclude()))
        with self.assertRaisesRegex(UsageError, "try again when it has ended"):
            self.do(lambda grid: grid.put(content(2)))
        self.world.grid.clock.callLater(20, lock.release)
        self.do(lambda grid: grid.put(content(2)))

    def test_a_gateway(self) -> None:
        """It hinders a prune until it has stored nothing for a while; then it takes part anew."""
        clock = self.world.grid.clock
        grid = self.client.start()
        lock = grid.storing_lock
        lock.leave_when_idle()
        self.world.grid.run(grid.put(content(2)))
        self.refused(UsageError)
        self.world.grid.run(Deferred.fromCoroutine(lock.share()))
        clock.advance(2 * lease_release_lock.IDLE_S)  # one operation that lasts
        self.refused(UsageError)
        lock.stored()
        clock.advance(lease_release_lock.IDLE_S - 100)
        self.refused(UsageError)
        self.prune()
        self.assertFalse(self.is_stored())
        self.world.grid.run(grid.put(content(1)))
        other = StoringLock((self.client.state,), clock)
        self.assertRaises(UsageError, self.world.grid.run, Deferred.fromCoroutine(other.exclude()))
        self.world.end(grid)
        self.world.grid.run(Deferred.fromCoroutine(other.exclude()))
        other.release()

    def test_a_lock_that_cannot_be_opened(self) -> None:
        """Without descriptors nothing is stored; where nothing can be written, no process prunes."""
        for number, error, taken in (
            (errno.EMFILE, OSError, False),
            (errno.EACCES, OSError, True),
            (errno.ENOLCK, CannotLock, True),
        ):

            def fails(*_: Any, kind: Any = error, number: int = number, **__: Any) -> None:
                raise kind(number, os.strerror(number))

            patched = self.patch(lease_release_lock, "open_locked", fails)
            if taken:
                self.do(lambda grid: grid.put(content(2)))
            else:
                with self.assertRaisesRegex(SinkError, "nothing was stored"):
                    self.do(lambda grid: grid.put(content(2)))
            patched.restore()

    def test_a_put_just_before_the_release(self) -> None:
        """On another machine with the same secrets: servers keep what was renewed since the prune began."""
        real = GbsServer.release_leases
        stored: list[Any] = []

        def late(server: GbsServer, request: Any) -> Any:
            if request.releases and not stored:
                self.patch(GbsServer, "release_leases", real)
                grid = self.client.start()
                grid._storing = StoringLock((), grid.clock)
                stored.append(grid)
                putting = grid.put(content(1))
                return putting.addCallback(lambda _: real(server, request))
            return real(server, request)

        self.patch(GbsServer, "release_leases", late)
        result = self.prune()
        self.assertTrue(self.is_stored())
        self.assertGreater(result.undone, 0)
        self.world.end(stored[0])

    def test_a_server_that_lies(self) -> None:
        """It says that it released, and did not; or that it did not, and did. No file is lost by it."""
        real = ShareStore.release_lease
        self.patch(ShareStore, "release_lease", lambda *_: Released(1, 0, 10))
        self.assertEqual(self.prune().undone, 0)
        self.assertTrue(self.is_stored())
        (self.client.files / "old").write_bytes(content(1))
        self.do(self.client.backup)
        self.world.check_reachable()
        (self.client.files / "old").unlink()
        self.pass_time()
        self.do(lambda grid: self.client.backup(grid, retention=Retention(last=1)))
        self.pass_time()

        def fail(store: ShareStore, *arguments: Any) -> Released:
            real(store, *arguments)
            raise OSError("a lie")

        self.patch(ShareStore, "release_lease", fail)
        result = self.prune()
        self.assertGreater(result.undone, 0)
        self.assertIn("status 500", str(result.problems[0]))
        self.flushLoggedErrors(OSError)
        self.patch(ShareStore, "release_lease", real)
        self.assertEqual(self.prune().undone, 0)
        self.assertFalse(self.is_stored())
        self.world.check_reachable()

    def test_servers_without_it(self) -> None:
        """They are named; the client counts what they have as stored, as before."""
        self.patch(GbsServer, "release_leases", lambda *_: succeed(None))
        result = self.prune()
        self.assertEqual(result.without, ("s0", "s1", "s2"))
        self.assertGreater(result.objects, 0)
        self.assertEqual(result.released, Released())
        self.assertTrue(self.is_stored())

    def test_a_killed_run(self) -> None:
        """What it has stored, and no run lists, goes too."""
        (self.client.files / "new").write_bytes(content(9))
        before = self.world.stored()
        grid = self.client.start()
        running = self.client.backup(grid)
        while self.world.stored() == before:
            self.world.grid.clock.step()
        self.world.kill(self.client, running)
        self.pass_time()
        self.prune()
        kept = self.world.check_reachable()
        self.assertEqual(self.world.stored() - kept, set())

    def test_a_killed_stream(self) -> None:
        """What it has stored goes as well."""
        before = self.world.stored()
        grid = self.client.start()
        stream = BackupStream("dump", io.BytesIO(content(9) * 10))
        running = Deferred.fromCoroutine(self.client.backups(grid).run(stream, "dump"))
        while self.world.stored() == before:
            self.world.grid.clock.step()
        self.world.kill(self.client, running)
        self.pass_time()
        self.prune()
        kept = self.world.check_reachable()
        self.assertEqual(self.world.stored() - kept, set())

    def test_a_killed_run_that_another_client_forgets(self) -> None:
        """It was listed, but not recorded; only the notes say what it has stored."""
        (self.client.files / "new").write_bytes(content(9))
        self.do(self.client.backup)
        run = max(self.world.runs(), key=lambda run: (run.name == "ann", run.time))
        sent: set[bytes] = set()
        self.do(lambda grid: maybeDeferred(self.world._read, grid, run.cap, sent))
        state = self.client.state / "backup"
        (state / "candidates").write_bytes(b"".join(sent))
        for path in state.glob("database.sqlite*"):
            path.unlink()
        self.prune()
        bob = self.world.clients[1]
        self.do(lambda grid: bob.forget(grid, (f"ann@{run.time}",), Retention()), bob)
        self.prune()
        kept = self.world.check_reachable()
        self.assertEqual(self.world.stored() - kept, set())

    def test_what_changes_meanwhile(self) -> None:
        """A link that is made while the catalogue is read is found before anything is released."""
        real = StoringLock.exclude

        async def late(lock: StoringLock) -> None:
            grid = self.client.start()
            await self.client.link(grid, "late", self.old)
            await grid.close()
            await real(lock)

        self.patch(StoringLock, "exclude", late)
        self.prune()
        self.assertTrue(self.is_stored())
        self.world.check_reachable()

    def test_a_clock_that_jumps(self) -> None:
        """Of the client: runs of the future are kept, and what they reach."""
        now = EPOCH_S + self.world.grid.clock.seconds()
        self.client.now = lambda: now + 10**8  # type: ignore[method-assign]
        self.do(self.client.backup)
        self.client.now = lambda: now  # type: ignore[method-assign]
        self.do(lambda grid: self.client.forget(grid, (), Retention(last=1)))
        self.assertIn(shown_time(now + 10**8), [run.time for run in self.world.runs()])
        self.prune()
        self.world.check_reachable()


class SpaceTests(SynchronousTestCase):
    """What backups, runs and aliases occupy."""

    def test_two_runs(self) -> None:
        """What only one has, what both have, and what an alias has, are as the servers' shares are."""
        world = PruneWorld(1)
        self.addCleanup(world.close)
        ann, _ = world.clients
        (ann.files / "same").write_bytes(content(1))
        (ann.files / "old").write_bytes(content(2))
        grid = ann.start()
        made = world.grid.run(Deferred.fromCoroutine(_made(grid)))
        world.grid.run(ann.backup(grid))
        world.grid.clock.advance(60)
        (ann.files / "old").unlink()
        (ann.files / "new").write_bytes(content(3))
        world.grid.run(ann.backup(grid))
        runs = world.runs()
        world.grid.run(Directory(grid, made, ann.now).link("first", runs[0].cap))
        kept = [prune_roots.Root("home", made)]
        found = world.grid.run(Deferred.fromCoroutine(occupied_space(grid, runs, kept)))

        def size(*numbers: int) -> int:
            return sum(len(content(number)) * 3 // 2 for number in numbers)

        roots = [run.cap.file.size * 3 // 2 for run in runs if isinstance(run.cap.file, ChkCap)]
        self.assertEqual(found.runs, (size(2) + roots[0], size(3) + roots[1]))
        self.assertEqual(found.backups, {"ann": size(1, 2, 3) + sum(roots)})
        self.assertGreater(found.kept["home"], size(1, 2) + roots[0])
        self.assertEqual(found.unreadable, ())
        for server in world.grid.servers[:2]:
            index = runs[0].cap.storage_index
            assert index is not None
            for number in server.store.list_shares(index):
                os.unlink(server.share_path(index, number))
        found = world.grid.run(Deferred.fromCoroutine(occupied_space(grid, runs, kept)))
        self.assertEqual(found.unreadable, (f"ann {runs[0].time}", "home"))
        world.end(grid)


class PinTests(SynchronousTestCase):
    """The file of pins."""

    def setUp(self) -> None:
        self.world = PruneWorld(1)
        self.addCleanup(self.world.close)
        self.directory = self.world.clients[0].directory
        self.cap = ChkCap(b"k" * 16, b"u" * 32, 3, 10, 1000)

    def test_there_and_back(self) -> None:
        """Names may have colons and blanks; a pin is removed by its name or cap."""
        for name in ("a: b", "home:x", "é"):
            prune_roots.add_pin(self.directory, name, self.cap)
        self.assertEqual(list(prune_roots.read_pins(self.directory)), ["a: b", "home:x", "é"])
        self.assertEqual(prune_roots.remove_pin(self.directory, "a: b"), self.cap)
        prune_roots.remove_pin(self.directory, str(self.cap))
        self.assertEqual(len(prune_roots.read_pins(self.directory)), 1)
        self.assertRaises(UsageError, prune_roots.remove_pin, self.directory, "a: b")

    def test_what_is_refused(self) -> None:
        """A name with another cap, impossible names, and caps that keep nothing or hide what they reach."""
        prune_roots.add_pin(self.directory, "x", self.cap)
        other = attrs.evolve(self.cap, size=5)
        self.assertRaises(UsageError, prune_roots.add_pin, self.directory, "x", other)
        for name in ("", " ", "a\nb", "x" * 300):
            self.assertRaises(UsageError, prune_roots.add_pin, self.directory, name, self.cap)
        for cap in (LitCap(b"x"), DirectoryCap(self.cap).verifier(), parse_cap("URI:NEW:x")):
            assert cap is not None
            self.assertRaises(CapError, prune_roots.add_pin, self.directory, "y", cap)
        (self.directory / "private/pins").write_text("nonsense\n")
        self.assertRaises(UsageError, prune_roots.read_pins, self.directory)
        self.assertRaises(UsageError, prune_roots.add_pin, self.directory, "z", self.cap)


class HistoryTests(SynchronousTestCase):
    """Nothing reachable is ever released; everything else is, within one prune of each client."""

    def test_histories(self) -> None:
        """A few random ones; ``python -m misc.prune_world`` runs a thousand."""
        for seed in range(FIRST_SEED, FIRST_SEED + HISTORIES):
            try:
                run_history(seed)
            except AssertionError as error:  # noqa: PERF203
                self.fail(f"PRUNE_SEED={seed}: {error}")


async def _made(grid: Any) -> DirectoryCap:
    from pipegrid.tree.directory import create_directory

    return (await create_directory(grid)).cap
