"""The relay delays and throttles real connections; here they are simulated, so that time is exact."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionLost
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.testing.clock import HeapClock
from pipegrid.testing.link_model import to_seconds
from pipegrid.testing.link_relay import (
    EARLY_S,
    LATE_S,
    MAX_QUEUE_BYTES,
    MIN_QUEUE_BYTES,
    READ_BYTES,
    WINDOW_BYTES,
    Copied,
    LinkShape,
    RelayedStream,
    RelayFactory,
    SharedLink,
    queue_bytes,
)
from pipegrid.testing.network import SimulatedNetwork, leaks, run

TOLERANCE_S = 2 * EARLY_S


class Greeter(Protocol):
    """Speaks first."""

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(b"hello")


class Echo(Protocol):
    """Answers with what it is told."""

    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)


class Flood(Protocol):
    """Sends much, and notes what it hears."""

    heard = b""

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(bytes(200_000))

    def dataReceived(self, data: bytes) -> None:
        Flood.heard = data


class Source:
    """A transport that can be paused."""

    paused = False

    def pauseProducing(self) -> None:
        self.paused = True

    def resumeProducing(self) -> None:
        self.paused = False


class Sink:
    """A transport that counts what it is given."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def registerProducer(self, *_: object) -> None:
        pass

    def writeSequence(self, data: list[bytes]) -> None:
        self.write(b"".join(data))

    def write(self, data: bytes) -> None:
        self.size_bytes += len(data)


class SocketSink(Sink):
    """One with a socket of its own, which takes so much of each piece at once, as Twisted's have."""

    connected = True
    producer = None
    producerPaused = streamingProducer = False
    _tempDataBuffer: tuple[()] = ()

    def __init__(self, takes_bytes: int) -> None:
        super().__init__()
        self.takes_bytes = takes_bytes
        self.dataBuffer = b""
        self.sent = b""

    def writeSomeData(self, data: bytes) -> int | Exception:
        if self.takes_bytes < 0:
            return ConnectionLost()
        self.sent += bytes(data[: self.takes_bytes])
        return min(len(data), self.takes_bytes)

    def write(self, data: bytes) -> None:
        self.dataBuffer += data

    def drain(self) -> None:
        """The reactor has found the socket writable."""
        self.sent, self.dataBuffer = self.sent + self.dataBuffer, b""


