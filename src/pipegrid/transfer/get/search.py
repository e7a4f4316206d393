"""
Which server to ask for what, decided from what is known so far.

Pure: a download tells it what servers answered, and asks it whom to ask next and where a share can be had.
Servers are asked in the file's permuted order; how many at a time is ``waves``' decision.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from pipegrid.transfer.get.waves import Waves

T = TypeVar("T", bound=Hashable)


class ShareSearch(Generic[T]):
    """
    The search for one file's shares.

    Args:
        ring: servers in the file's permuted order; no server twice.
    """

    def __init__(self, ring: Sequence[T]) -> None:
        self._waves = Waves(ring)
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
