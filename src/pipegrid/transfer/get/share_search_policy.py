"""Search for shares by querying servers in batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

# How many servers are queried at the same time, when it is not known which of them have the file.
#
# A few servers are queried first, since these usually have the shares. No other server is queried until a
# response shows that the first servers lack shares. From then on, each response or failure that does not end
# the search permits four more queries, so that the batches grow. For a thousand servers five batches suffice;
# a batch takes three round trips over new connections, and one over open connections. A search that succeeds
# with the first servers does not contact any other. The number of pending queries is bounded, and a silent
# server does not delay the others.
#
# Pure: the caller reports queries and responses.

T = TypeVar("T", bound=Hashable)

FIRST_QUESTIONS = 20
"""Number of servers queried at the same time when the expected servers do not have the shares."""

ASKED_FOR_ONE = 4
"""Number of further queries that one query without effect permits."""

MORE_QUESTIONS = 140
"""
Minimum number of pending queries after as many servers as the file has shares were queried without finding
them all: in this case all servers must be queried before a share can be called missing.
"""

MAX_QUESTIONS = 512
"""Maximum number of pending queries: below the usual limit of 1024 open files; each query takes a few KiB."""


class QueryBatches(Generic[T]):
    """
    Decides which servers of one ring are queried, in growing batches.

    Args:
        ring: the servers in the order in which to query them; no server occurs twice.
        few: number of servers to query at first.
        more: minimum number of pending queries once a response was without effect.
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
        """Record that the server was queried, in its turn or earlier."""
        if self._unasked and self._unasked[0] == server:
            self._unasked.popleft()
        elif server in self._unasked:
            self._unasked.remove(server)
        self._asked.add(server)

    def ended(self, server: T, without_effect: bool = True) -> None:
        """
        Record that a server has responded or failed. ``without_effect``: the response did not help, so
        further servers must be queried.
        """
        if server in self._asked:
            self._asked.remove(server)
            self._ended += 1
            self._few_will_do = self._few_will_do and not without_effect

    def hurry(self) -> None:
        """
        Permit queries to further servers, because some server takes too long, although no response was
        without effect.
        """
        self._few_will_do = False

    @property
    def holding(self) -> bool:
        """
        Whether the caller should wait for the pending queries: some servers have responded, and no response
        was without effect.
        """
        return self._few_will_do and bool(self._ended and self._asked)

    @property
    def all_asked(self) -> bool:
        """Whether every server was queried."""
        return not self._unasked

    @property
    def exhausted(self) -> bool:
        """Whether every server was queried and has responded or failed."""
        return not self._asked and not self._unasked

    def next(self) -> list[T]:
        """Return the servers to query now; the caller calls ``asked`` for each."""
        if not self._unasked:
            return []
        if self._few_will_do and (self._asked or not self._ended):
            room = self._few - self._ended - len(self._asked)
        else:
            most = self._more + (ASKED_FOR_ONE - 1) * self._ended
            room = min(most, MAX_QUESTIONS) - len(self._asked)
        return [self._unasked[i] for i in range(min(max(0, room), len(self._unasked)))]


# Which server to ask for which share, decided from the responses so far.
#
# Pure: a download reports the servers' responses, and asks which servers to query next and where a share can
# be read. Servers are queried in the file's permuted order; ``QueryBatches`` decides how many at a time.


class ShareSearch(Generic[T]):
    """
    The search for one file's shares.

    Args:
        ring: servers in the file's permuted order; no server occurs twice.

    Attributes:
        batches: decides which servers are asked for their lists of shares.
    """

    def __init__(self, ring: Sequence[T]) -> None:
        self.batches = QueryBatches(ring)
        self._holders: dict[int, list[T]] = {}
        self._excluded: set[tuple[int, T]] = set()
        self._gone: set[T] = set()

    # Facts.

    def answered(self, server: T, share_numbers: Iterable[int]) -> None:
        """Record that the server has these shares."""
        self.batches.ended(server)
        for number in sorted(share_numbers):
            holders = self._holders.setdefault(number, [])
            if server not in holders:
                holders.append(server)

    def failed(self, server: T) -> None:
        """Record that the server cannot be used."""
        self.batches.ended(server)
        self._gone.add(server)

    def exclude(self, share_number: int, server: T) -> None:
        """Record that the server's copy of this share is bad or missing."""
        self._excluded.add((share_number, server))

    # Decisions.

    @property
    def has_found_any(self) -> bool:
        """Whether some server has listed a share."""
        return bool(self._holders)

    def holders(self, share_number: int) -> list[T]:
        """Return the usable servers that have the share, in the order of their responses."""
        return [
            server
            for server in self._holders.get(share_number, ())
            if server not in self._gone and (share_number, server) not in self._excluded
        ]

    def best(self, taken: Container[int], busy: Container[T]) -> tuple[int, T] | None:
        """
        Return the next copy to read: of a share that is not in ``taken``, if possible on a server that is not
        in ``busy``.

        Among equally good copies, return the one with the lowest share number, then the one that was reported
        first.
        """
        copies = [
            (number, server)
            for number, servers in self.available().items()
            if number not in taken
            for server in servers
        ]
        return min(copies, key=lambda copy: copy[1] in busy, default=None)

    def available(self) -> dict[int, list[T]]:
        """Return every share that can be read, with its usable servers."""
        found = {number: self.holders(number) for number in sorted(self._holders)}
        return {number: servers for number, servers in found.items() if servers}
