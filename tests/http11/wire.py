"""A connection whose other end is the test: what it wrote, and what it is told."""

from __future__ import annotations

from typing import Any

from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IPushProducer, IReactorTime
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure

from pipegrid.http11.connection import PipelinedConnection
from pipegrid.http11.connection_limits import Limits
from pipegrid.http11.connection_loss import Owner
from pipegrid.http11.exchange import RawRequest


class Wire(StringTransport):
    """
    A transport in memory, with the test at its far end.

    Attributes:
        segments: what each call wrote.
    """

    def __init__(self) -> None:
        super().__init__()
        self.segments: list[bytes] = []
        self.aborted = False
        self.protocol: Any = None

    def write(self, data: bytes) -> None:
        super().write(data)
        self.segments.append(data)

    def writeSequence(self, data: Any) -> None:
        joined = b"".join(data)
        super().writeSequence([joined])
        self.segments.append(joined)

    def abortConnection(self) -> None:
        self.aborted = True
        super().abortConnection()

    def lose(self, reason: Exception | None = None) -> None:
        """The connection is gone."""
        self.connected = False
        self.protocol.connectionLost(Failure(reason or ConnectionDone()))

    @property
    def send_valve(self) -> IPushProducer:
        """What a full transport pauses."""
        assert self.producer is not None
        return self.producer  # type: ignore[no-any-return]


class ConnectionFixture:
    """One connection with its clock and wire."""

    def __init__(
        self, limits: Limits | None = None, owner: Owner[PipelinedConnection] | None = None
    ) -> None:
        self.clock = Clock()
        self.wire = Wire()
        clock: IReactorTime = self.clock
        self.connection = PipelinedConnection(clock, limits, "server.test:80", owner)
        self.wire.protocol = self.connection
        self.connection.makeConnection(self.wire)

    def turn(self) -> None:
        """End this turn of the reactor."""
        self.clock.advance(0)
        self.connection._check_invariants()

    def receive(self, data: bytes) -> None:
        """The server sends."""
        self.connection.dataReceived(data)
        self.connection._check_invariants()

    def sent(self) -> bytes:
        """What was written since the last call."""
        self.turn()
        data: bytes = self.wire.value()
        self.wire.clear()
        self.wire.segments.clear()
        return data


def get(path: str = "/", **options: Any) -> RawRequest:
    """A GET for a small answer."""
    options.setdefault("expected_response_bytes", 300)
    return RawRequest(b"GET %s HTTP/1.1\r\nHost: h\r\n\r\n" % path.encode(), **options)


def post(path: str = "/", body: bytes = b"data", **options: Any) -> RawRequest:
    """A POST, which must not be repeated."""
    options.setdefault("expected_response_bytes", 300)
    return RawRequest(
        b"POST %s HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)),
        [body],
        **options,
    )


def ok(body: bytes = b"", *headers: bytes, status: bytes = b"200 OK") -> bytes:
    """An answer of known length."""
    lines = b"".join(line + b"\r\n" for line in headers)
    return b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\n\r\n%s" % (status, lines, len(body), body)
