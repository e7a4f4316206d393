"""Reading from every share of a slot over HTTPS, where each read is a request: the expected ones at once."""

from __future__ import annotations

from typing import Any, Protocol

from twisted.internet.defer import Deferred

from pipegrid.errors import NoSuchShare
from pipegrid.reactor.together import together
from pipegrid.wire.messages import Numbers, Reads, SlotData


class SlotReader(Protocol):
    """A server that can be asked about one share at a time."""

    def list_slot(self, storage_index: bytes) -> Deferred[frozenset[int]]:
        """Ask for the numbers of all mutable shares."""

    def read_slot_share(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> Deferred[bytes]:
        """Read from one mutable share; see the contract."""


async def read_slot(
    server: SlotReader, storage_index: bytes, reads: Reads, expected: Numbers
) -> SlotData:
    """Read from every share of a slot; see the contract."""
    found: SlotData = {}

    async def read(number: int) -> None:
        try:
            found[number] = tuple(
                await together(
                    [server.read_slot_share(storage_index, number, *each) for each in reads]
                )
            )
        except NoSuchShare:
            return

    async def list_shares() -> frozenset[int]:
        return await server.list_slot(storage_index)

    listing = Deferred.fromCoroutine(list_shares())
    guesses = [Deferred.fromCoroutine(read(number)) for number in sorted(expected)]
    waiting: list[Deferred[Any]] = [listing, *guesses]
    numbers = (await together(waiting))[0]
    others = sorted(numbers - expected)
    await together([Deferred.fromCoroutine(read(number)) for number in others])
    return found
