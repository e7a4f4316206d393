"""
TCP to any host under a ``ConnectionPolicy``: directly, by name or by address, or through a SOCKS5 proxy (RFC
1928, 1929).

A SOCKS5 proxy gets names unresolved and looks them up itself: this machine sends no DNS query.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
from typing import Any

from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import NoProtocol
from twisted.internet.interfaces import (
    IConnector,
    IProtocol,
    IProtocolFactory,
    IReactorTCP,
    IStreamClientEndpoint,
)
from twisted.internet.protocol import ClientFactory, Factory, Protocol, connectionDone
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.reactor.connection_policy import (
    ConnectionPolicy,
    DirectWay,
    ProxyAddress,
    ProxyWay,
    RefusedConnection,
    RefusedWay,
)

# Only a name needs Twisted's ``HostnameEndpoint``, which looks up the name and tries its addresses. The
# module of that class imports plugins, archives and processes: a tenth of what a short command imports.

TIMEOUT_S = 30
"""The time limit of a connection attempt, as in Twisted's endpoints; callers with a shorter limit cancel."""


def endpoint_for(reactor: Any, host: str, port: int) -> IStreamClientEndpoint:
    """Return an endpoint for a host's name or address."""
    if isIPAddress(host) or isIPv6Address(host):
        return AddressEndpoint(reactor, host, port)
    from twisted.internet.endpoints import HostnameEndpoint

    endpoint: IStreamClientEndpoint = HostnameEndpoint(reactor, host, port)
    return endpoint


@implementer(IStreamClientEndpoint)
class AddressEndpoint:
    """
    An endpoint for TCP to an IPv4 or IPv6 address.

    Args:
        reactor: establishes the connection.
    """

    def __init__(self, reactor: IReactorTCP, host: str, port: int) -> None:
        self._reactor = reactor
        self._host = host
        self._port = port

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """Connect; fires with the protocol after its ``makeConnection``. The Deferred can be cancelled."""
        attempt = _Attempt(protocolFactory)
        attempt.connector = self._reactor.connectTCP(self._host, self._port, attempt, TIMEOUT_S)
        return attempt.made


class _Attempt(ClientFactory):
    """One connection attempt; does not pass its events to the protocol's factory."""

    noisy = False

    def __init__(self, factory: IProtocolFactory) -> None:
        self.connector: IConnector | None = None
        self.made: Deferred[IProtocol] = Deferred(self._cancelled)
        self._factory = factory

    def buildProtocol(self, addr: Any) -> Protocol | None:
        protocol: Any = self._factory.buildProtocol(addr)
        if protocol is None:
            self.made.errback(NoProtocol())
            return None
        return _Introduction(protocol, self.made)

    def clientConnectionFailed(self, connector: IConnector, reason: Failure) -> None:
        if not self.made.called:
            self.made.errback(reason)

    def _cancelled(self, _made: object) -> None:
        assert self.connector is not None
        self.connector.stopConnecting()


