"""Runs of the speed test on a target in memory: what is measured, in which order, and what stops it."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import CorruptionError, UsageError
from pipegrid.speedtest import run_results, runner, scenarios
from pipegrid.speedtest.benchmark_clients import Comparing, Session
from pipegrid.speedtest.run_results import DOWN, UP, RoundTrip, Run, parse_run
from pipegrid.speedtest.runner import Settings
from pipegrid.speedtest.scenarios import Scenario
from pipegrid.speedtest.targets import FileTarget, check_space, fitting_params


class MemorySession:
    """Keeps files in its target."""

    def __init__(self, target: MemoryTarget) -> None:
        self.target = target
        self.closed = False

    async def put(self, data: bytes, params: Params | None = None) -> str:
        """Keep it."""
        cap = str(len(self.target.files))
        self.target.files.append(data)
        self.target.encodings.append(params)
        return cap

    async def get(self, cap: str, sink: Comparing) -> None:
        """Give it back, perhaps damaged."""
        data = self.target.files[int(cap)]
        sink.write(data if not self.target.lies or len(data) < 300 else data[::-1])

    async def close(self) -> None:
        """Note it."""
        self.closed = True


class MemoryTarget(FileTarget):
    """A grid that is a list."""

    kind = "grid"

    def __init__(self, lies: bool = False, free: int | None = None) -> None:
        super().__init__(Clock())
        self.lies = lies
        self.free = free
        self.servers = 2
        self.files: list[bytes] = []
        self.encodings: list[Params | None] = []
        self.opened: list[tuple[int | None, MemorySession]] = []
        self.stopped = False

    async def start(self) -> None:
        """There is nothing to start."""

    async def open(self, window_bytes: int | None = None, **_: Any) -> Session:
        """Note the window."""
        session = MemorySession(self)
        self.opened.append((window_bytes, session))
        return session

    async def round_trips(self, count: int) -> list[RoundTrip]:
        """Always the same."""
        return [RoundTrip("a", [0.1] * count), RoundTrip("b", [0.3] * count)]

    async def free_bytes(self) -> int | None:
        """As the test says."""
        return self.free

    async def stop(self) -> None:
        """Note it."""
        self.stopped = True


SOME = (
    scenarios.series(2, 200),
    Scenario("startup", "scenario", (200,), fresh=True),
    scenarios.large(5000, most_rounds=1),
    Scenario("3x at once", "scenario", (400,) * 3, at_once=True),
    *scenarios.window_sweep(1000, (500,)),
    Scenario("1 of 2", "encoding", (400,), encoding=(1, 2)),
)


class RunnerTests(SynchronousTestCase):
    """``run``."""

    def setUp(self) -> None:
        self.said: list[str] = []
        # The collector is run before each measurement. It need not look at the modules of all other tests.
        gc.freeze()
        self.addCleanup(gc.unfreeze)

    def run_on(self, target: FileTarget, some: Sequence[Scenario] = SOME, rounds: int = 2) -> Any:
        """Run; return the Deferred."""
        settings = Settings(rounds, seed=7, pings=2)
        return runner.run(Clock(), target, lambda _: some, settings, self.said.append)

    def result(self, target: FileTarget, rounds: int = 2) -> Run:
        """Run; return what was measured."""
        return self.successResultOf(self.run_on(target, rounds=rounds))  # type: ignore[no-any-return]

    def test_everything_is_measured(self) -> None:
        """Each scenario, each direction, as many samples as rounds; and it can be written and read."""
        target = MemoryTarget()
        run = self.result(target)
        self.assertEqual(
            [(each.name, each.direction, len(each.samples_s)) for each in run.measurements],
            [
                ("2x 200B", UP, 2),
                ("2x 200B", DOWN, 2),
                ("startup", UP, 2),
                ("startup", DOWN, 2),
                ("5KB", UP, 1),
                ("5KB", DOWN, 1),
                ("3x at once", UP, 2),
                ("3x at once", DOWN, 2),
                ("500B", UP, 2),
                ("auto", UP, 2),
                ("1 of 2", UP, 2),
                ("1 of 2", DOWN, 2),
            ],
        )
        self.assertEqual([len(trip.samples_s) for trip in run.round_trips], [4, 4])
        self.assertAlmostEqual(run.average_rtt_s or 0, 0.2)
        self.assertEqual(parse_run(run.as_json(), "it"), run)
        self.assertTrue(target.stopped)
        self.assertTrue(all(session.closed for _, session in target.opened))

    def test_rounds_alternate(self) -> None:
        """All scenarios have their turn before one has another."""
        self.result(MemoryTarget())
        rounds = [line.partition(":")[0] for line in self.said if line.startswith("round")]
        self.assertEqual(rounds, ["round 1 of 2"] * 7 + ["round 2 of 2"] * 6)

    def test_each_round_has_an_order_of_its_own(self) -> None:
        """So that no scenario always follows the same other one; the same seed repeats them."""
        orders = []
        for _ in range(2):
            self.said.clear()
            self.result(MemoryTarget(), rounds=4)
            told = [line.split(": ") for line in self.said if line.startswith("round")]
            orders.append([title for _, title, _ in told])
        first = [tuple(order for order in orders[0][at : at + 6]) for at in (7, 13, 19)]
        self.assertEqual(len(set(first)), 3, first)
        self.assertEqual(orders[0], orders[1])

    def test_files_are_never_stored_twice(self) -> None:
        """Or the grid would have them already; they follow from the seed."""
        target, other = MemoryTarget(), MemoryTarget()
        self.result(target)
        self.result(other)
        sized = [file for file in target.files if len(file) > 200]
        self.assertEqual(len(set(sized)), len(sized))
        self.assertEqual(sized, [file for file in other.files if len(file) > 200])

    def test_windows_and_encodings_are_those_of_the_sweeps(self) -> None:
        """Clients of their own for windows, parameters for encodings."""
        target = MemoryTarget()
        self.result(target, rounds=1)
        windows = [window for window, _ in target.opened]
        self.assertEqual(windows.count(500), 1)
        self.assertEqual(windows.count(None), 4)
        self.assertIn(Params(1, 2), target.encodings)

    def test_wrong_bytes_end_the_run(self) -> None:
        """No figure is taken from a grid that lies; what was started is stopped."""
        target = MemoryTarget(lies=True)
        self.failureResultOf(self.run_on(target), CorruptionError)
        self.assertTrue(target.stopped)

    def test_too_little_room_is_said_before(self) -> None:
        """With the figures, and before anything is stored."""
        target = MemoryTarget(free=10**8)
        large = [scenarios.large(10**8)]
        failure = self.failureResultOf(self.run_on(target, large), UsageError)
        self.assertIn("1.00 GB", str(failure.value))
        self.assertIn("0.10 GB", str(failure.value))
        self.assertEqual((target.files, target.stopped), ([], True))

    def test_room_that_nobody_knows_is_no_obstacle(self) -> None:
        """As with gateways."""

        async def ask() -> None:
            await check_space(MemoryTarget(), 10**15)

        from twisted.internet.defer import Deferred

        self.successResultOf(Deferred.fromCoroutine(ask()))


class ParamsTests(SynchronousTestCase):
    """``fitting_params``."""

    def test_as_many_shares_as_servers(self) -> None:
        """Ten and more servers get 3 of 10."""
        found = [fitting_params(servers) for servers in (1, 4, 9, 10, 50)]
        pairs = [(each.required_shares, each.total_shares) for each in found]
        self.assertEqual(pairs, [(1, 1), (1, 4), (2, 9), (3, 10), (3, 10)])


class SelfDescriptionTests(SynchronousTestCase):
    """What a run says of where it ran."""

    def test_versions_and_machine(self) -> None:
        """Texts only; two runs on one machine say the same."""
        self.assertEqual(run_results.machine(), run_results.machine())
        self.assertIn("cores", run_results.machine())
        self.assertIn("twisted", run_results.versions())
        self.assertTrue(all(run_results.versions().values()))
