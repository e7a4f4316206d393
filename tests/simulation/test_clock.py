"""The clocks of a simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from pipegrid.testing.clock import HeapClock, HostClock, cooperator

operations = st.lists(
    st.tuples(
        st.sampled_from(["call", "cancel", "reset", "delay", "advance"]),
        st.integers(0, 20),
        st.integers(0, 30),
    ),
    max_size=60,
)


def play(clock: Clock, script: list[tuple[str, int, int]]) -> list[tuple[int, float]]:
    """Carry out the operations; return which calls ran, and when."""
    ran: list[tuple[int, float]] = []
    calls: list[IDelayedCall] = []

    def recorder(number: int) -> Callable[[], None]:
        return lambda: ran.append((number, clock.seconds()))

    for what, which, amount in script:
        if what == "call":
            calls.append(clock.callLater(amount, recorder(len(calls))))
        elif what == "advance":
            # Unit steps, for Clock runs what was due on the way at the end of a longer one.
            clock.pump([0] + [1] * amount)
        elif calls and (call := calls[which % len(calls)]).active():
            if what == "cancel":
                call.cancel()
            elif what == "reset":
                call.reset(amount)
            else:
                call.delay(amount)
    clock.pump([0] + [1] * 100)
    return ran


class HeapClockTests(SynchronousTestCase):
    """A Clock, only faster."""

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(operations)
    def test_as_twisteds(self, script: list[tuple[str, int, int]]) -> None:
        """Whatever is scheduled, moved and cancelled: the same calls run at the same times."""
        self.assertEqual(sorted(play(HeapClock(), script)), sorted(play(Clock(), script)))

    def test_calls_run_at_their_time(self) -> None:
        """A long advance passes every moment on its way, in order, insertions included."""
        clock = HeapClock()
        ran: list[tuple[str, float]] = []

        def first() -> None:
            ran.append(("first", clock.seconds()))
            clock.callLater(1, lambda: ran.append(("inserted", clock.seconds())))

        clock.callLater(5, lambda: ran.append(("last", clock.seconds())))
        clock.callLater(1, first)
        clock.callLater(1, lambda: ran.append(("second", clock.seconds())))
        self.assertEqual([call.getTime() for call in clock.getDelayedCalls()], [1, 1, 5])
        clock.advance(10)
        self.assertEqual(ran, [("first", 1), ("second", 1), ("inserted", 2), ("last", 5)])
        self.assertEqual(clock.seconds(), 10)
        self.assertFalse(clock.step())

    def test_cancelled_calls_do_not_pile_up(self) -> None:
        """A time-out set and cancelled for each request costs no memory."""
        clock = HeapClock()
        kept = clock.callLater(60, lambda: None)
        for _ in range(10_000):
            clock.callLater(60, lambda: None).cancel()
        self.assertEqual(clock.getDelayedCalls(), [kept])
        self.assertLess(len(clock._heap), 200)


class HostClockTests(SynchronousTestCase):
    """The clock of one host."""

    def test_a_crash_takes_the_timers(self) -> None:
        """No timer of a crashed program goes off; others', and later ones, do."""
        clock = HeapClock()
        host, other = HostClock(clock), HostClock(clock)
        self.assertTrue(verifyObject(IReactorTime, host))
        ran: list[str] = []
        host.callLater(1, ran.append, "dead")
        other.callLater(1, ran.append, "alive")
        host.crash()
        host.callLater(2, ran.append, "reborn")
        clock.advance(3)
        self.assertEqual(ran, ["alive", "reborn"])
        self.assertEqual(host.getDelayedCalls(), [])

    def test_the_dead_tidy_up(self) -> None:
        """What a crashed program cancels when it is collected is cancelled already, and nobody complains."""
        clock = HeapClock()
        host = HostClock(clock)
        call = host.callLater(1, lambda: None)
        host.crash()
        call.cancel()
        self.assertFalse(call.active())
        self.assertEqual(clock.getDelayedCalls(), [])

    def test_cooperation_in_virtual_time(self) -> None:
        """Cooperative tasks take one step a turn, the same number on every machine."""
        clock = HeapClock()
        steps: list[int] = []

        def work() -> Iterator[None]:
            for number in range(3):
                steps.append(number)
                yield

        cooperator(clock).cooperate(work())
        clock.step()
        self.assertEqual(steps, [0])
        clock.advance(0)
        self.assertEqual(steps, [0, 1, 2])
