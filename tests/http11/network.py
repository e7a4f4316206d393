"""A network in memory: the test accepts connections and plays every server."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred, fail
from twisted.internet.interfaces import IProtocol, IStreamClientEndpoint
from twisted.internet.task import Clock
from twisted.web.client import URI
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

from tests.http11.wire import Wire, ok

_REQUEST = re.compile(rb"([A-Z]+) (\S+) HTTP/1.1\r\n(?:[^\r\n]+\r\n)*\r\n")
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)


class ServerSide(Wire):
    """One connection, seen from the server."""

    def __init__(self) -> None:
        super().__init__()
        self.is_lost = False

    def take_requests(self) -> list[bytes]:
        """The requests that have arrived completely since the last call, as method and target."""
        data: bytes = self.value()
        found = []
        while match := _REQUEST.match(data):
            length = _LENGTH.search(match.group())
            end = match.end() + (int(length.group(1)) if length else 0)
            if len(data) < end:
                break
            found.append(match.group(1) + b" " + match.group(2))
            data = data[end:]
        self.clear()
        self.io.write(data)
        return found

    def answer(self, data: bytes) -> None:
        """Send to the client."""
        if not self.is_lost:
            self.protocol.dataReceived(data)

    def lose(self, reason: Exception | None = None) -> None:
        """End the connection."""
        if not self.is_lost:
            self.is_lost = True
            super().lose(reason)


@implementer(IAgentEndpointFactory, IStreamClientEndpoint)
class Network:
    """
    Every endpoint of it leads to the test.

    Attributes:
        connections: all that were accepted, oldest first.
        attempts: those that wait for `accept`; empty as long as `auto_accept`.
        refuse: fail attempts with this.
    """

    def __init__(self, auto_accept: bool = True) -> None:
        self.clock = Clock()
        self.auto_accept = auto_accept
        self.connections: list[ServerSide] = []
        self.attempts: list[tuple[Any, Deferred[IProtocol]]] = []
        self.refuse: Exception | None = None
        self.uris: list[bytes] = []

    def endpointForURI(self, uri: URI) -> Network:
        self.uris.append(uri.toBytes())
        return self

    def connect(self, protocolFactory: Any) -> Deferred[IProtocol]:
        if self.refuse is not None:
            return fail(self.refuse)
        connected: Deferred[IProtocol] = Deferred()
        self.attempts.append((protocolFactory, connected))
        if self.auto_accept:
            self.accept()
        return connected

    def accept(self) -> ServerSide:
        """Accept the oldest attempt."""
        factory, connected = self.attempts.pop(0)
        side = ServerSide()
        protocol = factory.buildProtocol(None)
        side.protocol = protocol
        self.connections.append(side)
        protocol.makeConnection(side)
        connected.callback(protocol)
        return side

    def turn(self) -> None:
        """End this turn of the reactor; connections the client dropped are gone in the next."""
        self.clock.advance(0)
        for side in self.connections:
            if side.disconnecting:
                side.lose()
        self.clock.advance(0)

    def live(self) -> list[ServerSide]:
        """The connections that are up."""
        return [side for side in self.connections if not side.is_lost]

    def serve(self, handle: Callable[[bytes], bytes] | None = None, turns: int = 50) -> None:
        """Answer all requests on all connections until nothing happens any more."""
        handle = handle or (lambda request: ok(request))
        for _ in range(turns):
            self.turn()
            requests = [(side, side.take_requests()) for side in self.live()]
            if not any(found for _, found in requests):
                return
            for side, found in requests:
                side.answer(b"".join(map(handle, found)))
