"""One connection: order, budget, back-pressure, and what becomes of requests when it ends early."""

from __future__ import annotations

import tracemalloc
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectionLost
from twisted.internet.interfaces import IConsumer, IPushProducer
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from pipegrid.http11.connection_limits import Limits
from pipegrid.http11.exchange import (
    RawResponse,
    RequestMaybeProcessed,
    RequestNotSent,
    RequestTimedOut,
    ResponseError,
    TooManyRequests,
)
from pipegrid.http11.request_queue import CROWD_REQUESTS
from tests.http11.wire import ConnectionFixture, get, ok, post


class Case(SynchronousTestCase):
    """Helpers for what requests come to."""

    def body_of(self, d: Deferred[RawResponse]) -> bytes:
        """The answer's body, which must be here."""
        return self.successResultOf(d).body

    def error_of(self, d: Deferred[RawResponse], kind: type[Exception]) -> Any:
        """The error, which must be here, be of this kind, and be one sentence."""
        error = self.failureResultOf(d, kind).value
        self.assertNotIn("\n", str(error))
        self.assertTrue(str(error)[-1:] == "." or isinstance(error, CancelledError), str(error))
        return error


class PipeliningTests(Case):
    """Requests do not wait."""

    def test_a_burst_is_one_segment(self) -> None:
        """Requests of one turn leave together, in order, without waiting for an answer."""
        fixture = ConnectionFixture()
        for n in range(10):
            fixture.connection.request(get(f"/{n}"))
        fixture.turn()
        self.assertEqual(len(fixture.wire.segments), 1)
        self.assertEqual(
            fixture.sent(), b"".join(b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n" % n for n in range(10))
        )

    def test_flush(self) -> None:
        """Where no answer is awaited, requests may leave before the end of the turn, in one write."""
        fixture = ConnectionFixture()
        connection, segments = fixture.connection, fixture.wire.segments
        for n in range(2):
            connection.request(get(f"/{n}"))
        connection.flush()
        self.assertEqual([each.count(b"GET") for each in segments], [2])
        connection.request(get("/2"))
        connection.flush()
        self.assertEqual(len(segments), 1)  # it goes with others of this turn
        connection.request(get("/3"))
        fixture.turn()
        self.assertEqual([each.count(b"GET") for each in segments], [2, 2])
        connection.flush()
        self.assertEqual(len(segments), 2)

    def test_answers_in_order(self) -> None:
        """Answers go to the requests in order, whatever pieces they come in."""
        fixture = ConnectionFixture()
        asked = [fixture.connection.request(get(f"/{n}")) for n in range(3)]
        fixture.turn()
        wire = ok(b"zero") + ok(b"one", status=b"404 Not Found") + ok(b"two")
        for n in range(len(wire)):
            fixture.receive(wire[n : n + 1])
        self.assertEqual([self.body_of(d) for d in asked], [b"zero", b"one", b"two"])

    def test_headers(self) -> None:
        """Headers are looked up by lower-case name; repeated ones are joined."""
        fixture = ConnectionFixture()
        d = fixture.connection.request(get())
        fixture.turn()
        fixture.receive(ok(b"", b"Content-Type: a/b", b"X: 1", b"x: 2"))
        answer = self.successResultOf(d)
        self.assertEqual(answer.headers[b"content-type"], b"a/b")
        self.assertEqual(answer.headers[b"x"], b"1, 2")
        self.assertNotIn(b"y", answer.headers)

    def test_a_request_made_by_an_answer_leaves_with_the_read(self) -> None:
        """What an answer's callback asks for is written before the read is over."""
        fixture = ConnectionFixture()
        d = fixture.connection.request(get("/1"))
        fixture.sent()
        d.addCallback(lambda _: fixture.connection.request(get("/2")))
        fixture.receive(ok())
        self.assertIn(b"GET /2", fixture.wire.value())

    def test_head_does_not_disturb(self) -> None:
        """An answer to HEAD between others, with a length and no body, is understood."""
        fixture = ConnectionFixture()
        head = get()
        head.head = head.head.replace(b"GET", b"HEAD")
        asked = [fixture.connection.request(r) for r in (get(), head, get())]
        fixture.turn()
        length = b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n"
        fixture.receive(ok(b"a\n") + length + ok(b"b"))
        self.assertEqual([self.body_of(d) for d in asked], [b"a\n", b"", b"b"])

    def test_interim_answers(self) -> None:
        """An interim answer is skipped."""
        fixture = ConnectionFixture()
        d = fixture.connection.request(get())
        fixture.turn()
        fixture.receive(b"HTTP/1.1 102 Processing\r\n\r\n" + ok(b"final"))
        self.assertEqual(self.body_of(d), b"final")

    def test_the_round_trip_is_that_of_a_light_request_with_none_before_it(self) -> None:
        """Neither a long body, nor answers that others wait for, make it seem longer than it is."""
        fixture = ConnectionFixture()
        connection = fixture.connection
        self.assertIsNone(connection.round_trip_s)
        for requests, took_s, expected in (
            ([post(body=bytes(10_000))], 0.05, None),
            ([get(), get()], 0.2, 0.2),
            ([get()], 0.3, 0.2),
            ([get()], 0.1, 0.1),
        ):
            for request in requests:
                connection.request(request)
            fixture.turn()
            fixture.clock.advance(took_s)
            fixture.receive(ok() * len(requests))
            if expected is None:
                self.assertIsNone(connection.round_trip_s)
            else:
                self.assertAlmostEqual(connection.round_trip_s or 0, expected)

    def test_body_until_close(self) -> None:
        """An answer that ends with the connection is complete when that ends in good order."""
        for reason, complete in ((None, True), (ConnectionLost(), False)):
            fixture = ConnectionFixture()
            d = fixture.connection.request(get())
            fixture.turn()
            fixture.receive(b"HTTP/1.0 200 OK\r\n\r\nabc")
            self.assertNoResult(d)
            fixture.wire.lose(reason)
            if complete:
                self.assertEqual(self.body_of(d), b"abc")
            else:
                self.error_of(d, ResponseError)


class BudgetTests(Case):
    """What may be outstanding."""

    def limited(self, **limits: Any) -> ConnectionFixture:
        """A connection with its own limits."""
        return ConnectionFixture(Limits(**limits))

    def test_small_answers_fill_the_budget(self) -> None:
        """Requests are written until the answers before the next exceed 60 KB."""
        fixture = self.limited()
        for n in range(40):
            fixture.connection.request(get(f"/{n}", expected_response_bytes=6_000))
        self.assertEqual(fixture.sent().count(b"GET"), 11)
        fixture.receive(ok())
        self.assertEqual(fixture.sent().count(b"GET"), 1)

    def test_a_large_answer_is_the_last(self) -> None:
        """A large GET may stand behind small ones, and nothing behind it until it is answered."""
        fixture = self.limited()
        sizes = [500, 10**6, 500, 10**6]
        for n, size in enumerate(sizes):
            fixture.connection.request(get(f"/{n}", expected_response_bytes=size))
        self.assertEqual(fixture.sent().count(b"GET"), 2)
        fixture.receive(ok())
        self.assertEqual(fixture.sent(), b"")
        fixture.receive(ok())
        self.assertEqual(fixture.sent().count(b"GET"), 2)

    def test_unknown_sizes_are_assumed(self) -> None:
        """An answer of unknown size is charged what the lane assumes."""
        fixture = self.limited(response_budget_bytes=1000)
        fixture.connection.lane.assumed_response_bytes = 400
        for _ in range(9):
            fixture.connection.request(get(expected_response_bytes=None))
        self.assertEqual(fixture.sent().count(b"GET"), 3)

    def test_count(self) -> None:
        """No more than max_requests_in_flight are unanswered."""
        fixture = self.limited(max_requests_in_flight=3)
        for _ in range(9):
            fixture.connection.request(get())
        self.assertEqual(fixture.sent().count(b"GET"), 3)

    def test_request_bytes(self) -> None:
        """Bodies in flight are bounded; one larger than the bound goes alone."""
        fixture = self.limited(max_request_bytes_in_flight=1000)
        for size in (400, 400, 400, 5000, 10):
            fixture.connection.request(post(body=b"x" * size))
        for posts in (2, 1, 1, 1):
            self.assertEqual(fixture.sent().count(b"POST"), posts)
            fixture.receive(ok() * (posts))

    def test_a_crowd(self) -> None:
        """Small requests wait where the server has enough bytes of them; few may be of any size."""
        fixture = self.limited(max_requests_in_flight=1000)
        lane = fixture.connection.lane
        lane.crowd_bytes = lambda: 20_000
        for _ in range(100):
            fixture.connection.request(post(body=b"x" * 1000))
        posts = fixture.sent().count(b"POST")
        self.assertGreaterEqual(posts, 18)
        self.assertLessEqual(posts, 20)
        fixture.receive(ok() * 3)
        self.assertEqual(fixture.sent().count(b"POST"), 3)
        lane.crowd_bytes = lambda: float("inf")
        fixture.receive(ok())
        self.assertEqual(fixture.sent().count(b"POST"), 100 - posts - 3)
        few = self.limited()
        few.connection.lane.crowd_bytes = lambda: 20_000
        for _ in range(CROWD_REQUESTS + 5):
            few.connection.request(post(body=b"x" * 100_000))
        self.assertEqual(few.sent().count(b"POST"), CROWD_REQUESTS)

    def test_queue(self) -> None:
        """One request more than may wait fails at once, and says why."""
        fixture = self.limited(max_waiting=2)
        fixture.wire.send_valve.pauseProducing()
        asked = [fixture.connection.request(get()) for _ in range(3)]
        self.assertNoResult(asked[1])
        self.assertFalse(self.error_of(asked[2], TooManyRequests).may_have_happened)


class BackPressureTests(Case):
    """Slow readers and full transports hold up the connection, not memory."""

    def test_a_full_transport_stops_requests(self) -> None:
        """While the transport is full nothing is written; when it drains, all goes on in order."""
        fixture = ConnectionFixture()
        body = bytes(range(256)) * 1024
        fixture.connection.request(post(body=body))
        fixture.connection.request(get("/behind"))
        valve = fixture.wire.send_valve
        fixture.turn()
        self.assertIn(b"/behind", fixture.wire.value())
        self.assertLess(max(map(len, fixture.wire.segments)), 2**17)

        fixture = ConnectionFixture()
        written = b""
        valve = fixture.wire.send_valve
        valve.pauseProducing()
        fixture.connection.request(post(body=body))
        fixture.connection.request(get("/behind"))
        self.assertEqual(fixture.sent(), b"")
        self.patch(fixture.wire, "writeSequence", self._pausing(fixture))
        while b"/behind" not in written:
            valve.resumeProducing()
            piece = fixture.sent()
            self.assertTrue(0 < len(piece) < 2**17)
            written += piece
        self.assertIn(body + b"GET /behind", written)

    @staticmethod
    def _pausing(fixture: ConnectionFixture) -> Any:
        original = fixture.wire.writeSequence

        def write_and_pause(data: list[bytes]) -> None:
            original(data)
            fixture.wire.send_valve.pauseProducing()

        return write_and_pause

    def test_a_slow_consumer_pauses_the_transport(self) -> None:
        """A consumer that pauses its producer stops the reading, until it resumes."""
        fixture = ConnectionFixture()
        consumer = Consumer()
        d = fixture.connection.request(get(consumer_for=lambda answer: consumer))
        behind = fixture.connection.request(get())
        fixture.turn()
        fixture.receive(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nabc")
        self.assertEqual(fixture.wire.producerState, "producing")
        consumer.producer.pauseProducing()
        self.assertEqual(fixture.wire.producerState, "paused")
        fixture.clock.pump([1] * 500)
        self.assertNoResult(d)
        consumer.producer.resumeProducing()
        self.assertEqual(fixture.wire.producerState, "producing")
        consumer.pause_on_write = True
        fixture.receive(b"d")
        self.assertEqual(fixture.wire.producerState, "paused")
        consumer.producer.resumeProducing()
        fixture.receive(b"ef" + ok(b"behind"))
        self.assertEqual(consumer.received, [b"abc", b"d", b"ef", "over"])
        self.assertEqual(fixture.wire.producerState, "producing")
        self.assertEqual(self.successResultOf(d).body_bytes, 6)
        self.assertEqual(self.body_of(behind), b"behind")

    def test_a_consumer_is_chosen_by_the_head(self) -> None:
        """An error's body is collected where only good answers are streamed."""
        fixture = ConnectionFixture()
        consumer = Consumer()
        d = fixture.connection.request(
            get(consumer_for=lambda answer: consumer if answer.status == 200 else None)
        )
        fixture.turn()
        fixture.receive(ok(b"no such thing", status=b"404 Not Found"))
        self.assertEqual(self.body_of(d), b"no such thing")
        self.assertEqual(consumer.received, [])

    def test_a_consumer_that_stops(self) -> None:
        """A consumer that wants no more ends its request, and its neighbours get their answers."""
        fixture = ConnectionFixture()
        consumer = Consumer()
        d = fixture.connection.request(get(consumer_for=lambda answer: consumer))
        behind = fixture.connection.request(get())
        fixture.turn()
        fixture.receive(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nabc")
        consumer.producer.stopProducing()
        self.error_of(d, CancelledError)
        fixture.receive(b"def" + ok(b"behind"))
        self.assertEqual(self.body_of(behind), b"behind")
        self.assertEqual(consumer.received, [b"abc", "over"])

    def test_a_consumer_that_fails(self) -> None:
        """An exception in a consumer fails its request and no other."""
        fixture = ConnectionFixture()
        consumer = Consumer()
        consumer.write = lambda data: 1 // 0  # type: ignore[method-assign,assignment]
        d = fixture.connection.request(get(consumer_for=lambda answer: consumer))
        behind = fixture.connection.request(get())
        fixture.turn()
        fixture.receive(ok(b"x") + ok(b"behind"))
        self.error_of(d, ResponseError)
        self.assertEqual(self.body_of(behind), b"behind")
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)


@implementer(IConsumer)
class Consumer:
    """Keeps what it gets."""

    producer: IPushProducer

    def __init__(self) -> None:
        self.received: list[object] = []
        self.pause_on_write = False

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        assert streaming
        self.producer = producer

    def unregisterProducer(self) -> None:
        self.received.append("over")

    def write(self, data: bytes) -> None:
        self.received.append(data)
        if self.pause_on_write:
            self.pause_on_write = False
            self.producer.pauseProducing()


class CancelTests(Case):
    """Taking a request back never harms its neighbours."""

    def setUp(self) -> None:
        self.fixture = ConnectionFixture(Limits(discard_limit_bytes=1000))
        self.connection = self.fixture.connection

    def test_unsent(self) -> None:
        """A request that is not sent is never sent."""
        asked = [self.connection.request(get(f"/{n}")) for n in range(3)]
        asked[1].cancel()
        self.error_of(asked[1], CancelledError)
        self.assertNotIn(b"GET /1", self.fixture.sent())
        self.fixture.receive(ok(b"0") + ok(b"2"))
        self.assertEqual([self.body_of(asked[0]), self.body_of(asked[2])], [b"0", b"2"])

    def test_sent(self) -> None:
        """The answer to a sent one is read and dropped."""
        asked = [self.connection.request(get(f"/{n}")) for n in range(3)]
        self.fixture.turn()
        asked[1].cancel()
        self.error_of(asked[1], CancelledError)
        self.fixture.receive(ok(b"0") + ok(b"1") + ok(b"2"))
        self.assertEqual([self.body_of(asked[0]), self.body_of(asked[2])], [b"0", b"2"])

    def test_while_it_is_answered(self) -> None:
        """The rest of an answer is read and dropped if it is short."""
        asked = [self.connection.request(get(f"/{n}")) for n in range(2)]
        self.fixture.turn()
        wire = ok(b"x" * 1500)
        self.fixture.receive(wire[:800])
        asked[0].cancel()
        self.fixture.receive(wire[800:] + ok(b"1"))
        self.error_of(asked[0], CancelledError)
        self.assertEqual(self.body_of(asked[1]), b"1")

    def test_a_long_rest(self) -> None:
        """If the rest is long the connection ends at once; neighbours learn what is true of them."""
        for cut in (0, 300, 3000):  # cancelled before, within, and by the head's length
            self.setUp()
            asked = [self.connection.request(r) for r in (get("/0"), post("/1"), get("/2"))]
            self.fixture.turn()
            wire = ok(b"x" * 5000)
            self.fixture.receive(wire[:cut])
            asked[0].cancel()
            if not cut:
                self.assertFalse(self.fixture.wire.aborted)
                self.fixture.receive(wire[:100])
            self.assertTrue(self.fixture.wire.aborted)
            self.error_of(asked[0], CancelledError)
            self.assertTrue(self.error_of(asked[1], RequestMaybeProcessed).may_have_happened)
            self.error_of(asked[2], RequestMaybeProcessed)

    def test_a_long_rest_of_unknown_length(self) -> None:
        """Chunks nobody wants are counted."""
        d = self.connection.request(get())
        self.fixture.turn()
        self.fixture.receive(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        d.cancel()
        chunk = b"100\r\n" + b"x" * 256 + b"\r\n"
        self.fixture.receive(chunk * 3)
        self.assertFalse(self.fixture.wire.aborted)
        self.fixture.receive(chunk)
        self.assertTrue(self.fixture.wire.aborted)
        self.error_of(d, CancelledError)

    def test_while_its_body_is_sent(self) -> None:
        """Those before it are answered, those behind are given back, then the connection ends."""
        self.patch(self.fixture.wire, "writeSequence", BackPressureTests._pausing(self.fixture))
        asked = [
            self.connection.request(r) for r in (get("/0"), post("/1", b"x" * 10**6), post("/2"))
        ]
        self.fixture.turn()
        asked[1].cancel()
        self.error_of(asked[1], CancelledError)
        self.assertFalse(self.error_of(asked[2], RequestNotSent).may_have_happened)
        self.assertFalse(self.fixture.wire.aborted)
        self.fixture.receive(ok(b"0"))
        self.assertEqual(self.body_of(asked[0]), b"0")
        self.assertTrue(self.fixture.wire.aborted)

    def test_unwanted_answers_behind_one_that_does_not_come(self) -> None:
        """Who asks again and again, and gives up each time, does not keep a dead connection."""
        fixture = ConnectionFixture(Limits(timeout_s=10, abandoned_timeout_s=5))
        fixture.connection.request(get("/0")).addErrback(lambda _: None)
        fixture.turn()
        for n in range(1, 6):
            asked = fixture.connection.request(get(f"/{n}"))
            asked.addErrback(lambda _: None)
            fixture.turn()
            fixture.clock.advance(1.9)
            asked.cancel()
        self.assertTrue(fixture.connection.open)
        fixture.clock.advance(1.0)
        self.assertFalse(fixture.connection.open)

    def test_an_unwanted_answer_that_does_not_come(self) -> None:
        """It does not hold up its neighbours for as long as one that is wanted."""
        asked = [self.connection.request(get(f"/{n}")) for n in range(2)]
        self.fixture.turn()
        self.fixture.clock.advance(30)
        asked[0].cancel()
        self.error_of(asked[0], CancelledError)
        self.fixture.clock.advance(4.9)
        self.assertNoResult(asked[1])
        self.fixture.clock.advance(0.2)
        self.error_of(asked[1], RequestMaybeProcessed)

    def test_closing_does_not_wait_for_it(self) -> None:
        """A connection on which only unwanted answers are owed closes at once."""
        for close_first in (False, True):
            self.setUp()
            d = self.connection.request(get())
            self.fixture.turn()
            for step in (d.cancel, self.connection.close)[:: -1 if close_first else 1]:
                self.assertFalse(self.fixture.wire.disconnecting)
                step()
            self.assertTrue(self.fixture.wire.disconnecting)
            self.error_of(d, CancelledError)

    def test_from_within_an_answer(self) -> None:
        """An answer may cancel the request that is answered in the same read."""
        first, second, third = (self.connection.request(get()) for _ in range(3))
        self.fixture.turn()
        first.addCallback(lambda _: second.cancel())
        self.fixture.receive(ok(b"1") + ok(b"2") + ok(b"3"))
        self.error_of(second, CancelledError)
        self.assertEqual(self.body_of(third), b"3")


class EndTests(Case):
    """How connections end."""

    def setUp(self) -> None:
        self.fixture = ConnectionFixture()
        self.connection = self.fixture.connection

    def test_loss(self) -> None:
        """Each request learns whether it may have been processed."""
        self.fixture.connection.request(get("/0"))
        self.fixture.sent()
        asked = [self.connection.request(r) for r in (get("/1"), post("/2"))]
        self.fixture.turn()
        self.fixture.receive(ok(b"0") + b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab")
        self.fixture.wire.send_valve.pauseProducing()
        unsent = self.connection.request(post("/3"))
        gone = self.connection.when_lost()
        self.fixture.wire.lose(ConnectionLost())
        self.assertIn("was interrupted", str(self.error_of(asked[0], ResponseError)))
        self.assertTrue(self.error_of(asked[1], RequestMaybeProcessed).may_have_happened)
        self.assertFalse(self.error_of(unsent, RequestNotSent).may_have_happened)
        self.assertIsNone(self.successResultOf(gone))
        self.error_of(self.connection.request(get()), RequestNotSent)
        self.assertEqual(self.fixture.clock.getDelayedCalls(), [])

    def test_connection_close(self) -> None:
        """What stands behind an answer with Connection: close is as if never sent."""
        asked = [self.connection.request(r) for r in (get(), post(), get())]
        self.fixture.turn()
        self.fixture.receive(ok(b"last", b"Connection: close") + ok(b"ignored"))
        self.assertEqual(self.body_of(asked[0]), b"last")
        for d in asked[1:]:
            self.assertFalse(self.error_of(d, RequestNotSent).may_have_happened)
        self.assertFalse(self.connection.open)
        self.assertTrue(self.fixture.wire.disconnecting)

    def test_implicit_close(self) -> None:
        """An HTTP/1.0 answer ends the connection, but promises nothing for what stood behind it."""
        asked = [self.connection.request(r) for r in (get(), post())]
        self.fixture.turn()
        self.fixture.receive(b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx")
        self.assertEqual(self.body_of(asked[0]), b"x")
        self.error_of(asked[1], RequestMaybeProcessed)

    def test_garbage(self) -> None:
        """Garbage ends the connection; answers before it stand."""
        asked = [self.connection.request(r) for r in (get(), get(), get())]
        self.fixture.turn()
        self.fixture.receive(ok(b"good") + b"\0\1\2")
        self.assertEqual(self.body_of(asked[0]), b"good")
        self.error_of(asked[1], ResponseError)
        self.error_of(asked[2], RequestMaybeProcessed)
        self.assertTrue(self.fixture.wire.aborted)

    def test_unasked_answer(self) -> None:
        """An answer nobody asked for ends the connection."""
        self.fixture.receive(ok(b"surprise"))
        self.assertTrue(self.fixture.wire.aborted)
        self.assertFalse(self.connection.open)

    def test_silence(self) -> None:
        """A server that never answers is given up after timeout_s of silence, not of waiting."""
        asked = [self.connection.request(get(timeout_s=10)) for _ in range(2)]
        self.fixture.turn()
        wire = ok(b"slow")
        for byte in wire:
            self.fixture.clock.advance(9)
            self.fixture.receive(bytes([byte]))
        self.assertEqual(self.body_of(asked[0]), b"slow")
        self.fixture.clock.advance(9.9)
        self.assertNoResult(asked[1])
        self.fixture.clock.advance(0.2)
        self.assertTrue(self.error_of(asked[1], RequestTimedOut).may_have_happened)
        self.assertTrue(self.fixture.wire.aborted)

    def test_sending_is_progress(self) -> None:
        """A long upload over a thin line is not silence."""
        self.patch(self.fixture.wire, "writeSequence", BackPressureTests._pausing(self.fixture))
        d = self.connection.request(post(body=b"x" * 10**6, timeout_s=10))
        self.fixture.turn()
        for _ in range(100):
            self.fixture.clock.advance(9)
            self.fixture.wire.send_valve.resumeProducing()
        self.assertNoResult(d)
        self.fixture.clock.advance(11)
        self.error_of(d, RequestTimedOut)

    def test_idle(self) -> None:
        """A connection that is not used is closed before the server does so."""
        d = self.connection.request(get())
        self.fixture.turn()
        self.fixture.clock.advance(44)
        self.fixture.receive(ok())
        self.successResultOf(d)
        self.fixture.clock.advance(44)
        self.assertFalse(self.fixture.wire.disconnecting)
        self.fixture.clock.advance(2)
        self.assertTrue(self.fixture.wire.disconnecting)
        self.assertFalse(self.fixture.wire.aborted)
        self.fixture.clock.advance(6)
        self.assertTrue(self.fixture.wire.aborted, "the server did not close its side")

    def test_early_answer(self) -> None:
        """An answer to half a request counts; the rest of the request is not sent."""
        self.patch(self.fixture.wire, "writeSequence", BackPressureTests._pausing(self.fixture))
        d = self.connection.request(post(body=b"x" * 10**6))
        behind = self.connection.request(post())
        self.fixture.turn()
        self.fixture.receive(ok(b"too large", status=b"413 Too Large"))
        self.assertEqual(self.successResultOf(d).status, 413)
        self.assertFalse(self.error_of(behind, RequestNotSent).may_have_happened)
        self.assertTrue(self.fixture.wire.disconnecting)

    def test_long_answers_are_bounded(self) -> None:
        """An answer longer than expected fails, whether it says its length or not."""
        chunked = b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        for wire in ([ok(b"x" * 10**6, status=b"404 Not Found")], [chunked] + [chunk] * 40):
            self.setUp()
            d = self.connection.request(get(max_body_bytes=10**5))
            self.fixture.turn()
            for piece in wire:
                self.fixture.receive(piece)
            self.error_of(d, ResponseError)
            self.assertTrue(self.fixture.wire.aborted)

    def test_chunks_without_number(self) -> None:
        """An answer in chunks of two bytes takes as much memory as its bytes, not thirty times that."""
        count, most = 50_000, 200
        d = self.connection.request(get(max_body_bytes=2 * count))
        self.fixture.turn()
        self.fixture.receive(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        for piece in range(count // most):
            # Few enough for one read that they are not joined by the parser.
            for _ in range(most // 50):
                self.fixture.receive(b"".join(b"2\r\n%02d\r\n" % (piece % 100) for _ in range(50)))
        self.assertLess(tracemalloc.get_traced_memory()[0], 4 * 2 * count)
        self.fixture.receive(b"0\r\n\r\n")
        wanted = b"".join(b"%02d" % (piece % 100) * most for piece in range(count // most))
        self.assertEqual(self.body_of(d), wanted)

    def test_close(self) -> None:
        """Closing waits for answers that are owed and gives back what is not sent."""
        first = self.connection.request(get())
        self.fixture.turn()
        second = self.connection.request(get())
        gone = self.connection.close()
        self.error_of(second, RequestNotSent)
        self.error_of(self.connection.request(get()), RequestNotSent)
        self.assertFalse(self.fixture.wire.disconnecting)
        self.fixture.receive(ok(b"owed"))
        self.assertEqual(self.body_of(first), b"owed")
        self.assertTrue(self.fixture.wire.disconnecting)
        self.assertNoResult(gone)
        self.fixture.wire.lose()
        self.successResultOf(gone)
        self.assertEqual(self.fixture.clock.getDelayedCalls(), [])
