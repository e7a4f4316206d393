"""Virtual clocks; precise real timers."""

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

from pipegrid.testing.link_model import to_ns, to_seconds
from pipegrid.testing.link_relay import EARLY_S

# Calls that are due some time, the next one first: what a clock of one's own keeps.

_FEW = 64


class PendingCalls:
    """A heap of calls; what an operation costs grows with the logarithm of how many are pending."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, DelayedCall]] = []
        self._numbers = count()
        self._cancelled = 0

    def _push(self, call: DelayedCall) -> None:
        # A call that was moved to an earlier time is here twice; the later entry finds it called.
        heapq.heappush(self._heap, (call.getTime(), next(self._numbers), call))

    def _forget(self, _call: DelayedCall) -> None:
        # Runs while the call still counts as active, so the pruning it asks for is for later ones.
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
                # Twisted tells nobody when a call is put off.
                heapq.heapreplace(heap, (call.getTime(), next(self._numbers), call))
            else:
                return call
        return None


# Clocks for virtual time: a fast ``Clock``, and the view of it that one host has.
#
# Twisted's own ``Clock`` sorts all pending calls at every insertion and after every call it runs, which
# makes a simulation with n timers cost n for each event (a thousand idle connections have a thousand
# time-outs pending). It also jumps to the end of an ``advance`` before it runs what was due on the way.
# ``HeapClock`` does neither.


class HeapClock(PendingCalls, Clock):
    """
    A ``Clock`` whose cost per call grows with the logarithm of the calls that are pending.

    Calls run at their own time, as ``seconds()`` has it, and in order of insertion among equals.
    """

    def callLater(
        self, delay: float, callable: Callable[..., object], *args: object, **kw: object
    ) -> IDelayedCall:
        """Schedule a call, as ``IReactorTime`` has it."""
        assert delay >= 0, f"{delay} is not a time from now"
        call = DelayedCall(
            self.rightNow + delay, callable, args, kw, self._forget, self._push, self.seconds
        )
        self._push(call)
        return call

    @property
    def calls(self) -> list[DelayedCall]:  # type: ignore[override]
        """All pending calls, the next one first."""
        pending = {id(entry[2]): entry for entry in self._heap if entry[2].active()}
        ordered = sorted((call.getTime(), number, call) for _, number, call in pending.values())
        return [call for _, _, call in ordered]

    def getDelayedCalls(self) -> Sequence[IDelayedCall]:
        """All pending calls, the next one first."""
        return self.calls

    def next_time(self) -> float | None:
        """The time of the next call, or None if nothing is pending."""
        return None if self._next() is None else self._heap[0][0]

    def step(self) -> bool:
        """Go to the next call and run it; False if nothing is pending."""
        time_s = self.next_time()
        if time_s is None:
            return False
        call = heapq.heappop(self._heap)[2]
        self.rightNow = max(self.rightNow, time_s)
        call.called = 1
        call.func(*call.args, **call.kw)
        return True

    def advance(self, amount: float) -> None:
        """Let ``amount`` seconds pass, running every call at its time."""
        end_s = self.rightNow + amount
        while (time_s := self.next_time()) is not None and time_s <= end_s:
            self.step()
        self.rightNow = max(self.rightNow, end_s)


@implementer(IReactorTime)
class HostClock:
    """
    The clock as one host sees it: a crash takes all its timers.

    Whatever runs on a simulated host gets this as its reactor, so that no timer of a program that has
    crashed ever goes off.
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
        """Schedule a call that a crash of this host forgets."""
        call = self._clock.callLater(delay, callable, *args, **kw)
        self._calls.append(call)
        if len(self._calls) > self._prune_at:
            self._calls = [call for call in self._calls if call.active()]
            self._prune_at = max(_FEW, 2 * len(self._calls))
        return call

    def getDelayedCalls(self) -> Sequence[IDelayedCall]:
        """The pending calls of this host."""
        return [call for call in self._calls if call.active()]

    def crash(self) -> None:
        """
        Forget every pending call.

        Objects of the program that has crashed are still there, and when Python collects them some tidy up:
        they may cancel what they scheduled, as they would have done alive, and find nothing strange.
        """
        for call in self.getDelayedCalls():
            call.cancel()
            call.cancel = _nothing  # type: ignore[method-assign]
        self._calls = []


