"""
Who has to wait: connections that have kept the server busy take turns, and rest while others are at work.

How long the server works for a connection is measured (``server.turns.Spending``). Up to a burst, and a
share of all time for good, it has its turn as soon as something comes. Beyond, it waits in line with its
like: one of them has a turn at a time, and behind each all of them rest ``REST`` times as long as the turn
took; but only while anybody else asks for something. So floods, however many, get a fifth of the server at
most, and bulk work loses nothing while it is alone, or among its like.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from twisted.internet.interfaces import IReactorTime

REST = 4.0
ACTIVE_S = 0.25
"""For so long after somebody has asked for something they may ask for more."""


class Governor:
    """
    The line, of all connections that have to wait.

    Args:
        clock: for rests.
        others: how much was asked for by other ways so far; any number that grows with it.
    """

    def __init__(self, clock: IReactorTime, others: Callable[[], int]) -> None:
        self._clock = clock
        self._others = others
        self._seen = others()
        self._active_s = float("-inf")
        self._line: deque[Callable[[], None]] = deque()
        self._waiting = False
        self._spent_s = 0.0
        self._rests_until_s = 0.0

    def __repr__(self) -> str:
        return f"<Governor, {len(self._line)} in line>"

    @property
    def now_s(self) -> float:
        """The time that spending is told in."""
        return self._clock.seconds()

    @property
    def others_ask(self) -> bool:
        """Whether anybody has asked for something lately who need not wait."""
        self._look_for_others()
        return self.now_s - self._active_s < ACTIVE_S

    def light_work(self) -> None:
        """Somebody who need not wait has asked for something."""
        self._active_s = self.now_s

    def heavy_work(self, work_s: float) -> None:
        """The server has worked for one of those who wait, in its turn or for a call that it brought."""
        self._spent_s += work_s

    def enter(self, turn: Callable[[], None]) -> None:
        """Have a turn in line."""
        self._line.append(turn)
        self._wait()

    def _wait(self) -> None:
        if not self._waiting:
            self._waiting = True
            rest_s = max(0.0, self._rests_until_s - self._clock.seconds())
            self._clock.callLater(rest_s, self._next)

    def _look_for_others(self) -> None:
        others = self._others()
        if others != self._seen:
            self._seen, self._active_s = others, self._clock.seconds()

    def _next(self) -> None:
        self._waiting = False
        if not self._line:
            return
        now_s = self._clock.seconds()
        owed_s, self._spent_s = self._spent_s, 0.0
        if self.others_ask and owed_s:
            # Behind what the last turn brought, its calls included.
            self._rests_until_s = now_s + owed_s * REST
            self._wait()
            return
        self._line.popleft()()
        if self._line:
            self._wait()
