"""The face that Twisted programs know: requests, bodies both ways, and what may go wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread, get_ident
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, maybeDeferred, succeed
from twisted.internet.error import ConnectionLost
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python import threadable
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.client import ResponseDone, ResponseFailed, readBody
from twisted.web.http import PotentialDataLoss
from twisted.web.http_headers import Headers
from twisted.web.iweb import UNKNOWN_LENGTH, IAgent, IBodyProducer, IResponse
from zope.interface import implementer
from zope.interface.verify import verifyObject

from pipegrid.errors import UsageError
from pipegrid.http11.agent import PipelinedAgent
from pipegrid.http11.connection_limits import Limits
from pipegrid.http11.exchange import (
    AgentClosed,
    RawRequest,
    RequestBodyError,
    RequestMaybeProcessed,
    RequestNotSent,
    ResponseError,
)
from tests.http11.network import Network, ServerSide
from tests.http11.wire import ok


class Reader(Protocol):
    """Keeps a body, and the reason of its end."""

    def __init__(self) -> None:
        self.body = b""
        self.reason: Any = None
        self.pause_at: int | None = None

    def dataReceived(self, data: bytes) -> None:
        self.body += data
        if self.pause_at is not None and len(self.body) >= self.pause_at:
            self.flow.pauseProducing()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        assert self.reason is None, "told twice"
        self.reason = reason.value

    @property
    def flow(self) -> Any:
        """The transport of the body."""
        return self.transport


@implementer(IBodyProducer)
class Body:
    """A body that the test writes."""

    def __init__(self, length: Any) -> None:
        self.length = length
        self.done: Deferred[None] = Deferred()
        self.calls: list[str] = []
        self.consumer: Any = None

    def startProducing(self, consumer: Any) -> Deferred[None]:
        self.calls.append("start")
        self.consumer = consumer
        return self.done

    def pauseProducing(self) -> None:
        self.calls.append("pause")

    def resumeProducing(self) -> None:
        self.calls.append("resume")

    def stopProducing(self) -> None:
        self.calls.append("stop")


class AgentCase(SynchronousTestCase):
    """An agent on a network in memory."""

    def setUp(self) -> None:
        self.make()

    def make(self, serial: Any = False, **limits: Any) -> None:
        """Begin anew."""
        limits.setdefault("max_connections", 1)
        self.network = Network()
        self.agent = PipelinedAgent(self._reactor(), self.network, Limits(**limits), serial=serial)

    def known(self) -> None:
        """The host has answered before, so requests may be written behind others."""
        self.agent.pool_for(b"http://host.test")._unknown = False

    def _reactor(self) -> Any:
        return self.network.clock

    def request(
        self,
        method: bytes = b"GET",
        path: bytes = b"/",
        headers: Any = None,
        body: Any = None,
        **options: Any,
    ) -> Deferred[IResponse]:
        """One request to one host."""
        all_headers = None if headers is None else Headers(headers)
        return self.agent.request(method, b"http://host.test" + path, all_headers, body, **options)

    @property
    def side(self) -> ServerSide:
        """The server's end of the newest connection, after this turn."""
        self.network.turn()
        return self.network.connections[-1]

    def written(self) -> bytes:
        """What was sent on it."""
        side = self.side
        data: bytes = side.value()
        side.clear()
        return data


