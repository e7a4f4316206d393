"""The grid in virtual time that applications test with."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from pipegrid import NotEnoughSharesError, UnhappyError
from pipegrid.testing.clock import HeapClock
from pipegrid.testing.fault_plan import Crash, FaultPlan, shrink
from pipegrid.testing.grid import SimulatedGrid
from pipegrid.testing.network import Hung

DATA = bytes(range(256)) * 40


class SimulatedGridTests(SynchronousTestCase):
    """What an application's test does with it."""

    def setUp(self) -> None:
        self.simulated = SimulatedGrid(self.mktemp())
        self.addCleanup(self.simulated.close)

    def test_put_and_get(self) -> None:
        """A file comes back, to another client too, each in a known number of round trips."""
        simulated = self.simulated
        grid = simulated.client()
        stored, put = simulated.round_trips(lambda: grid.put(DATA))
        self.assertEqual(put, 2)  # the first connects
        other = simulated.client("other")
        fetched, get = simulated.round_trips(lambda: other.read(stored.cap))
        self.assertEqual((fetched, get), (DATA, 2))
        fetched, get = simulated.round_trips(lambda: other.read(stored.cap))
        self.assertEqual((fetched, get), (DATA, 1))
        self.assertEqual(simulated.leaks(), [])

    def test_directories(self) -> None:
        """Mutable files and directories work as well."""
        simulated = self.simulated
        grid = simulated.client()
        directory = simulated.run(grid.create_directory())
        simulated.run(directory.put("fox", DATA))
        shared = simulated.client("other").directory(directory.cap.readonly())
        found = simulated.run(shared.list())
        self.assertEqual(set(found), {"fox"})

    def test_servers_that_crash(self) -> None:
        """Three servers suffice to read, two do not, and servers that restart have what they had."""
        simulated = self.simulated
        grid = simulated.client()
        cap = simulated.run(grid.put(DATA)).cap
        for server in simulated.servers[3:]:
            server.host.crash()
        self.assertEqual(simulated.run(grid.read(cap)), DATA)
        simulated.servers[0].host.crash()
        self.assertRaises(NotEnoughSharesError, simulated.run, grid.read(cap))
        self.assertRaises(UnhappyError, simulated.run, grid.put(b"x" * 100))
        for server in simulated.servers:
            if not server.host.up:
                server.host.restart()
        self.assertEqual(simulated.run(simulated.client("other").read(cap)), DATA)

    def test_faults_by_seed(self) -> None:
        """One seed gives one course of events, down to the byte and the nanosecond."""
        logs = []
        for _ in range(2):
            with SimulatedGrid(self.mktemp(), seed=5) as simulated:
                grid = simulated.client()
                plan = FaultPlan.random(5, ["client"], simulated.names, duration_s=1, faults=9)
                simulated.apply(plan)
                simulated.run(grid.put(DATA))
                logs.append(list(simulated.network.log))
        self.assertEqual(*logs)

    def test_a_failure_is_shrunk(self) -> None:
        """Of twelve faults those eight are left without which the put succeeds."""

        def fails(plan: FaultPlan) -> bool:
            with SimulatedGrid(self.mktemp()) as simulated:
                simulated.apply(plan)
                try:
                    simulated.run(simulated.client().put(DATA))
                except UnhappyError:
                    return True
                return False

        events = [Crash(0.0, f"s{n % 10}", None) for n in range(8)]
        plan = shrink(FaultPlan((*events, *events[:4])), fails)
        self.assertEqual(len(plan.events), 4)

    def test_nothing_that_never_ends(self) -> None:
        """What waits for ever is told with what is pending."""
        self.assertRaises(Hung, self.simulated.run, Deferred[None]())

    def test_the_directory(self) -> None:
        """Somebody's files are not taken for a server's."""
        path = Path(self.mktemp())
        path.mkdir()
        (path / "mine").touch()
        self.assertRaises(FileExistsError, SimulatedGrid, path)
        self.assertIsInstance(self.simulated.clock, HeapClock)
