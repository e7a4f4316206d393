"""
Which unfinished uploads give way to what others ask for: ``standing``'s rule, kept ready for a full disk.

Nothing here waits or takes a lock; the table's is held by whoever calls.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, Protocol, TypeVar

from pipegrid.storage.uploads.evictionorder import EvictionOrder
from pipegrid.storage.uploads.standing import Asked, Client, Standing


class Held(Standing, Protocol):
    """An upload that somebody may take up."""

    def take_up(self, client: Client) -> None:
        """Have it belong to a client."""


U = TypeVar("U", bound=Held)


class Eviction(Generic[U]):
    """The uploads of a store, in the order in which they would be given up; made when there is no room."""

    def __init__(self) -> None:
        self._orders: dict[bool, EvictionOrder[U]] = {}  # by what is counted: bytes, or places
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
        order = self._orders.get(by_bytes)
        if order is None:
            order = self._orders[by_bytes] = EvictionOrder(uploads, by_bytes, now)
        chosen = order.choose(client, asked, now)
        if not chosen:
            recent = {each: at for each, at in self._in_vain.items() if at == second}
            self._in_vain = {**recent, client: second}
        return list(chosen)

    def hand_over(self, upload: U, client: Client) -> None:
        """Have an upload belong to a client from now on."""
        orders = [each for each in self._orders.values() if upload in each]
        for order in orders:
            order.remove(upload)
        upload.take_up(client)
        for order in orders:
            order.add(upload)

    def add(self, upload: U) -> None:
        """Another upload has begun, and may have to give way."""
        for order in self._orders.values():
            order.add(upload)

    def remove(self, upload: U) -> None:
        """An upload has ended, however that was, and cannot give way any more."""
        for order in self._orders.values():
            order.remove(upload)

    def clear(self) -> None:
        """Make the order anew when there is no room: that costs little every few minutes."""
        self._orders.clear()