class _Introduction(Protocol):
    """
    Gives a new transport its protocol, then fires ``made``.

    Objects between transport and protocol, such as a wrapper that counts bytes, may continue to call this
    object, which forwards their calls.
    """

    def __init__(self, protocol: Any, made: Deferred[IProtocol]) -> None:
        self._protocol = protocol
        self._made = made

    def makeConnection(self, transport: Any) -> None:
        transport.protocol = self._protocol
        self._protocol.makeConnection(transport)
        if not self._made.called:
            self._made.callback(self._protocol)

    def dataReceived(self, data: bytes) -> None:
        self._protocol.dataReceived(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._protocol.connectionLost(reason)


_VERSION, _NO_AUTHENTICATION, _USER_PASSWORD, _CONNECT = 5, 0, 2, 1
_IPV4, _NAME, _IPV6 = 1, 3, 4
_PASSWORD_VERSION = 1
_LONGEST_NAME = 255
_REPLIES = {
    1: "cannot connect",
    2: "does not permit the connection",
    3: "cannot reach the network",
    4: "cannot reach the host",
    5: "finds no server at that port",
    6: "got no answer in time",
    7: "does not make connections",
    8: "does not support that kind of address",
    # The following codes are Tor's extension (proposal 304).
    0xF0: "cannot find that onion service",
    0xF1: "cannot use the descriptor of that onion service",
    0xF2: "cannot reach that onion service",
    0xF3: "cannot reach that onion service",
    0xF4: "needs a key for that onion service",
    0xF5: "has a wrong key for that onion service",
    0xF6: "finds that onion address invalid",
    0xF7: "got no answer of that onion service in time",
}

_SALT = os.urandom(16)
"""A random value of this process, so that the isolating user names for one host differ between runs."""


class ProxyError(ConnectionError):
    """A proxy cannot be reached, or cannot connect to the host."""


class SocksTunnel(Protocol):
    """
    One connection to a SOCKS5 proxy.

    Args:
        factory: builds the protocol that gets the connection when the proxy has connected to the host.

    Attributes:
        opened: fires with that protocol when the proxy has connected, or fails with ``ProxyError``.
    """

    transport: Any

    def __init__(
        self,
        factory: IProtocolFactory,
        host: str,
        port: int,
        proxy: ProxyWay,
    ) -> None:
        self.opened: Deferred[IProtocol] = Deferred(lambda _: None)
        self._factory = factory
        self._proxy = proxy
        self._target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._request = _connect_request(host, port)
        self._credentials = _credentials(proxy, self._target)
        self._received = b""
        self._next = self._read_method
        self._inner: Any = None
        self._over = False

    def connectionMade(self) -> None:
        methods = b"" if self._proxy.isolates else bytes([_NO_AUTHENTICATION])
        methods += b"" if self._credentials is None else bytes([_USER_PASSWORD])
        self.transport.write(bytes([_VERSION, len(methods)]) + methods)

    def dataReceived(self, data: bytes) -> None:
        if self._inner is not None:
            self._inner.dataReceived(data)
            return
        self._received += data  # no bound needed: a reply has at most 262 bytes
        while not self._over and self._inner is None and self._next():
            pass

    def _read_method(self) -> bool:
        reply = self._take(2)
        if reply is None:
            return False
        if reply[0] != _VERSION:
            self._fail("does not speak SOCKS5")
        elif reply[1] == _NO_AUTHENTICATION and not self._proxy.isolates:
            self._ask()
        elif reply[1] == _USER_PASSWORD and self._credentials is not None:
            name, password = self._credentials
            self.transport.write(
                bytes([_PASSWORD_VERSION, len(name)]) + name + bytes([len(password)]) + password
            )
            self._next = self._read_login
        elif self._proxy.isolates:
            self._fail("takes no user names, which keep connections to different hosts apart")
        else:
            self._fail("wants another user name and password")
        return True

    def _read_login(self) -> bool:
        reply = self._take(2)
        if reply is None:
            return False
        if reply[1] != 0:
            self._fail("does not accept the user name and password")
        else:
            self._ask()
        return True

    def _ask(self) -> None:
        self._next = self._read_reply
        self.transport.write(self._request)

    def _read_reply(self) -> bool:
        head = self._received[:5]
        if len(head) < 2 or (head[0] == _VERSION and head[1] == 0 and len(head) < 5):
            return False
        if head[0] != _VERSION:
            self._fail("does not speak SOCKS5")
            return True
        if head[1] != 0:
            self._fail(_REPLIES.get(head[1], f"answers with error {head[1]}"))
            return True
        address_bytes = {_IPV4: 4, _IPV6: 16, _NAME: 1 + head[4]}.get(head[3])
        if address_bytes is None:
            self._fail("does not speak SOCKS5")
            return True
        if self._take(4 + address_bytes + 2) is None:
            return False
        self._open()
        return True

    def _open(self) -> None:
        transport = self.transport
        inner: Any = self._factory.buildProtocol(transport.getPeer())
        if inner is None:
            self._fail("connects, but the connection is not wanted any more")
            return
        self._inner = inner
        rest, self._received = self._received, b""
        if getattr(transport, "protocol", None) is self:
            transport.protocol = inner  # used by code that starts TLS later
        inner.makeConnection(transport)
        if rest:
            inner.dataReceived(rest)
        self.opened.callback(inner)

    def _take(self, size: int) -> bytes | None:
        """Remove and return that many received bytes; None if fewer have arrived."""
        if len(self._received) < size:
            return None
        taken, self._received = self._received[:size], self._received[size:]
        return taken

    def _fail(self, what: str) -> None:
        if self._over:
            return
        self.give_up()
        self.opened.errback(ProxyError(f"{self._proxy.name} {what} ({self._target})"))

    def give_up(self) -> None:
        """Abort the connection, unless the inner protocol has it already; this does not fire ``opened``."""
        self._over = True
        if self.transport is not None and self._inner is None:
            self.transport.abortConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self._inner is not None:
            self._inner.connectionLost(reason)
        else:
            self._fail("closed the connection before it was made")


class _Once(Factory):
    """A factory that gives one existing protocol to the single connection that is made."""

    noisy = False

    def __init__(self, tunnel: SocksTunnel) -> None:
        self._tunnel = tunnel

    def buildProtocol(self, addr: Any) -> SocksTunnel:
        return self._tunnel


def _connect_request(host: str, port: int) -> bytes:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            name = host.encode("ascii")
        except UnicodeEncodeError:
            name = host.encode("idna")
        if not 1 <= len(name) <= _LONGEST_NAME:
            raise RefusedConnection(f"the host name {host[:60]!r} is too long") from None
        where = bytes([_NAME, len(name)]) + name
    else:
        where = bytes([_IPV4 if address.version == 4 else _IPV6]) + address.packed
    return bytes([_VERSION, _CONNECT, 0]) + where + port.to_bytes(2, "big")


def _credentials(proxy: ProxyWay, target: str) -> tuple[bytes, bytes] | None:
    """
    Return user name and password: the configured ones, or a pair that differs for each target; None if none
    is needed.
    """
    if proxy.username:
        return proxy.username.encode("utf-8")[:255], proxy.password.encode("utf-8")[:255]
    if not proxy.isolates:
        return None
    digest = hashlib.sha256(_SALT + target.encode("utf-8")).hexdigest()
    return b"pipegrid", digest[:32].encode("ascii")


@implementer(IStreamClientEndpoint)
class SocksEndpoint:
    """
    An endpoint for TCP to a host through a SOCKS5 proxy.

    Args:
        reactor: makes the connection to the proxy.
        host: a name or an address; the proxy looks up names.
    """

    def __init__(self, reactor: Any, proxy: ProxyWay, host: str, port: int) -> None:
        self._reactor = reactor
        self._proxy = proxy
        self._host = host
        self._port = port

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """
        Connect; fires with the protocol when the proxy has connected to the host. The Deferred can be
        cancelled.

        Fails with ``ProxyError`` if the proxy cannot be reached, or cannot connect to the host.
        """
        return Deferred.fromCoroutine(self._connect(protocolFactory))

    async def _connect(self, factory: IProtocolFactory) -> IProtocol:
        proxy = self._proxy
        addresses = proxy.addresses
        if not addresses and proxy.find is not None:
            addresses = await proxy.find(self._reactor)
        why = ""
        for address in addresses:
            tunnel = SocksTunnel(factory, self._host, self._port, proxy)
            outer = _Once(tunnel)
            try:
                await proxy_endpoint(self._reactor, address).connect(outer)
            except CancelledError:
                tunnel.give_up()
                raise
            except Exception as error:
                why = why or str(error).rstrip(".")
                continue
            try:
                return await tunnel.opened
            except CancelledError:
                tunnel.give_up()
                raise
        shown = " or ".join(map(str, addresses)) or "any address"
        raise ProxyError(
            f"{proxy.name} cannot be reached at {shown} ({why or 'no address is known'}); is it running?"
        )


def proxy_endpoint(reactor: Any, address: ProxyAddress) -> IStreamClientEndpoint:
    """Return an endpoint that connects to the proxy itself."""
    if not address.path:
        return AddressEndpoint(reactor, address.host, address.port)
    from twisted.internet.endpoints import UNIXClientEndpoint

    endpoint: IStreamClientEndpoint = UNIXClientEndpoint(reactor, address.path, TIMEOUT_S)
    return endpoint


def endpoint_through(
    policy: ConnectionPolicy, reactor: Any, host: str, port: int, through_tor: bool = False
) -> IStreamClientEndpoint:
    """
    Return an endpoint for a host that uses the way which the policy permits.

    Args:
        host: a name or an address.
        through_tor: see ``ConnectionPolicy.way_to``.

    Raises:
        RefusedConnection: the policy permits no way to the host.
    """
    way = policy.way_to(host, through_tor)
    if isinstance(way, DirectWay):
        return endpoint_for(reactor, host, port)
    if isinstance(way, RefusedWay):
        raise RefusedConnection(f"no connection to {host}:{port} is made: {way.reason}")
    return SocksEndpoint(reactor, way, host, port)
