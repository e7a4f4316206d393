"""
Timers that are exact to some ten microseconds, under any reactor of Linux.

Twisted waits with ``epoll``, whose time-outs are whole milliseconds, so a round trip of 0.12 ms cannot be
made with ``callLater``. The kernel's timers that are files (``timerfd``) go off when they should, and wake
the reactor as any file does. Python has them from 3.13 on; here the C library is called, which has had them
since 2008. Where there are none, the reactor's own timers do the work, to the millisecond.

**Waking up.** A process that has slept for some milliseconds runs 0.1 to 0.3 ms late: the processor wakes up,
and its caches are cold. So before a call that is further away than ``SLEEP_S`` the timer goes off ``AWAKE_S``
too early, and the rest is waited for awake. Calls that come thick, as those of a busy line do, cost no such
waiting.

What wakes it otherwise, bytes that have come, cannot be foreseen. But how late it is after sleeping shows
whenever a timer goes off, and ``behind_s`` tells it of whatever else has ended a sleep.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from twisted.internet.base import DelayedCall
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from zope.interface import implementer

from pipegrid.links.pending import PendingCalls
from pipegrid.links.relay import EARLY_S

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
        early_s: what a relay on this clock should take for "now" (``relay.SharedLink``).
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
