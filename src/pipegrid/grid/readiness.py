"""
When an operation may begin: as soon as there are servers enough for it.

By default those count that are known, since a transfer finds out by itself, and in the same round trip, who
is there. Only who asks for it (``--wait-for N``) waits until servers have answered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from pipegrid.errors import ServerError, UnhappyError
from pipegrid.reactor.timeouts import timeout_or
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.watch import Watch

if TYPE_CHECKING:
    from pipegrid.grid.discovery import Discovery

STATUS_SILENCE_S = 10.0
"""A person waits for the answer: a server that takes longer is as good as gone."""
WAIT_FOR_S = 60.0
"""How long ``wait_for`` waits."""
_ASK_AGAIN_S = 1.0
_LOOK_AGAIN_S = 0.05


class Readiness:
    """
    Holds operations back until there are servers enough.

    Args:
        peers: the grid's list, which grows.
        discovery: what makes it grow, or None.
        wait_for: how many servers must have answered before the first operation.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        discovery: Discovery | None,
        clock: IReactorTime,
        wait_for: int = 0,
    ) -> None:
        self._peers = peers
        self._discovery = discovery
        self._clock = clock
        self._wait_for = wait_for

    async def wait(self, needed: int, *, all_told: bool = False, storing: bool = False) -> None:
        """
        Return when an operation that needs so many servers may begin.

        Args:
            all_told: it wants to know of all servers, so introducers are waited for.
            storing: only servers count that may be given shares.

        Raises:
            UnhappyError: there are no servers at all, or too few answered.
        """
        await self._asked_for()
        if self._discovery is None:
            return
        if all_told:
            await self._discovery.wait_settled()
        await self._discovery.wait(
            lambda: sum(peer.takes_uploads or not storing for peer in self._peers) >= needed
        )
        if not self._peers:
            statuses = self._discovery.statuses
            reasons = [f"introducer {each.name}: {each.reason}" for each in statuses if each.reason]
            because = f" ({'; '.join(reasons)})" if reasons else ""
            raise UnhappyError(
                f"no storage server is known{because}; see 'pipegrid status', and try again later",
                0,
                needed,
            )

    async def up_or_late(self) -> None:
        """Wait for as many servers as were asked for, and no longer than that may take."""
        with contextlib.suppress(UnhappyError):  # whoever tells how they are tells that, too
            await self._asked_for()

    async def more_servers(self) -> bool:
        """Wait for introducers that have not told what they know; returns whether that was news."""
        if self._discovery is None or self._discovery.settled:
            return False
        before = set(self._peers)
        await self._discovery.wait_settled()
        return not before >= set(self._peers)

    async def _asked_for(self) -> None:
        if self._wait_for > 0:
            await self._until_up(self._wait_for)
            self._wait_for = 0

    async def _until_up(self, wanted: int) -> None:
        """Ask all servers again and again until so many have answered once."""
        deadline = self._clock.seconds() + WAIT_FOR_S
        up: set[Peer] = set()
        asking: dict[Peer, Deferred[None]] = {}

        async def ask(peer: Peer) -> None:
            try:
                watch = Watch(self._clock, STATUS_SILENCE_S)
                await watch.answer(peer.server.version(), peer)
            except ServerError:
                await deferLater(self._clock, _ASK_AGAIN_S, lambda: None)
            else:
                up.add(peer)
            finally:
                asking.pop(peer, None)

        try:
            while True:
                for peer in self._peers:
                    if peer not in up and peer not in asking:
                        asked = Deferred.fromCoroutine(ask(peer))
                        asked.addErrback(lambda failure: failure.trap(CancelledError))
                        if not asked.called:
                            asking[peer] = asked
                if len(up) >= wanted:
                    return
                left_s = deadline - self._clock.seconds()
                if left_s <= 0:
                    raise UnhappyError(
                        f"{len(up)} of the {wanted} servers to wait for answered within "
                        f"{WAIT_FOR_S:g} s; see 'pipegrid status', or wait for fewer",
                        len(up),
                        wanted,
                    )
                # Servers answer, and others are announced, at any moment.
                await timeout_or(Deferred(), min(left_s, _LOOK_AGAIN_S), self._clock)
        finally:
            for asked in list(asking.values()):
                asked.cancel()
