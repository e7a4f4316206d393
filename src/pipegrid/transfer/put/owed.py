"""
The answers that a server owes for one share, and how long they take.
"""

from __future__ import annotations

from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

T = TypeVar("T")


class OwedAnswers:
    """
    The calls of one share that have not ended.

    Attributes:
        answers: how many have ended.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._calls: dict[Deferred[Any], float] = {}  # with the time of each, the oldest first
        self._answers_s = 0.0
        self.answers = 0

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def pace_s(self) -> float:
        """How long an answer takes: on average, or the oldest that is owed if that is longer."""
        average_s = self._answers_s / self.answers if self.answers else 0.0
        oldest = next(iter(self._calls.values()), None)
        return average_s if oldest is None else max(average_s, self._clock.seconds() - oldest)

    def asked(self, call: Deferred[T], sent_s: float | None = None) -> None:
        """Know a call, which was sent at that time, or now, until it ends."""
        self._calls[call] = self._clock.seconds() if sent_s is None else sent_s
        call.addBoth(self._answered, call)

    def cancel(self) -> None:
        """Give up all that are owed."""
        for call in list(self._calls):
            call.cancel()

    def _answered(self, result: T, call: Deferred[T]) -> T:
        self.answers += 1
        self._answers_s += self._clock.seconds() - self._calls.pop(call)
        return result
