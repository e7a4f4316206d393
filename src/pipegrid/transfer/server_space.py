"""Find out which servers report that they accept no more shares, because they are full or read-only."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from functools import partial

from twisted.internet.defer import DeferredLock
from twisted.internet.interfaces import IReactorTime

from pipegrid.errors import ServerError
from pipegrid.reactor.deferreds import few_at_a_time
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.time_limits import CallTimeout
from pipegrid.wire.storage_messages import ServerVersion

BELIEVED_S = 30.0

_ASKED_AT_ONCE = 100


class Capacity:
    """
    What the servers of one client have reported of their space.

    The reports matter when shares are on fewer servers than possible: a server without space must not count
    as possible, or each repair would try to use it, without effect. Servers are asked only in this case, and
    once for all objects that are checked in the meantime: a report is used for ``BELIEVED_S`` seconds.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._lock = DeferredLock()
        self._said: dict[Peer, tuple[float, ServerVersion | None]] = {}

    def __repr__(self) -> str:
        return f"<Capacity: {len(self._said)} servers>"

    async def full(
        self, peers: Collection[Peer], share_bytes: int, silence_s: float, *, mutable: bool = False
    ) -> set[Peer]:
        """
        Return the servers that do not accept a share of this size, including servers that do not respond.

        Args:
            share_bytes: size of the share.
            silence_s: a server without activity for this many seconds counts as not responding.
            mutable: whether the share belongs to a mutable file.
        """
        await self._lock.acquire()
        try:
            now_s = self._clock.seconds()
            self._said = {
                peer: said for peer, said in self._said.items() if now_s - said[0] < BELIEVED_S
            }
            unknown = [
                partial(self._ask, peer, silence_s) for peer in peers if peer not in self._said
            ]
            await few_at_a_time(_ASKED_AT_ONCE, unknown)
        finally:
            self._lock.release()
        return {peer for peer in peers if not self._has_space(peer, share_bytes, mutable)}

    async def _ask(self, peer: Peer, silence_s: float) -> None:
        version = None
        with suppress(ServerError):
            version = await CallTimeout(self._clock, silence_s).answer(peer.server.version(), peer)
        self._said[peer] = self._clock.seconds(), version

    def _has_space(self, peer: Peer, share_bytes: int, mutable: bool) -> bool:
        _, version = self._said.get(peer, (0.0, None))
        if version is None:
            return False
        most = version.available_bytes if mutable else version.max_share_bytes
        return most is None or most >= max(1, share_bytes)
