"""How one server is, at this moment."""

from __future__ import annotations

from twisted.internet.interfaces import IReactorTime

from pipegrid.errors import ServerError
from pipegrid.grid.readiness import STATUS_SILENCE_S
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.results import ServerStatus
from pipegrid.transfer.watch import Watch


async def status_of(peer: Peer, clock: IReactorTime) -> ServerStatus:
    """Ask a server how it is; one that does not answer has a reason."""
    reason, rtt_s, application, available_bytes = None, None, None, None
    started = clock.seconds()
    try:
        version = await Watch(clock, STATUS_SILENCE_S).answer(peer.server.version(), peer)
        if peer.protocol in ("https", "foolscap"):
            # That was a connection; how long does an answer take?
            started = clock.seconds()
            version = await Watch(clock, STATUS_SILENCE_S).answer(peer.server.version(), peer)
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
    )
