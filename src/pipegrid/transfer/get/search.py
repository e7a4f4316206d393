"""
Which server to ask for what, decided from what is known so far.

Pure: a download or check tells it what servers answered, and asks it whom to ask next and where a
share can be had. Servers are asked in the file's permuted order, a bounded number at a time.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

MAX_QUESTIONS = 10
"""How many servers are asked at the same time; the ring may have a thousand."""


class ShareSearch(Generic[T]):
    """
    The search for one file's shares.

    Args:
        ring: servers in the file's permuted order; no server twice.
    """

    def __init__(self, ring: Sequence[T]) -> None:
        self._unasked = list(reversed(ring))
        self._asked: set[T] = set()
        self._holders: dict[int, list[T]] = {}
        self._excluded: set[tuple[int, T]] = set()
        self._gone: set[T] = set()

    # Facts.

    def asked(self, server: T) -> None:
        """The server was asked which shares it has."""
        if server in self._unasked:
            self._unasked.remove(server)
        self._asked.add(server)

    def answered(self, server: T, share_numbers: Iterable[int]) -> None:
        """The server has these shares."""
        self._asked.discard(server)
        for number in sorted(share_numbers):
            holders = self._holders.setdefault(number, [])
            if server not in holders:
                holders.append(server)

    def failed(self, server: T) -> None:
        """The server cannot be used."""
        self._asked.discard(server)
        self._gone.add(server)

    def exclude(self, share_number: int, server: T) -> None:
        """This copy of the share is bad, or not there."""
        self._excluded.add((share_number, server))

    # Decisions.

    @property
    def waiting(self) -> bool:
        """Whether some server has not answered yet."""
        return bool(self._asked)

    @property
    def exhausted(self) -> bool:
        """Whether every server was asked and has answered or failed."""
        return not self._asked and not self._unasked

    def ask_next(self) -> list[T]:
        """Return servers to ask now; the caller says ``asked`` for each."""
        room = MAX_QUESTIONS - len(self._asked)
        return [self._unasked[-1 - i] for i in range(min(max(0, room), len(self._unasked)))]

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
