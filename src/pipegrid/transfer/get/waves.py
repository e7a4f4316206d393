"""
How many servers are asked at the same time, when it is not known which of them have the file.

A few at first, since mostly they know; every answer, or failure, that did not end the search lets two
others be asked. So waves double: a thousand servers take seven round trips, and whoever finds
what is needed among the first has asked no others, nor connected to them. What is on its way is bounded,
and a silent server holds up nobody.

Pure: told of questions and answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

FIRST_QUESTIONS = 20
"""How many servers are asked together when those who should have known did not."""

MAX_QUESTIONS = 512
"""How many at a time at most: below the usual limit of 1024 open files, and a few KiB each."""


class Waves(Generic[T]):
    """
    The questions to the servers of one ring.

    Args:
        ring: in the order in which they are to be asked; no server twice.
        few: how many are asked before any has answered.
        more: how many at least when some have.
    """

    def __init__(
        self, ring: Sequence[T], few: int = FIRST_QUESTIONS, more: int = FIRST_QUESTIONS
    ) -> None:
        self._unasked = deque(ring)
        self._asked: set[T] = set()
        self._few = few
        self._more = max(few, more)
        self._ended = 0

    def asked(self, server: T) -> None:
        """The server was asked; in its turn or before."""
        if self._unasked and self._unasked[0] == server:
            self._unasked.popleft()
        elif server in self._unasked:
            self._unasked.remove(server)
        self._asked.add(server)

    def ended(self, server: T) -> None:
        """It has answered, or failed."""
        if server in self._asked:
            self._asked.remove(server)
            self._ended += 1

    @property
    def waiting(self) -> bool:
        """Whether some server has not answered yet."""
        return bool(self._asked)

    @property
    def exhausted(self) -> bool:
        """Whether every server was asked and has answered or failed."""
        return not self._asked and not self._unasked

    def next(self) -> list[T]:
        """Return servers to ask now; the caller says ``asked`` for each."""
        most = self._few
        if self._ended:
            most = min(self._more + self._ended, MAX_QUESTIONS)
        room = most - len(self._asked)
        return [self._unasked[i] for i in range(min(max(0, room), len(self._unasked)))]
