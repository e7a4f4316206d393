"""
Which unfinished uploads give way to what others ask for: ``standing``'s rule, kept ready for a full disk.

Nothing here waits or takes a lock; the table's is held by whoever calls.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, Protocol, TypeVar

from pipegrid.storage.uploads.hoard import Hoard
from pipegrid.storage.uploads.standing import Asked, Client, Standing


class Held(Standing, Protocol):
    """An upload that somebody may take up."""

    def take_up(self, client: Client) -> None:
        """Have it belong to a client."""


U = TypeVar("U", bound=Held)


class Yielding(Generic[U]):
    """The uploads of a store, in the order in which they would be given up; made when there is no room."""

    def __init__(self) -> None:
        self._hoards: dict[bool, Hoard[U]] = {}  # by what is counted: bytes, or places
        # Who asked in which second, and nobody had to make room.
        self._in_vain: dict[Client, int] = {}

    def choose(self, uploads: Collection[U], client: Client, asked: Asked, now: float) -> list[U]:
        """
        Return which uploads to give up for what is asked; none: it has to be refused.

        Args:
            uploads: all that there are.
        """
        second = int(now)
        if self._in_vain.get(client) == second:
            return []
        by_bytes = asked.missing_bytes > 0
        hoard = self._hoards.get(by_bytes)
        if hoard is None:
            hoard = self._hoards[by_bytes] = Hoard(uploads, by_bytes, now)
        chosen = hoard.choose(client, asked, now)
        if not chosen:
            recent = {each: at for each, at in self._in_vain.items() if at == second}
            self._in_vain = {**recent, client: second}
        return list(chosen)

    def hand_over(self, upload: U, client: Client) -> None:
        """Have an upload belong to a client from now on."""
        hoards = [each for each in self._hoards.values() if upload in each]
        for hoard in hoards:
            hoard.remove(upload)
        upload.take_up(client)
        for hoard in hoards:
            hoard.add(upload)

    def add(self, upload: U) -> None:
        """Another upload has begun, and may have to give way."""
        for hoard in self._hoards.values():
            hoard.add(upload)

    def remove(self, upload: U) -> None:
        """An upload has ended, however that was, and cannot give way any more."""
        for hoard in self._hoards.values():
            hoard.remove(upload)

    def clear(self) -> None:
        """Make the order anew when there is no room: that costs little every few minutes."""
        self._hoards.clear()
