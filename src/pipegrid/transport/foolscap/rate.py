"""
Foolscap connections that share the rate of all others: see ``transport.throttled``.

Foolscap starts TLS on a connection that it has spoken on already (``startTLS``). So the connection that it is
given is the bounded one, and TLS comes to lie between that and Foolscap: every byte counts, as with HTTPS.
"""

from __future__ import annotations

from typing import Any

from foolscap.connections import tcp
from foolscap.ipb import IConnectionHintHandler
from twisted.internet.interfaces import ISSLTransport
from twisted.protocols.tls import TLSMemoryBIOFactory
from zope.interface import alsoProvides, implementer

from pipegrid.transport.throttled import Throttle, Throttled


def limit(tub: Any, throttle: Throttle) -> None:
    """Let all connections that a tub makes from now on share a rate."""
    tub.removeAllConnectionHintHandlers()
    tub.addConnectionHintHandler("tcp", _ThrottledTcp(throttle))


@implementer(IConnectionHintHandler)
class _ThrottledTcp:
    """Connects over TCP, as Foolscap's own does."""

    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle
        self._inner = tcp.default()

    def hint_to_endpoint(self, hint: str, reactor: Any, update_status: Any) -> tuple[Any, str]:
        """Return the endpoint of an address, and its host."""
        endpoint, host = self._inner.hint_to_endpoint(hint, reactor, update_status)
        return self._throttle.endpoint(endpoint, _StartsTls), host

    def describe(self) -> str:
        """What it is, for Foolscap's reports."""
        return "tcp"


class _StartsTls(Throttled):
    """
    A bounded connection on which TLS can be started; what is written goes through it from then on.

    Attributes:
        TLS: whether it was.
    """

    TLS = False

    def startTLS(self, context: Any, normal: bool = True) -> None:
        """Begin, as the client unless ``normal`` is False."""
        nothing: Any = None  # there is no factory to wrap, only a protocol
        factory = TLSMemoryBIOFactory(context, normal, nothing)
        tls: Any = factory.protocol(factory, self.protocol, False)
        self.protocol = tls
        self.getHandle = tls.getHandle
        self.getPeerCertificate = tls.getPeerCertificate
        alsoProvides(self, ISSLTransport)
        self.TLS = True
        tls.makeConnection(_Beneath(self))

    def write(self, data: bytes) -> None:
        """Send it, encrypted if that has begun."""
        if self.TLS:
            self.protocol.write(data)
        else:
            super().write(data)

    def writeSequence(self, data: Any) -> None:
        self.write(b"".join(data))

    def loseConnection(self, *arguments: Any) -> None:
        """Close it behind what waits, with a goodbye."""
        if self.TLS:
            self.protocol.loseConnection()
        else:
            super().loseConnection(*arguments)

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """Somebody writes, and may be asked to pause."""
        if self.TLS:
            self.protocol.registerProducer(producer, streaming)
        else:
            super().registerProducer(producer, streaming)

    def unregisterProducer(self) -> None:
        if self.TLS:
            self.protocol.unregisterProducer()
        else:
            super().unregisterProducer()


class _Beneath:
    """The connection as its TLS sees it: what is written is sent as it is."""

    def __init__(self, connection: _StartsTls) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def write(self, data: bytes) -> None:
        """Send it when it may leave."""
        Throttled.write(self._connection, data)

    def writeSequence(self, data: Any) -> None:
        self.write(b"".join(data))

    def loseConnection(self, *arguments: Any) -> None:
        """Close it behind what waits."""
        Throttled.loseConnection(self._connection, *arguments)

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """TLS writes, and may be asked to pause."""
        Throttled.registerProducer(self._connection, producer, streaming)

    def unregisterProducer(self) -> None:
        Throttled.unregisterProducer(self._connection)
