"""
What a port listens with: the first bytes of a connection tell Foolscap from TLS.

    GET /id/            Foolscap, which begins in the clear and goes over to TLS later
    anything else       TLS, and GBS inside

Fewer than 8 bytes within 30 seconds are neither. Whatever was looked at is handed on.

Source: the format reference, storage protocols, section 3.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IAddress, IDelayedCall, IReactorTime
from twisted.internet.protocol import Factory, connectionDone
from twisted.internet.protocol import Protocol as TwistedProtocol
from twisted.python.failure import Failure

if TYPE_CHECKING:
    from twisted.internet.interfaces import IOpenSSLServerConnectionCreator

    from pipegrid.server.gbs.site import GbsServer

FOOLSCAP_BEGINS = b"GET /id/"
PATIENCE_S = 30.0


class FoolscapFactory(Protocol):
    """What makes protocols for Foolscap; ``foolscap_port.FoolscapPort`` is one."""

    def buildProtocol(self, addr: IAddress | None) -> Any:
        """Return a protocol for a connection that asks for Foolscap, or None."""


class FrontFactory(Factory):
    """
    Makes a protocol for each connection that looks at its first bytes.

    Args:
        server: what speaks GBS, inside TLS.
        contexts: for TLS.
        clock: for patience.
        foolscap: what speaks Foolscap; None: nobody does.
    """

    noisy = False

    def __init__(
        self,
        server: GbsServer,
        contexts: IOpenSSLServerConnectionCreator,
        clock: Any,
        foolscap: FoolscapFactory | None = None,
    ) -> None:
        from pipegrid.reactor.tls import BatchingTLSFactory

        self.clock: IReactorTime = clock
        self.connections: set[Front] = set()
        self._server = server
        self._tls = BatchingTLSFactory(contexts, False, server, clock)
        self._foolscap = foolscap
        self._empty: list[Deferred[None]] = []

    def buildProtocol(self, addr: IAddress | None) -> Front | None:
        """Return what will look at the first bytes, unless there are too many connections."""
        if len(self.connections) >= self._server.max_connections:
            self._server.refused += 1
            self.note_hostile(addr, "there are too many connections")
            return None
        return Front(self, addr)

    def choose(self, first_bytes: bytes, addr: IAddress | None) -> TwistedProtocol | None:
        """Return who goes on with a connection that begins like this; None: nobody."""
        if first_bytes.startswith(FOOLSCAP_BEGINS):
            if self._foolscap is None:
                return None
            chosen: TwistedProtocol | None = self._foolscap.buildProtocol(addr)
            return chosen
        inner = self._server.buildProtocol(addr)
        if inner is None:
            return None
        tls: TwistedProtocol = self._tls.protocol(self._tls, inner)
        return tls

    def note_hostile(self, addr: IAddress | None, reason: str) -> None:
        """Write to the log why a client was turned away."""
        self._server.note_hostile(str(getattr(addr, "host", addr)), reason)

    def closed(self, connection: Front) -> None:
        """A connection is gone."""
        self.connections.discard(connection)
        if not self.connections:
            empty, self._empty = self._empty, []
            for waiting in empty:
                waiting.callback(None)

    def stop(self) -> Deferred[None]:
        """Cut whatever is still there; fires when all is gone."""
        if not self.connections:
            return succeed(None)
        waiting: Deferred[None] = Deferred()
        self._empty.append(waiting)
        for connection in list(self.connections):
            connection.abort()
        return waiting


class Front(TwistedProtocol):
    """Looks at the first bytes of one connection, then hands everything on."""

    def __init__(self, factory: FrontFactory, addr: IAddress | None) -> None:
        self._front = factory
        self._addr = addr
        self._seen = b""
        self._inner: TwistedProtocol | None = None
        self._timer: IDelayedCall | None = None
        self._turned_away = False

    def connectionMade(self) -> None:
        """Begin to wait for the first bytes."""
        self._front.connections.add(self)
        self._timer = self._front.clock.callLater(PATIENCE_S, self._waited_too_long)

    def dataReceived(self, data: bytes) -> None:
        """Hand on, once it is known to whom."""
        if self._inner is not None:
            self._inner.dataReceived(data)
            return
        if self._turned_away:
            return
        self._seen += data
        if len(self._seen) >= len(FOOLSCAP_BEGINS):
            self._begin()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Tell whoever it was handed to."""
        self._stop_waiting()
        self._front.closed(self)
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.connectionLost(reason)

    def abort(self) -> None:
        """Cut the connection."""
        transport: Any = self.transport
        transport.abortConnection()

    def _begin(self) -> None:
        self._stop_waiting()
        inner = self._front.choose(self._seen, self._addr)
        if inner is None:
            self._turn_away()
            return
        transport: Any = self.transport
        with suppress(AttributeError, OSError):
            # Answers are short and many, and none should wait for the acknowledgement of the one before.
            transport.setTcpNoDelay(True)
        self._inner = inner
        inner.makeConnection(transport)
        seen, self._seen = self._seen, b""
        inner.dataReceived(seen)

    def _waited_too_long(self) -> None:
        self._timer = None
        self._front.note_hostile(self._addr, "it said nothing for half a minute")
        self._turn_away()

    def _turn_away(self) -> None:
        self._turned_away = True
        self.abort()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