def _nothing() -> None:
    """A timer of the dead is cancelled already."""


def cooperator(clock: IReactorTime) -> Cooperator:
    """
    Return a Cooperator that takes one step per turn of ``clock``, and none of real time.

    Twisted's global one runs on the real reactor, for as many steps as fit in 10 real ms. Twisted Web
    gives it every pull producer and, unless told otherwise, every ``FileBodyProducer``. In a test:
    ``self.patch(twisted.internet.task, "_theCooperator", cooperator(clock))``.
    """
    return Cooperator(
        terminationPredicateFactory=lambda: lambda: True,
        scheduler=lambda call: clock.callLater(0, call),
    )


# What is due, and when, in whole nanoseconds.
#
# A ``Clock`` counts in floats, and two sums that mean the same instant can differ in the last bit, which
# would put an end before the data it follows. So the network keeps its own queue, ordered by nanoseconds
# and then by cause, and has one timer of the clock, for whatever comes first.


class Agenda:
    """Calls to make, on a clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        # (time, order, call, arguments), and the timer for the first of them.
        self._agenda: list[tuple[int, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = count()
        self._timer: IDelayedCall | None = None
        self._timer_ns = 0
        self._in_turn = False

    def now_ns(self) -> int:
        """The time in whole nanoseconds."""
        return to_ns(self.clock.seconds())

    def later(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        """Make a call of the network's own after some time."""
        self.at(self.now_ns() + to_ns(delay_s), call, *args)

    def soon(self, call: Callable[[], None]) -> None:
        """Make a call in the next turn."""
        self.at(self.now_ns(), call)

    def at(self, time_ns: int, call: Callable[..., object], *args: Any) -> None:
        """Make a call at a time; at the same time, in the order in which they were asked for."""
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
        # One turn is what was due when it began: whoever makes more work at this instant waits
        # for the next, so that zero-delay timers of programs get theirs in between.
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
        """Whether a pending call of the clock is this agenda's timer."""
        return call is self._timer


# Timers that are exact to some ten microseconds, under any reactor of Linux.
#
# Twisted waits with ``epoll``, whose time-outs are whole milliseconds, so a round trip of 0.12 ms cannot be
# made with ``callLater``. The kernel's timers that are files (``timerfd``) go off when they should, and wake
# the reactor as any file does. Python has them from 3.13 on; here the C library is called, which has had them
# since 2008. Where there are none, the reactor's own timers do the work, to the millisecond.
#
# **Waking up.** A process that has slept for some milliseconds runs 0.1 to 0.3 ms late: the processor
# wakes up, and its caches are cold. So before a call that is further away than ``SLEEP_S`` the timer goes
# off ``AWAKE_S`` too early, and the rest is waited for awake. Calls that come thick, as those of a busy
# line do, cost no such waiting.
#
# What wakes it otherwise, bytes that have come, cannot be foreseen. But how late it is after sleeping shows
# whenever a timer goes off, and ``behind_s`` tells it of whatever else has ended a sleep.

PRECISE_EARLY_S = 0.00006
"""
About what it takes to get bytes from one socket to another, without any link; twice that for a round trip.

So a relay that counts this as part of the way makes round trips of 0.12 ms and more as they should be.
"""

SLEEP_S = 0.002
AWAKE_S = 0.0003

_NANOSECONDS = 1_000_000_000
_WAKES = 9


class _TimerSpec(ctypes.Structure):
    """``struct itimerspec``: an interval, here always zero, and when to go off first."""

    _fields_ = [
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("first_s", ctypes.c_long),
        ("first_ns", ctypes.c_long),
    ]


