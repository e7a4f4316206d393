"""Who works in which turn of the reactor."""

from __future__ import annotations

from collections.abc import Callable

import attrs
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.server.connection_turns import (
    ACTIVE_S,
    ALONE_S,
    BURST_S,
    SLICE_S,
    CpuUsage,
    FairQueue,
    FairTurns,
)
from tests.server.gbs.support import one_turn

STEP_S = 0.0001


@attrs.define(eq=False)
class Worker:
    """Has so many steps to do, as a connection has requests."""

    name: str
    turns: FairTurns[Worker]
    clock: Clock
    done: list[str]
    place: str = ""
    left: int = 0
    waits: bool = False
    spending: CpuUsage = attrs.Factory(lambda: CpuUsage(0.0))

    def ask(self, steps: int) -> None:
        """Have more to do."""
        self.turns.start()
        self.left += steps
        if not self.waits:
            self.work(self.turns.may_have(self))

    def take_turn(self) -> None:
        """Go on."""
        self.waits = False
        self.turns.start()
        self.work(True)

    def work(self, granted: bool) -> None:
        """Do what may be done now."""
        while granted and self.left and not self.turns.over:
            self.left -= 1
            self.clock.rightNow += STEP_S
            self.done.append(self.name)
        if granted:
            self.turns.end(self)
        if self.left:
            self.waits = True
            self.turns.wait(self)


