"""TCP connections to a host that is given by name or by address."""

from __future__ import annotations

from typing import Any

from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.defer import Deferred
from twisted.internet.error import NoProtocol
from twisted.internet.interfaces import (
    IConnector,
    IProtocol,
    IProtocolFactory,
    IReactorTCP,
    IStreamClientEndpoint,
)
from twisted.internet.protocol import ClientFactory, connectionDone
from twisted.internet.protocol import Protocol as TwistedProtocol
from twisted.python.failure import Failure
from zope.interface import implementer

# A name needs Twisted's ``HostnameEndpoint``, which looks it up and tries the addresses. Its module
# imports plugins, archives and processes, a tenth of what a short command imports; an address does not
# need it.

TIMEOUT_S = 30
"""As for Twisted's endpoints; a caller with a shorter time limit cancels."""


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
    TCP to an IPv4 or IPv6 address.

    Args:
        reactor: establishes the connection.
    """

    def __init__(self, reactor: IReactorTCP, host: str, port: int) -> None:
        self._reactor = reactor
        self._host = host
        self._port = port

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """Connect; fires with the protocol once it has its transport. Can be cancelled."""
        attempt = _Attempt(protocolFactory)
        attempt.connector = self._reactor.connectTCP(self._host, self._port, attempt, TIMEOUT_S)
        return attempt.made


class _Attempt(ClientFactory):
    """One connection attempt; isolates the protocol's factory from connection events."""

    noisy = False

    def __init__(self, factory: IProtocolFactory) -> None:
        self.connector: IConnector | None = None
        self.made: Deferred[IProtocol] = Deferred(self._cancelled)
        self._factory = factory

    def buildProtocol(self, addr: Any) -> TwistedProtocol | None:
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


class _Introduction(TwistedProtocol):
    """
    Gives a new transport its protocol, and fires ``made`` afterwards.

    Objects between the two, such as a wrapper that counts bytes, may continue to call this protocol,
    which forwards the calls.
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
