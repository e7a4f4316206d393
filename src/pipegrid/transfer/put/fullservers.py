"""
Servers that are full, as the puts of a client have found, and what follows for the next ones.

A server that has no room says so only when it is given shares, and asked why it did not take them; where too
few others are left each put learns that anew, which costs it its bytes and three questions to each server. So
it is remembered, for ``FULL_S`` and for shares that are as large or larger: room may come back with the end
of a lease, and what is too large for a server says nothing of what is smaller. After that time one put finds
out how things are, and the others wait for its outcome no more than before: they go by what was known.

A put that cannot come to its happiness without full servers asks them for their lists only, since what is
there already counts, and is refused when these do not help.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from pipegrid.core.placement import servers_of_happiness
from pipegrid.errors import ServerError
from pipegrid.reactor.together import together
from pipegrid.transfer.peers import Means, Peer
from pipegrid.transfer.put.keyedfile import KeyedFile
from pipegrid.transfer.put.reasons import not_spread
from pipegrid.transfer.watch import Watch

FULL_S = 5.0
"""A put in vain every so often costs nobody much, and room that has come back is found soon."""

ASK_S = 5.0
"""As ``refusals.ASK_S``; a server that takes longer is given shares, as if nothing were known."""


@attrs.define
class _Full:
    """A server that does not take shares of so many bytes, until then by the clock; and its reason."""

    share_bytes: int
    until_s: float
    reason: str


class FullServers:
    """What all puts of a client have found; times are seconds of one clock."""

    def __init__(self) -> None:
        self._full: dict[Peer, _Full] = {}

    def __repr__(self) -> str:
        return f"<FullServers: {len(self._full)}>"

    def refused(self, peer: Peer, share_bytes: int, reason: str, now_s: float) -> None:
        """The server has no room for a share of this size, and that is its sentence."""
        before = self._full.get(peer)
        if before is not None:
            share_bytes = min(share_bytes, before.share_bytes)
        self._full[peer] = _Full(share_bytes, now_s + FULL_S, reason)

    def took(self, names: Iterable[str]) -> None:
        """The servers of these names have taken shares."""
        if self._full:
            taken = set(names)
            self._full = {peer: each for peer, each in self._full.items() if peer.name not in taken}

    def among(self, peers: Iterable[Peer], share_bytes: int, now_s: float) -> dict[Peer, str]:
        """
        Return those of these servers that will not take a share of this size, with their reasons.

        Of those that have not been tried for ``FULL_S`` none is returned: whoever asks tries them.
        """
        if not self._full:
            return {}
        found = {}
        for peer in peers:
            each = self._full.get(peer)
            if each is None or share_bytes < each.share_bytes:
                continue
            if now_s < each.until_s:
                found[peer] = each.reason
            else:
                each.until_s = now_s + FULL_S
        return found

    async def check(self, means: Means, file: KeyedFile) -> None:
        """
        Refuse a file that full servers leave no way to be stored.

        Raises:
            UnhappyError: that is so.
        """
        if not self._full:
            return
        takers = means.takers
        full = self.among(takers, file.shares.share_bytes, means.clock.seconds())
        others = len(takers) - len(full)
        if not full or others >= file.happy:
            return
        homes = await _homes(means.clock, full, file.shares.storage_index)
        if homes is None:
            return
        reached = servers_of_happiness(homes)
        if reached + others < file.happy:
            raise not_spread(
                file.name,
                reached=reached,
                happy=file.happy,
                stored=len(homes),
                required_shares=file.geometry.required_shares,
                reasons={},
                full={peer.name: reason for peer, reason in full.items()},
                contended=False,
            )


async def _homes(
    clock: IReactorTime, servers: Collection[Peer], storage_index: bytes
) -> dict[int, set[Peer]] | None:
    """Return the shares that these servers list, with who has each; None if one does not answer."""

    async def ask(peer: Peer) -> frozenset[int] | None:
        try:
            return await Watch(clock, ASK_S).answer(peer.server.list_shares(storage_index), peer)
        except ServerError:
            return None

    answers = await together([Deferred.fromCoroutine(ask(peer)) for peer in servers])
    homes: dict[int, set[Peer]] = {}
    for peer, there in zip(servers, answers, strict=True):
        if there is None:
            return None
        for number in there:
            homes.setdefault(number, set()).add(peer)
    return homes
