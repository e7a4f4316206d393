"""The HTTP server of the gateway, in virtual time: who is refused, what is bounded, what is left behind."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
from twisted.internet.abstract import FileDescriptor
from twisted.internet.address import IPv4Address
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET

from pipegrid.gateway.body_spool import BodySpool, SpoolSpace
from pipegrid.gateway.gateway_settings import GatewayLimits, GatewaySettings
from pipegrid.gateway.http_response import HttpResponse, WebError, respond
from pipegrid.gateway.http_site import LINGER_S, GatewayChannel, GatewaySite, shown_path
from pipegrid.gateway.root_resource import root_resource
from pipegrid.reactor.tcp_transport import unsent_bytes

LIMITS = GatewayLimits(connections=4, idle_s=100, head_s=10, stalled_s=50, spare_bytes=0)
SECRET = b"URI:DIR2:aaaa:bbbb"


class _Answers(Resource):
    """Answers at once, or when a test says so."""

    isLeaf = True

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.bodies: list[bytes] = []
        self.waiting: list[Deferred[HttpResponse | None]] = []
        self.cancelled = 0
        self.waits = False

    def render(self, request: Any) -> int:
        async def work() -> HttpResponse | None:
            self.bodies.append(request.body.read_at(0, request.body.size))
            request.body.check()
            if not self.waits:
                return HttpResponse("done")
            waiting: Deferred[HttpResponse | None] = Deferred()
            self.waiting.append(waiting)
            try:
                return await waiting
            except CancelledError:
                self.cancelled += 1
                raise

        return respond(request, work(), self.clock)


class _Socket(FileDescriptor):
    """
    A transport of Twisted's, whose reactor is the test.

    Args:
        most_bytes: that it takes at a time.
    """

    connected = 1

    def __init__(self, most_bytes: int) -> None:
        reactor: Any = mock.Mock()
        super().__init__(reactor)
        self._most_bytes = most_bytes
        self.sent = b""
        self.aborted = False

    def writeSomeData(self, data: bytes) -> int:
        part = bytes(data)[: self._most_bytes]
        self.sent += part
        return len(part)

    def abortConnection(self) -> None:
        self.aborted = True

    def write_all(self) -> None:
        """Do what the reactor does until all is sent."""
        while unsent_bytes(self):
            self.doWrite()

    def getPeer(self) -> IPv4Address:
        return IPv4Address("TCP", "127.0.0.1", 1)

    getHost = getPeer


class SiteTestCase(SynchronousTestCase):
    """A site, and clients of it."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.root = _Answers(self.clock)
        self.directory = Path(self.mktemp())
        self.lines: list[str] = []
        settings = GatewaySettings(self.directory, hosts=("files.example",), limits=LIMITS)
        self.site = GatewaySite(
            self.root,
            settings,
            self.clock,
            lambda text, **fields: self.lines.append(text.format(**fields)),
        )

    def connect(self) -> tuple[GatewayChannel, StringTransport]:
        """Return a new connection."""
        channel = self.site.buildProtocol(None)
        transport = StringTransport()
        channel.makeConnection(transport)
        return channel, transport

    def lose(self, channel: GatewayChannel) -> None:
        """Have a client go away."""
        channel.connectionLost(Failure(ConnectionError()))

    def ask(self, *lines: bytes, body: bytes = b"") -> bytes:
        """Send one request on a connection of its own; returns the answer."""
        channel, transport = self.connect()
        channel.dataReceived(b"\r\n".join([*lines, b"", b""]) + body)
        self.lose(channel)
        return bytes(transport.value())

    def status(self, *lines: bytes, body: bytes = b"") -> int:
        """Send one request; returns the status."""
        return int(self.ask(*lines, body=body).split(b" ")[1])


