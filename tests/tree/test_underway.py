"""What of a tree is under way: some files at first, until it is known whether they are many."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.flow.concurrency_limits import FEW, INITIAL_LIMIT, MANY, SmallFileCapacity
from pipegrid.transfer.put.put_many import SMALL_BYTES
from pipegrid.transfer.settings import Limits
from pipegrid.tree.upload_queue import SOME, UNDECIDED_S, UploadQueue


class UndecidedTests(SynchronousTestCase):
    """What begins when, and what the servers are told."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.small_file_capacity = SmallFileCapacity.COUNTED
        self.expected: list[int] = []
        self.ended = 0
        self.waiting: list[Deferred[None]] = []
        self.numbers = 0
        self.in_flight: UploadQueue[int] = UploadQueue(
            self.has_ended,
            Limits(),
            self.clock.seconds,
            lambda: self.small_file_capacity,
            self.expected.append,
        )

    def tearDown(self) -> None:
        self.in_flight.forget_waiting()

    def has_ended(self, outcome: Any) -> None:
        """Count it."""
        self.ended += 1

    def meet(self, count: int, size: int = 100, stores: bool = True) -> None:
        """Have so many be met."""

        async def store() -> None:
            waiting: Deferred[None] = Deferred()
            self.waiting.append(waiting)
            await waiting

        for _ in range(count):
            self.numbers += 1
            self.in_flight.begin(size, store(), self.numbers, stores)

    def test_few_are_all(self) -> None:
        """They begin as soon as nothing more is to come, and nobody prepares for anything."""
        self.meet(SOME + 10)
        self.assertEqual(len(self.waiting), SOME)
        self.in_flight.all_met()
        self.assertEqual(len(self.waiting), SOME + 10)
        self.assertEqual(self.expected, [])

    def test_many(self) -> None:
        """The servers are told when so many small ones have been met, and each time that more come."""
        self.meet(30, SMALL_BYTES + 1)
        self.meet(MANY - 1)
        self.assertEqual((len(self.waiting), self.expected), (SOME, []))
        self.small_file_capacity = SmallFileCapacity.FEW  # as servers say who prepare
        self.meet(1)
        self.assertEqual((len(self.waiting), self.expected), (SOME, [MANY]))
        for waiting in self.waiting[: SOME - FEW]:
            waiting.callback(None)
        self.assertEqual(len(self.waiting), SOME)
        self.waiting[SOME - FEW].callback(None)
        self.assertEqual(len(self.waiting), SOME + 1)
        self.small_file_capacity = SmallFileCapacity.COUNTED
        self.waiting[SOME].callback(None)
        ended = SOME - FEW + 2
        self.assertEqual(len(self.waiting), INITIAL_LIMIT + ended)
        self.meet(MANY)
        self.assertEqual(self.expected, [MANY, MANY])

    def test_a_slow_walk(self) -> None:
        """It is not waited for longer than connections take."""
        self.meet(SOME + 5)
        self.clock.advance(UNDECIDED_S)
        self.meet(1)
        self.assertEqual(len(self.waiting), SOME + 6)

    def test_questions(self) -> None:
        """What only looks does not wait, and says nothing of what will be stored."""
        self.meet(200, 0, stores=False)
        self.assertEqual((len(self.waiting), self.expected), (200, []))

    def test_servers_that_take_many_to_a_message(self) -> None:
        """They are given all at once."""
        self.small_file_capacity = SmallFileCapacity.ANY
        self.meet(100)
        self.assertEqual(len(self.waiting), 100)
