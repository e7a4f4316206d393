"""
Slots of mutable shares over Foolscap: read-test-write, and reading all shares of a slot in one call.

Nothing refers to a slot but its storage index, so nothing is kept here, and nothing is lost with a connection
but the answers.

Source: the format reference, storage protocols, section 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twisted.internet.defer import Deferred

from pipegrid.reactor.together import all_ended
from pipegrid.transport.foolscap.link import FoolscapLink, check_numbers, in_pieces
from pipegrid.transport.interface import fits_reads
from pipegrid.transport.sentences import no_share, nonsense, nothing_to_lease
from pipegrid.wire.foolscap import MAX_REASON_BYTES
from pipegrid.wire.messages import (
    Changes,
    LeaseSecrets,
    Reads,
    ShareChange,
    SlotData,
    SlotResult,
    SlotSecrets,
)

_Data = SlotData


class FoolscapSlots:
    """
    The slots of one server.

    Args:
        server: what a person calls it.
    """

    def __init__(self, link: FoolscapLink, server: str) -> None:
        self._link = link
        self._server = server

    async def read_test_write(
        self, storage_index: bytes, secrets: SlotSecrets, changes: Changes, reads: Reads
    ) -> SlotResult:
        storage = await self._link.storage()
        success, data = await self._link.call(
            storage,
            "slot_testv_and_readv_and_writev",
            storage_index,
            (secrets.write_enabler, secrets.lease.renew, secrets.lease.cancel),
            {number: _vectors(change) for number, change in changes.items()},
            list(reads),
            share_bytes=sum(len(data) for each in changes.values() for _, data in each.writes),
        )
        return SlotResult(bool(success), self._checked(data, reads))

    async def read(self, storage_index: bytes, numbers: Sequence[int], reads: Reads) -> _Data:
        """Read from shares; no numbers mean all of them."""
        storage = await self._link.storage()
        data = await self._link.call(
            storage,
            "slot_readv",
            storage_index,
            list(numbers),
            list(reads),
            share_bytes=len(numbers) * sum(length for _, length in reads),
        )
        return self._checked(data, reads)

    async def read_share(
        self, storage_index: bytes, share_number: int, offset: int, length: int
    ) -> bytes:
        """
        Return bytes of one share, in as many calls as its length takes; NoSuchShare if it is not
        there.
        """
        reads = [
            self.read(storage_index, [share_number], [each]) for each in in_pieces(offset, length)
        ]
        answers = await all_ended(list(map(Deferred.fromCoroutine, reads)))
        if any(share_number not in data for data in answers):
            raise no_share(self._server, share_number)
        found = [data[share_number][0] for data in answers]
        return found[0] if len(found) == 1 else b"".join(found)

    async def add_lease(self, storage_index: bytes, lease: LeaseSecrets) -> None:
        """Add or renew a lease; Foolscap does not say whether there was anything to lease, so it is asked."""
        storage = await self._link.storage()
        added = self._link.call(storage, "add_lease", storage_index, lease.renew, lease.cancel)
        shares = Deferred.fromCoroutine(self.read(storage_index, (), ()))
        _, found = await all_ended([added, shares])
        if not found:
            raise nothing_to_lease(self._server, "store")

    async def advise_corrupt(self, storage_index: bytes, share_number: int, reason: str) -> None:
        """Complain about a share; whether there is one has to be asked."""
        storage = await self._link.storage()
        text = reason.encode("utf-8", "replace")[:MAX_REASON_BYTES]
        advised = self._link.call(
            storage, "advise_corrupt_share", b"mutable", storage_index, share_number, text
        )
        shares = Deferred.fromCoroutine(self.read(storage_index, (), ()))
        _, found = await all_ended([advised, shares])
        if share_number not in found:
            raise no_share(self._server, share_number)

    def _checked(self, data: Any, reads: Reads) -> _Data:
        """Return what was read, if it is what was asked for: a piece for each read, none too long."""
        check_numbers(self._server, "a read of mutable shares", data)
        if not fits_reads(data, reads):
            raise nonsense(
                self._server, "a read of mutable shares", "other reads than were asked for"
            )
        return {number: tuple(pieces) for number, pieces in data.items()}


def _vectors(change: ShareChange) -> tuple[list[Any], list[Any], int | None]:
    return (
        [(offset, size, b"eq", specimen) for offset, size, specimen in change.tests],
        [(offset, bytes(data)) for offset, data in change.writes],
        change.new_length,
    )