class SerialTests(AgentCase):
    """Which requests may be written behind others."""

    def written_paths(self) -> list[bytes]:
        """Return the targets of what was sent since the last time."""
        return [head.split(b" ")[1] for head in self.written().split(b"\r\n\r\n") if head]

    def test_an_unknown_host(self) -> None:
        """It gets one request until the first answer is whole; then all the others."""
        for number in range(4):
            self.request(path=b"/%d" % number)
        self.assertEqual(self.written_paths(), [b"/0"])
        answer = ok(b"first")
        self.side.answer(answer[:-1])
        self.assertEqual(self.written_paths(), [])
        self.side.answer(answer[-1:])
        self.assertEqual(self.written_paths(), [b"/1", b"/2", b"/3"])

    def test_serial(self) -> None:
        """Of an agent, or of some hosts, each connection has one request at a time, for ever."""
        for serial, is_serial in ((True, True), (["Host.test"], True), (["other"], False)):
            self.make(serial=serial)
            for number in range(4):
                self.request(path=b"/%d" % number)
            for number in range(4):
                paths = self.written_paths()
                if is_serial:
                    self.assertEqual(paths, [b"/%d" % number], serial)
                elif number == 1:
                    self.assertEqual(paths, [b"/1", b"/2", b"/3"], serial)
                self.network.clock.advance(1)
                self.side.answer(ok())

    def test_nonsense(self) -> None:
        """Anything else is refused."""
        for serial in ("host", b"host", 1, [b"host"], ["h\xf6st"], None):
            with self.assertRaises(UsageError) as caught:
                self.make(serial=serial)
            self.assertIn("list of names of hosts", str(caught.exception))


class RequestTests(AgentCase):
    """What is sent."""

    def test_interfaces(self) -> None:
        """It is an IAgent, its answers are IResponses."""
        verifyObject(IAgent, self.agent)
        d = self.request()
        self.side.answer(ok())
        verifyObject(IResponse, self.successResultOf(d))

    def test_get(self) -> None:
        """A GET is a request line and the host."""
        for uri, line, host in (
            (b"http://host.test", b"GET / ", b"host.test"),
            (b"http://host.test/", b"GET / ", b"host.test"),
            (b"http://host.test/a%20b?c=d/e#frag", b"GET /a%20b?c=d/e ", b"host.test"),
            (b"http://host.test?q", b"GET /?q ", b"host.test"),
            (b"http://host.test#frag", b"GET / ", b"host.test"),
            (b"http://host.test/x//y", b"GET /x//y ", b"host.test"),
            (b"HTTP://Host.test/A", b"GET /A ", b"Host.test"),
            (b"http://host.test:80/p", b"GET /p ", b"host.test:80"),
            (b"http://host.test:8080/p", b"GET /p ", b"host.test:8080"),
            (b"https://[::1]:8443/p", b"GET /p ", b"[::1]:8443"),
        ):
            self.agent.request(b"GET", uri)
            self.assertEqual(self.written(), line + b"HTTP/1.1\r\nHost: " + host + b"\r\n\r\n", uri)
            self.side.answer(ok())
        self.assertEqual(
            self.network.uris,
            [b"http://host.test", b"http://host.test:8080", b"https://[::1]:8443"],
        )

    def test_headers(self) -> None:
        """Headers are sent as they are; the host can be replaced, the framing cannot."""
        self.request(headers={b"x-a": [b"1", b"2"], b"Host": [b"other"], b"Content-Length": [b"7"]})
        sent = self.written().split(b"\r\n")
        self.assertEqual(sent[0], b"GET / HTTP/1.1")
        self.assertEqual(sorted(sent[1:]), [b"", b"", b"Host: other", b"X-A: 1", b"X-A: 2"])

    def test_empty_bodies(self) -> None:
        """A POST without a body says so; a DELETE need not."""
        self.request(b"POST")
        self.assertIn(b"Content-Length: 0\r\n", self.written())
        self.request(b"DELETE")
        self.assertNotIn(b"Content-Length", self.written())

    def test_nonsense(self) -> None:
        """What would break the protocol is refused before anything is sent."""
        for method, uri in (
            (b"GET /", b"http://h/"),
            (b"", b"http://h/"),
            (b"CONNECT", b"http://h/"),
            (b"GET", b"http://h/a b"),
            (b"GET", b"http://h/\r\nX: y"),
            (b"GET", b"http://h/\xff"),
            (b"GET", b"ftp://h/"),
            (b"GET", b"//h/"),
            (b"GET", b"http://user@h/"),
            (b"GET", b"http:///x"),
            (b"GET", b""),
        ):
            self.failureResultOf(self.agent.request(method, uri), UsageError)
        headers = Headers()
        headers._rawHeaders = {b"a": [b"b\r\nc: d"]}
        self.failureResultOf(self.agent.request(b"GET", b"http://h/", headers), UsageError)
        self.assertEqual(self.network.connections, [])

    def test_one_burst(self) -> None:
        """Many requests leave in one segment, and get their own answers."""
        self.known()
        asked = [self.request(path=b"/%d" % n) for n in range(12)]
        self.assertEqual(len(self.side.segments), 1)
        self.side.answer(b"".join(ok(b"%d" % n) for n in range(12)))
        bodies = [self.successResultOf(readBody(self.successResultOf(d))) for d in asked]
        self.assertEqual(bodies, [b"%d" % n for n in range(12)])

    def test_connection_close(self) -> None:
        """Nothing is written behind a request that asks the server to close."""
        first = self.request(path=b"/1", headers={b"Connection": [b"close"]})
        second = self.request(path=b"/2")
        self.assertEqual(self.side.take_requests(), [b"GET /1"])
        self.side.answer(ok(b"", b"Connection: close"))
        self.successResultOf(first)
        self.assertEqual(self.side.take_requests(), [b"GET /2"])
        self.side.answer(ok())
        self.successResultOf(second)

    def test_one_pool_per_host(self) -> None:
        """However it is spelled, a host has one set of connections; raw requests share it."""
        pool = self.agent.pool_for(b"http://host.test/x")
        self.assertIs(pool, self.agent.pool_for(b"http://HOST.test:80"))
        self.assertIsNot(pool, self.agent.pool_for(b"https://host.test/"))


