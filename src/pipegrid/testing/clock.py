"""Clocks: fast virtual time for simulations, and precise timers for real links."""

from __future__ import annotations

import ctypes
import heapq
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from twisted.internet.base import DelayedCall
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import Clock, Cooperator
from zope.interface import implementer

from pipegrid.reactor.deferreds import Timer
from pipegrid.testing.link_model import NANOSECONDS, to_ns, to_seconds
from pipegrid.testing.link_relay import EARLY_S

_FEW = 64


class PendingCalls:
    """A heap of pending calls; an operation takes time proportional to the logarithm of their number."""

    seconds: Callable[[], float]

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, DelayedCall]] = []
        self._numbers = count()
        self._cancelled = 0

    def callLater(
        self, delay: float, callable: Callable[..., object], *args: object, **kw: object
    ) -> IDelayedCall:
        """Schedule a call, as in ``IReactorTime``."""
        assert delay >= 0, f"{delay} is not a delay"
        at_s = self.seconds() + delay
        call = DelayedCall(at_s, callable, args, kw, self._forget, self._push, self.seconds)
        self._push(call)
        return call

    def _push(self, call: DelayedCall) -> None:
        # A call that is moved to an earlier time gets a second entry; when the later entry is reached, the
        # call has already run.
        heapq.heappush(self._heap, (call.getTime(), next(self._numbers), call))

    def _forget(self, _call: DelayedCall) -> None:
        # This runs while the cancelled call still counts as active, so its entry is removed at a later
        # cancellation.
        self._cancelled += 1
        if self._cancelled > _FEW and self._cancelled * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].active()]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def _next(self) -> DelayedCall | None:
        """Return the next call, which is the first in the heap; None if nothing is pending."""
        heap = self._heap
        while heap:
            time_s, _, call = heap[0]
            if not call.active():
                heapq.heappop(heap)
            elif call.getTime() > time_s:
                # Twisted gives no notification when a call is delayed, so its entry may show an earlier time.
                heapq.heapreplace(heap, (call.getTime(), next(self._numbers), call))
            else:
                return call
        return None


# Twisted's own ``Clock`` sorts all pending calls at every insertion and after every call, so each event takes
# time proportional to the number of timers (a thousand idle connections have a thousand pending timeouts).
# Its ``advance`` also first jumps to the end of the period, and only then runs the calls that are due within
# it. ``HeapClock`` does neither.


class HeapClock(PendingCalls, Clock):
    """
    A ``Clock`` on which a call takes time proportional to the logarithm of the number of pending calls.

    Calls run when ``seconds()`` shows their time; calls at the same time run in order of insertion.
    """

    @property
    def calls(self) -> list[DelayedCall]:  # type: ignore[override]
        """All pending calls, the next one first."""
        pending = {id(entry[2]): entry for entry in self._heap if entry[2].active()}
        ordered = sorted((call.getTime(), number, call) for _, number, call in pending.values())
        return [call for _, _, call in ordered]

    def getDelayedCalls(self) -> Sequence[IDelayedCall]:
        """Return all pending calls, the next one first."""
        return self.calls

    def next_time(self) -> float | None:
        """Return the time of the next call; None if nothing is pending."""
        return None if self._next() is None else self._heap[0][0]

    def step(self) -> bool:
        """Advance to the next call and run it; return False if nothing is pending."""
        time_s = self.next_time()
        if time_s is None:
            return False
        call = heapq.heappop(self._heap)[2]
        self.rightNow = max(self.rightNow, time_s)
        call.called = 1
        call.func(*call.args, **call.kw)
        return True

    def advance(self, amount: float) -> None:
        """Let ``amount`` seconds pass, and run every due call at its time."""
        end_s = self.rightNow + amount
        while (time_s := self.next_time()) is not None and time_s <= end_s:
            self.step()
        self.rightNow = max(self.rightNow, end_s)


