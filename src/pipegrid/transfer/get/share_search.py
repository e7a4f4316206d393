"""Search for shares, in batches of servers."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

# How many servers are asked at the same time, when it is not known which of them have the file.
#
# A few at first, since mostly they know; as long as nothing says that they do not, nobody else is asked. Then
# every answer, or failure, that did not end the search lets four others be asked. So waves grow by four: a
# thousand servers take five, of three round trips over new connections and of one over those that are up; and
# whoever finds what is needed among the first has asked no others, nor connected to them. What is on its way
# is bounded, and a silent server holds up nobody.
#
# Pure: told of questions and answers.

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


class QueryBatches(Generic[T]):
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


# Which server to ask for what, decided from what is known so far.
#
# Pure: a download tells it what servers answered, and asks it whom to ask next and where a share can be had.
# Servers are asked in the file's permuted order; how many at a time is ``waves``' decision.


class ShareSearch(Generic[T]):
    """
    The search for one file's shares.

    Args:
        ring: servers in the file's permuted order; no server twice.
    """

    def __init__(self, ring: Sequence[T]) -> None:
        self._waves = QueryBatches(ring)
        self._holders: dict[int, list[T]] = {}
        self._excluded: set[tuple[int, T]] = set()
        self._gone: set[T] = set()

    # Facts.

    def asked(self, server: T) -> None:
        """The server was asked which shares it has."""
        self._waves.asked(server)

    def answered(self, server: T, share_numbers: Iterable[int]) -> None:
        """The server has these shares."""
        self._waves.ended(server)
        for number in sorted(share_numbers):
            holders = self._holders.setdefault(number, [])
            if server not in holders:
                holders.append(server)

    def failed(self, server: T) -> None:
        """The server cannot be used."""
        self._waves.ended(server)
        self._gone.add(server)

    def exclude(self, share_number: int, server: T) -> None:
        """This copy of the share is bad, or not there."""
        self._excluded.add((share_number, server))

    # Decisions.

    @property
    def waiting(self) -> bool:
        """Whether some server has not answered yet."""
        return self._waves.waiting

    @property
    def exhausted(self) -> bool:
        """Whether every server was asked and has answered or failed."""
        return self._waves.exhausted

    @property
    def has_found_any(self) -> bool:
        """Whether some server has said that it has a share."""
        return bool(self._holders)

    def ask_next(self) -> list[T]:
        """Return servers to ask now; the caller says ``asked`` for each."""
        return self._waves.next()

    def holders(self, share_number: int) -> list[T]:
        """Return the usable servers that have the share, in the order of their answers."""
        return [
            server
            for server in self._holders.get(share_number, ())
            if server not in self._gone and (share_number, server) not in self._excluded
        ]

    def best(self, taken: Container[int], busy: Container[T]) -> tuple[int, T] | None:
        """
        Return the next copy to read: of a share not taken, if possible on a server that is not busy.

        Of several that are as good, the one with the lowest share number, in the order of answers.
        """
        copies = [
            (number, server)
            for number, servers in self.available().items()
            if number not in taken
            for server in servers
        ]
        return min(copies, key=lambda copy: copy[1] in busy, default=None)

    def available(self) -> dict[int, list[T]]:
        """Return every share that can be had, with its usable servers."""
        found = {number: self.holders(number) for number in sorted(self._holders)}
        return {number: servers for number, servers in found.items() if servers}