class RequestBodyTests(AgentCase):
    """Bodies from IBodyProducers."""

    def test_known_length(self) -> None:
        """The head tells the length; the body follows as it is produced; then the next request."""
        self.known()
        body = Body(6)
        d = self.request(b"PUT", body=body)
        self.request(path=b"/next")
        self.assertTrue(self.written().endswith(b"Content-Length: 6\r\n\r\n"))
        body.consumer.write(b"abc")
        body.consumer.write(b"def")
        self.assertEqual(self.written(), b"abcdef")
        body.done.callback(None)
        self.assertIn(b"GET /next", self.written())
        self.side.answer(ok(b"done"))
        self.successResultOf(d)
        self.assertEqual(body.calls, ["start"])

    def test_unknown_length(self) -> None:
        """Without a length it is sent in chunks."""
        body = Body(UNKNOWN_LENGTH)
        self.request(b"PUT", body=body)
        self.assertTrue(self.written().endswith(b"Transfer-Encoding: chunked\r\n\r\n"))
        body.consumer.write(b"x" * 26)
        body.consumer.write(b"")
        body.done.callback(None)
        self.assertEqual(self.written(), b"1a\r\n" + b"x" * 26 + b"\r\n0\r\n\r\n")

    def test_produced_at_once(self) -> None:
        """A producer may write all of it before startProducing returns."""
        self.known()
        body = Body(3)

        def start(consumer: Any) -> Deferred[None]:
            consumer.write(b"abc")
            return succeed(None)

        body.startProducing = start  # type: ignore[method-assign]
        self.request(b"PUT", body=body)
        self.request(path=b"/next")
        self.assertIn(b"\r\n\r\nabcGET /next", self.written())

    def test_back_pressure(self) -> None:
        """A full transport pauses the producer."""
        body = Body(6)
        self.request(b"PUT", body=body)
        valve = self.side.send_valve
        valve.pauseProducing()
        valve.resumeProducing()
        self.assertEqual(body.calls, ["start", "pause", "resume"])

    def test_wrong_length(self) -> None:
        """Too many or too few bytes fail the request with a sentence, and end the connection."""
        for data, calls in ((b"1234567", ["start", "stop"]), (b"12345", ["start"])):
            self.setUp()
            body = Body(6)
            d = self.request(b"PUT", body=body)
            side = self.side
            body.consumer.write(data)
            if len(data) < 6:
                body.done.callback(None)
            self.assertIn("host.test", str(self.failureResultOf(d, RequestBodyError).value))
            self.assertTrue(side.aborted)
            self.assertEqual(body.calls, calls)
            body.consumer.write(b"late")  # harmless

    def test_failing_source(self) -> None:
        """If the source fails, those before get their answers, those behind another connection."""
        body = Body(6)
        before = self.request(path=b"/before")
        self.network.turn()
        self.side.answer(ok())
        self.successResultOf(before)
        before, d, behind = (
            self.request(path=b"/before2"),
            self.request(b"PUT", b"/p", body=body),
            self.request(path=b"/behind"),
        )
        side = self.side
        body.done.errback(OSError("disk full"))
        self.assertIn("disk full", str(self.failureResultOf(d, RequestBodyError).value))
        self.assertFalse(side.aborted)
        side.answer(ok(b"2"))
        self.successResultOf(before)
        self.assertTrue(side.aborted)
        self.network.serve()
        self.successResultOf(behind)

    def test_cancelled(self) -> None:
        """Cancelling stops the producer and ends the connection."""
        body = Body(6)
        d = self.request(b"PUT", body=body)
        side = self.side
        body.consumer.write(b"abc")
        d.cancel()
        self.failureResultOf(d, CancelledError)
        self.assertEqual(body.calls, ["start", "stop"])
        self.assertTrue(side.aborted)

    def test_not_repeated(self) -> None:
        """A body that was partly produced cannot be sent again, not even by a PUT."""
        body = Body(6)
        d = self.request(b"PUT", body=body)
        self.side.lose()
        self.failureResultOf(d, RequestMaybeProcessed)
        self.assertEqual(body.calls, ["start", "stop"])

    def test_repeated_while_untouched(self) -> None:
        """A body not yet asked for goes with its request to another connection."""
        body = Body(3)
        first = self.request(path=b"/first", headers={b"Connection": [b"close"]})
        d = self.request(b"POST", b"/p", body=body)
        self.side.answer(ok(b"", b"Connection: close"))
        self.successResultOf(first)
        self.assertIn(b"POST /p", self.written())
        body.consumer.write(b"abc")
        body.done.callback(None)
        self.side.answer(ok())
        self.successResultOf(d)

    def test_expect_continue(self) -> None:
        """With Expect, the body waits for 100 Continue, or for a second at most."""
        headers = {b"Expect": [b"100-continue"]}
        for patient in (True, False):
            self.setUp()
            body = Body(3)
            d = self.request(b"POST", headers=headers, body=body)
            self.assertIn(b"Expect: 100-continue\r\n", self.written())
            self.assertEqual(body.calls, [])
            if patient:
                self.side.answer(b"HTTP/1.1 100 Continue\r\n\r\n")
            else:
                self.network.clock.advance(1.1)
            self.assertEqual(body.calls, ["start"])
            body.consumer.write(b"abc")
            body.done.callback(None)
            self.side.answer(ok())
            self.successResultOf(d)

    def test_expect_refused(self) -> None:
        """A final answer instead of 100 Continue: the body is never asked for."""
        body = Body(3)
        d = self.request(b"POST", headers={b"Expect": [b"100-continue"]}, body=body)
        self.side.answer(ok(status=b"417 No"))
        self.assertEqual(self.successResultOf(d).code, 417)
        self.network.clock.advance(2)
        self.assertEqual(body.calls, [])
        self.assertTrue(self.network.connections[0].disconnecting)

    def test_early_answer(self) -> None:
        """An answer before the body is complete stops the producer."""
        body = Body(10**6)
        d = self.request(b"POST", body=body)
        self.network.turn()
        body.consumer.write(b"abc")
        self.side.answer(ok(status=b"413 Too Large"))
        self.assertEqual(self.successResultOf(d).code, 413)
        self.assertEqual(body.calls, ["start", "stop"])


