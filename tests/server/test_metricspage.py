"""The page for Prometheus gives strangers nothing to fill: no disk, no memory, no descriptors, no time."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.server import metrics
from pipegrid.server.metrics import (
    MAX_CONNECTIONS,
    MAX_HEAD_BYTES,
    TIMEOUT_S,
    MetricsConnection,
    MetricsFactory,
)

ASKS = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n"


class Transport(StringTransport):
    """Loses its connection as a socket does."""

    aborted = False

    def __init__(self, protocol: MetricsConnection) -> None:
        super().__init__()
        self.protocol = protocol

    def abortConnection(self) -> None:
        """Have the protocol told."""
        self.aborted = True
        self.protocol.connectionLost()


class LateTransport(Transport):
    """Loses its connection in the reactor's next turn, as Twisted's does."""

    is_closed = False

    def abortConnection(self) -> None:
        """Note it."""
        self.aborted = True

    def turn(self) -> None:
        """The next turn has come."""
        if self.aborted and not self.is_closed:
            self.is_closed = True
            self.protocol.connectionLost()


class MetricsPageTests(SynchronousTestCase):
    """One factory on a clock of its own, with a page that counts how often it was made."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.made = 0
        self.factory = MetricsFactory(self.clock, self.render)

    def render(self) -> bytes:
        self.made += 1
        return b"pipegrid_looks %d\n" % self.made

    def connect(self) -> tuple[MetricsConnection, Transport]:
        connection = self.factory.buildProtocol(None)
        assert connection is not None
        transport = Transport(connection)
        connection.makeConnection(transport)
        return connection, transport

    def ask(self, request: bytes) -> bytes:
        """Return the answer, by pieces of a byte; the connection ends with it."""
        connection, transport = self.connect()
        for at in range(len(request)):
            connection.dataReceived(request[at : at + 1])
        self.assertTrue(transport.disconnecting)
        connection.connectionLost()
        self.assertEqual(self.clock.getDelayedCalls(), [])
        return bytes(transport.value())

    def test_page(self) -> None:
        """It is given, whole, with its length and type; a query behind its name means nothing."""
        for url in (b"/metrics", b"/metrics?name[]=x"):
            answer = self.ask(ASKS.replace(b"/metrics", url))
            head, _, page = answer.partition(b"\r\n\r\n")
            self.assertEqual(page, b"pipegrid_looks 1\n")
            self.assertTrue(head.startswith(b"HTTP/1.1 200 OK\r\nConnection: close\r\n"), head)
            self.assertIn(b"\r\nContent-Length: 17\r\n", head)
            self.assertIn(b"\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8", head)

    def test_head(self) -> None:
        """HEAD is told of a page, and not given it."""
        answer = self.ask(ASKS.replace(b"GET", b"HEAD"))
        self.assertIn(b"\r\nContent-Length: 17\r\n", answer)
        self.assertTrue(answer.endswith(b"\r\n\r\n"))

    def test_refusals(self) -> None:
        """What is no such request is told so, without looking at what is counted."""
        for request, status in (
            (ASKS.replace(b"/metrics", b"/"), b"404"),
            (ASKS.replace(b"GET", b"POST"), b"405"),
            (ASKS.replace(b"HTTP/1.1", b"HTTP/2.0"), b"400"),
            (b"\x16\x03\x01\r\n\r\n", b"400"),
            (b"GET /metrics HTTP/1.1\r\nx: " + b"y" * MAX_HEAD_BYTES, b"431"),
        ):
            self.assertEqual(self.ask(request).split()[1], status, request[:40])
        self.assertEqual(self.made, 0)

    def test_body(self) -> None:
        """What stands behind a head is not kept."""
        connection, transport = self.connect()
        head = b"POST /metrics HTTP/1.1\r\nHost: here\r\nContent-Length: 100000000000\r\n\r\n"
        connection.dataReceived(head + b"x" * 100_000)
        self.assertTrue(transport.disconnecting)
        answer = transport.value()
        connection.dataReceived(ASKS + b"x" * 100_000)
        self.assertEqual(transport.value(), answer)
        self.assertLessEqual(len(connection._head), MAX_HEAD_BYTES + 1)
        connection.connectionLost()

    def test_slow(self) -> None:
        """Ten seconds are for all of it: the head, and until the answer has left."""
        for said in (b"", ASKS[:-2], ASKS):
            connection, transport = self.connect()
            connection.dataReceived(said)
            self.clock.advance(TIMEOUT_S - 1)
            connection.dataReceived(b"x")
            self.assertFalse(transport.aborted)
            self.clock.advance(1)
            self.assertTrue(transport.aborted)
        self.assertEqual(self.factory.connections, {})

    def test_crowd(self) -> None:
        """Of more than sixteen the oldest goes, and who asks is answered."""
        crowd = [self.connect()[1] for _ in range(MAX_CONNECTIONS)]
        self.assertIn(b"pipegrid_looks", self.ask_amid_crowd())
        self.assertEqual([each.aborted for each in crowd], [True] + [False] * (MAX_CONNECTIONS - 1))
        self.factory.stopFactory()
        self.assertTrue(all(each.aborted for each in crowd))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_bursts(self) -> None:
        """In one turn, in which what is cut keeps its descriptor, a thousand newcomers open twice sixteen."""
        crowd: list[LateTransport] = []
        for burst in range(3):
            refused = 0
            for _ in range(1000):
                connection = self.factory.buildProtocol(None)
                if connection is None:
                    refused += 1
                    continue
                crowd.append(LateTransport(connection))
                connection.makeConnection(crowd[-1])
            is_open = [each for each in crowd if not each.is_closed]
            self.assertEqual(len(is_open), 2 * MAX_CONNECTIONS)
            self.assertEqual(refused, 1000 - (2 if burst == 0 else 1) * MAX_CONNECTIONS)
            for each in crowd:
                each.turn()
            self.assertEqual(sum(not each.is_closed for each in crowd), MAX_CONNECTIONS)
            self.assertEqual(len(self.factory.connections), MAX_CONNECTIONS)

    def ask_amid_crowd(self) -> bytes:
        connection, transport = self.connect()
        connection.dataReceived(ASKS)
        connection.connectionLost()
        return bytes(transport.value())

    def test_flood(self) -> None:
        """The page is made once a second, however many ask."""
        for _ in range(50):
            self.assertIn(b"pipegrid_looks 1\n", self.ask(ASKS))
        self.clock.advance(metrics.KEPT_S)
        self.assertIn(b"pipegrid_looks 2\n", self.ask(ASKS))