class TurnsTests(SynchronousTestCase):
    """Workers whose steps take a tenth of a millisecond."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.rightNow = 1000.0
        self.turns: FairTurns[Worker] = FairTurns(self.clock)
        self.done: list[str] = []

    def worker(self, name: str, place: str = "", heavy: bool = False) -> Worker:
        """Return one, which the server has worked for before if it is heavy."""
        worker = Worker(name, self.turns, self.clock, self.done, place)
        if heavy:
            worker.spending.spend(2 * BURST_S, self.clock.seconds())
        return worker

    def turn(self) -> str:
        """Have a turn of the reactor; returns who did a step in it."""
        self.done.clear()
        one_turn(self.clock)
        return "".join(self.done)

    def test_alone(self) -> None:
        """Who is alone for some time does a lot in a turn, and the reactor has its turns all the same."""
        worker = self.worker("a")
        worker.ask(1)
        self.clock.rightNow += ACTIVE_S
        self.done.clear()
        worker.ask(1000)
        most = round(ALONE_S / STEP_S) + 1
        self.assertLessEqual(abs(len(self.done) - most), 1)
        self.assertGreater(len(self.turn()), 10)

    def test_a_slice_each(self) -> None:
        """Those who have much to do take turns, a slice each."""
        workers = [self.worker(name) for name in "abc"]
        for worker in workers:
            worker.ask(1000)
        seen = [self.turn() for _ in range(9)]
        self.assertEqual([set(each) for each in seen], [{"a"}, {"b"}, {"c"}] * 3)
        for each in seen:
            self.assertLessEqual(abs(len(each) - SLICE_S / STEP_S), 2)

    def test_who_asks_for_little(self) -> None:
        """It is served at once, however many wait, and whoever they are."""
        for number in range(50):
            self.worker("x", f"flood {number % 4}").ask(1000)
        little = self.worker("h")
        for _ in range(10):
            self.turn()
            little.ask(1)
            self.assertEqual(self.done[-1], "h")

    def test_who_asks_for_little_again_and_again(self) -> None:
        """Beyond a burst they share a slice, then the line has one: many of its like make no turn long."""
        many = [self.worker(chr(97 + number), heavy=True) for number in range(20)]
        for worker in many:
            worker.ask(1)
        a_slice = round(SLICE_S / STEP_S)
        self.assertEqual("".join(self.done), "abcdefghijklmnopqrst"[: len(self.done)])
        self.assertLessEqual(abs(len(self.done) - a_slice), 1)
        turns = ["".join(self.done)]
        while len("".join(turns)) < 20:
            turns.append(self.turn())
            self.assertIn(len(turns[-1]), range(1, a_slice + 2))
        self.assertEqual("".join(turns), "abcdefghijklmnopqrst")
        self.assertLessEqual(len(turns), 4)

    def test_a_client_with_several_connections(self) -> None:
        """It asks on one after the other, one request at a time: none of them waits for a turn."""
        several = [self.worker(name, "here", heavy=True) for name in "abc"]
        for number in range(300):
            several[number % 3].ask(1)
            self.clock.rightNow += 0.001
            self.assertEqual(self.done, ["abc"[number % 3]])
            self.assertEqual(self.clock.getDelayedCalls(), [])
            self.done.clear()

    def test_each_pays_for_itself(self) -> None:
        """Who shares a slice with others is not charged for what was done for them."""
        many = [self.worker(chr(97 + number), heavy=True) for number in range(20)]
        for worker in many:
            worker.ask(1)
        while self.turn():
            pass
        for worker in many:
            self.assertAlmostEqual(worker.spending._spent_s, 2 * BURST_S + STEP_S, places=4)

    def test_who_comes_after_a_pause_is_alone(self) -> None:
        """Another has worked last, but long ago: what is asked for is done in one turn."""
        one, other = self.worker("a"), self.worker("b")
        one.ask(1)
        self.clock.rightNow += ACTIVE_S + 0.001
        self.done.clear()
        other.ask(round(ALONE_S / STEP_S) - 1)
        self.assertEqual(len(self.done), round(ALONE_S / STEP_S) - 1)
        self.assertEqual(self.clock.getDelayedCalls(), [])
        one.ask(round(ALONE_S / STEP_S))
        self.assertLessEqual(self.done.count("a"), round(SLICE_S / STEP_S) + 1)

    def test_a_stranger_makes_slices_short(self) -> None:
        """Who is not known yet is served between slices of half a millisecond."""
        worker = self.worker("a")
        worker.ask(1)
        self.clock.rightNow += ACTIVE_S
        self.turns.asked()
        self.done.clear()
        worker.ask(1000)
        self.assertLessEqual(len(self.done), round(SLICE_S / STEP_S) + 1)

    def test_looking_at_the_clock(self) -> None:
        """One request takes three looks: when it begins, whether it may go on, and when it has ended."""
        worker = self.worker("a")
        looks = 0
        really = self.clock.seconds

        def count() -> float:
            nonlocal looks
            looks += 1
            return really()

        self.patch(self.clock, "seconds", count)
        self.turns.start()
        self.assertTrue(self.turns.may_have(worker))
        self.assertFalse(self.turns.over)
        self.turns.end(worker)
        self.assertEqual(looks, 3)

    def test_who_was_there_alone(self) -> None:
        """Bulk work that nobody disputes waits for nothing."""
        worker = self.worker("a", heavy=True)
        for _ in range(5):
            worker.ask(1)
        self.assertEqual(len(self.done), 5)
        other = self.worker("b", heavy=True)
        self.clock.rightNow += 0.001
        other.ask(1)
        self.assertEqual(self.done[-1], "b")
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_addresses(self) -> None:
        """The address goes first that has fewest waiting."""
        for _ in range(9):
            self.worker("x", "flood").ask(1000)
        self.worker("h", "elsewhere").ask(30)
        seen = [set(self.turn()) for _ in range(4)]
        self.assertEqual(seen[0], {"h"})
        self.assertIn({"h"}, seen[1:])

    def test_who_has_gone(self) -> None:
        """It has no turn, and nothing is left when all have gone."""
        first, second = self.worker("a"), self.worker("b")
        first.ask(1000)
        second.ask(1000)
        self.turns.leave(first)
        self.assertEqual(set(self.turn()), {"b"})
        self.turns.leave(second)
        self.turns.leave(second)
        self.assertEqual(self.clock.getDelayedCalls(), [])


class LineTests(SynchronousTestCase):
    """In which order."""

    def setUp(self) -> None:
        self.queue: FairQueue[Worker] = FairQueue()

    def join(self, name: str, place: str) -> Worker:
        """Have somebody wait."""
        clock = Clock()
        worker = Worker(name, FairTurns(clock), clock, [], place)
        self.queue.join(worker)
        return worker

    def order(self, then: Callable[[Worker], None] = lambda worker: None) -> str:
        """Return who has a turn, until nobody waits."""
        found = ""
        while self.queue:
            member = self.queue.next()
            found += member.name
            then(member)
        return found

    def test_order(self) -> None:
        """Within an address as they came; between addresses those of few first."""
        for name, place in (("1", "x"), ("2", "x"), ("3", "x"), ("4", "y"), ("5", "z")):
            self.join(name, place)
        self.assertEqual(self.order(), "45123")

    def test_equal_addresses(self) -> None:
        """The first has its turn first, and then has fewer."""
        for name, place in (("1", "x"), ("2", "x"), ("a", "y"), ("b", "y")):
            self.join(name, place)
        self.assertEqual(self.order(), "12ab")

    def test_leaving(self) -> None:
        """Who has left is not called, and may leave again."""
        first, second = self.join("1", "x"), self.join("2", "x")
        self.queue.leave(first)
        self.queue.leave(first)
        self.assertEqual(self.order(), "2")
        self.queue.leave(second)
        self.assertFalse(self.queue)
