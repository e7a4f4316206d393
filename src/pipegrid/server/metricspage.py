"""
The page for Prometheus: one place, one small answer a connection, and nothing that a client could make large.

Whoever reaches its port is a stranger, and on a bare port that is every user of the machine. A web server for
all purposes took bodies that nobody had asked for into temporary files, 100 MB a second, until the disk was
full, and as many connections as there were descriptors, which clients of the storage server then lacked. So
here

* only the head of a request is read, 8 KiB at most, and nothing behind it;
* each connection has ten seconds for all of it, and ends with its answer;
* there are sixteen, by ``crowd``'s rules: who comes then is let in, and the oldest goes, but no more than
  sixteen of them in one turn of the reactor, in which their descriptors are not free yet;
* the page is made once a second, however often it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.interfaces import IAddress, IReactorTime
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure

from pipegrid.reactor.alarm import Alarm
from pipegrid.server.crowd import Crowd

PLACE = b"/metrics"
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

MAX_CONNECTIONS = 16
MAX_HEAD_BYTES = 8192
TIMEOUT_S = 10.0
KEPT_S = 1.0
"""So long a page is good for whoever asks next."""

_WORDS = {
    200: b"OK",
    400: b"Bad Request",
    404: b"Not Found",
    405: b"Method Not Allowed",
    431: b"Request Header Fields Too Large",
}


class MetricsFactory(Factory):
    """
    Makes a connection for everybody who asks, and keeps them few.

    Args:
        clock: for timeouts.
        render: makes the page.

    Attributes:
        connections: those that are open, the oldest first.
    """

    noisy = False

    def __init__(self, clock: IReactorTime, render: Callable[[], bytes]) -> None:
        self.clock = clock
        self.connections: dict[MetricsConnection, None] = {}
        # Whoever asks is on this machine, as a rule, or behind one proxy.
        self._crowd: Crowd[MetricsConnection] = Crowd(
            MAX_CONNECTIONS, MAX_CONNECTIONS, max_closing=MAX_CONNECTIONS
        )
        self._render = render
        self._page = b""
        self._made_s: float | None = None

    def buildProtocol(self, addr: IAddress | None) -> MetricsConnection | None:
        """Return what answers one request, or None: so many have just been cut that there is no room."""
        connection = MetricsConnection(self)
        victim = self._crowd.enter(connection, str(getattr(addr, "host", "")))
        if victim is connection:
            return None
        if victim is not None:
            victim.abort()
        return connection

    def stopFactory(self) -> None:
        """Cut all connections: the server ends."""
        for each in list(self.connections):
            each.abort()

    def page(self) -> bytes:
        """Return the page, which may be a second old."""
        now_s = self.clock.seconds()
        if self._made_s is None or not 0 <= now_s - self._made_s < KEPT_S:
            self._page, self._made_s = self._render(), now_s
        return self._page

    def connected(self, connection: MetricsConnection) -> None:
        """Take note of one more."""
        self.connections[connection] = None

    def disconnected(self, connection: MetricsConnection) -> None:
        """It is gone, and its descriptor free."""
        self.connections.pop(connection, None)
        self._crowd.leave(connection)


class MetricsConnection(Protocol):
    """One request, and its answer."""

    def __init__(self, factory: MetricsFactory) -> None:
        self._factory = factory
        self._head = b""
        self._answered = False
        self._alarm = Alarm(factory.clock, self.abort)

    def connectionMade(self) -> None:
        self._alarm.set(TIMEOUT_S)
        self._factory.connected(self)

    def dataReceived(self, data: bytes) -> None:
        """Take part of the head; what is behind it is not looked at."""
        if self._answered:
            return
        self._head += data[: MAX_HEAD_BYTES + 1 - len(self._head)]
        head, end, _ = self._head.partition(b"\r\n\r\n")
        if end or len(self._head) > MAX_HEAD_BYTES:
            self._answered = True
            transport: Any = self.transport
            transport.write(self._answer(head) if end else _answer(431))
            transport.loseConnection()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._alarm.stop()
        self._factory.disconnected(self)

    def quiet_s(self) -> float:
        """Return 0: nobody has to show a secret here, so all are judged by their age."""
        return 0.0

    def abort(self) -> None:
        """Close the connection at once."""
        transport: Any = self.transport
        transport.abortConnection()

    def _answer(self, head: bytes) -> bytes:
        method, url, version = (*head.partition(b"\r\n")[0].split(b" "), b"", b"")[:3]
        if not version.startswith(b"HTTP/1."):
            return _answer(400)
        if url.partition(b"?")[0] != PLACE:
            return _answer(404)
        if method not in (b"GET", b"HEAD"):
            return _answer(405)
        return _answer(200, self._factory.page(), method == b"GET")


def _answer(status: int, page: bytes = b"", with_page: bool = True) -> bytes:
    head = b"HTTP/1.1 %d %s\r\nConnection: close\r\nContent-Length: %d\r\n" % (
        status,
        _WORDS[status],
        len(page),
    )
    if page:
        head += b"Content-Type: %s\r\n" % CONTENT_TYPE
    if status == 405:
        head += b"Allow: GET, HEAD\r\n"
    return head + b"\r\n" + (page if with_page else b"")
