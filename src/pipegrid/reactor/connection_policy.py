"""
How connections may be made: directly, through a SOCKS5 proxy, through Tor, or not at all.

All code that connects to a server takes a ``ConnectionPolicy``, and asks the policy for the way to each host.
A policy only decides: ``tcp_socks5_endpoints.endpoint_through`` connects. A host without a way is refused; it
is never connected to directly instead.

This module imports neither Twisted nor sockets, since some callers must start fast.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from pipegrid.errors import UsageError


def is_overlay_name(host: str) -> bool:
    """Return whether only Tor or I2P can resolve a name: a DNS query would reveal the name (RFC 7686)."""
    return host.lower().rstrip(".").endswith((".onion", ".i2p"))


class RefusedConnection(UsageError):
    """The settings permit no connection to this host; nothing was sent."""


class ProxyAddress(NamedTuple):
    """
    Where a proxy listens.

    Attributes:
        host: an IPv4 or IPv6 address, never a name: the lookup of a name would bypass the proxy.
        port: 1 to 65535.
        path: of a Unix-domain socket, which replaces host and port.
    """

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


Find = Callable[[Any], Awaitable["tuple[ProxyAddress, ...]"]]
"""A function that takes the reactor and finds out where a proxy listens; it may raise ConnectionError."""


class ProxyWay(NamedTuple):
    """
    A SOCKS5 proxy, which also looks up names.

    Attributes:
        name: the proxy's name in errors, such as ``Tor``.
        addresses: where the proxy may listen; tried in this order.
        isolates: whether each host gets a different user name, so that Tor uses different circuits for
            different hosts.
        username, password: for the proxy; empty if the proxy requires none.
        find: finds the addresses of the proxy, if ``addresses`` is empty.
        starts: whether ``find`` first starts the proxy, which may take longer than the time limit of a
            connection.
    """

    name: str
    addresses: tuple[ProxyAddress, ...]
    isolates: bool = False
    username: str = ""
    password: str = ""
    find: Find | None = None
    starts: bool = False


class DirectWay(NamedTuple):
    """A connection without a proxy; the connection and its DNS queries reveal this machine's address."""


class RefusedWay(NamedTuple):
    """
    No connection is permitted.

    Attributes:
        reason: a clause for the error message.
    """

    reason: str


Way = DirectWay | ProxyWay | RefusedWay

TOR_PORTS = (9050, 9150)
"""The usual SOCKS ports of the Tor service and of Tor Browser."""


def usual_tor() -> ProxyWay:
    """Return the proxy of a Tor on this machine that listens on its usual ports."""
    return ProxyWay("Tor", tuple(ProxyAddress("127.0.0.1", port) for port in TOR_PORTS), True)


class ConnectionPolicy(NamedTuple):
    """
    The way to each host.

    Attributes:
        tcp: the way to hosts of the internet.
        tor: the way to onion services, and to hosts whose address asks for Tor.
        hides_address: whether this machine's address must not be revealed (``reveal-IP-address = false``).
    """

    tcp: Way
    tor: Way
    hides_address: bool = False

    @property
    def starting(self) -> Find | None:
        """
        A function that starts a proxy and must be awaited before the first connection; None if no proxy must
        be started.
        """
        for way in (self.tcp, self.tor):
            if isinstance(way, ProxyWay) and way.starts:
                return way.find
        return None

    @property
    def is_direct(self) -> bool:
        """Whether hosts of the internet are connected to without a proxy."""
        return isinstance(self.tcp, DirectWay)

    def way_to(self, host: str, through_tor: bool = False) -> Way:
        """
        Return the way to a host; a ``RefusedWay`` if no connection is permitted.

        Args:
            host: a name or an address.
            through_tor: whether the host's address asks for Tor, as a ``tor:`` hint does.
        """
        name = host.lower().rstrip(".")
        if name.endswith(".i2p"):
            return RefusedWay("it is an I2P service, and I2P is not supported")
        # Only Tor resolves onion names; a DNS query would reveal the name (RFC 7686).
        if through_tor or name.endswith(".onion"):
            return RefusedWay("Tor is not used") if isinstance(self.tor, DirectWay) else self.tor
        return self.tcp

    def is_direct_to(self, host: str, _port: int = 0, through_tor: bool = False) -> bool:
        """Return whether connections to a host use no proxy."""
        return isinstance(self.way_to(host, through_tor), DirectWay)

    def permits(self, host: str, through_tor: bool = False) -> bool:
        """Return whether there is a way to a host."""
        return not isinstance(self.way_to(host, through_tor), RefusedWay)


DIRECT_CONNECTIONS = ConnectionPolicy(DirectWay(), usual_tor())
"""The policy without settings: as in Tahoe-LAFS, a Tor on its usual ports reaches onion services."""

NO_CONNECTIONS = ConnectionPolicy(
    RefusedWay("no connections are made"), RefusedWay("no connections are made")
)
"""The policy for work on this machine alone."""

_ENDPOINT = re.compile(
    r"(?:tcp:)?(?:host=)?(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(?:port=)?(?P<port>[0-9]{1,5})\Z"
)
_PORT_ONLY = re.compile(r"(?:tcp:)?(?:port=)?(?P<port>[0-9]{1,5})\Z")
_UNIX = re.compile(r"unix:(?:path=)?(?P<path>/[^:\0]*)\Z")


def parse_proxy_address(text: str) -> ProxyAddress:
    """
    Return where a proxy listens: ``tcp:HOST:PORT``, ``HOST:PORT``, ``PORT`` on this machine, or
    ``unix:/PATH``.

    Raises:
        ValueError: the text has none of these forms, or its host is a name; the message is a clause for an
            error.
    """
    if (found := _UNIX.match(text)) is not None:
        return ProxyAddress("", 0, found["path"])
    match = _PORT_ONLY.match(text) or _ENDPOINT.match(text)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise ValueError("it must be like tcp:127.0.0.1:9050, or unix:/run/tor/socks")
    host = (match.groupdict().get("host") or "127.0.0.1").removeprefix("[").removesuffix("]")
    host = "127.0.0.1" if host == "localhost" else host
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(
            "its host must be an address, not a name, since looking up a name bypasses the proxy"
        ) from None
    return ProxyAddress(host, int(match["port"]))
