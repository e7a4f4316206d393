"""Delays operations of a grid until there are enough servers for them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from pipegrid.errors import ServerError, UnhappyError
from pipegrid.reactor.deferreds import timeout_or
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.results import ServerStatus
from pipegrid.transfer.time_limits import CallTimeout

if TYPE_CHECKING:
    from pipegrid.grid.introducer_discovery import Discovery


# An operation may start as soon as there are enough servers for it.
#
# By default all known servers count: a transfer learns in its first round trip which of them respond. With
# ``--wait-for N``, the first operation waits until N servers have responded.

STATUS_SILENCE_S = 10.0
"""The time limit for a status request; it is short, since a person waits for the status."""
SLOW_STATUS_SILENCE_S = 60.0
"""The time limit for a status request to a server that may connect slowly: Tor makes circuits first."""


WAIT_FOR_S = 60.0
"""The longest wait for the number of servers in ``wait_for``."""


_ASK_AGAIN_S = 1.0
_LOOK_AGAIN_S = 0.05


def status_silence_s(peer: Peer) -> float:
    """Return the time limit for a status request to a server."""
    return SLOW_STATUS_SILENCE_S if peer.connects_slowly else STATUS_SILENCE_S


class Readiness:
    """
    Delays operations until there are enough servers.

    Args:
        peers: the grid's list of peers, which grows.
        discovery: adds servers to the list; None if there are no introducers.
        wait_for: the number of servers that must respond before the first operation starts.
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

    async def wait(self, needed: int, *, all_reported: bool = False, storing: bool = False) -> None:
        """
        Return when enough servers are known for an operation that needs this number, or when introducers are
        unlikely to announce more.

        Args:
            all_reported: all servers are needed, so wait until all introducers have responded or failed.
            storing: count only servers that accept shares.

        Raises:
            UnhappyError: no server is known, or too few of the servers of ``wait_for`` responded.
        """
        await self._asked_for()
        if self._discovery is None:
            return
        if all_reported:
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
        """
        Wait for the servers of ``wait_for``; return without an error if they do not respond within the time
        limit.
        """
        with contextlib.suppress(UnhappyError):  # the caller reports the status of each server
            await self._asked_for()

    async def more_servers(self) -> bool:
        """If introducers have not responded yet, wait for them; returns whether new servers were found."""
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
        """
        Ask all servers repeatedly until the wanted number of them have responded.

        Raises:
            UnhappyError: too few responded within ``WAIT_FOR_S``.
        """
        deadline = self._clock.seconds() + WAIT_FOR_S
        up: set[Peer] = set()
        asking: dict[Peer, Deferred[None]] = {}

        async def ask(peer: Peer) -> None:
            try:
                watch = CallTimeout(self._clock, status_silence_s(peer))
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
                # Both sets change during the wait: servers respond, and new servers are announced.
                await timeout_or(Deferred(), min(left_s, _LOOK_AGAIN_S), self._clock)
        finally:
            for asked in list(asking.values()):
                asked.cancel()


# Finding the current status of one server.


async def status_of(peer: Peer, clock: IReactorTime) -> ServerStatus:
    """Return a server's status; if it does not respond, the status has the reason."""
    reason, rtt_s, application, available_bytes = None, None, None, None
    started = clock.seconds()
    limit_s = status_silence_s(peer)
    try:
        version = await CallTimeout(clock, limit_s).answer(peer.server.version(), peer)
        if peer.protocol in ("https", "foolscap"):
            # The time of the first request includes connecting; measure the round trip with a second one.
            started = clock.seconds()
            version = await CallTimeout(clock, limit_s).answer(peer.server.version(), peer)
    except ServerError as error:
        reason = str(error)
    else:
        rtt_s = clock.seconds() - started
        application, available_bytes = version.application, version.available_bytes
    return ServerStatus(
        nickname=peer.name,
        server_id=peer.identity.server_id,
        protocol=peer.protocol,
        address=peer.address,
        reachable=reason is None,
        reason=reason,
        rtt_s=rtt_s,
        version=application,
        available_bytes=available_bytes,
        no_uploads=peer.no_uploads(),
        certified_by=peer.certified_by,
        certified_until=peer.certified_until,
    )
