"""The relay delays and throttles real connections; here they are simulated, so that time is exact."""

from __future__ import annotations

from typing import cast

from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.simulation.clock import HeapClock
from pipegrid.simulation.driver import leaks, run
from pipegrid.simulation.network import SimulatedNetwork
from pipegrid.simulation.relay import Link, LinkShape, RelayFactory

EARLY_S = 0.001


class Echo(Protocol):
    """Answers with what it is told."""

    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)


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

    def connect(self, shape: LinkShape, target_port: int = 1) -> Collector:
        """Return a connection to the echo server over a link of this shape."""
        link = Link(self.clock, shape)
        target = self.network.endpoint("relay", "server", target_port)
        self.network.host("relay").listen(2, RelayFactory(link, target))
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
        self.assert_close(self.ask(client, b"first"), 0.2, EARLY_S)
        self.assert_close(self.ask(client, b"second"), 0.1, EARLY_S)

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
