"""
Adding or renewing this client's leases on the shares of a file, of which not a byte is read.

Each server is asked which shares it has, and for the lease, in one breath: both take one round trip.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import attrs
from twisted.internet.defer import Deferred

from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.errors import NoSuchShare, ServerError
from pipegrid.reactor.together import few_at_a_time
from pipegrid.transfer.peers import Means, Peer, lease_secrets, ring
from pipegrid.transfer.results import RenewResult
from pipegrid.transfer.watch import Watch

SERVERS_AT_ONCE = 100
"""All have to be asked, and each answers with some bytes; what is held of an unanswered question is small."""


@attrs.define
class Leased:
    """
    What came of it so far.

    Attributes:
        peers: those that gave a lease.
        numbers: share number to the nicknames of the servers that gave a lease on it.
        unreachable: nicknames of those that said nothing.
        reasons: why leases were not given, though there are shares.
    """

    peers: list[Peer] = attrs.field(factory=list)
    numbers: dict[int, list[str]] = attrs.field(factory=dict)
    unreachable: list[str] = attrs.field(factory=list)
    reasons: list[str] = attrs.field(factory=list)


class Renewal:
    """
    Leases on one encoded file (not on a literal one).

    Args:
        silence_s: a server that gives no sign of life for so long counts as unreachable.
    """

    def __init__(self, means: Means, cap: ChkCap | ChkVerifierCap, silence_s: float = 60.0) -> None:
        self._clock = means.clock
        self._given = cap
        self._cap = cap.verifier()
        self._storage_index = self._cap.storage_index
        self._secrets = means.secrets.for_file(self._storage_index)
        self._silence_s = silence_s
        self.leased = Leased()

    async def everywhere(self, peers: Sequence[Peer]) -> RenewResult:
        """Renew on every server that has a share."""
        in_order = ring(self._storage_index, peers)
        await few_at_a_time(
            SERVERS_AT_ONCE, [partial(self._find_and_renew, one) for one in in_order]
        )
        leased = self.leased
        return RenewResult(
            cap=self._given,
            leases={number: sorted(leased.numbers[number]) for number in sorted(leased.numbers)},
            required_shares=self._cap.required_shares,
            total_shares=self._cap.total_shares,
            unreachable=sorted(leased.unreachable),
            reasons=sorted(set(leased.reasons)),
        )

    async def on(self, peers: Iterable[Peer]) -> Leased:
        """Renew on servers that are known to have shares."""

        async def renew(peer: Peer) -> None:
            try:
                await self._renew(peer)
            except ServerError as error:
                self.leased.reasons.append(str(error))
            else:
                self.leased.peers.append(peer)

        await few_at_a_time(SERVERS_AT_ONCE, [partial(renew, peer) for peer in peers])
        return self.leased

    async def _renew(self, peer: Peer) -> None:
        lease = lease_secrets(self._secrets, peer.identity)
        watch = Watch(self._clock, self._silence_s)
        await watch.answer(peer.server.add_lease(self._storage_index, lease), peer)

    async def _find_and_renew(self, peer: Peer) -> None:
        watch = Watch(self._clock, self._silence_s)
        listing = peer.server.list_shares(self._storage_index)
        renewing = Deferred.fromCoroutine(self._renew(peer))
        try:
            numbers = await watch.answer(listing, peer)
        except BaseException as error:
            renewing.addErrback(lambda _: None)
            renewing.cancel()
            if not isinstance(error, ServerError):
                raise
            self.leased.unreachable.append(peer.name)
            return
        try:
            await renewing
        except NoSuchShare:
            return
        except ServerError as error:
            self.leased.reasons.append(str(error))
            return
        self.leased.peers.append(peer)
        for number in numbers:
            if number < self._cap.total_shares:
                self.leased.numbers.setdefault(number, []).append(peer.name)
