"""Mutable files through the grid, over HTTPS to real servers on a simulated network."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import DirectoryCap
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import CapError, PipegridError, UsageError
from pipegrid.testing.network import leaks
from pipegrid.transfer.put.source import open_at_once
from tests.transfer.world import content
from tests.transport.gbs_world import GbsWorld, make_grid


class GridTestCase(SynchronousTestCase):
    """Ten servers, 50 ms away."""

    def setUp(self) -> None:
        self.world = GbsWorld(Path(self.mktemp()), 10, latency_s=0.05)
        self.addCleanup(self.world.close)
        self.grids: list[Any] = []
        self.grid = self.open()

    def open(self) -> Any:
        """Return a grid with connections that are up."""
        grid = make_grid(self.world)
        self.grids.append(grid)
        self.world.run(grid.status())
        return grid

    def tearDown(self) -> None:
        for grid in self.grids:
            self.world.run(grid.close())
        self.world.clock.advance(700)
        self.assertEqual(leaks(self.world.clock, self.world.network), [])

    def trips(self, waiting: Deferred[Any]) -> tuple[float, Any]:
        """Return how many round trips something takes, and its result."""
        began_s = self.world.clock.seconds()
        result = self.world.run(waiting)
        return round(self.world.round_trips(began_s), 1), result


class RoundTripTests(GridTestCase):
    """The budgets, with connections up."""

    def warm(self, grid: Any) -> None:
        """Have both kinds of connections up: that of changes, and that of questions."""
        cap = self.world.run(grid.create_mutable(b"warm")).cap
        self.world.run(grid.read(cap.readonly()))
        self.world.run(grid.read(cap))

    def test_bytes_need_no_thread(self) -> None:
        """What is in memory already is not handed to a thread and back to be read; a file is."""
        cap = self.world.run(self.grid.create_mutable(b"first")).cap
        workers = self.grid._mutables._workers
        for source, jobs in ((b"second", 0), (BytesIO(b"third"), 1)):
            with mock.patch.object(workers, "run", wraps=workers.run) as run:
                self.world.run(self.grid.overwrite(cap, source))
            opened = [call for call in run.call_args_list if call.args[0] is open_at_once]
            self.assertEqual(len(opened), jobs)
        self.assertEqual(self.world.run(self.grid.read(cap)), b"third")

    def test_small_files(self) -> None:
        """Create 1, get 1 with either cap, overwrite 2, 1 when it is known; the same for modify."""
        self.warm(self.grid)
        for format in ("sdmf", "mdmf"):
            trips, result = self.trips(self.grid.create_mutable(content(500), format=format))
            self.assertEqual(trips, 1.0)
            other = self.open()
            self.warm(other)
            trips, data = self.trips(other.read(result.cap.readonly()))
            self.assertEqual((trips, data), (1.0, content(500)))
            another = self.open()
            self.warm(another)
            trips, data = self.trips(another.read(result.cap))
            self.assertEqual((trips, data), (1.0, content(500)))
            third = self.open()
            self.warm(third)
            trips, _ = self.trips(third.overwrite(result.cap, b"new"))
            self.assertEqual(trips, 2.0)
            trips, _ = self.trips(third.overwrite(result.cap, b"newer"))
            self.assertEqual(trips, 1.0)
            fourth = self.open()
            self.warm(fourth)
            trips, _ = self.trips(fourth.modify(result.cap, lambda old: old + b"!"))
            self.assertEqual(trips, 2.0)
            trips, _ = self.trips(fourth.modify(result.cap, lambda old: old + b"?"))
            self.assertEqual(trips, 1.0)
            self.assertEqual(self.world.run(self.open().read(result.cap)), b"newer!?")

    def test_remembered_content(self) -> None:
        """What is right saves a round trip; what is wrong is not believed, and does no harm."""
        self.warm(self.grid)
        old = content(700)
        cap = self.world.run(self.grid.create_mutable(old)).cap
        known = self.grid._mutables.files.known.of(cap.storage_index)
        for remembered, wanted in ((old, 1.0), (b"x" * 701, 2.0), (b"", 2.0), (None, 2.0)):
            known.content = None  # as in another process of this client
            call = self.grid.modify(cap, lambda had: had + b"!", remembered=remembered)
            trips, _ = self.trips(call)
            self.assertEqual(trips, wanted, remembered)
        self.assertEqual(self.world.run(self.open().read(cap)), old + b"!!!!")
        refused = self.grid.modify(cap, lambda had: had, remembered="text")
        with self.assertRaises(UsageError):
            self.world.run(refused)

    def test_remembered_content_that_others_have_changed(self) -> None:
        """Their change is kept: the servers refuse, and the answers tell what is there."""
        self.warm(self.grid)
        cap = self.world.run(self.grid.create_mutable(b"a")).cap
        other = self.open()
        self.world.run(other.modify(cap, lambda had: had + b"b"))
        self.grid._mutables.files.known.of(cap.storage_index).content = None
        self.world.run(self.grid.modify(cap, lambda had: had + b"c", remembered=b"a"))
        self.assertEqual(self.world.run(other.read(cap)), b"abc")

    def test_large_files(self) -> None:
        """Ten megabytes of MDMF: made in 1, read in 2, a range of it changed in 3, and in 2 when known."""
        self.warm(self.grid)
        data = content(10_000_000)
        trips, result = self.trips(self.grid.create_mutable(data, format="mdmf"))
        self.assertLess(trips, 1.2)
        other = self.open()
        self.warm(other)
        trips, found = self.trips(other.read(result.cap.readonly()))
        self.assertEqual(found, data)
        self.assertLess(trips, 2.2)
        trips, _ = self.trips(other.update(result.cap, 5_000_000, b"x" * 1000))
        self.assertLess(trips, 3.2)
        trips, _ = self.trips(other.update(result.cap, 6_000_000, b"y" * 1000))
        self.assertLess(trips, 2.2)
        read = self.world.run(self.grid.read(result.cap, 4_999_999, 1002))
        self.assertEqual(read, data[4_999_999:5_000_000] + b"x" * 1000 + data[5_001_000:5_001_001])


class UseTests(GridTestCase):
    """Arguments, results, sinks."""

    def refused(self, kind: type[PipegridError], waiting: Deferred[Any], *words: str) -> None:
        with self.assertRaises(kind) as caught:
            self.world.run(waiting)
        for word in words:
            self.assertIn(word, str(caught.exception))

    def test_sinks_and_ranges(self) -> None:
        """Into a file object, a path, and as bytes; all or a range."""
        cap = self.world.run(self.grid.create_mutable(BytesIO(content(300_000)), format="MDMF")).cap
        self.assertEqual(
            self.world.run(self.grid.read(str(cap), 131_000, 200)),
            content(300_000)[131_000:131_200],
        )
        path = Path(self.mktemp())
        told: list[tuple[int, int]] = []
        result = self.world.run(
            self.grid.get(cap.readonly(), path, progress=lambda *each: told.append(each))
        )
        self.assertEqual(path.read_bytes(), content(300_000))
        self.assertEqual((result.size, told[-1][0], len(result.shares_used)), (300_000, 300_000, 3))

    def test_wrong_arguments(self) -> None:
        """Each is a sentence, and nothing is sent."""
        cap = self.world.run(self.grid.create_mutable(b"x")).cap
        chk = self.world.run(self.grid.put(content(1000))).cap
        self.refused(UsageError, self.grid.create_mutable(b"", format="xdmf"), "'sdmf' or 'mdmf'")
        self.refused(CapError, self.grid.overwrite(chk, b""), "can never change")
        self.refused(CapError, self.grid.modify(str(cap.readonly()), bytes), "does not write")
        self.refused(CapError, self.grid.read(cap.verifier()), "verifier")
        self.refused(UsageError, self.grid.modify(cap, b"no function"), "function")
        nothing: Any = None
        self.refused(UsageError, self.grid.modify(cap, lambda _: nothing), "bytes, not None")
        wrong: Any = 5
        self.refused(UsageError, self.grid.modify(cap, bytes, merge=wrong), "merge is a function")
        self.refused(UsageError, self.grid.modify(cap, bytes, redo=wrong), "redo is a function")
        self.refused(
            UsageError, self.grid.update(cap, 2, b"behind the end"), "at its end at the latest"
        )
        self.refused(UsageError, self.grid.read(cap, 2, 1), "begins at byte 2")
        self.refused(CapError, self.grid.read(DirectoryCap(cap)), "directory")

    def test_upkeep(self) -> None:
        """Check, verify, leases and repair say what they do of immutable files, and name the version."""
        cap = self.world.run(self.grid.create_mutable(content(2000), params=Params(3, 10))).cap
        for given in (cap, cap.readonly(), cap.verifier(), DirectoryCap(cap)):
            result = self.world.run(self.grid.check(given, verify=True, add_lease=True))
            self.assertTrue(result.healthy)
            self.assertEqual((len(result.good_shares), len(result.renewed)), (10, 10))
            self.assertEqual(result.version.sequence_number, 1)
        self.assertEqual(len(self.world.run(self.grid.renew(cap)).leases), 10)
        for server in self.world.servers[:4]:
            for number in server.store.slots.list_shares(cap.storage_index):
                directory = server.store.slots._directory_of(cap.storage_index)
                (Path(directory) / str(number)).unlink()
        result = self.world.run(self.grid.check(cap))
        self.assertEqual((result.healthy, len(result.good_shares)), (False, 6))
        repaired = self.world.run(self.grid.repair(cap))
        self.assertTrue(repaired.whole)
        self.assertTrue(self.world.run(self.grid.check(cap, verify=True)).healthy)
        self.assertEqual(self.world.run(self.open().read(cap)), content(2000))
        self.refused(CapError, self.grid.repair(cap.readonly()), "write")