class Collector(Protocol):
    """Fires ``done`` with what came when so many bytes have come."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.wanted = 0
        self.done: Deferred[bytes] = Deferred()
        self.lost: Deferred[None] = Deferred()

    def expect(self, size_bytes: int) -> Deferred[bytes]:
        self.received.clear()
        self.wanted = size_bytes
        self.done = Deferred()
        return self.done

    def dataReceived(self, data: bytes) -> None:
        self.received += data
        if len(self.received) >= self.wanted and not self.done.called:
            self.done.callback(bytes(self.received))

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.lost.callback(None)


class RelayTests(SynchronousTestCase):
    """A connection through the relay behaves like one over the link."""

    def setUp(self) -> None:
        self.clock = HeapClock()
        self.network = SimulatedNetwork(self.clock, latency_s=0.0)
        self.network.host("server").listen(1, Factory.forProtocol(Echo))

    def connect(
        self, shape: LinkShape, target_port: int = 1, early_s: float = EARLY_S
    ) -> Collector:
        """Return a connection to the echo server over a link of this shape."""
        link = SharedLink(self.clock, shape, early_s)
        target = self.network.endpoint("relay", "server", target_port)
        self.network.host("relay").listen(2, RelayFactory(link, target))
        return self.connect_again()

    def connect_again(self) -> Collector:
        """Return one more connection over that link."""
        endpoint = self.network.endpoint("client", "relay", 2)
        connecting = endpoint.connect(Factory.forProtocol(Collector))
        return cast(Collector, run(self.clock, connecting, network=self.network))

    def ask(self, client: Collector, data: bytes) -> float:
        """Return the seconds until the echo of data is here, and right."""
        started = self.clock.seconds()
        answer = client.expect(len(data))
        assert client.transport is not None
        client.transport.write(data)
        self.assertEqual(run(self.clock, answer, network=self.network), data)
        return self.clock.seconds() - started

    def assert_close(self, seconds: float, expected: float, tolerance: float) -> None:
        """Fail unless the times are this close."""
        self.assertLessEqual(abs(seconds - expected), tolerance + 1e-9, (seconds, expected))

    def test_round_trip(self) -> None:
        """An answer takes the link's round trip, and the first one that of the handshake too."""
        client = self.connect(LinkShape(rtt_s=0.1))
        self.assert_close(self.ask(client, b"first"), 0.2, TOLERANCE_S)
        self.assert_close(self.ask(client, b"second"), 0.1, TOLERANCE_S)

    def test_a_round_trip_below_a_millisecond(self) -> None:
        """With a clock that is fine enough it is exact; the reactor's own would make nothing of it."""
        client = self.connect(LinkShape(rtt_s=0.00012), early_s=0.00001)
        self.ask(client, b"first")
        self.assert_close(self.ask(client, b"second"), 0.00012, 0.00002)

    def test_a_server_that_speaks_first(self) -> None:
        """It knows of the connection after one and a half round trips, so its word takes two."""
        self.network.host("server").listen(3, Factory.forProtocol(Greeter))
        started = self.clock.seconds()
        client = self.connect(LinkShape(rtt_s=0.1), target_port=3)
        self.assertEqual(run(self.clock, client.expect(5), network=self.network), b"hello")
        self.assert_close(self.clock.seconds() - started, 0.2, TOLERANCE_S)

    def test_connections_share_a_direction_fairly(self) -> None:
        """Two that send at once need twice the time, and both of them end at about that time."""
        rate = 100_000
        first = self.connect(LinkShape(0.01, up_bytes_per_s=rate))
        second = self.connect_again()
        for client in (first, second):
            self.ask(client, b"x")
        data = b"z" * 500_000
        started = self.clock.seconds()
        ends = []
        for client in (first, second):
            answer = client.expect(len(data))
            answer.addCallback(lambda _: ends.append(self.clock.seconds() - started))
            assert client.transport is not None
            client.transport.write(data)
        self.clock.advance(30)
        self.assertEqual(len(ends), 2)
        for seconds in ends:
            self.assert_close(seconds, 2 * len(data) / rate, 0.05)

    def test_directions_are_apart(self) -> None:
        """What goes up does not wait for what comes down, though the line down is full."""
        self.network.host("server").listen(4, Factory.forProtocol(Flood))
        flooded = self.connect(LinkShape(0.01, 10_000, 10_000), target_port=4)
        self.clock.advance(1)
        self.assertGreater(len(flooded.received), 5_000)
        assert flooded.transport is not None
        flooded.transport.write(b"stop")
        self.clock.advance(0.1)
        self.assertEqual(Flood.heard, b"stop")

    def line_of(self, steps: list[tuple[float, int]], rate: int) -> float:
        """Return when a line of this rate is free, after reads at these times, of so many bytes."""
        clock = Clock()
        link = SharedLink(clock, LinkShape(up_bytes_per_s=rate))
        stream = RelayedStream(link.up, clock, 0.0)
        stream.write_to(cast(Any, Sink()))
        for at_s, size_bytes in steps:
            clock.advance(at_s - clock.seconds())  # what was due on the way runs late, at the end
            stream.send(Copied(bytes(size_bytes)))
        for _ in range(10):
            clock.advance(1)
        return to_seconds(link.up.path.line.free_ns)

    def test_a_relay_that_is_held_up_makes_up_for_it(self) -> None:
        """What was in the socket meanwhile goes as if it had been read in time, within limits."""
        rate = 10 * READ_BYTES
        for late_s, expected_s in ((0.05, 0.2), (0.09, 0.2), (0.4, 0.5 - LATE_S + 0.1)):
            steps = [(0.0, READ_BYTES), (0.1 + late_s, READ_BYTES)]
            self.assertAlmostEqual(self.line_of(steps, rate), expected_s, 6)

    def test_what_comes_later_is_not_earlier(self) -> None:
        """After a read that took all there was, the next bytes are as late as they are."""
        self.assertAlmostEqual(self.line_of([(0.0, 100), (5.0, 100)], 1000), 5.1, 6)

    def test_a_receiver_that_does_not_read_stops_the_sender(self) -> None:
        """After a window's worth of bytes; when it reads again, the sender goes on."""
        clock = Clock()
        stream = RelayedStream(SharedLink(clock, LinkShape()).up, clock, 0.0)
        source = Source()
        stream.read_from(cast(Any, source))
        stream.write_to(cast(Any, Sink()))
        stream.pauseProducing()
        sent_bytes = 0
        while not source.paused and sent_bytes < 2 * WINDOW_BYTES:
            stream.send(Copied(bytes(100_000)))
            sent_bytes += 100_000
            clock.advance(0.001)
        self.assertTrue(WINDOW_BYTES < sent_bytes < WINDOW_BYTES + 200_000, sent_bytes)
        stream.resumeProducing()
        self.assertFalse(source.paused)

    def test_what_a_socket_takes_is_sent_at_once(self) -> None:
        """And the rest behind it, in order, before anything that arrives later; nothing once it is lost."""
        pieces = [bytes([n]) * 1000 for n in range(4)]
        for takes_bytes, at_once in ((1000, 4000), (300, 300), (0, 0), (-1, 0)):
            clock = Clock()
            stream = RelayedStream(SharedLink(clock, LinkShape()).up, clock, 0.0)
            sink = SocketSink(takes_bytes)
            stream.write_to(cast(Any, sink))
            for piece in pieces:
                stream.send(Copied(piece))
                clock.advance(0.001)
            self.assertEqual(len(sink.sent), at_once)
            sink.drain()
            self.assertEqual(sink.sent, b"".join(pieces))

    def test_who_has_gone_leaves_the_line_to_others(self) -> None:
        """What waits for the line when its receiver hangs up is not sent."""
        self.network.host("server").listen(4, Factory.forProtocol(Flood))
        first = self.connect(LinkShape(0.1, 10_000, 10_000), target_port=4)
        second = self.connect_again()
        self.clock.advance(1)
        cast(Any, first.transport).abortConnection()
        self.clock.advance(0.5)
        before = len(second.received)
        self.clock.advance(2)
        self.assert_close((len(second.received) - before) / 10_000, 2.0, 0.3)
        cast(Any, second.transport).abortConnection()
        self.clock.advance(60)
        self.assertEqual(leaks(self.clock, self.network), [])

    def test_dropping_leaves_what_is_on_the_line(self) -> None:
        """And the count of bytes right, wherever a chunk is cut."""
        clock = Clock()
        link = SharedLink(clock, LinkShape(0.2, up_bytes_per_s=146_000))
        stream = RelayedStream(link.up, clock, 0.0)
        stream.write_to(cast(Any, Sink()))
        for size_bytes in (1000, 2000, 300):
            stream.send(Copied(bytes(size_bytes)))
        stream.sink_gone()
        stream.source_ended()
        for _ in range(1000):
            clock.advance(0.001)
        self.assertEqual((stream._held_bytes, len(stream._chunks)), (0, 0))
        stream.send(Copied(b"nobody hears this"))
        self.assertEqual(stream.flow.queued_bytes, 0)
        self.assertEqual(clock.getDelayedCalls(), [])

    def test_a_fast_line_may_have_more_waiting(self) -> None:
        """So that it does not run empty when the relay is held up; a slow one has what a socket has."""
        self.assertEqual(queue_bytes(None), MIN_QUEUE_BYTES)
        self.assertEqual(queue_bytes(80_000), MIN_QUEUE_BYTES)
        self.assertEqual(queue_bytes(125_000_000), 6_250_000)
        self.assertEqual(queue_bytes(10**10), MAX_QUEUE_BYTES)

    def test_bandwidth(self) -> None:
        """Bytes take as long as the slower of the two directions needs for them."""
        client = self.connect(LinkShape(0.02, up_bytes_per_s=1_000_000, down_bytes_per_s=250_000))
        self.ask(client, b"x")
        data = bytes(range(256)) * 4000
        seconds = self.ask(client, data)
        self.assert_close(seconds, len(data) / 250_000 + 0.02, 0.05)

    def test_large_transfers_are_bounded(self) -> None:
        """A sender is paused while the line is busy, and nothing is lost for it."""
        client = self.connect(LinkShape(0.01, 2_000_000, 2_000_000))
        data = b"0123456789abcdef" * 200_000
        self.assert_close(self.ask(client, data), len(data) / 2_000_000, 0.3)

    def test_closing_reaches_the_other_side_after_the_bytes(self) -> None:
        """When the client closes, the server's connection ends, and nothing is left behind."""
        client = self.connect(LinkShape(0.1))
        self.ask(client, b"x")
        assert client.transport is not None
        client.transport.loseConnection()
        self.clock.advance(5)
        self.assertEqual(leaks(self.clock, self.network), [])

    def test_a_target_that_is_not_there(self) -> None:
        """The client's connection is closed."""
        client = self.connect(LinkShape(0.1), target_port=9)
        run(self.clock, client.lost, network=self.network)
