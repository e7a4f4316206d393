"""Waiting for "something changed"."""

from __future__ import annotations

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.reactor.deferreds import Wakeup


class WakeupTests(SynchronousTestCase):
    """No event is lost, and nothing is left behind."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.wakeup = Wakeup(self.clock)

    def tearDown(self) -> None:
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_an_event_wakes_the_waiter_from_the_reactor(self) -> None:
        """Not from within the event: whoever fires may be in the middle of something."""
        waiting = self.wakeup.wait()
        self.wakeup.fire()
        self.assertNoResult(waiting)
        self.clock.advance(0)
        self.assertIsNone(self.successResultOf(waiting))

    def test_an_event_before_the_wait_is_not_lost(self) -> None:
        """Somebody looked, something happened, then they wait: they look again at once."""
        self.wakeup.fire()
        self.assertIsNone(self.successResultOf(self.wakeup.wait(10.0)))

    def test_a_burst_of_events_wakes_once(self) -> None:
        """Before the wait or during it, many events are one."""
        self.wakeup.fire()
        self.wakeup.fire()
        self.successResultOf(self.wakeup.wait())
        waiting = self.wakeup.wait()
        self.assertNoResult(waiting)
        self.wakeup.fire()
        self.wakeup.fire()
        self.clock.advance(0)
        self.successResultOf(waiting)
        again = self.wakeup.wait()
        self.clock.advance(100)
        self.assertNoResult(again)
        again.addErrback(lambda _: None)
        again.cancel()

    def test_time_passes(self) -> None:
        """A wait with a limit ends at it, exactly."""
        waiting = self.wakeup.wait(3.0)
        self.clock.advance(2.5)
        self.assertNoResult(waiting)
        self.clock.advance(0.5)
        self.successResultOf(waiting)

    def test_a_negative_limit_is_none_at_all(self) -> None:
        """What is overdue is done as soon as the reactor turns."""
        waiting = self.wakeup.wait(-1.0)
        self.clock.advance(0)
        self.successResultOf(waiting)

    def test_an_event_ends_the_timer(self) -> None:
        """One waiter, one timer: none is left when the event was first."""
        waiting = self.wakeup.wait(3.0)
        self.wakeup.fire()
        self.clock.advance(0)
        self.successResultOf(waiting)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_the_event_and_the_end_of_time_together(self) -> None:
        """They wake once, and the event does not count again."""
        waiting = self.wakeup.wait(3.0)
        self.clock.callLater(3.0, self.wakeup.fire)
        self.clock.advance(3.0)
        self.successResultOf(waiting)
        again = self.wakeup.wait(1.0)
        self.clock.advance(1.0)
        self.successResultOf(again)

    def test_cancelling(self) -> None:
        """The waiter goes, its timer too; the place is free for the next one."""
        for fired in (False, True):
            waiting = self.wakeup.wait(3.0)
            if fired:
                self.wakeup.fire()
            waiting.cancel()
            self.failureResultOf(waiting, CancelledError)
            self.assertEqual(self.clock.getDelayedCalls(), [])
            if fired:
                # Nobody has looked since.
                self.successResultOf(self.wakeup.wait())

    def test_only_one_may_wait(self) -> None:
        """A second waiter is a mistake in the program."""
        first = self.wakeup.wait()
        self.assertRaises(AssertionError, self.wakeup.wait)
        first.addErrback(lambda _: None)
        first.cancel()

    def test_the_waiter_may_wait_again_at_once(self) -> None:
        """A loop may go on from within its own waking."""
        woken = []

        async def loop() -> None:
            for _ in range(3):
                await self.wakeup.wait(1.0)
                woken.append(self.clock.seconds())

        done = Deferred.fromCoroutine(loop())
        for _ in range(3):
            self.clock.advance(1.0)
        self.successResultOf(done)
        self.assertEqual(woken, [1.0, 2.0, 3.0])
