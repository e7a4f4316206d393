"""Reading: what a connection may owe, streams among each other, and order between connections."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Factory
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import NoSuchShare
from pipegrid.http11.connection import PipelinedConnection
from pipegrid.http11.connection_limits import Limits
from pipegrid.server.gbs.http_connection import GbsConnection, GbsSite
from pipegrid.server.gbs.request_check import Request
from pipegrid.server.gbs.storage_operations import GbsService
from pipegrid.testing.network import leaks
from pipegrid.transport.gbs.requests import GbsRequests, GbsSettings
from pipegrid.wire.storage_messages import WriteAnswer
from tests.scratch import scratch_path
from tests.transport.contract import SECRETS, SI, Consumer
from tests.transport.gbs_world import CLIENT, PORT, GbsWorld

SHARE_BYTES = 1 << 20
SHARES = 10


def _data_of(consumer: Consumer, _: int) -> bytes:
    return consumer.data


class DelicateFactory(GbsSite):
    """
    As a server built on Twisted: a GET that begins while the transport is full ends the connection.

    Attributes:
        dropped: how often that happened.
    """

    dropped = 0

    def buildProtocol(self, addr: IAddress | None) -> GbsConnection | None:
        connection = super().buildProtocol(addr)
        if connection is not None:
            self._make_delicate(connection)
        return connection

    def _make_delicate(self, connection: GbsConnection) -> None:
        order = connection._order
        really_may = order.may_begin

        def may_begin(request: Request) -> bool:
            if not order.can_write and request.method == b"GET":
                self.dropped += 1
                connection.abort()
                return False
            return really_may(request)

        order.may_begin = may_begin  # type: ignore[method-assign]


class ReadingTestCase(SynchronousTestCase):
    """One server with ten shares of 1 MiB, behind a line that is slower than it."""

    make_factory: Callable[[GbsService, Any], Factory] | None = None
    settings: GbsSettings | None = None

    def setUp(self) -> None:
        self.world = GbsWorld(
            scratch_path(self),
            bytes_per_s=2_000_000,
            make_factory=self.make_factory,
            settings=self.settings,
        )
        self.addCleanup(self.world.close)
        self.server = self.world.connect()
        random = Random(5)
        self.shares = [random.randbytes(SHARE_BYTES) for _ in range(SHARES)]
        waiting: list[Deferred[Any]] = [
            self.server.allocate(SI, set(range(SHARES)), SHARE_BYTES, SECRETS)
        ]
        for number, data in enumerate(self.shares):
            waiting.append(self.server.write(SI, number, 0, [data], SECRETS.upload))
        self.world.run(gatherResults(waiting))

    def tearDown(self) -> None:
        self.world.run(self.server.disconnect())
        self.world.clock.advance(700)
        self.assertEqual(leaks(self.world.clock, self.world.network), [])


class DelicateServerTests(ReadingTestCase):
    """Servers that cannot pipeline long answers are not asked to."""

    make_factory = DelicateFactory

    def test_any_mixture_of_reads(self) -> None:
        """Reads, lists and streams of all sizes, hundreds at once, never meet a full transport."""
        random = Random(11)
        checks: list[tuple[Deferred[Any], Any]] = []
        for burst in range(8):
            for _ in range(random.choice((1, 5, 60))):
                number, offset = random.randrange(SHARES), random.randrange(SHARE_BYTES)
                length = round(300_000 ** random.random())
                expected = self.shares[number][offset : offset + length]
                kind = random.random()
                if kind < 0.2:
                    checks.append((self.server.list_shares(SI), set(range(SHARES))))
                elif kind < 0.85:
                    checks.append((self.server.read(SI, number, offset, length), expected))
                else:
                    consumer = Consumer()
                    stream = self.server.stream(SI, number, offset, length, consumer)
                    checks.append((stream.addCallback(partial(_data_of, consumer)), expected))
            self.world.clock.advance(random.random() * burst / 4)
        for waiting, expected in checks:
            self.assertEqual(self.world.run(waiting), expected)
        self.assertEqual(self.world.servers[0].factory.dropped, 0)

    def test_the_server_is_delicate(self) -> None:
        """Without a budget the same server drops the connection: the test above can fail."""
        limits = Limits(response_budget_bytes=1 << 30)
        connection = self.world.run(
            self.world.network.endpoint(CLIENT, "s0", PORT).connect(
                Factory.forProtocol(lambda: PipelinedConnection(self.world.client.clock, limits))
            )
        )
        assert isinstance(connection, PipelinedConnection)
        requests = GbsRequests(self.server.nurl, 60.0)
        failed: list[Any] = []
        for number in range(SHARES):
            answer: Deferred[Any] = connection.request(requests.read(SI, number, 0, 100_000))
            answer.addErrback(failed.append)
        self.world.clock.advance(10)
        self.world.run(connection.close())
        self.assertTrue(failed)
        self.assertEqual(self.world.servers[0].factory.dropped, 1)

    def test_small_reads_share_a_connection(self) -> None:
        """A hundred short reads take two connections at most, and few round trips."""
        self.world.run(self.server.list_shares(SI))
        self.world.clock.advance(1)
        before = self.world.servers[0].factory.accepted
        began_s = self.world.clock.seconds()
        reads = [self.server.read(SI, 0, 100 * n, 100) for n in range(100)]
        pieces: list[bytes] = [self.world.run(read) for read in reads]
        self.assertEqual(b"".join(pieces), self.shares[0][:10_000])
        self.assertEqual(self.world.servers[0].factory.accepted, before)
        self.assertLess(self.world.round_trips(began_s), 1.5)


class StreamTests(ReadingTestCase):
    """More streams than connections, and streams whose connection is lost."""

    settings = GbsSettings(max_streams=2, max_read_connections=1)

    def test_paused_streams_make_way(self) -> None:
        """Ten streams on two connections, each paused until the others have caught up: all end."""
        consumers: list[Consumer] = []
        waiting = []
        marks: dict[Consumer, int] = {}

        def pause(consumer: Consumer) -> None:
            if len(consumer.data) >= marks.get(consumer, 0) + 150_000:
                marks[consumer] = len(consumer.data)
                consumer.producer.pauseProducing()

        for number in range(SHARES):
            consumer = Consumer(pause)
            consumers.append(consumer)
            waiting.append(self.server.stream(SI, number, 0, SHARE_BYTES, consumer))
        self.world.clock.advance(20)
        self.assertTrue(all(consumer.data for consumer in consumers))
        for _ in range(20 * SHARES):
            running = [c for c in consumers if c.producer is not None]
            if not running:
                break
            slowest = min(running, key=lambda c: len(c.data))
            slowest.producer.resumeProducing()
            self.world.clock.advance(1.0)
        for share, stream, consumer in zip(self.shares, waiting, consumers, strict=True):
            self.assertEqual(self.world.run(stream), SHARE_BYTES)
            self.assertEqual(consumer.data, share)

    def test_a_stream_that_makes_way_at_its_last_byte(self) -> None:
        """One that was paused by its last byte, and gave up its connection, just ends when it is resumed."""
        for past_the_end in (0, 1000):
            consumers = [Consumer(self.pause_at_the_end) for _ in range(SHARES)]
            waiting = [
                self.server.stream(SI, number, 0, SHARE_BYTES + past_the_end, consumer)
                for number, consumer in enumerate(consumers)
            ]
            self.world.clock.advance(60)
            for consumer in consumers:
                self.assertEqual(len(consumer.data), SHARE_BYTES)
                if consumer.producer is not None:
                    consumer.producer.resumeProducing()
            for stream in waiting:
                self.assertEqual(self.world.run(stream, 5.0), SHARE_BYTES)

    def pause_at_the_end(self, consumer: Consumer) -> None:
        if len(consumer.data) == SHARE_BYTES:
            consumer.producer.pauseProducing()

    def test_short_reads_pass_paused_streams(self) -> None:
        """However many streams are paused, a list or a short read is answered."""
        for number in range(4):
            consumer = Consumer(lambda c: c.producer.pauseProducing())
            self.server.stream(SI, number, 0, SHARE_BYTES, consumer).addErrback(lambda _: None)
        self.world.clock.advance(5)
        self.assertEqual(self.world.run(self.server.list_shares(SI), 2.0), set(range(SHARES)))
        self.assertEqual(self.world.run(self.server.read(SI, 9, 5, 5), 2.0), self.shares[9][5:10])

    def test_a_stream_outlives_its_connection(self) -> None:
        """A stream whose connection is lost goes on where it was, each byte once."""
        for after_bytes in (0, 50, 100, 300, 70_000, 900_000):
            world_connections = self.world.network._connections_between[(CLIENT, "s0")]
            for n in range(2):
                self.world.network.cut(CLIENT, "s0", world_connections + n, CLIENT, after_bytes)
            server = self.world.connect()
            consumer = Consumer()
            count = self.world.run(server.stream(SI, 3, 0, SHARE_BYTES, consumer))
            self.assertEqual((count, consumer.data == self.shares[3]), (SHARE_BYTES, True))
            self.assertEqual(consumer.registrations, 1)
            self.world.run(server.disconnect())

    def test_a_read_outlives_its_connection(self) -> None:
        """So does a short read, also when its answer had begun."""
        for after_bytes in (0, 10, 120, 200, 5000):
            connections = self.world.network._connections_between[(CLIENT, "s0")]
            self.world.network.cut(CLIENT, "s0", connections, CLIENT, after_bytes)
            server = self.world.connect()
            data = self.world.run(server.read(SI, 3, 0, 6000))
            self.assertEqual(data, self.shares[3][:6000])
            self.world.run(server.disconnect())

    def test_a_cancelled_stream_drops_its_connection(self) -> None:
        """Megabytes that nobody wants are not read."""
        stream = self.server.stream(SI, 0, 0, SHARE_BYTES, Consumer())
        self.world.clock.advance(0.4)
        before = sum(sent.size_bytes for sent in self.world.network.log)
        stream.addErrback(lambda _: None)
        stream.cancel()
        self.world.clock.advance(30)
        after = sum(sent.size_bytes for sent in self.world.network.log)
        self.assertLess(after - before, 300_000)


class OrderTests(ReadingTestCase):
    """Calls that touch the same share take effect in their order, although connections differ."""

    def upload(self, number: int, data: bytes) -> Deferred[WriteAnswer]:
        """Allocate and write."""
        self.server.allocate(SI, {number}, len(data), SECRETS)
        return self.server.write(SI, number, 0, [data], SECRETS.upload)

    def test_questions_behind_a_write_see_it(self) -> None:
        """What is asked after a write is answered after it, short or long."""
        write = self.upload(20, b"x" * 500_000)
        consumer = Consumer()
        waiting: list[Deferred[Any]] = [
            self.server.list_shares(SI),
            self.server.read(SI, 20, 0, 5),
            self.server.read(SI, 20, 0, 400_000),
            self.server.stream(SI, 20, 0, 500_000, consumer),
            write,
        ]
        listed, short, long, streamed, written = [self.world.run(each) for each in waiting]
        self.assertIn(20, listed)
        self.assertEqual((short, long), (b"xxxxx", b"x" * 400_000))
        self.assertEqual((streamed, len(consumer.data)), (500_000, 500_000))
        self.assertTrue(written.complete)

    def test_questions_before_a_write_do_not_see_it(self) -> None:
        """What is asked before a write is answered before it, however long it takes to connect."""
        server = self.server
        listed = server.list_shares(SI)
        read = server.read(SI, 20, 0, 5)
        stream = server.stream(SI, 20, 0, 500_000, Consumer())
        write = self.upload(20, b"x" * 1000)
        behind = server.list_shares(SI)
        self.assertNotIn(20, self.world.run(listed))
        both: tuple[Deferred[Any], ...] = (read, stream)
        for missing in both:
            with self.assertRaises(NoSuchShare):
                self.world.run(missing)
        self.assertTrue(self.world.run(write).complete)
        self.assertIn(20, self.world.run(behind))

    def test_reading_one_share_while_another_is_written(self) -> None:
        """A repair reads and writes at once: its paused streams hold up no write, and nothing is held up."""
        consumer = Consumer(lambda c: c.producer.pauseProducing())
        stream = self.server.stream(SI, 0, 0, SHARE_BYTES, consumer)
        self.world.clock.advance(1)
        self.assertTrue(self.world.run(self.upload(20, b"x" * 1000)).complete)
        waiting = self.server.stream(SI, 1, 0, SHARE_BYTES, Consumer())
        began_s = self.world.clock.seconds()
        self.assertTrue(self.world.run(self.upload(21, b"x" * 1000)).complete)
        self.assertLess(self.world.round_trips(began_s), 2.0)
        for each in (stream, waiting):
            each.addErrback(lambda _: None)

    def test_cancelled_while_it_waits(self) -> None:
        """A write that waits for an earlier question can be cancelled, and the next one goes on."""
        listed = self.server.list_shares(SI)
        first = self.upload(20, b"x" * 1000)
        second = self.server.write(SI, 20, 0, [b"y" * 1000], SECRETS.upload)
        first.addErrback(lambda _: None)
        first.cancel()
        self.assertTrue(self.world.run(second).complete)
        self.assertNotIn(20, self.world.run(listed))
        self.assertEqual(self.world.run(self.server.read(SI, 20, 0, 3)), b"yyy")
