"""
One mutable file on the servers of a grid, and the requests to each server with the secrets for that server.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import TypeVar

import attrs
from twisted.internet.defer import Deferred

from pipegrid.core.caps import MutableCap
from pipegrid.core.hashes import write_enabler
from pipegrid.core.mutable.versions import Version
from pipegrid.errors import NoSuchShare, ServerError, ServerUnreachable, WrongSecret
from pipegrid.transfer.failure_messages import Shortfall
from pipegrid.transfer.peers import Peer, TransferContext, lease_secrets, ring
from pipegrid.transfer.settings import MutableSettings
from pipegrid.transfer.time_limits import CallTimeout
from pipegrid.wire.storage_messages import LeaseSecrets, ShareChange, SlotResult, SlotSecrets

T = TypeVar("T")

ATTEMPTS = 2
"""
Maximum number of times that a change is sent: a second time if its connection was lost; the second response
shows whether the first request was carried out.
"""

SLOWEST_BYTES_PER_S = 8000
"""
Slowest transfer rate at which a response is still awaited. Transports notice by themselves when no bytes
move, but a response is reported only when it is complete: the more data is in flight, the later this happens,
which is not the server's fault.
"""


class Slot:
    """
    One mutable file, its servers, and what its operations share.

    With a write cap the file is queried by read-test-write, which lists and reads all shares of a server in
    one request. With any other cap, the protocol may require share numbers, and these are guessed.

    Args:
        means: what all transfers of the grid use; the slot uses the servers that ``means`` has now.

    Attributes:
        peers: the servers, in the order of the file's ring.
        shortfall: counts writes that reach fewer servers than wanted; None: such writes are not counted.
        wrong_enabler: the servers that have the file's shares under another write enabler, and so let this
            client only read them; maps each to its error.
    """

    def __init__(self, means: TransferContext, cap: MutableCap, settings: MutableSettings) -> None:
        self.cap = cap
        self.storage_index = cap.storage_index
        self.peers = ring(self.storage_index, means.peers)
        self.clock = means.clock
        self.workers = means.workers
        self.settings = settings
        self.shortfall: Shortfall | None = means.shortfall
        self._file_secrets = means.secrets.for_file(self.storage_index)
        self.wrong_enabler: dict[Peer, WrongSecret] = {}
        self._derived: dict[Peer, SlotSecrets] = {}
        self._pending: dict[CallTimeout, int] = {}

    @property
    def can_write(self) -> bool:
        """Whether the cap grants writing."""
        return self.cap.access == "write"

    def lease(self, peer: Peer) -> LeaseSecrets:
        """Return the secrets of this client's leases on the file, on one server."""
        return lease_secrets(self._file_secrets, peer.identity)

    def _secrets(self, peer: Peer) -> SlotSecrets:
        """Return the secrets to change the file on one server; they are derived once and kept."""
        found = self._derived.get(peer)
        if found is None:
            enabler = write_enabler(self.cap.secret, peer.identity.lease_seed)
            found = self._derived[peer] = SlotSecrets(self.lease(peer), enabler)
        return found

    async def look(
        self, peer: Peer, length: int, expected: AbstractSet[int] = frozenset()
    ) -> dict[int, bytes]:
        """
        Return the first ``length`` bytes of every share of a server.

        Args:
            expected: shares that the server probably has.
        """
        server, reads = peer.server, [(0, length)]
        if self.can_write and peer not in self.wrong_enabler:
            try:
                result = await self._answer(
                    peer, server.read_test_write(self.storage_index, self._secrets(peer), {}, reads)
                )
                return {number: pieces[0] for number, pieces in result.data.items()}
            except WrongSecret as error:
                self.wrong_enabler[peer] = error
        found = await self._answer(peer, server.read_slot(self.storage_index, reads, expected))
        return {number: pieces[0] for number, pieces in found.items()}

    async def change(
        self, peer: Peer, changes: Mapping[int, ShareChange], read_bytes: int
    ) -> SlotResult:
        """
        Test shares and write them; the result contains the beginning of every share as it was before the
        write.
        """
        size = sum(len(data) for change in changes.values() for _, data in change.writes)
        for attempt in range(ATTEMPTS):
            call = peer.server.read_test_write(
                self.storage_index, self._secrets(peer), changes, [(0, read_bytes)]
            )
            try:
                result = await self._answer(peer, call, size)
                return attrs.evolve(result, repeated=True) if attempt else result
            except ServerUnreachable:
                if attempt + 1 == ATTEMPTS:
                    raise
        raise AssertionError("not reached")

    async def read(self, peer: Peer, number: int, offset: int, length: int) -> bytes:
        """
        Return ``length`` bytes of one share, or fewer at the end of the share. Raises ``NoSuchShare`` if the
        share does not exist.
        """
        call = peer.server.read_slot_share(self.storage_index, number, offset, length)
        return await self._answer(peer, call, length)

    async def has_changed(self, peer: Peer, number: int, version: Version) -> bool:
        """
        Return whether a share that had this version has another version now, or is gone.

        If so, the bytes that were read earlier may be a mix of both versions and prove no damage. A version
        that was replaced never returns, so if the share still has this version, all earlier reads got this
        version, too. If the server does not respond, the result is False.
        """
        head = version.signed_prefix
        try:
            now = await self.read(peer, number, 0, len(head))
        except NoSuchShare:
            return True
        except ServerError:
            return False
        return now != head

    async def add_lease(self, peer: Peer) -> None:
        """Add or renew this client's lease on the file, on one server."""
        await self._answer(peer, peer.server.add_slot_lease(self.storage_index, self.lease(peer)))

    async def advise_corrupt(self, peer: Peer, number: int, reason: str) -> None:
        """Report to the server that a share looked corrupt; errors are ignored."""
        with suppress(ServerError):
            await self._answer(
                peer, peer.server.advise_corrupt_slot_share(self.storage_index, number, reason)
            )

    async def _answer(self, peer: Peer, call: Deferred[T], size: int = 0) -> T:
        """Wait for the response to a call that transfers ``size`` bytes of share data."""
        if not size:
            return await CallTimeout(self.clock, self.settings.silence_s).answer(call, peer)
        watch = CallTimeout(self.clock, self.settings.silence_s, self._transfer_s)
        self._pending[watch] = size
        try:
            return await watch.answer(call, peer)
        finally:
            del self._pending[watch]
            for other in self._pending:
                other.progress()  # this call has used the link, which delays the other calls

    def _transfer_s(self) -> float:
        return sum(self._pending.values()) / SLOWEST_BYTES_PER_S


def quorum(slot: Slot, total_shares: int) -> int:
    """
    Return how many servers must accept shares of a version; as many must respond to the query before the
    write.
    """
    takers = sum(peer.takes_uploads for peer in slot.peers)
    return min(slot.settings.happy, total_shares, takers)