class ResponseTests(AgentCase):
    """What comes back."""

    def test_head(self) -> None:
        """The answer has what IResponse names."""
        headers = Headers({b"x": [b"y"]})
        d = self.agent.request(b"GET", b"http://host.test/p", headers)
        self.side.answer(
            b"HTTP/1.1 404 Not here\r\nContent-Length: 0\r\nSet-Cookie: a\r\nset-cookie: b\r\n"
            b"Connection: keep-alive\r\n\r\n"
        )
        response = self.successResultOf(d)
        self.assertEqual(
            (response.version, response.code, response.phrase, response.length),
            ((b"HTTP", 1, 1), 404, b"Not here", 0),
        )
        self.assertEqual(response.headers.getRawHeaders(b"set-cookie"), [b"a", b"b"])
        self.assertFalse(response.headers.hasHeader(b"connection"))
        self.assertEqual(response.request.absoluteURI, b"http://host.test/p")
        self.assertEqual(response.request.headers, headers)

    def test_body_in_pieces(self) -> None:
        """The body is delivered as it comes, and its end is told."""
        d = self.request()
        self.side.answer(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        response = self.successResultOf(d)
        self.assertIs(response.length, UNKNOWN_LENGTH)
        reader = Reader()
        response.deliverBody(reader)
        self.assertEqual(reader.body, b"abc")
        self.side.answer(b"1\r\nd\r\n")
        self.assertEqual((reader.body, reader.reason), (b"abcd", None))
        self.side.answer(b"0\r\n\r\n")
        self.assertIsInstance(reader.reason, ResponseDone)
        self.assertRaises(RuntimeError, response.deliverBody, Reader())

    def test_nobody_reads(self) -> None:
        """Until somebody reads, nothing more is taken from the network."""
        d = self.request()
        self.side.answer(ok(b"x" * 1000)[:500])
        self.assertEqual(self.side.producerState, "paused")
        response = self.successResultOf(d)
        reader = Reader()
        response.deliverBody(reader)
        self.assertEqual(self.side.producerState, "producing")
        self.side.answer(ok(b"x" * 1000)[500:])
        self.assertEqual(reader.body, b"x" * 1000)

    def test_read_late(self) -> None:
        """A short answer that came at once can be read at any time, and blocks nobody."""
        self.known()
        first, second = self.request(), self.request()
        self.side.answer(ok(b"first") + ok(b"second"))
        self.assertEqual(self.side.producerState, "producing")
        for d, body in ((second, b"second"), (first, b"first")):
            self.assertEqual(self.successResultOf(readBody(self.successResultOf(d))), body)

    def test_read_in_another_order(self) -> None:
        """A program may wait for a later answer before it reads an earlier one."""
        self.make(max_connections=2)
        self.request(b"HEAD")
        self.side.answer(ok())
        first = self.request(path=b"/1")
        behind = [self.request(method, b"/2") for method in (b"GET", b"POST", b"PUT")]
        side = self.side
        side.clear()
        side.answer(ok(b"x" * 1000)[:500])
        self.network.clock.advance(0.6)
        self.assertEqual(self.side.take_requests(), [b"GET /2", b"PUT /2"])
        self.request(path=b"/3")
        self.assertEqual(self.side.take_requests(), [b"GET /3"])
        self.side.answer(ok(b"2") + ok(b"2p") + ok(b"3"))
        self.assertEqual(self.successResultOf(readBody(self.successResultOf(behind[0]))), b"2")
        self.assertNoResult(behind[1])
        reader = Reader()
        self.successResultOf(first).deliverBody(reader)
        side.answer(ok(b"x" * 1000)[500:] + ok(b"dropped") + ok(b"posted") + ok(b"dropped"))
        self.assertIsInstance(reader.reason, ResponseDone)
        self.assertEqual(self.successResultOf(readBody(self.successResultOf(behind[1]))), b"posted")
        self.request(path=b"/4")
        self.request(path=b"/5")
        self.network.turn()
        self.assertEqual(
            [c.take_requests() for c in self.network.connections], [[b"GET /4"], [b"GET /5"]]
        )

    def test_never_read(self) -> None:
        """An answer nobody ever reads is dropped after a minute; the others are asked again."""
        d, behind = self.request(path=b"/1"), self.request(path=b"/2")
        side = self.side
        side.answer(ok(b"x" * 10**5)[:1000])
        response = self.successResultOf(d)
        self.network.clock.advance(59)
        self.assertFalse(side.aborted)
        self.assertNoResult(behind)
        self.network.clock.advance(2)
        self.assertTrue(side.aborted)
        self.network.serve()
        self.successResultOf(behind)
        reader = Reader()
        response.deliverBody(reader)
        self.assertIsInstance(reader.reason, ResponseFailed)

    def test_slow_reader(self) -> None:
        """A reader's pause holds up the connection for as long as it takes."""
        d = self.request()
        self.network.turn()
        self.side.answer(ok(b"x" * 1000)[:100])
        reader = Reader()
        reader.pause_at = 200
        self.successResultOf(d).deliverBody(reader)
        self.side.answer(ok(b"x" * 1000)[100:500])
        self.assertEqual(self.side.producerState, "paused")
        self.network.clock.advance(3600)
        reader.pause_at = None
        reader.flow.resumeProducing()
        self.assertEqual(self.side.producerState, "producing")
        self.side.answer(ok(b"x" * 1000)[500:])
        self.assertIsInstance(reader.reason, ResponseDone)

    def test_cut_off(self) -> None:
        """A body that is cut off fails with ResponseFailed, and what it says names the host."""
        d = self.request()
        self.network.turn()
        self.side.answer(ok(b"x" * 1000)[:100])
        reader = Reader()
        self.successResultOf(d).deliverBody(reader)
        self.side.lose(ConnectionLost())
        assert isinstance(reader.reason, ResponseFailed)
        self.assertIsInstance(reader.reason.reasons[0].value, ResponseError)
        self.assertIn("host.test", str(reader.reason.reasons[0].value))

    def test_until_close(self) -> None:
        """A body that ends with the connection may be incomplete, and says so."""
        d = self.request()
        self.network.turn()
        self.side.answer(b"HTTP/1.1 200 OK\r\n\r\nabc")
        reader = Reader()
        self.successResultOf(d).deliverBody(reader)
        self.side.lose()
        self.assertEqual(reader.body, b"abc")
        self.assertIsInstance(reader.reason, PotentialDataLoss)

    def test_stopped_reader(self) -> None:
        """A reader that drops the connection drops only its answer, if the rest is short."""
        for size, survives in ((1000, True), (10**6, False)):
            for how in ("stopProducing", "loseConnection", "abortConnection"):
                self.setUp()
                self.known()
                d, behind = self.request(path=b"/1"), self.request(path=b"/2")
                side = self.side
                side.answer(ok(b"x" * size)[:100])
                reader = Reader()
                self.successResultOf(d).deliverBody(reader)
                getattr(reader.flow, how)()
                self.assertIsNone(reader.reason, "not from within")
                side.answer(ok(b"x" * size)[100:] + ok(b"behind"))
                self.network.serve()
                self.assertEqual(len(self.network.connections), 1 if survives else 2)
                self.assertEqual(self.successResultOf(behind).code, 200)
                self.assertIsInstance(reader.reason, ResponseFailed)

    def test_cancelled_read(self) -> None:
        """Cancelling readBody is quiet."""
        d = self.request()
        self.network.turn()
        self.side.answer(ok(b"x" * 1000)[:100])
        reading = readBody(self.successResultOf(d))
        reading.cancel()
        self.failureResultOf(reading, CancelledError)
        self.network.turn()

    def test_failing_reader(self) -> None:
        """A reader that raises fails its own answer."""
        self.known()
        d, behind = self.request(path=b"/1"), self.request(path=b"/2")
        self.network.turn()
        reader = Reader()
        reader.dataReceived = lambda data: 1 // 0  # type: ignore[method-assign,assignment]
        d.addCallback(lambda response: response.deliverBody(reader))
        self.side.answer(ok(b"x") + ok(b"behind"))
        self.assertIsInstance(reader.reason, ResponseFailed)
        self.assertEqual(self.successResultOf(behind).code, 200)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_cancel_before_the_answer(self) -> None:
        """Cancelling a request that was sent leaves its neighbours alone."""
        self.known()
        first, second, third = (self.request(path=b"/%d" % n) for n in range(3))
        self.network.turn()
        second.cancel()
        self.failureResultOf(second, CancelledError)
        self.side.answer(ok(b"0") + ok(b"1") + ok(b"2"))
        for d, body in ((first, b"0"), (third, b"2")):
            self.assertEqual(self.successResultOf(readBody(self.successResultOf(d))), body)

    def test_addresses(self) -> None:
        """While it lasts, a reader can ask who the server is; it cannot write to it."""
        d = self.request()
        self.network.turn()
        self.side.answer(ok(b"abc")[:-1])
        reader = Reader()
        self.successResultOf(d).deliverBody(reader)
        self.assertEqual(reader.flow.getPeer(), self.side.getPeer())
        self.assertRaises(RuntimeError, reader.flow.write, b"x")
        self.side.answer(b"c")
        self.assertRaises(RuntimeError, reader.flow.getHost)

    def test_close(self) -> None:
        """A closed agent closes its connections and sends nothing more, on them or on others."""
        d = self.request()
        self.side.answer(ok())
        self.successResultOf(d)
        closed = self.agent.close()
        self.network.turn()
        self.successResultOf(closed)
        self.successResultOf(self.agent.close())
        for path in (b"/", b"/again"):
            error = self.failureResultOf(self.request(path=path), AgentClosed).value
            self.assertEqual(
                str(error), "The agent was closed, so it sends no more requests; make another one."
            )
        self.assertRaises(AgentClosed, self.agent.pool_for, b"http://host.test/")
        self.assertEqual(len(self.network.connections), 1)
        self.assertEqual(self.network.clock.getDelayedCalls(), [])

    def test_close_under_way(self) -> None:
        """Closing waits for no answer: requests, and bodies that are being read, fail at once and say why."""
        self.known()
        reading, waiting = self.request(path=b"/1"), self.request(path=b"/2")
        self.side.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nfirst")
        body = readBody(self.successResultOf(reading))
        closed = self.agent.close()
        cut = self.failureResultOf(body, ResponseFailed).value.reasons[0].value
        self.assertIn("(the agent was closed)", str(cut))
        error = self.failureResultOf(waiting, RequestMaybeProcessed).value
        self.assertIn("(the agent was closed)", str(error))
        self.network.turn()
        self.successResultOf(closed)
        self.assertEqual(self.network.clock.getDelayedCalls(), [])

    def test_another_thread(self) -> None:
        """Nothing of Twisted's can be called from there; that is said, and nothing happens."""
        uri = b"http://host.test/"
        pool = self.agent.pool_for(uri)
        calls: tuple[Callable[[], Deferred[Any]], ...] = (
            self.request,
            self.agent.close,
            lambda: pool.request(RawRequest(b"GET / HTTP/1.1\r\nHost: host.test\r\n\r\n")),
            lambda: maybeDeferred(self.agent.drop, uri, "it was too slow"),
            lambda: maybeDeferred(self.agent.pool_for, uri),
        )
        self.patch(threadable, "ioThread", get_ident())
        failures: list[Failure] = []
        for call in calls:
            thread = Thread(target=lambda: call().addErrback(failures.append))  # noqa: B023
            thread.start()
            thread.join()
        self.assertEqual([each.type for each in failures], [UsageError] * len(calls))
        for each in failures:
            self.assertIn("from the reactor's own thread only", str(each.value))
        self.network.turn()
        self.assertEqual(self.network.connections, [])
        d = self.request()
        self.side.answer(ok(b"here"))
        self.assertEqual(self.successResultOf(readBody(self.successResultOf(d))), b"here")

    def test_unreachable(self) -> None:
        """A host that cannot be reached is named."""
        self.network.refuse = ConnectionRefusedError("refused")
        error = self.failureResultOf(self.request(), RequestNotSent).value
        self.assertIn("host.test:80", str(error))
