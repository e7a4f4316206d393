"""Opens a storage server that a list or an introducer names: its addresses, connections and pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
from twisted.internet.interfaces import IReactorTime

from pipegrid.errors import UsageError
from pipegrid.flow.pipeline import Pipeline
from pipegrid.flow.window import AutoWindow
from pipegrid.grid.client_cache_files import BundleLimits
from pipegrid.reactor.connection_policy import ConnectionPolicy
from pipegrid.transfer.peers import Peer
from pipegrid.transport.failover import FailoverServer, Route
from pipegrid.wire import server_address
from pipegrid.wire.announcements import KnownServer
from pipegrid.wire.server_address import Furl, Nurl
from pipegrid.wire.storage_messages import ServerIdentity

if TYPE_CHECKING:
    from pipegrid.reactor.preconnect import Preconnector
    from pipegrid.transport.foolscap.client import FoolscapServer
    from pipegrid.transport.gbs.client import GbsServer
    from pipegrid.transport.throttle import Throttle


WINDOW_MEMORY_BYTES = 40 << 20
"""
The most memory for messages to all the servers of one file. Together with the buffers of coding and TLS, a
client stays below 64 MiB (``misc/speedtest/memory.py --rtt-ms 200``). Each of ten servers gets 4 MiB: the
window, and an eighth of it for a message that exceeds the window.
"""


FLIGHT_BYTES = 128 << 20
"""
The most unacknowledged bytes, for all servers of one file, if connections release messages that the kernel
has taken. It allows 600 MB/s at a round-trip time of 200 ms. A higher limit did not help where ten servers
took 300 MB/s. With 44 MiB instead, a put of 100 MB at 100 ms took 1.9 s instead of 1.4.
"""


PROXY_CONNECT_S = 60.0
"""The time limit for connecting through a proxy, TLS included: Tor makes circuits first."""


_LEAST_WINDOW_BYTES = 256 << 10


class Windows(NamedTuple):
    """
    The bounds of the pipeline to one server.

    Attributes:
        held_bytes: the most bytes of messages in memory.
        flight_bytes: the most unacknowledged bytes, for connections that release messages before they are
            acknowledged.
    """

    held_bytes: int
    flight_bytes: int

    @classmethod
    def shared_by(cls, servers: int, memory_bytes: int | None = None) -> Windows:
        """
        Return the bounds for one server if the limits are divided among this number of servers.

        Args:
            memory_bytes: the client's memory for all data, half of which is for windows; None: the default.
        """
        held, flight = WINDOW_MEMORY_BYTES, FLIGHT_BYTES
        if memory_bytes is not None:
            held, flight = min(held, memory_bytes // 2), min(flight, memory_bytes * 2)
        return cls(
            *(max(_LEAST_WINDOW_BYTES, total // servers * 8 // 9) for total in (held, flight))
        )

    def pipeline(
        self, clock: IReactorTime, transport_rtt_s: Callable[[], float | None]
    ) -> Pipeline:
        """
        Return a pipeline to a server, for connections that may release messages before they are acknowledged.
        """
        window = AutoWindow(maximum_bytes=self.flight_bytes, transport_rtt_s=transport_rtt_s)
        return Pipeline(window, clock, self.held_bytes)


class ConnectionOptions(NamedTuple):
    """
    How to connect to a server.

    Attributes:
        policy: the permitted way to each address of the server.
        throttle: bounds the rate of all bytes to and from all servers; None: no bound.
        ahead: connections that were opened in advance; one of them may lead to this server.
        bundle_limits: the known bundle lengths of servers whose announcements do not have them; None: none is
            known.
    """

    policy: ConnectionPolicy
    throttle: Throttle | None = None
    ahead: Preconnector | None = None
    bundle_limits: BundleLimits | None = None


def open_server(
    reactor: IReactorTime,
    known: KnownServer,
    windows: Windows,
    options: ConnectionOptions,
    *,
    force_foolscap: bool = False,
    foolscap_beside: bool = False,
) -> Peer:
    """
    Return a peer for a server, without connecting to it.

    Args:
        windows: the bounds of the peer's pipeline.
        options: how to connect to the server.
        force_foolscap: use Foolscap even if the server speaks HTTPS.
        foolscap_beside: use Foolscap in addition to HTTPS where that is faster, if the server speaks both.

    Raises:
        ValueError: the server speaks no protocol that this client can use, or the policy permits none of its
            addresses; the text says why.
    """
    if known.furl is None and force_foolscap:
        raise ValueError("it speaks HTTPS only, but [client] force_foolscap requires Foolscap")
    policy = options.policy
    nurls = [] if force_foolscap else _reachable_nurls(known, policy)
    furl = _reachable_furl(known, policy, nurls)
    if not nurls:
        assert furl is not None
        server = _open_foolscap(reactor, known.identity, furl, options)
        pipeline = Pipeline(AutoWindow(maximum_bytes=windows.held_bytes), reactor)
        peer = Peer(server, pipeline, "foolscap", furl.address)
        peer.connects_slowly = not _is_direct(furl, policy)
        return peer
    beside = furl if foolscap_beside else None
    by_owner: dict[tuple[bytes, str], list[Nurl]] = {}
    for each in nurls:
        by_owner.setdefault((each.spki_hash, each.swissnum), []).append(each)
    routes = [
        Route(
            "https",
            f"{nurls[0].host}:{nurls[0].port}",
            partial(_open_gbs, reactor, known, nurls, beside, options),
        )
        for nurls in by_owner.values()
    ]
    if furl is not None:
        opens = partial(_open_foolscap, reactor, known.identity, furl, options)
        routes.append(Route("foolscap", furl.address, lambda told: opens()))
    peer = _peer_over(reactor, known.identity, routes, windows)
    peer.connects_slowly = not policy.is_direct_to(*nurls[0].place)
    return peer


def _reachable_nurls(known: KnownServer, policy: ConnectionPolicy) -> list[Nurl]:
    """
    Return the NURLs to use; none if no NURL is reachable but there is a fURL, or if only the fURL avoids Tor.

    Raises:
        ValueError: no address of the server can be used.
    """
    all_nurls = () if known.nurl is None else (known.nurl, *known.other_nurls)
    try:
        places = server_address.reachable([each.place for each in all_nurls], policy)
    except ValueError:
        if known.furl is None:
            raise
        return []
    through_tor = all(place.through_tor for place in places)
    if through_tor and policy.is_direct and _is_direct(known.furl, policy):
        return []  # use the fURL, which needs no Tor
    return [each for place in dict.fromkeys(places) for each in all_nurls if each.place == place]


def _is_direct(furl: Furl | None, policy: ConnectionPolicy) -> bool:
    """
    Return whether the policy permits a direct connection to an address of a fURL; False if the fURL is None.
    """
    places = [server_address.place_of(hint) for hint in ([] if furl is None else furl.hints)]
    return any(place is not None and policy.is_direct_to(*place) for place in places)


def _reachable_furl(
    known: KnownServer, policy: ConnectionPolicy, nurls: Sequence[Nurl]
) -> Furl | None:
    """
    Return the fURL with the hints to use; None if there is no usable fURL, or if only the NURLs are reached
    without Tor.

    Args:
        nurls: the NURLs that are used.

    Raises:
        ValueError: neither the fURL nor a NURL can be used.
    """
    if known.furl is None:
        return None
    without_tor = policy.is_direct and any(not each.leads_through_tor for each in nurls)
    if without_tor and not _is_direct(known.furl, policy):
        return None
    try:
        return known.furl.reachable(policy)
    except ValueError:
        if not nurls:
            raise
        return None


def _peer_over(
    reactor: IReactorTime, identity: ServerIdentity, routes: Sequence[Route], windows: Windows
) -> Peer:
    """Return a peer for the only route, or for several routes: HTTPS if it works, else Foolscap."""
    first = routes[0]

    def chosen(route: Route) -> None:
        peer.protocol, peer.address = route.protocol, route.address

    gbs: Any = (
        first.open(lambda usable: None)
        if len(routes) == 1
        else FailoverServer(identity, routes, reactor, chosen)
    )
    pipeline = windows.pipeline(reactor, lambda: gbs.round_trip_s)
    peer = Peer(gbs, pipeline, first.protocol, first.address)
    return peer


def _open_gbs(
    reactor: IReactorTime,
    known: KnownServer,
    nurls: Sequence[Nurl],
    furl: Furl | None,
    options: ConnectionOptions,
    told: Callable[[bool], None],
) -> GbsServer:
    """Return a server that is reached over HTTPS, by NURLs with the same key and secret."""
    from pipegrid.transport.gbs.client import GbsServer, endpoints_for_all
    from pipegrid.transport.gbs.requests import GbsSettings

    settings, policy = GbsSettings(), options.policy
    if not policy.is_direct_to(*nurls[0].place):
        settings = settings._replace(connect_timeout_s=PROXY_CONNECT_S)
    identity = known.identity
    endpoints = endpoints_for_all(
        reactor, nurls, identity.nickname, policy, options.throttle, options.ahead, told
    )
    beside = None
    if furl is not None:
        beside = partial(_open_foolscap, reactor, identity, furl, options, nurls[0])
    limits = options.bundle_limits or BundleLimits(())
    server = GbsServer(
        identity,
        nurls[0],
        endpoints,
        reactor,
        settings,
        bundle_bytes=known.bundle_bytes or limits.of(identity.server_id),
        open_beside=beside,
    )
    if not known.bundle_bytes:
        limits.note_at_end(identity.server_id, lambda: server.bundle_bytes)
    return server


def _open_foolscap(
    reactor: IReactorTime,
    identity: ServerIdentity,
    address: Furl,
    options: ConnectionOptions,
    beside: Nurl | None = None,
) -> FoolscapServer:
    """
    Return a server that is reached over Foolscap; if ``beside`` is given, the server's key must have the hash
    in that NURL.
    """
    from pipegrid.transport.foolscap.client import FoolscapServer, FoolscapSettings
    from pipegrid.transport.foolscap.link import TubConnector

    settings = FoolscapSettings(close_behind=beside is None)
    policy = options.policy
    if not _is_direct(address, policy):
        settings = attrs.evolve(settings, connect_timeout_s=PROXY_CONNECT_S)
    pin = None if beside is None else beside.spki_hash
    try:
        return FoolscapServer(
            identity, TubConnector(address, policy, options.throttle, pin), reactor, settings
        )
    except UsageError as error:
        raise ValueError(str(error)) from None
