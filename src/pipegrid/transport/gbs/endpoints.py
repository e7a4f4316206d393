"""The way to a server over HTTPS: TCP, and TLS to the owner of its NURL's key and nobody else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from twisted.internet.interfaces import IStreamClientEndpoint

from pipegrid.errors import UsageError
from pipegrid.http11.dialer import Alternatives
from pipegrid.http11.pinned import pin_endpoint
from pipegrid.reactor.clientcontext import http_context
from pipegrid.reactor.connecting import endpoint_for
from pipegrid.wire.nurl import Nurl

if TYPE_CHECKING:
    from pipegrid.reactor.ahead import Ahead
    from pipegrid.transport.throttled import Throttle


def endpoints_for_all(
    reactor: Any,
    nurls: Sequence[Nurl],
    server: str,
    throttle: Throttle | None = None,
    ahead: Ahead | None = None,
) -> Callable[[], IStreamClientEndpoint]:
    """Return the same for a server with several NURLs: all are tried, the first one first."""
    ways = [endpoints_for(reactor, each, server, throttle, ahead) for each in nurls]
    return ways[0] if len(ways) == 1 else Alternatives(ways)


def endpoints_for(
    reactor: Any,
    nurl: Nurl,
    server: str,
    throttle: Throttle | None = None,
    ahead: Ahead | None = None,
) -> Callable[[], IStreamClientEndpoint]:
    """
    Return what makes endpoints to the owner of a NURL's key: TCP, and TLS pinned to that key.

    Args:
        ahead: has connections that may be made already; they are not used where there is a throttle.

    Raises:
        UsageError: the way leads through Tor.
    """
    if nurl.leads_through_tor:
        raise UsageError(f"{server} is reached through Tor only, which is not supported yet")

    adopt = None
    if ahead is not None and throttle is None:
        from pipegrid.reactor.adopting import AdoptingEndpoint

        adopt = partial(AdoptingEndpoint, reactor, ahead, (nurl.host, nurl.port), http_context())

    def make() -> IStreamClientEndpoint:
        endpoint = endpoint_for(reactor, nurl.host, nurl.port)
        if throttle is not None:
            endpoint = throttle.endpoint(endpoint)
        return pin_endpoint(endpoint, nurl.spki_hash, server, adopt)

    return make