class TimerFile:
    """
    One timer of the kernel, as a file that the reactor reads.

    Args:
        expired: called when it goes off.

    Raises:
        OSError: this system has none.
    """

    def __init__(self, expired: Callable[[], object]) -> None:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            self._set = libc.timerfd_settime
            create = libc.timerfd_create
        except (AttributeError, TypeError) as error:
            raise OSError(f"this system has no timerfd ({error})") from None
        flags = os.O_NONBLOCK | os.O_CLOEXEC  # which TFD_NONBLOCK and TFD_CLOEXEC are
        self._file: int = create(time.CLOCK_MONOTONIC, flags)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "cannot make a timer")
        self._expired = expired

    def set(self, delay_s: float) -> None:
        """Go off once, after so many seconds."""
        # Zero would switch it off.
        seconds, rest = divmod(max(1, round(delay_s * _NANOSECONDS)), _NANOSECONDS)
        self._set(self._file, 0, ctypes.byref(_TimerSpec(0, 0, seconds, rest)), None)

    def fileno(self) -> int:
        """Return the file, for the reactor."""
        return self._file

    def logPrefix(self) -> str:
        """Return a name, for the reactor."""
        return "timer"

    def doRead(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:  # it was set anew in this turn of the reactor
            return
        self._expired()

    def connectionLost(self, _reason: object) -> None:
        """The reactor lets go of it."""
        self.close()

    def close(self) -> None:
        """Give the file back to the kernel; a second call does nothing."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


@implementer(IReactorTime)
class PreciseClock(PendingCalls):
    """
    The reactor's clock, more exactly, and never put back.

    Args:
        now: seconds since some moment.
        make_timer: given what to call.

    Attributes:
        early_s: what a relay on this clock should take for "now" (``link_relay.SharedLink``).
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
        self._fallback: IDelayedCall | None = None
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
        Return for how long whatever has just happened has probably waited for this process to wake up.

        Zero if it was awake anyway, or nothing is known.
        """
        now_s = self._now()
        slept, self._last_s = now_s - self._last_s > SLEEP_S, now_s
        if not slept or not self._wakes:
            return 0.0
        return sorted(self._wakes)[len(self._wakes) // 2]

    def callLater(
        self, delay: float, callable: Callable[..., object], *args: object, **kw: object
    ) -> IDelayedCall:
        """Schedule a call, as ``IReactorTime`` has it."""
        at_s = self.seconds() + delay
        call = DelayedCall(at_s, callable, args, kw, self._forget, self._push, self.seconds)
        self._push(call)
        return call

    def getDelayedCalls(self) -> Sequence[IDelayedCall]:
        return [entry[2] for entry in sorted(self._heap) if entry[2].active()]

    def close(self) -> None:
        """Forget all calls, and give the timer back."""
        self._heap.clear()
        if self._fallback is not None and self._fallback.active():
            self._fallback.cancel()
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
        now_s = self.seconds()  # what they schedule for now comes after what the reactor has to do
        while (call := self._next()) is not None and call.getTime() <= now_s:
            heapq.heappop(self._heap)
            call.called = 1
            call.func(*call.args, **call.kw)
        self._last_s = self._now()
        self._arm()

    def _wait_awake(self) -> None:
        call = self._next()
        if call is None:
            return
        due_s = call.getTime()
        if due_s <= self.seconds() + AWAKE_S:
            while self.seconds() < due_s:
                pass

    def _arm(self) -> None:
        """Have the timer go off in time for the first call."""
        call = self._next()
        if call is None:
            return
        at_s = call.getTime()
        if self._armed_for is not None and self._armed_for <= at_s:
            return  # it goes off too early at worst, and is set anew then
        self._armed_for = at_s
        delay_s = max(0.0, at_s - self.seconds())
        if self._timer is not None:
            self._slept = delay_s > SLEEP_S
            self._timer.set(delay_s - AWAKE_S if self._slept else delay_s)
            return
        if self._fallback is not None and self._fallback.active():
            self._fallback.cancel()
        self._fallback = self._reactor.callLater(delay_s, self._run_due)