class RefusedTests(SiteTestCase):
    """A hostile page in the same browser can do nothing."""

    def test_hosts(self) -> None:
        """Loopback's names, with a port or without, and those that were configured; no others."""
        for host in (
            b"127.0.0.1",
            b"localhost:3456",
            b"[::1]:3456",
            b"FILES.example",
            b"LocalHost.",
        ):
            self.assertEqual(self.status(b"GET / HTTP/1.1", b"Host: " + host), 200, host)
        self.assertEqual(self.status(b"GET / HTTP/1.0"), 200)
        for host in (
            b"evil.example",
            b"127.0.0.1.evil.example",
            b"127.0.0.1@evil.example",
            b"a b",
            b"",
        ):
            self.assertEqual(self.status(b"GET / HTTP/1.1", b"Host: " + host), 403, host)
        two = (b"Host: 127.0.0.1", b"Host: 127.0.0.1")
        self.assertEqual(self.status(b"GET / HTTP/1.1", *two), 403)

    def test_changes_by_other_sites(self) -> None:
        """No method but GET and HEAD, whatever the page sends; programs send neither header."""
        host = b"Host: 127.0.0.1:3456"
        for method in (b"POST", b"PUT", b"DELETE", b"PATCH"):
            line = method + b" /uri HTTP/1.1"
            for good in (b"http://127.0.0.1:3456", b"https://127.0.0.1:3456"):
                self.assertEqual(self.status(line, host, b"Origin: " + good), 200)
            self.assertEqual(self.status(line, host), 200)
            for bad in (
                b"http://evil.example",
                b"null",
                b"http://127.0.0.1:80",
                b"http://127.0.0.1",
            ):
                self.assertEqual(self.status(line, host, b"Origin: " + bad), 403, bad)
            for site, status in ((b"same-origin", 200), (b"none", 200), (b"cross-site", 403)):
                self.assertEqual(self.status(line, host, b"Sec-Fetch-Site: " + site), status)
            self.assertEqual(self.status(line, host, b"Sec-Fetch-Site: same-site"), 403)
            # What Chromium sends with a form of a page that sends no referrer, and with one of a sandbox.
            null = (line, host, b"Origin: null")
            self.assertEqual(self.status(*null, b"Sec-Fetch-Site: same-origin"), 200)
            self.assertEqual(self.status(*null, b"Sec-Fetch-Site: cross-site"), 403)

    def test_what_other_sites_embed(self) -> None:
        """A link may be followed; nothing is loaded into a page of another site."""
        head = (b"GET /uri/x HTTP/1.1", b"Host: 127.0.0.1", b"Sec-Fetch-Site: cross-site")
        self.assertEqual(self.status(*head, b"Sec-Fetch-Mode: navigate"), 200)
        self.assertEqual(self.status(*head, b"Sec-Fetch-Mode: no-cors"), 403)
        self.assertEqual(self.status(*head, b"Sec-Fetch-Mode: cors"), 403)

    def test_text_in_a_query(self) -> None:
        """It may be of any alphabet, and any bytes: what makes no sense is the resource's to refuse."""
        for query in (b"name=%C3%A9%E2%80%AE", b"%ff=%fe", b"x=%zz", b"a=1&a=2&&;"):
            self.assertEqual(self.status(b"GET /?" + query + b" HTTP/1.1", b"Host: 127.0.0.1"), 200)

    def test_headers(self) -> None:
        """No CORS, whoever asks; every answer says how browsers have to treat it."""
        said = self.ask(
            b"OPTIONS /uri HTTP/1.1",
            b"Host: 127.0.0.1",
            b"Origin: http://evil.example",
            b"Access-Control-Request-Method: PUT",
        ).lower()
        self.assertNotIn(b"access-control", said)
        for status in (200, 403):
            host = b"127.0.0.1" if status == 200 else b"evil.example"
            said = self.ask(b"GET / HTTP/1.1", b"Host: " + host).lower()
            for header in (
                b"x-content-type-options: nosniff",
                b"x-frame-options: deny",
                b"referrer-policy: no-referrer",
                b"content-security-policy: default-src 'self'",
                b"cross-origin-resource-policy: same-origin",
            ):
                self.assertIn(header, said)

    def test_a_refused_body_is_dropped(self) -> None:
        """It takes no space, however long."""
        channel, transport = self.connect()
        channel.dataReceived(
            b"PUT /uri HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 1000000\r\n\r\n"
        )
        for _ in range(10):
            channel.dataReceived(b"x" * 100_000)
            self.assertEqual(self.site.space.used_bytes, 0)
        self.assertIn(b"HTTP/1.1 403", transport.value())
        self.assertEqual(self.root.bodies, [])
        self.lose(channel)

    def test_no_http(self) -> None:
        """Raw bytes of other protocols get one sentence, and the connection ends."""
        for bad in (
            b"\x16\x03\x01\x02\x00\r\n\r\n",
            b"GET /\r\n\r\n",
            b"PUT / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
            b"PUT / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
            b"PUT / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n",
            b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n",
        ):
            channel, transport = self.connect()
            channel.dataReceived(bad)
            self.assertTrue(transport.disconnecting, bad[:60])
            self.assertEqual(self.root.bodies, [])
            self.lose(channel)


