"""How much of answers may be owed before another request leaves: what has come is not, and hosts differ."""

from __future__ import annotations

from collections import deque
from typing import Any

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.protocol import Factory, Protocol
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.http11.connection_limits import Limits
from pipegrid.http11.connection_loss import Loss
from pipegrid.http11.exchange import RawExchange, RawResponse
from pipegrid.http11.host_pool import PROOF, HostPool, HostStats
from pipegrid.http11.request_queue import RequestQueue
from pipegrid.http11.response_parser import ResponseHead
from pipegrid.testing.clock import HeapClock
from pipegrid.testing.network import SimulatedNetwork, run
from tests.http11.wire import ConnectionFixture, get, ok

RTT_S = 0.1
ANSWER_BYTES = 500_000


class DischargeTests(SynchronousTestCase):
    """On one connection."""

    def setUp(self) -> None:
        self.fixture = ConnectionFixture(Limits(response_budget_bytes=1000))

    def test_what_has_arrived_is_not_owed(self) -> None:
        """The next request leaves with the last budget of a large answer, not behind its end."""
        for path in "ab":
            self.fixture.connection.request(get(f"/{path}", expected_response_bytes=10_000))
        self.assertEqual(self.fixture.sent().count(b"GET"), 1)
        answer = ok(b"x" * 10_000)
        self.fixture.receive(answer[:-1100])
        self.assertEqual(self.fixture.sent(), b"")
        self.fixture.receive(answer[-1100:-900])
        self.assertIn(b"GET /b", self.fixture.sent())

    def test_the_head_tells_the_truth(self) -> None:
        """An answer that turns out to be longer than it was guessed to be is charged what it is."""
        connection = self.fixture.connection
        connection.request(get("/a"))
        self.fixture.sent()
        self.fixture.receive(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n")
        connection.request(get("/b"))
        self.assertEqual(self.fixture.sent(), b"")
        self.fixture.receive(b"x" * 4500)
        self.assertIn(b"GET /b", self.fixture.sent())

    def test_chunks_say_nothing(self) -> None:
        """Nobody knows how much of a chunked answer is still to come."""
        self.fixture.connection.request(get("/a", expected_response_bytes=2000))
        self.fixture.connection.request(get("/b"))
        self.fixture.sent()
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.fixture.receive(head + b"7d0\r\n" + b"x" * 2000 + b"\r\n")
        self.assertEqual(self.fixture.sent(), b"")
        self.fixture.receive(b"0\r\n\r\n")
        self.assertIn(b"GET /b", self.fixture.sent())


class GroupTests(SynchronousTestCase):
    """What the window sees of requests that leave together."""

    def test_one_message(self) -> None:
        """They are acknowledged with the last answer, and count what all brought; a later one is another."""
        lane = RequestQueue(Limits())
        lane.measure()
        window = lane.window
        assert window is not None
        exchanges = [RawExchange(get(expected_response_bytes=1000), "host") for _ in range(4)]
        for exchange, now in zip(exchanges, (1.0, 1.0, 1.0, 1.5), strict=True):
            lane.add(exchange)
            lane.start_next()
            lane.asked(exchange, now)
            exchange.received_bytes = 1200
        self.assertEqual(len({id(exchange.token) for exchange in exchanges}), 2)
        self.assertEqual(window.in_flight_bytes, 4000)
        for left_bytes in (4000, 4000, 1000, 0):
            lane.answered(2.0)
            self.assertEqual(window.in_flight_bytes, left_bytes)


class RecordTests(SynchronousTestCase):
    """Who bears more."""

    def record_of(self, product: bytes | None, answers: int, **limits: Any) -> HostStats:
        """Return what is known after some answers, each with others behind it."""
        record = HostStats(Limits(**limits))
        headers = [] if product is None else [(b"server", product)]
        for _ in range(answers):
            exchange = RawExchange(get(), "host")
            exchange.response = ResponseHead(200, b"OK", headers)
            record.answered(exchange, 0.0, True)
        return record

    def test_products(self) -> None:
        """Some are known to; of others it is proven; Twisted's never do, nor does who says nothing."""
        for product, after_one, after_many in (
            (b"nginx/1.22.1", True, True),
            (b"Apache/2.4.57 (Debian)", True, True),
            (b"SomethingElse/1.0", False, True),
            (b"TwistedWeb/24.3.0", False, False),
            (None, False, False),
        ):
            with self.subTest(product):
                self.assertEqual(self.record_of(product, 1).takes_larger_budget, after_one)
                self.assertEqual(self.record_of(product, PROOF).takes_larger_budget, after_many)

    def test_how_many_a_connection(self) -> None:
        """A host's word counts, not its haste; one that goes on answering has no quota."""
        record = HostStats(Limits())
        for answered, quota in ((3, 1000), (100, 100), (5, 100)):
            record.lost(
                Loss(reason="", announced=True, announced_close=True, answered=answered), 0, 0.0
            )
            self.assertEqual(record.quota, quota)
        record.lost(Loss(reason="", announced=True, answered=50), 0, 0.0)  # we closed it
        record.outlasted(99)
        self.assertEqual(record.quota, 100)
        record.outlasted(100)
        self.assertEqual(record.quota, float("inf"))

    def test_not_where_the_limits_say_no(self) -> None:
        """No more than response_budget_bytes: that stays as it is."""
        self.assertFalse(
            self.record_of(b"nginx", 99, max_response_budget_bytes=0).takes_larger_budget
        )

    def test_not_again_after_a_loss(self) -> None:
        """A connection that was lost with requests on it ends that, unless its end was announced."""
        for announced in (True, False):
            record = self.record_of(b"nginx", PROOF)
            loss = Loss(reason="reset", announced=announced, in_flight=2)
            record.lost(loss, PROOF, 0.0)
            self.assertEqual(record.takes_larger_budget, announced)
            exchange = RawExchange(get(), "host")
            exchange.response = ResponseHead(200, b"OK", [(b"server", b"nginx")])
            record.answered(exchange, 0.0, True)
            self.assertEqual(record.takes_larger_budget, announced)


class Answers(Protocol):
    """Answers each GET with so many bytes, under a name, as fast as the line takes them."""

    product = b"nginx"
    most_waiting = 0

    def connectionMade(self) -> None:
        self.rest = b""
        self.waiting: deque[bytes] = deque()
        self.is_full = False
        self.transport.registerProducer(self, True)  # type: ignore[union-attr]

    def dataReceived(self, data: bytes) -> None:
        *whole, self.rest = (self.rest + data).split(b"\r\n\r\n")
        self.waiting.extend(whole)
        Answers.most_waiting = max(Answers.most_waiting, len(self.waiting))
        self.answer()

    def answer(self) -> None:
        while self.waiting and not self.is_full:
            self.waiting.popleft()
            self.transport.write(ok(b"x" * ANSWER_BYTES, b"Server: " + self.product))  # type: ignore[union-attr]

    def pauseProducing(self) -> None:
        self.is_full = True

    def resumeProducing(self) -> None:
        self.is_full = False
        self.answer()

    def stopProducing(self) -> None:
        self.waiting.clear()


class MeasuredTests(SynchronousTestCase):
    """Twenty answers of half a megabyte, on one connection over 100 ms."""

    def seconds(self, product: bytes, bytes_per_s: int | None = None) -> float:
        """Return how long they take, the connection being up."""
        clock = HeapClock()
        network = SimulatedNetwork(clock, latency_s=RTT_S / 2, bytes_per_s=bytes_per_s)
        factory = Factory.forProtocol(type("Named", (Answers,), {"product": product}))
        network.host("server").listen(80, factory)
        client = network.host("client")
        pool = HostPool(
            client.clock,
            lambda: network.endpoint("client", "server", 80),
            "server:80",
            Limits(max_connections=1),
        )

        def ask(count: int) -> None:
            asked = [
                pool.request(
                    get("/", expected_response_bytes=ANSWER_BYTES, max_body_bytes=ANSWER_BYTES)
                )
                for _ in range(count)
            ]
            all_of_them: Deferred[list[RawResponse]] = gatherResults(asked)
            found = run(clock, all_of_them, network=network)
            self.assertEqual({each.body_bytes for each in found}, {ANSWER_BYTES})

        ask(1)
        since_s = clock.seconds()
        ask(20)
        elapsed_s = clock.seconds() - since_s
        run(clock, pool.close(), network=network)
        return elapsed_s

    def test_a_host_that_is_known_is_never_idle(self) -> None:
        """It takes a few round trips where it took one for each answer."""
        self.assertLess(self.seconds(b"nginx"), 6 * RTT_S)
        self.assertGreater(self.seconds(b"TwistedWeb"), 19 * RTT_S)

    def test_a_narrow_line(self) -> None:
        """On 100 Mbit/s the bytes are what takes the time; and little more is asked than the line holds."""
        rate = 12_500_000
        Answers.most_waiting = 0
        self.assertLess(self.seconds(b"nginx", rate), 20 * ANSWER_BYTES / rate + 2 * RTT_S)
        path = rate * RTT_S / ANSWER_BYTES
        self.assertLess(Answers.most_waiting, 4 * path + 2)
