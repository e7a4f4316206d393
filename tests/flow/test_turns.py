"""Pieces of work begin a few at a time."""

from __future__ import annotations

from twisted.internet.defer import CancelledError
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.reactor.deferreds import PerTurnLimit


class TurnsTests(SynchronousTestCase):
    """What happens when the clock is asked for nothing but its next turns."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.turns = PerTurnLimit(self.clock, 2)
        self.begun: list[int] = []

    def ask(self, number: int) -> None:
        """Note when it may begin."""
        self.turns.begin().addCallback(lambda _: self.begun.append(number))

    def test_so_many_in_each_turn_in_order(self) -> None:
        """The first begin at once, the others in later turns, and then the clock has rest."""
        for number in range(5):
            self.ask(number)
        self.assertEqual(self.begun, [0, 1])
        self.clock.callLater(0, self.begun.append, 100)  # others have their turns, too
        self.clock.advance(0)
        self.assertEqual(self.begun, [0, 1, 2, 3, 100, 4])
        self.assertEqual(self.clock.getDelayedCalls(), [])
        for number in range(5, 8):
            self.ask(number)
        self.assertEqual(self.begun, [0, 1, 2, 3, 100, 4, 5], "the last turn had one place left")
        self.clock.advance(0)
        self.assertEqual(self.begun, [0, 1, 2, 3, 100, 4, 5, 6, 7])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_nobody_overtakes(self) -> None:
        """Who comes while others wait, waits, though their turn has begun."""
        for number in range(3):
            self.ask(number)
        self.turns.begin().addCallback(lambda _: self.ask(9))
        self.ask(4)
        self.clock.advance(0)
        self.assertEqual(self.begun, [0, 1, 2, 4, 9])

    def test_cancelled(self) -> None:
        """Who is cancelled takes nobody's place."""
        for number in range(2):
            self.ask(number)
        waiting = self.turns.begin()
        for number in (2, 3):
            self.ask(number)
        waiting.cancel()
        self.failureResultOf(waiting, CancelledError)
        self.clock.advance(0)
        self.assertEqual(self.begun, [0, 1, 2, 3])
