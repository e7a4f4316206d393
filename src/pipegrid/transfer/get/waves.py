"""
How many servers are asked at the same time, when it is not known which of them have the file.

A few at first, since mostly they know; as long as nothing says that they do not, nobody else is asked. Then
every answer, or failure, that did not end the search lets four others be asked. So waves grow by four: a
thousand servers take five, of three round trips over new connections and of one over those that are up; and
whoever finds what is needed among the first has asked no others, nor connected to them. What is on its way
is bounded, and a silent server holds up nobody.

Pure: told of questions and answers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

FIRST_QUESTIONS = 20
"""How many servers are asked together when those who should have known did not."""

ASKED_FOR_ONE = 4
"""So many servers are asked for one that was asked in vain."""

MORE_QUESTIONS = 140
"""
How many at least are asked where as many should have had shares as there are, and did not: then all have to
be asked before it may be said that something is missing.
"""

MAX_QUESTIONS = 512
"""How many at a time at most: below the usual limit of 1024 open files, and a few KiB each."""


class Waves(Generic[T]):
    """
    The questions to the servers of one ring.

    Args:
        ring: in the order in which they are to be asked; no server twice.
        few: how many are asked before one has answered in vain.
        more: how many at least when one has.
    """

    def __init__(
        self, ring: Sequence[T], few: int = FIRST_QUESTIONS, more: int = FIRST_QUESTIONS
    ) -> None:
        self._unasked = deque(ring)
        self._asked: set[T] = set()
        self._few = few
        self._more = max(few, more)
        self._ended = 0
        self._few_will_do = True

    def asked(self, server: T) -> None:
        """The server was asked; in its turn or before."""
        if self._unasked and self._unasked[0] == server:
            self._unasked.popleft()
        elif server in self._unasked:
            self._unasked.remove(server)
        self._asked.add(server)

    def ended(self, server: T, in_vain: bool = True) -> None:
        """It has answered, or failed; ``in_vain``: so that others have to be asked."""
        if server in self._asked:
            self._asked.remove(server)
            self._ended += 1
            self._few_will_do = self._few_will_do and not in_vain

    def hurry(self) -> None:
        """Ask others although nobody has answered in vain: somebody takes too long."""
        self._few_will_do = False

    @property
    def holding(self) -> bool:
        """Whether some have answered, none of them in vain, and others are to be waited for."""
        return self._few_will_do and bool(self._ended and self._asked)

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
        if self._few_will_do and (self._asked or not self._ended):
            room = self._few - self._ended - len(self._asked)
        else:
            most = self._more + (ASKED_FOR_ONE - 1) * self._ended
            room = min(most, MAX_QUESTIONS) - len(self._asked)
        return [self._unasked[i] for i in range(min(max(0, room), len(self._unasked)))]
