"""State that all puts of one client share, such as the full servers that earlier puts have found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime

from pipegrid.core.placement import servers_of_happiness
from pipegrid.errors import ServerError
from pipegrid.reactor.deferreds import Deadlines, gather
from pipegrid.transfer.failure_messages import PlacementOutcome, not_spread
from pipegrid.transfer.peers import Peer, TransferContext
from pipegrid.transfer.put.ask_first_policy import PlacementHistory
from pipegrid.transfer.put.file_key import KeyedFile
from pipegrid.transfer.settings import UploadSettings
from pipegrid.transfer.time_limits import CallTimeout

# Full servers: a server without space reports this only when it was sent shares and is then asked why it
# refused them. If too few other servers are left, every put would find this out again, at the cost of its
# bytes and three requests per server. So the refusal is remembered for ``FULL_S`` seconds, for shares of the
# refused size or larger: space may become free when a lease ends, and a server that refuses a large share may
# accept a smaller one. After that time one put tries the server again; until its outcome is known, other puts
# use the previous result.
#
# A put that cannot reach happiness without full servers first asks these only for their lists of shares,
# since existing shares count. If the existing shares do not suffice, the put fails.

FULL_S = 5.0
"""How many seconds a refusal is remembered. One failed put every 5 s is cheap, and finds free space soon."""


ASK_S = 5.0
"""
Time limit for a response, in seconds. When it has passed, the put sends shares as if no server were known to
be full, or fails with the reasons known so far.
"""


class _Full(NamedTuple):
    """
    Until ``until_s`` by the clock, the server takes no shares of ``share_bytes`` or more; ``reason`` says
    why.
    """

    share_bytes: int
    until_s: float
    reason: str


class FullServers:
    """The full servers that all puts of a client have found; times are seconds of one clock."""

    def __init__(self) -> None:
        self._full: dict[Peer, _Full] = {}

    def __repr__(self) -> str:
        return f"<FullServers: {len(self._full)}>"

    def refused(self, peer: Peer, share_bytes: int, reason: str, now_s: float) -> None:
        """Record that a server has no space for a share of this size; ``reason`` is the server's message."""
        before = self._full.get(peer)
        if before is not None:
            share_bytes = min(share_bytes, before.share_bytes)
        self._full[peer] = _Full(share_bytes, now_s + FULL_S, reason)

    def took(self, names: Iterable[str]) -> None:
        """Record that the servers with these names have accepted shares."""
        if self._full:
            taken = set(names)
            self._full = {peer: each for peer, each in self._full.items() if peer.name not in taken}

    def among(self, peers: Iterable[Peer], share_bytes: int, now_s: float) -> dict[Peer, str]:
        """
        Return the servers that probably refuse a share of this size, with their reasons.

        Servers that no put has tried for ``FULL_S`` are left out, so that the caller tries them again.
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
                self._full[peer] = each._replace(until_s=now_s + FULL_S)
        return found

    async def check(self, means: TransferContext, file: KeyedFile) -> None:
        """
        Raise if a file cannot be stored because servers are full.

        Raises:
            UnhappyError: the servers with space, and the existing shares on full servers, do not reach the
                wanted happiness.
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
            outcome = PlacementOutcome(
                reached=reached,
                happy=file.happy,
                stored=len(homes),
                required_shares=file.geometry.required_shares,
                full={peer.name: reason for peer, reason in full.items()},
            )
            raise not_spread(file.name, outcome)


async def _homes(
    clock: IReactorTime, servers: Collection[Peer], storage_index: bytes
) -> dict[int, set[Peer]] | None:
    """Return the servers that have each share, from their lists; None if some server does not respond."""

    async def ask(peer: Peer) -> frozenset[int] | None:
        try:
            return await CallTimeout(clock, ASK_S).answer(
                peer.server.list_shares(storage_index), peer
            )
        except ServerError:
            return None

    answers = await gather([Deferred.fromCoroutine(ask(peer)) for peer in servers])
    homes: dict[int, set[Peer]] = {}
    for peer, there in zip(servers, answers, strict=True):
        if there is None:
            return None
        for number in there:
            homes.setdefault(number, set()).add(peer)
    return homes


class PutContext(NamedTuple):
    """
    What all puts of one client share.

    Attributes:
        grid: what all transfers share: servers, clock, workers, secrets.
        settings: how long to wait for stragglers and silent servers.
        history: whether puts have found shares on unexpected servers.
        full: servers without space.
        overdue: notifies uploads of small files that take too long.
        say: gets a sentence that the user should know in addition to the result.
    """

    grid: TransferContext
    settings: UploadSettings
    history: PlacementHistory
    full: FullServers
    overdue: Deadlines
    say: Callable[[str], None]