class BoundsTests(SiteTestCase):
    """What clients can take is bounded, in time and in number."""

    def test_slow_heads(self) -> None:
        """A head of which a byte comes now and then is waited for as long as any other."""
        channel, transport = self.connect()
        for byte in b"GET / HTT":
            channel.dataReceived(bytes([byte]))
            self.clock.advance(1)
        self.assertFalse(transport.disconnecting)
        self.clock.advance(2)
        self.assertTrue(transport.disconnecting)
        self.lose(channel)

    def test_idle_connections(self) -> None:
        """They end after a while; and a new one takes the place of the one that was idle the longest."""
        pairs = []
        for _ in range(4):
            pairs.append(self.connect())
            self.clock.advance(1)
        pairs[0][0].dataReceived(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self.connect()
        self.assertEqual(
            [transport.disconnecting for _, transport in pairs], [False, True, False, False]
        )
        self.clock.advance(200)
        self.assertTrue(all(transport.disconnecting for _, transport in pairs))
        for channel, _ in pairs:
            self.lose(channel)

    def test_all_are_busy(self) -> None:
        """Then a new connection is refused, and none that works is ended."""
        self.root.waits = True
        pairs = [self.connect() for _ in range(4)]
        for channel, _ in pairs:
            channel.dataReceived(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self.assertIsNone(self.site.buildProtocol(None))
        self.assertFalse(any(transport.disconnecting for _, transport in pairs))
        for channel, _ in pairs:
            self.lose(channel)
        self.assertEqual((self.root.cancelled, self.site.refused), (4, 1))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_a_reader_that_stops(self) -> None:
        """It is disconnected after a while, which cancels what it asked for."""
        self.root.waits = True
        channel, transport = self.connect()
        channel.dataReceived(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        channel.pauseProducing()
        self.clock.advance(49)
        channel.resumeProducing()
        channel.pauseProducing()
        self.clock.advance(49)
        self.assertFalse(transport.disconnecting)
        self.clock.advance(2)
        self.assertTrue(transport.disconnecting)
        self.lose(channel)
        self.assertEqual(self.root.cancelled, 1)

    def test_who_goes_away(self) -> None:
        """In the middle of a body nothing is done, and its space is given back."""
        channel, _ = self.connect()
        channel.dataReceived(
            b"PUT /uri HTTP/1.1\r\nHost: localhost\r\nContent-Length: 300000\r\n\r\n"
            + b"x" * 200_000
        )
        self.assertEqual(self.site.space.used_bytes, 200_000)
        self.lose(channel)
        self.assertEqual((self.site.space.used_bytes, self.root.bodies), (0, []))
        self.assertEqual(os.listdir(self.directory / "tmp"), [])

    def test_truncated_bodies(self) -> None:
        """Who sends no more, and still reads, gets one sentence; nothing is done."""
        for rest in (
            b"Content-Length: 5\r\n\r\nabc",
            b"Transfer-Encoding: chunked\r\n\r\n5\r\nabc",
        ):
            channel, transport = self.connect()
            channel.dataReceived(b"PUT /uri HTTP/1.1\r\nHost: localhost\r\n" + rest)
            channel.readConnectionLost()
            self.assertIn(b"HTTP/1.1 400 Bad Request", transport.value())
            self.assertTrue(transport.value().endswith(b"send it again, whole\n"))
            self.assertTrue(transport.disconnecting)
            self.lose(channel)
        self.assertEqual((self.root.bodies, self.site.space.used_bytes), ([], 0))

    def test_long_heads(self) -> None:
        """A line or a head that is too long, and too many headers: one sentence, however much follows."""
        begin = b"GET /uri/x HTTP/1.1\r\nHost: localhost\r\n"
        for head in (
            b"GET /uri/" + b"n" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n",
            begin + b"X-A: " + b"n" * 200_000,
            begin + b"".join(b"X-%d: %s\r\n" % (n, b"n" * 9000) for n in range(20)),
            begin + b"X: y\r\n" * 200,
        ):
            channel, transport = self.connect()
            for start in range(0, len(head), 50_000):
                channel.dataReceived(head[start : start + 50_000])
            channel.dataReceived(b"\r\n\r\n")
            self.assertTrue(transport.value().startswith(b"HTTP/1.1 431 "), transport.value())
            self.assertEqual(transport.value().count(b"HTTP/1.1"), 1)
            self.assertTrue(transport.value().endswith(b"or leave out headers\n"))
            self.assertTrue(transport.disconnecting)
            self.lose(channel)
        self.assertEqual(self.root.bodies, [])

    def test_a_refused_client_may_read(self) -> None:
        """Its connection is closed for writing, what it sends is dropped, and it is not waited for long."""
        for leaves in (True, False):
            channel, found = self.connect()
            transport: Any = found
            closed: list[str] = []
            transport.loseWriteConnection = partial(closed.append, "write")
            transport.abortConnection = partial(closed.append, "all")
            channel.dataReceived(b"nonsense\r\n\r\n")
            said = bytes(transport.value())
            self.assertIn(b"400 Bad Request", said)
            for _ in range(3):
                channel.dataReceived(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
            self.assertEqual((bytes(transport.value()), closed), (said, ["write"]))
            if leaves:
                channel.readConnectionLost()
                self.assertTrue(transport.disconnecting)  # when all of the answer has been sent
            else:
                self.clock.advance(LINGER_S)
                self.assertEqual(closed, ["write", "all"])
            self.lose(channel)

    def test_who_closes_while_it_waits(self) -> None:
        """What it asked for is cancelled."""
        self.root.waits = True
        channel, transport = self.connect()
        channel.dataReceived(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        channel.readConnectionLost()
        self.assertEqual((transport.disconnecting, transport.value()), (True, b""))
        self.lose(channel)
        self.assertEqual(self.root.cancelled, 1)

    def test_pipelined_requests(self) -> None:
        """They are answered in order, one after the other."""
        channel, transport = self.connect()
        request = b"PUT /uri HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n"
        channel.dataReceived(request + b"a" + request + b"b" + request + b"c")
        self.assertEqual(self.root.bodies, [b"a", b"b", b"c"])
        self.assertEqual(transport.value().count(b"HTTP/1.1 200 OK"), 3)
        self.lose(channel)

    def connect_slow(self) -> tuple[GatewayChannel, _FullTransport]:
        """Return a connection to a client that reads when a test says so."""
        channel = self.site.buildProtocol(None)
        transport = _FullTransport()
        channel.makeConnection(transport)
        return channel, transport

    def test_pipelined_requests_of_a_slow_reader(self) -> None:
        """Each waits until the response before it has been read."""
        channel, transport = self.connect_slow()
        request = b"PUT /uri HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n"
        channel.dataReceived(request + b"a" + request + b"b" + request + b"c")
        for answered in ([b"a"], [b"a", b"b"], [b"a", b"b", b"c"], [b"a", b"b", b"c"]):
            self.assertEqual(self.root.bodies, answered)
            self.assertEqual(transport.value().count(b"HTTP/1.1 200 OK"), len(answered))
            channel.resumeProducing()
        channel.dataReceived(request + b"d")
        self.assertEqual(self.root.bodies[3:], [b"d"])
        self.lose(channel)
        self.assertEqual(self.site.unread_bytes, 0)

    def test_pipelined_requests_without_bodies(self) -> None:
        """They wait, too, although they arrive in one piece."""
        channel, transport = self.connect_slow()
        channel.dataReceived(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3 + b"GET / H")
        for answered in (1, 2, 3, 3):
            self.assertEqual(transport.value().count(b"HTTP/1.1 200 OK"), answered)
            channel.resumeProducing()
        channel.dataReceived(b"TTP/1.1\r\nHost: localhost\r\n\r\n")
        self.assertEqual(transport.value().count(b"HTTP/1.1 200 OK"), 4)
        self.lose(channel)

    def test_who_sends_on_after_a_response_that_it_does_not_read(self) -> None:
        """Nothing more is read, until it has read the response."""
        channel, transport = self.connect_slow()
        channel.dataReceived(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self.assertEqual(transport.value().count(b"HTTP/1.1 200 OK"), 1)
        channel.dataReceived(b"GET / HTTP/1.1\r\nHost: local")
        self.assertEqual(transport.producerState, "paused")
        channel.resumeProducing()
        self.assertEqual(transport.producerState, "producing")
        channel.dataReceived(b"host\r\n\r\n")
        self.assertEqual(transport.value().count(b"HTTP/1.1 200 OK"), 2)
        self.lose(channel)

    def test_who_sends_and_does_not_read(self) -> None:
        """Its further requests are not read, until it has read the response."""
        self.root.waits = True
        channel, transport = self.connect_slow()
        channel.dataReceived(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        channel.pauseProducing()
        sent = 0
        while transport.producerState == "producing":
            self.assertLess(sent, 100_000)
            channel.dataReceived(b"GET / HTTP/1.1\r\nX: " + bytes(1000))
            sent += 1000
        channel.resumeProducing()
        self.assertEqual(transport.producerState, "paused")
        self.lose(channel)

    def test_responses_that_nobody_reads(self) -> None:
        """Those who stopped reading first make way for others; a single response may be larger."""
        limits = attrs.evolve(LIMITS, unread_bytes=100_000)
        self.site.limits = limits
        self.root.waits = True
        pairs = [self.connect_slow() for _ in range(4)]
        for (channel, _), size in zip(pairs, (200_000, 30_000, 40_000, 60_000), strict=True):
            channel.dataReceived(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            self.clock.advance(1)
            self.root.waiting.pop().callback(HttpResponse(bytes(size)))
            found = [transport.disconnecting for _, transport in pairs]
            expected = {200_000: [], 30_000: [0], 40_000: [0], 60_000: [0, 1]}[size]
            self.assertEqual([at for at, ends in enumerate(found) if ends], expected, size)
        self.assertLess(self.site.unread_bytes, 101_000)
        pairs[2][0].resumeProducing()
        self.assertLess(self.site.unread_bytes, 61_000)
        for channel, _ in pairs:
            self.lose(channel)
        self.assertEqual(self.site.unread_bytes, 0)

    def test_responses_that_are_being_read(self) -> None:
        """What a client has read of its response counts no more, even if it has not read all."""
        self.site.limits = attrs.evolve(LIMITS, unread_bytes=250_000)
        self.root.waits = True
        sockets = [_Socket(50_000) for _ in range(3)]
        channels = []
        for socket, aborted in zip(sockets, ([], [], [0, 1]), strict=True):
            channel = self.site.buildProtocol(None)
            channels.append(channel)
            channel.makeConnection(socket)
            channel.dataReceived(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            self.clock.advance(1)
            self.root.waiting.pop().callback(HttpResponse(bytes(180_000)))
            self.assertEqual([at for at, each in enumerate(sockets) if each.aborted], aborted)
            while socket is sockets[0] and unsent_bytes(socket) > 50_000:
                socket.doWrite()
        self.assertLess(self.site.unread_bytes, 181_000)
        for channel in channels:
            self.lose(channel)
        self.assertEqual(self.site.unread_bytes, 0)

    def test_a_slow_reader(self) -> None:
        """It is not disconnected as long as it reads, also after its response is complete."""
        self.root.waits = True
        socket = _Socket(1000)
        channel = self.site.buildProtocol(None)
        channel.makeConnection(socket)
        channel.dataReceived(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self.root.waiting.pop().callback(HttpResponse(bytes(180_000)))
        for _ in range(20):
            self.clock.advance(40)
            socket.doWrite()
            self.assertFalse(socket.aborted or socket.disconnecting)
        for _ in range(5):
            self.clock.advance(40)
        self.assertTrue(socket.aborted)
        self.lose(channel)


class _FullTransport(StringTransport):
    """Has its producer pause with each write, as if the client did not read."""

    def write(self, data: bytes) -> None:
        super().write(data)
        producer: Any = self.producer
        if producer is not None:
            producer.pauseProducing()

    def writeSequence(self, data: Any) -> None:
        self.write(b"".join(data))


class LogTests(SiteTestCase):
    """One line a request, without secrets."""

    def test_interrupted(self) -> None:
        """In its body, or while it is answered; not while it is idle."""
        self.root.waits = True
        for body in (b"abc", b"abcde"):
            channel, _ = self.connect()
            head = (
                b"PUT /uri/" + SECRET + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n"
            )
            channel.dataReceived(head + body)
            self.lose(channel)
        channel, _ = self.connect()
        self.lose(channel)
        self.assertEqual(
            self.lines,
            [
                "PUT /uri/[CENSORED] interrupted after 3 B of its body",
                "PUT /uri/[CENSORED] interrupted after 0 B 0 ms",
            ],
        )

    def test_the_log_comes_after_the_answer(self) -> None:
        """The client has the whole answer, as far as its socket takes it, before the line is written."""
        for most_bytes in (1 << 20, 10):
            socket = _Socket(most_bytes)
            sent: list[int] = []
            self.site._tell = lambda text, to=socket, n=sent, **fields: n.append(len(to.sent))
            channel = self.site.buildProtocol(None)
            channel.makeConnection(socket)
            channel.dataReceived(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            socket.write_all()
            self.assertEqual(socket.sent[-8:], b"\r\n\r\ndone")
            self.assertEqual(sent, [min(most_bytes, len(socket.sent))])
            self.lose(channel)

    def test_lines(self) -> None:
        """Neither capabilities nor arguments stand in it, wherever they are."""
        for path in (
            b"/uri/" + SECRET,
            b"/cap/" + SECRET + b"/name?t=json",
            b"/" + SECRET,
            b"/uri?uri=" + SECRET,
            b"/static/secret-name",
            b"/operations/secret-handle",
        ):
            self.ask(b"GET " + path + b" HTTP/1.1", b"Host: localhost")
        self.assertEqual(len(self.lines), 6)
        for secret in ("URI", "aaaa", "secret", "name?", "t=json"):
            self.assertFalse([line for line in self.lines if secret in line], self.lines)
        self.assertTrue(self.lines[0].startswith("GET /uri/[CENSORED] 200 4 B"), self.lines[0])
        self.assertEqual(shown_path(b"/status"), "/status")


class BodySpoolTests(SynchronousTestCase):
    """Bodies beyond some size are files without a name, and a full disk is told."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.space = SpoolSpace(self.directory, 0)

    def test_bytes_come_back(self) -> None:
        """Whether they stay in memory, or go to a file on the way."""
        for sizes in ([0], [10], [60_000, 60_000], [100_000], [1, 2, 70_000, 3]):
            body = BodySpool(self.space)
            data = b"".join(bytes([number]) * size for number, size in enumerate(sizes))
            for number, size in enumerate(sizes):
                body.write(bytes([number]) * size)
            self.assertEqual(body.size, len(data))
            with body.opened() as source:
                self.assertEqual(source if isinstance(source, bytes) else source.read(), data)
            self.assertEqual(body.read_at(5, 20), data[5:25])
            body.close()
            body.close()
            self.assertEqual(self.space.used_bytes, 0)

    def test_no_space(self) -> None:
        """What was announced and does not fit is refused at once; what turns out so, when it does."""
        full = SpoolSpace(self.directory, 1 << 62)
        self.directory.mkdir()
        body = BodySpool(full, 1_000_000)
        self.assertEqual(body.refused and body.refused.status, 507)
        body = BodySpool(full)
        body.write(b"x" * 100_000)
        self.assertIn("free some", str(body.refused))
        body.write(b"x")
        self.assertEqual((full.used_bytes, body.size), (0, 0))
        blocked = SpoolSpace(self.directory / "file/below", 0)
        (self.directory / "file").write_bytes(b"")
        body = BodySpool(blocked)
        body.write(b"x" * 100_000)
        self.assertEqual(body.refused and body.refused.status, 507)


class ExpectTests(SiteTestCase):
    """A client that waits for "100 Continue" gets it, or why its body is refused."""

    BODY = b"x" * 100_000

    def wait(self, *lines: bytes) -> tuple[GatewayChannel, StringTransport]:
        """Send the head of a request with a body."""
        channel, transport = self.connect()
        length = b"Content-Length: %d" % len(self.BODY)
        head = [*lines, b"Host: localhost", b"Expect: 100-continue", length, b"", b""]
        channel.dataReceived(b"\r\n".join(head))
        return channel, transport

    def check_refused(self, status: int, words: bytes, *lines: bytes) -> None:
        """Check that a body is refused before it is sent, and that the connection ends with that."""
        channel, transport = self.wait(*lines)
        said = bytes(transport.value())
        self.assertTrue(said.startswith(b"HTTP/1.1 %d " % status), said)
        self.assertIn(words, said)
        self.assertIn(b"Connection: close", said)
        self.assertTrue(transport.disconnecting)
        channel.dataReceived(self.BODY)  # by a client that did not wait
        self.assertEqual(bytes(transport.value()), said)
        self.lose(channel)
        self.assertEqual(self.site.space.used_bytes, 0)

    def test_space(self) -> None:
        for _ in range(2):
            channel, transport = self.wait(b"PUT /uri HTTP/1.1")
            self.assertEqual(transport.value(), b"HTTP/1.1 100 Continue\r\n\r\n")
            transport.clear()
            channel.dataReceived(self.BODY)
            self.assertTrue(transport.value().startswith(b"HTTP/1.1 200 "))
            self.lose(channel)
        self.assertEqual(self.root.bodies, [self.BODY] * 2)

    def test_no_space(self) -> None:
        """Also for the first body of all, before its directory exists."""
        self.site.space = SpoolSpace(self.directory / "new", 1 << 62)
        self.check_refused(507, b"free some", b"PUT /uri HTTP/1.1")
        kind = b"Content-Type: multipart/form-data; boundary=b"
        self.check_refused(507, b"free some", b"POST /uri?t=upload HTTP/1.1", kind)
        self.assertIn("PUT /uri 507", self.lines[0])
        self.assertEqual(self.root.bodies, [])

    def test_other_sites(self) -> None:
        line = b"PUT /uri HTTP/1.1"
        self.check_refused(403, b"another site", line, b"Origin: http://evil.example")

    def test_no_body(self) -> None:
        """There is nothing to wait for: the request is answered as any other, also if it is refused."""
        for host, status in ((b"localhost", 200), (b"evil.example", 403)):
            channel, transport = self.connect()
            lines = b"GET /uri HTTP/1.1", b"Host: " + host, b"Expect: 100-continue", b"", b""
            channel.dataReceived(b"\r\n".join(lines))
            said = bytes(transport.value())
            self.assertTrue(said.startswith(b"HTTP/1.1 %d " % status), said)
            self.lose(channel)

    def test_limits(self) -> None:
        """Those of the web API, where the head shows what the body will be."""
        directory = Path(self.mktemp())
        settings = GatewaySettings(
            directory, limits=attrs.evolve(LIMITS, mutable_bytes=90_000, children_bytes=80_000)
        )
        nothing: Any = None
        self.site.resource = root_resource(nothing, settings, nothing, {})
        cap = b"URI%3ASSK%3Aaaaa%3Abbbb"
        json = b"Content-Type: application/json"
        for line, most_bytes in (
            (b"PUT /uri/URI:DIR2:a:b/c?t=uri HTTP/1.1", 64 << 10),
            (b"POST /uri/URI:DIR2:a:b?t=set_children HTTP/1.1", 80_000),
            (b"POST /uri?t=mkdir-immutable HTTP/1.1", 80_000),
            (b"PUT /uri?format=MDMF HTTP/1.1", 90_000),
            (b"PUT /uri?mutable=true HTTP/1.1", 90_000),
            (b"PUT /uri/" + cap + b" HTTP/1.1", 90_000),
            (b"PUT /uri/URI:DIR2:a:b/c?offset=1 HTTP/1.1", 90_000),
            (b"POST /restic/r/config HTTP/1.1", None),
            (b"PUT /uri/URI:DIR2:a:b/URI:SSK:a HTTP/1.1", None),
            (b"PUT /uri?format=tar HTTP/1.1", None),
        ):
            if most_bytes is None:
                channel, transport = self.wait(line)
                self.assertEqual(transport.value(), b"HTTP/1.1 100 Continue\r\n\r\n", line)
                self.lose(channel)
            else:
                words = b"the body has 100000 bytes, and at most %d are allowed" % most_bytes
                self.check_refused(413, words, line, json)


class _Fails(_Answers):
    """Fails before its work begins."""

    def render(self, request: Any) -> int:
        raise ValueError("a secret")


class RespondTests(SiteTestCase):
    """Errors of a request become one sentence."""

    def test_arguments(self) -> None:
        """Their names and values may be any bytes."""
        for query in (
            b"filename=fianc%C3%A9e.txt",
            b"a=%FF&%FF=b",
            b"a=%zz",
            b"%00",
        ):
            line = b"GET /uri/x?" + query + b" HTTP/1.1"
            self.assertEqual(self.status(line, b"Host: localhost"), 200, query)

    def test_a_resource_fails(self) -> None:
        """The answer is one sentence, and the log has the reason."""
        self.site.resource = _Fails(self.clock)
        said = self.ask(b"GET / HTTP/1.1", b"Host: localhost")
        self.assertIn(b"HTTP/1.1 500", said)
        self.assertTrue(said.endswith(b"its log has the details"), said)
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)

    def test_a_channel_fails(self) -> None:
        """The connection ends, and the log has the reason."""
        channel, transport = self.connect()

        def fail(*_: object) -> None:
            raise ValueError

        self.patch(self.site, "look_at_head", fail)
        channel.dataReceived(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self.assertTrue(transport.disconnecting)
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)
        self.lose(channel)

    def test_errors(self) -> None:
        """Those that were foreseen are told; others are in the log alone."""
        self.root.waits = True
        channel, transport = self.connect()
        for error, wanted in (
            (WebError(409, "there is one already"), b"409 Conflict"),
            (ValueError("a secret"), b"500 Internal Server Error"),
        ):
            channel.dataReceived(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            self.root.waiting.pop().errback(error)
            self.assertIn(wanted, transport.value())
        self.assertIn(b"there is one already", transport.value())
        self.assertNotIn(b"a secret", transport.value())
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)
        self.lose(channel)

    def test_it_is_answered_later(self) -> None:
        """``render`` says so to ``twisted.web``."""
        self.assertEqual(NOT_DONE_YET, 1)