@implementer(IReactorTime)
class HostClock:
    """
    The clock of one host: a crash drops all its timers.

    Programs on a simulated host get this clock as their reactor, so that no timer of a crashed program ever
    fires.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._calls: list[IDelayedCall] = []
        self._prune_at = _FEW

    def seconds(self) -> float:
        return self._clock.seconds()

    def callLater(
        self, delay: float, callable: Callable[..., object], *args: object, **kw: object
    ) -> IDelayedCall:
        """Schedule a call that a crash of this host drops."""
        call = self._clock.callLater(delay, callable, *args, **kw)
        self._calls.append(call)
        if len(self._calls) > self._prune_at:
            self._calls = [call for call in self._calls if call.active()]
            self._prune_at = max(_FEW, 2 * len(self._calls))
        return call

    def getDelayedCalls(self) -> Sequence[IDelayedCall]:
        """Return the pending calls of this host."""
        return [call for call in self._calls if call.active()]

    def crash(self) -> None:
        """
        Drop every pending call.

        When Python collects the objects of the crashed program, some of them cancel their timers, which
        must succeed.
        """
        for call in self.getDelayedCalls():
            call.cancel()
            call.cancel = _nothing  # type: ignore[method-assign]
        self._calls = []


def _nothing() -> None:
    """Do nothing when a dropped call is cancelled."""


def cooperator(clock: IReactorTime) -> Cooperator:
    """
    Return a Cooperator that takes one step per turn of ``clock``, and no real time.

    Twisted's global Cooperator runs on the real reactor, for as many steps as fit in 10 ms of real time.
    Twisted Web gives it every pull producer and, by default, every ``FileBodyProducer``. In a test:
    ``self.patch(twisted.internet.task, "_theCooperator", cooperator(clock))``.
    """
    return Cooperator(
        terminationPredicateFactory=lambda: lambda: True,
        scheduler=lambda call: clock.callLater(0, call),
    )


# A ``Clock`` counts in floats. Two sums for the same instant can differ in the last bit, which might put the
# end of a stream before its data. So the network has its own queue, ordered by nanoseconds and then by
# insertion, and one timer of the clock for the first entry.


class Agenda:
    """A queue of calls in whole nanoseconds, on a clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        # The entries are (time, order, call, arguments); the timer is for the first entry.
        self._agenda: list[tuple[int, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = count()
        self._timer: IDelayedCall | None = None
        self._timer_ns = 0
        self._in_turn = False

    def now_ns(self) -> int:
        """The time in whole nanoseconds."""
        return to_ns(self.clock.seconds())

    def later(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        """Schedule a call of the network after a delay."""
        self.at(self.now_ns() + to_ns(delay_s), call, *args)

    def soon(self, call: Callable[[], None]) -> None:
        """Make a call in the next turn of the clock."""
        self.at(self.now_ns(), call)

    def at(self, time_ns: int, call: Callable[..., object], *args: Any) -> None:
        """Schedule a call at a time; calls at the same time run in order of insertion."""
        heapq.heappush(self._agenda, (time_ns, next(self._order), call, args))
        if not self._in_turn and (self._timer is None or time_ns < self._timer_ns):
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._agenda:
            self._timer_ns = self._agenda[0][0]
            delay_s = max(0.0, to_seconds(self._timer_ns) - self.clock.seconds())
            self._timer = self.clock.callLater(delay_s, self._turn)

    def _turn(self) -> None:
        # One turn runs the calls that were due when the turn began. Calls scheduled during it for the same
        # time wait for the next turn, so that zero-delay timers of programs run in between.
        self._timer = None
        now_ns = self.now_ns()
        end = next(self._order)
        agenda = self._agenda
        self._in_turn = True
        try:
            while agenda and agenda[0][0] <= now_ns and agenda[0][1] < end:
                _, _, call, args = heapq.heappop(agenda)
                call(*args)
        finally:
            self._in_turn = False
            self._set_timer()

    def owns(self, call: IDelayedCall) -> bool:
        """Return whether a pending call of the clock is this queue's timer."""
        return call is self._timer


# Twisted waits with ``epoll``, whose timeouts are whole milliseconds, so ``callLater`` cannot make a round
# trip of 0.12 ms. Linux's ``timerfd`` is exact to some ten microseconds, and wakes the reactor as any file
# does. Python supports it from 3.13 on; this module calls the C library, which has supported it since 2008.
# Without ``timerfd``, the reactor's own timers are used, exact to the millisecond.
#
# A process that has slept for some milliseconds wakes up 0.1 to 0.3 ms late, since the CPU wakes up slowly
# and its caches are cold. So for a call that is further away than ``SLEEP_S`` the timer fires ``AWAKE_S`` too
# early, and a busy loop takes the remaining time. Frequent calls, as on a busy link, need no busy loop.
# Wake-ups by arriving bytes cannot be predicted, but the usual lateness after a sleep is measured whenever a
# timer fires; ``behind_s`` returns this lateness for other wake-ups.

PRECISE_EARLY_S = 0.00006
"""
About the time to pass bytes from one socket to another without any link; a round trip takes twice as long.

A relay that counts this time as part of the latency makes round trips of 0.12 ms and more exact.
"""

SLEEP_S = 0.002
AWAKE_S = 0.0003

_WAKES = 9


class _TimerSpec(ctypes.Structure):
    """``struct itimerspec``: an interval, always zero here, and the time until the timer fires."""

    _fields_ = [
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("first_s", ctypes.c_long),
        ("first_ns", ctypes.c_long),
    ]


class TimerFile:
    """
    A timer of the kernel, as a file that the reactor reads.

    Args:
        expired: called when the timer fires.

    Raises:
        OSError: this system has no ``timerfd``.
    """

    def __init__(self, expired: Callable[[], object]) -> None:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            self._set = libc.timerfd_settime
            create = libc.timerfd_create
        except (AttributeError, TypeError) as error:
            raise OSError(f"this system has no timerfd ({error})") from None
        flags = os.O_NONBLOCK | os.O_CLOEXEC  # the values of TFD_NONBLOCK and TFD_CLOEXEC
        self._file: int = create(time.CLOCK_MONOTONIC, flags)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "cannot make a timer")
        self._expired = expired

    def set(self, delay_s: float) -> None:
        """Make the timer fire once, after a number of seconds."""
        # A time of zero would disable the timer.
        seconds, rest = divmod(max(1, to_ns(delay_s)), NANOSECONDS)
        self._set(self._file, 0, ctypes.byref(_TimerSpec(0, 0, seconds, rest)), None)

    def fileno(self) -> int:
        """Return the file descriptor, for the reactor."""
        return self._file

    def logPrefix(self) -> str:
        """Return a name, for the reactor."""
        return "timer"

    def doRead(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:  # the timer was set again in this turn of the reactor
            return
        self._expired()

    def connectionLost(self, _reason: object) -> None:
        """Close the file, since the reactor has removed it."""
        self.close()

    def close(self) -> None:
        """Close the file; a second call has no effect."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


@implementer(IReactorTime)
class PreciseClock(PendingCalls):
    """
    The reactor's clock, but more exact, and never set back.

    Args:
        now: returns seconds of a monotonic clock.
        make_timer: makes a timer, given its callback.

    Attributes:
        early_s: the ``early_s`` for a relay on this clock (``link_relay.SharedLink``).
    """

    def __init__(
        self,
        reactor: Any,
        now: Callable[[], float] = time.monotonic,
        make_timer: Callable[[Callable[[], object]], TimerFile] = TimerFile,
    ) -> None:
        self._reactor = reactor
        self._now = now
        super().__init__()
        self._armed_for: float | None = None
        self._slept = False
        self._wakes: deque[float] = deque(maxlen=_WAKES)
        self._last_s = now()
        self._fallback = Timer(reactor, self._run_due)
        self._timer: TimerFile | None = None
        self.early_s = EARLY_S
        try:
            self._timer = make_timer(self._run_due)
        except OSError:
            return
        self.early_s = PRECISE_EARLY_S
        reactor.addReader(self._timer)

    def seconds(self) -> float:
        return self._now()

    def behind_s(self) -> float:
        """
        Return how many seconds the current event has probably waited for this process to wake up.

        Zero if the process was awake, or if the time is unknown.
        """
        now_s = self._now()
        slept, self._last_s = now_s - self._last_s > SLEEP_S, now_s
        if not slept or not self._wakes:
            return 0.0
        return sorted(self._wakes)[len(self._wakes) // 2]

    def getDelayedCalls(self) -> Sequence[IDelayedCall]:
        return [entry[2] for entry in sorted(self._heap) if entry[2].active()]

    def close(self) -> None:
        """Drop all calls, and close the timer."""
        self._heap.clear()
        self._fallback.stop()
        if self._timer is not None:
            self._reactor.removeReader(self._timer)
            self._timer.close()
            self._timer = None

    def _push(self, call: DelayedCall) -> None:
        super()._push(call)
        self._arm()

    def _run_due(self) -> None:
        if self._slept and self._armed_for is not None:
            late_s = self._now() - (self._armed_for - AWAKE_S)
            self._wakes.append(min(max(late_s, 0.0), AWAKE_S))
        self._armed_for = None
        if self._slept:
            self._slept = False
            self._wait_awake()
        # Calls that are scheduled for now while this loop runs wait until the reactor has handled its other
        # events.
        now_s = self.seconds()
        while (call := self._next()) is not None and call.getTime() <= now_s:
            heapq.heappop(self._heap)
            call.called = 1
            call.func(*call.args, **call.kw)
        self._last_s = self._now()
        self._arm()

    def _wait_awake(self) -> None:
        call = self._next()
        if call is not None and call.getTime() <= self.seconds() + AWAKE_S:
            while self.seconds() < call.getTime():
                pass

    def _arm(self) -> None:
        """Set the timer for the first call."""
        call = self._next()
        if call is None:
            return
        at_s = call.getTime()
        if self._armed_for is not None and self._armed_for <= at_s:
            return  # at worst the timer fires too early, and is set again
        self._armed_for = at_s
        delay_s = max(0.0, at_s - self.seconds())
        if self._timer is not None:
            self._slept = delay_s > SLEEP_S
            self._timer.set(delay_s - AWAKE_S if self._slept else delay_s)
            return
        self._fallback.stop()
        self._fallback.set(delay_s)
