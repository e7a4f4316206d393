"""
What is due, and when, in whole nanoseconds.

A ``Clock`` counts in floats, and two sums that mean the same instant can differ in the last bit, which
would put an end before the data it follows. So the network keeps its own queue, ordered by nanoseconds
and then by cause, and has one timer of the clock, for whatever comes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import Clock

from pipegrid.links.link import to_ns, to_seconds


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
