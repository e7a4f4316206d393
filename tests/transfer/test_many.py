"""Many files at once: which start, and when the next ones do."""

from __future__ import annotations

import os
from pathlib import Path

from twisted.internet.defer import Deferred, fail, gatherResults, succeed
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import SourceError
from pipegrid.flow.concurrency_limits import FEW, INITIAL_LIMIT, SmallFileCapacity
from pipegrid.transfer.put.put_many import MAX_BYTES, MAX_FILES, ManyPuts, PutOrder
from pipegrid.transfer.results import Progress
from tests.transfer.world import RTT, World, content


def taken(order: PutOrder) -> list[int]:
    """Start all that may start."""
    numbers = []
    while order.next is not None:
        numbers.append(order.next)
        order.started(numbers[-1])
    return numbers


class PutOrderTests(SynchronousTestCase):
    """Which file is next."""

    def test_large_files_first(self) -> None:
        """By size; those of one size in the order given, those of unknown size before all."""
        self.assertEqual(taken(PutOrder([1, 5, None, 5, 9])), [2, 4, 1, 3, 0])

    def test_two_always(self) -> None:
        """Two large files are under way, a third waits until one has ended."""
        order = PutOrder([1 << 40] * 3)
        self.assertEqual(taken(order), [0, 1])
        order.ended(0)
        self.assertEqual(taken(order), [2])

    def test_bytes_are_bounded(self) -> None:
        """As many as hold the bytes together, and what is acknowledged does not count."""
        order = PutOrder([MAX_BYTES // 4] * 8)
        self.assertEqual(taken(order), [0, 1, 2, 3])
        order.progressed(2, 50, 100)
        self.assertEqual(taken(order), [])
        order.progressed(0, 50, 100)
        self.assertEqual(taken(order), [4])
        order.ended(2)
        order.ended(0)
        self.assertEqual(taken(order), [5])
        order.progressed(0, 100, 100)  # it has ended: late news change nothing
        self.assertEqual(taken(order), [])

    def test_the_end_of_a_large_file(self) -> None:
        """Small files start while its last bytes are on the line."""
        order = PutOrder([100 * MAX_BYTES, 1, 1, 1])
        self.assertEqual(taken(order), [0, 1])
        order.progressed(0, 985, 1000)
        self.assertEqual(taken(order), [])
        order.progressed(0, 995, 1000)
        self.assertEqual(taken(order), [2, 3])

    def test_files_are_bounded(self) -> None:
        """However small they are."""
        self.assertEqual(len(taken(PutOrder([0] * 1000))), MAX_FILES)

    def test_a_pipe(self) -> None:
        """While nothing is known of it, it holds nobody back; then it counts as what it has left."""
        order = PutOrder([None, None, 1, 2])
        self.assertEqual(taken(order), [0, 1, 3, 2])
        order = PutOrder([None, *[MAX_BYTES // 2] * 3])
        order.started(0)
        order.progressed(0, 10, MAX_BYTES)
        self.assertEqual(taken(order), [1])


class ManyPutsTests(SynchronousTestCase):
    """The driver."""

    def setUp(self) -> None:
        self.running: dict[int, Deferred[str]] = {}
        self.progress: dict[int, Progress] = {}
        self.outcomes: list[tuple[int, str]] = []
        self.cancelled: list[int] = []

    def start(self, number: int, progress: Progress) -> Deferred[str]:
        """Note it."""
        self.progress[number] = progress
        running: Deferred[str] = Deferred(lambda _: self.cancelled.append(number))
        self.running[number] = running
        return running

    def ended(self, number: int, outcome: str | Failure) -> None:
        """Note it."""
        text = outcome.getErrorMessage() if isinstance(outcome, Failure) else outcome
        self.outcomes.append((number, text))

    def run_all(self, sizes: list[int | None]) -> Deferred[None]:
        """Start them."""
        return Deferred.fromCoroutine(ManyPuts(sizes, self.start, self.ended).run())

    def test_progress_starts_the_next(self) -> None:
        """What was acknowledged makes room."""
        done = self.run_all([MAX_BYTES] * 3)
        self.assertEqual(sorted(self.running), [0, 1])
        self.progress[0](1, 1)
        self.assertEqual(sorted(self.running), [0, 1])
        self.progress[1](1, 1)
        self.assertEqual(sorted(self.running), [0, 1, 2])
        for number in (2, 0, 1):
            self.running[number].callback(str(number))
        self.successResultOf(done)
        self.assertEqual(self.outcomes, [(2, "2"), (0, "0"), (1, "1")])

    def test_failures_stop_nobody(self) -> None:
        """They are told like results."""
        done = self.run_all([2, 1])
        self.running[0].errback(SourceError("gone"))
        self.assertNoResult(done)
        self.running[1].callback("1")
        self.successResultOf(done)
        self.assertEqual(self.outcomes, [(0, "gone"), (1, "1")])

    def test_cancelled(self) -> None:
        """All that run are cancelled, and no other starts."""
        done = self.run_all([MAX_BYTES] * 3)
        done.cancel()
        self.failureResultOf(done)
        self.assertEqual(self.cancelled, [0, 1])
        self.assertEqual(sorted(self.running), [0, 1])

    def test_servers_that_take_one_request_a_share(self) -> None:
        """Fewer small files are under way while each takes long; to others their number is no matter."""
        now = [0.0]
        small_file_capacity = [SmallFileCapacity.COUNTED]
        puts = ManyPuts(
            [1000] * 1000,
            self.start,
            self.ended,
            seconds=lambda: now[0],
            small_file_capacity=lambda: small_file_capacity[0],
        )
        done = Deferred.fromCoroutine(puts.run())
        self.assertEqual(len(self.running), INITIAL_LIMIT)
        for number in range(INITIAL_LIMIT):  # a queue: each waits for the one before
            now[0] += 0.5
            self.running[number].callback("")
        self.assertLess(len(self.running) - INITIAL_LIMIT, MAX_FILES // 4)
        small_file_capacity[0] = SmallFileCapacity.ANY
        now[0] += 0.1
        self.running[INITIAL_LIMIT].callback("")
        self.assertEqual(len(self.running) - INITIAL_LIMIT - 1, MAX_FILES)
        done.cancel()
        self.failureResultOf(done)

    def test_servers_that_are_about_to_be_quicker(self) -> None:
        """As few are under way as ever, until they are."""
        small_file_capacity = [SmallFileCapacity.FEW]
        puts = ManyPuts(
            [1000] * 1000,
            self.start,
            self.ended,
            small_file_capacity=lambda: small_file_capacity[0],
        )
        done = Deferred.fromCoroutine(puts.run())
        self.assertEqual(len(self.running), FEW)
        small_file_capacity[0] = SmallFileCapacity.COUNTED
        self.running[0].callback("")
        self.assertEqual(len(self.running), INITIAL_LIMIT + 1)
        done.cancel()
        self.failureResultOf(done)

    def test_nothing_to_do(self) -> None:
        """No files are done at once."""
        self.successResultOf(self.run_all([]))

    def test_ends_at_once(self) -> None:
        """Thousands that end while they start need no deep stack."""

        def start(number: int, progress: Progress) -> Deferred[str]:
            progress(1, 1)
            return succeed("") if number % 2 else fail(SourceError("gone"))

        done = Deferred.fromCoroutine(ManyPuts([1] * 3000, start, self.ended).run())
        self.successResultOf(done)
        self.assertEqual(len(self.outcomes), 3000)


class DescriptorTests(SynchronousTestCase):
    """Files are not opened before their time, however many are put at once."""

    def most_open(self, size: int, params: Params) -> tuple[int, float]:
        """Put 100 files; return how many were open at the beginning, and the time."""
        path = Path(self.mktemp())
        path.write_bytes(content(size))
        world = World(params=params)
        before = len(os.listdir("/dev/fd"))
        puts = gatherResults([world.grid.put(str(path), random_key=True) for _ in range(100)])
        opened = len(os.listdir("/dev/fd")) - before
        _, took = world.timed(puts)
        self.assertEqual(len(os.listdir("/dev/fd")), before)
        return opened, took

    def test_small_files(self) -> None:
        """They are read and closed before they are sent, so that all go in one round trip."""
        self.assertEqual(self.most_open(200, Params()), (64, RTT))

    def test_files_of_several_segments(self) -> None:
        """They stay open, but not all at once."""
        opened, took = self.most_open(3000, Params(3, 10, 999))
        self.assertEqual((opened, took), (64, 2 * RTT))
