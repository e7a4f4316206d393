"""Timers finer than the reactor's: in order, never too early, and as good as the reactor's without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase, TestCase

from pipegrid.testing.clock import AWAKE_S, PRECISE_EARLY_S, PreciseClock, TimerFile
from pipegrid.testing.link_relay import EARLY_S


class PressedTimer:
    """Goes off when the test says so; remembers what it was set to."""

    def __init__(self, expired: Callable[[], object]) -> None:
        self.expired = expired
        self.delays: list[float] = []
        self.closed = False

    def set(self, delay_s: float) -> None:
        self.delays.append(delay_s)

    def close(self) -> None:
        self.closed = True


class Readers(Clock):
    """A reactor that only remembers its readers."""

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[Any] = []

    def addReader(self, reader: Any) -> None:
        self.readers.append(reader)

    def removeReader(self, reader: Any) -> None:
        self.readers.remove(reader)


class PreciseClockTests(SynchronousTestCase):
    """The arithmetic, in virtual time."""

    def setUp(self) -> None:
        self.reactor = Readers()
        self.ran: list[str] = []

    def make(self) -> tuple[PreciseClock, PressedTimer]:
        made: list[PressedTimer] = []

        def make_timer(expired: Callable[[], object]) -> TimerFile:
            made.append(PressedTimer(expired))
            return cast(TimerFile, made[0])

        # A nanosecond passes at each look, so that waiting awake comes to an end.
        def now() -> float:
            self.reactor.rightNow += 1e-9
            return self.reactor.rightNow

        return PreciseClock(self.reactor, now, make_timer), made[0]

    def test_calls_run_in_order_when_they_are_due(self) -> None:
        """Those of one time in the order in which they were made, those that are not due later."""
        clock, timer = self.make()
        for name, delay_s in (("c", 0.001), ("a", 0.0005), ("b", 0.0005), ("later", 1.0)):
            clock.callLater(delay_s, self.ran.append, name)
        self.reactor.rightNow += 0.0011
        timer.expired()
        self.assertEqual(self.ran, ["a", "b", "c"])
        self.assertEqual(len(clock.getDelayedCalls()), 1)

    def test_the_timer_is_set_for_the_first_call(self) -> None:
        """A call after it needs nothing; one before it does."""
        clock, timer = self.make()
        for delay_s in (0.001, 0.0015, 0.0005):
            clock.callLater(delay_s, self.ran.append, "x")
        self.assertEqual([round(delay_s, 6) for delay_s in timer.delays], [0.001, 0.0005])

    def test_after_a_sleep_it_is_awake_in_time(self) -> None:
        """The timer goes off early, and the call still runs when it is due, not before."""
        clock, timer = self.make()
        due_s = self.reactor.rightNow + 0.1
        clock.callLater(0.1, lambda: self.ran.append("x"))
        self.assertAlmostEqual(timer.delays[0], 0.1 - AWAKE_S, 6)
        self.reactor.rightNow = due_s - 0.00001
        timer.expired()
        self.assertEqual(self.ran, ["x"])
        self.assertGreaterEqual(self.reactor.rightNow, due_s)

    def test_what_wakes_it_has_waited(self) -> None:
        """As long as timers have shown that waking takes; not while it is awake, or nothing is known."""
        clock, timer = self.make()
        self.reactor.rightNow += 1.0
        self.assertEqual(clock.behind_s(), 0.0)
        for late_s in (0.0001, 0.0002, 0.0003):
            due_s = self.reactor.rightNow + 0.1
            clock.callLater(0.1, self.ran.append, "x")
            self.reactor.rightNow = due_s - AWAKE_S + late_s
            timer.expired()
        self.assertEqual(clock.behind_s(), 0.0)
        self.reactor.rightNow += 1.0
        self.assertAlmostEqual(clock.behind_s(), 0.0002, 6)
        self.assertEqual(clock.behind_s(), 0.0)

    def test_cancelled_and_delayed_calls(self) -> None:
        """The one never runs, the other at its new time."""
        clock, timer = self.make()
        clock.callLater(0.001, self.ran.append, "cancelled").cancel()
        clock.callLater(0.001, self.ran.append, "delayed").delay(0.001)
        self.reactor.rightNow += 0.0015
        timer.expired()
        self.assertEqual(self.ran, [])
        self.reactor.rightNow += 0.001
        timer.expired()
        self.assertEqual(self.ran, ["delayed"])

    def test_many_cancelled_calls_are_forgotten(self) -> None:
        """They take no memory."""
        clock, _ = self.make()
        for _number in range(10_000):
            clock.callLater(1, self.ran.append, "x").cancel()
        self.assertLess(len(clock._heap), 1000)

    def test_without_such_timers_the_reactors_do(self) -> None:
        """To the millisecond, and a relay is told so."""

        def fail(_expired: object) -> TimerFile:
            raise OSError("none here")

        clock = PreciseClock(self.reactor, self.reactor.seconds, fail)
        self.assertEqual(clock.early_s, EARLY_S)
        clock.callLater(2.0, self.ran.append, "second")
        clock.callLater(1.0, self.ran.append, "first")
        self.reactor.advance(1.0)
        self.assertEqual(self.ran, ["first"])
        self.reactor.advance(1.0)
        self.assertEqual(self.ran, ["first", "second"])
        clock.callLater(1.0, self.ran.append, "never")
        clock.close()
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_closing_gives_the_timer_back(self) -> None:
        """To the reactor and to the system."""
        clock, timer = self.make()
        self.assertEqual(clock.early_s, PRECISE_EARLY_S)
        clock.close()
        self.assertEqual((self.reactor.readers, timer.closed), ([], True))


class TimerFileTests(TestCase):
    """The kernel's timer under the real reactor."""

    def test_calls_run_and_never_too_early(self) -> None:
        """However late a busy machine makes them."""
        clock = PreciseClock(reactor)
        self.addCleanup(clock.close)
        done: Deferred[None] = Deferred()
        ran: list[float] = []
        delays = (0.0, 0.0001, 0.003, 0.0005)
        started = clock.seconds()

        def note(delay_s: float) -> None:
            self.assertGreaterEqual(clock.seconds(), started + delay_s)
            ran.append(delay_s)
            if len(ran) == len(delays):
                done.callback(None)

        due_s = {each: clock.callLater(each, note, each).getTime() for each in delays}
        done.addCallback(lambda _: self.assertEqual(ran, sorted(delays, key=due_s.__getitem__)))
        return done  # type: ignore[return-value]
