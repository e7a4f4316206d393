"""Connections take the time that TCP takes, to the nanosecond."""

from __future__ import annotations

from twisted.internet.error import (
    CannotListenError,
    ConnectingCancelledError,
    ConnectionRefusedError,
    NoProtocol,
    TimeoutError,
)
from twisted.internet.interfaces import IListeningPort, IStreamClientEndpoint
from twisted.internet.protocol import Factory
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase
from zope.interface.verify import verifyObject

from pipegrid.testing.clock import HeapClock
from pipegrid.testing.link_model import Bottleneck
from pipegrid.testing.network import SimulatedNetwork, bursts, leaks, run, timeline
from pipegrid.testing.simulated_tcp import TcpOptions
from tests.simulation.programs import Echo, Keeping, Recorder, pair

RTT_S = 0.1
MB = 1_000_000


def network_of(
    bytes_per_s: int | None = None, latency_s: float = RTT_S / 2, **options: int
) -> SimulatedNetwork:
    return SimulatedNetwork(
        HeapClock(),
        1,
        latency_s,
        bytes_per_s,
        TcpOptions(**options),  # type: ignore[arg-type]
    )


class ConnectingTests(SynchronousTestCase):
    """The handshake."""

    def setUp(self) -> None:
        self.clock = HeapClock()
        self.network = SimulatedNetwork(self.clock, latency_s=RTT_S / 2)
        self.server = Keeping(Echo)
        self.port = self.network.host("server").listen(80, self.server)

    def test_a_connection_takes_one_round_trip(self) -> None:
        """The client has it after one, the server half a one later, both know who the other is."""
        endpoint = self.network.endpoint("client", "server", 80)
        self.assertTrue(verifyObject(IStreamClientEndpoint, endpoint))
        self.assertTrue(verifyObject(IListeningPort, self.port))
        near = run(self.clock, endpoint.connect(Factory.forProtocol(Recorder)))
        assert isinstance(near, Recorder)
        self.assertEqual(near.made_s, RTT_S)
        self.clock.advance(RTT_S)
        far = self.server.made[0]
        self.assertEqual(far.made_s, 0.15)
        self.assertEqual(near.transport.getPeer(), far.transport.getHost())
        self.assertEqual(near.transport.getHost(), far.transport.getPeer())
        self.assertEqual(near.transport.getPeer().port, 80)

    def test_who_speaks_first_is_heard_half_a_round_trip_later(self) -> None:
        """A client's first bytes arrive with its acknowledgement, a server's cannot come before it."""

        class Greeter(Recorder):
            def connectionMade(self) -> None:
                super().connectionMade()
                self.transport.write(b"hello")

        self.network.host("server").listen(81, greeters := Keeping(Greeter))
        near = run(
            self.clock,
            self.network.endpoint("client", "server", 81).connect(Factory.forProtocol(Greeter)),
        )
        assert isinstance(near, Greeter)
        self.clock.advance(1)
        self.assertEqual(greeters.made[0].pieces, [(0.15, 5)])
        self.assertEqual(near.pieces, [(0.2, 5)])

    def test_refused(self) -> None:
        """Where nobody listens, a client knows after one round trip."""
        deferred = self.network.endpoint("client", "server", 9).connect(Keeping())
        self.assertRaises(ConnectionRefusedError, run, self.clock, deferred)
        self.assertEqual(self.network.round_trips(self.clock.seconds(), "client", "server"), 1)
        self.port.stopListening()
        deferred = self.network.endpoint("client", "server", 80).connect(Keeping())
        self.assertRaises(ConnectionRefusedError, run, self.clock, deferred)
        self.assertEqual(leaks(self.clock, self.network), [])

    def test_a_port_is_taken_once(self) -> None:
        """Two programs cannot listen on one port."""
        self.assertRaises(CannotListenError, self.network.host("server").listen, 80, Keeping())

    def test_nobody_answers(self) -> None:
        """A partition ends in the endpoint's time-out, and nothing is left."""
        self.network.partition("client", "server")
        deferred = self.network.endpoint("client", "server", 80, timeout_s=7).connect(Keeping())
        self.assertRaises(TimeoutError, run, self.clock, deferred)
        self.assertEqual(self.clock.seconds(), 7)
        self.network.heal("client", "server")
        self.clock.advance(1)
        self.assertEqual(leaks(self.clock, self.network), [])
        self.assertEqual(self.server.made, [])

    def test_cancelled(self) -> None:
        """Who gives up connecting leaves nothing, on neither side."""
        deferred = self.network.endpoint("client", "server", 80).connect(Keeping())
        self.clock.advance(RTT_S * 0.7)
        deferred.cancel()
        self.failureResultOf(deferred, ConnectingCancelledError)
        self.clock.advance(1)
        self.assertEqual(self.server.made, [])
        self.assertEqual(leaks(self.clock, self.network), [])

    def test_a_factory_may_decline(self) -> None:
        """A client factory without a protocol fails the endpoint; a server's closes the connection."""

        class Declining(Factory):
            def buildProtocol(self, addr: object) -> None:
                return None

        deferred = self.network.endpoint("client", "server", 80).connect(Declining())
        self.assertRaises(NoProtocol, run, self.clock, deferred)
        self.network.host("server").listen(82, Declining())
        near = run(
            self.clock,
            self.network.endpoint("client", "server", 82).connect(Factory.forProtocol(Recorder)),
        )
        assert isinstance(near, Recorder)
        run(self.clock, near.over)
        self.assertEqual(near.lost_s, round(0.1 + 2 * RTT_S, 9))

    def test_a_plain_clock_will_do(self) -> None:
        """Twisted's own Clock gives the same times, if it goes from one call to the next."""
        times = []
        for clock in (HeapClock(), Clock()):
            network = SimulatedNetwork(clock, latency_s=1 / 3, bytes_per_s=7_777_777)
            network.host("server").listen(80, Keeping(Echo))
            endpoint = network.endpoint("client", "server", 80)
            near = run(clock, endpoint.connect(Factory.forProtocol(Recorder)))
            assert isinstance(near, Recorder)
            near.transport.write(b"x" * MB)
            times.append(run(clock, near.when(MB)))
            self.assertEqual(near.received, b"x" * MB)
        self.assertEqual(times[0], times[1])


class TimeTests(SynchronousTestCase):
    """How long data takes."""

    def test_an_echo_takes_one_round_trip(self) -> None:
        """Exactly one, also where the latency is no whole number of anything."""
        for latency_s in (0.05, 1 / 3, 0.000123457, 1e-9, 0):
            network = network_of(latency_s=latency_s)
            near, _ = pair(network, Echo)
            begun_s = network.clock.seconds()
            near.transport.write(b"ping")
            end_s = run(network.clock, near.when(4))
            self.assertEqual(round(end_s - begun_s, 9), round(2 * round(latency_s, 9), 9))
            if latency_s:
                elapsed_s = network.clock.seconds() - begun_s
                self.assertEqual(network.round_trips(elapsed_s, "client", "server"), 1)

    def test_bulk_takes_its_bytes_and_one_round_trip(self) -> None:
        """10 MB at 1 MB/s with one byte in answer: 10 s + 1 RTT."""
        network = network_of(MB)
        near, far = pair(network)
        begun_s = network.clock.seconds()
        near.transport.write(b"x" * (10 * MB))
        run(network.clock, far.when(10 * MB))
        far.transport.write(b"y")
        end_s = run(network.clock, near.when(1))
        self.assertEqual(round(end_s - begun_s, 9), round(10 + RTT_S + 1e-6, 9))

    def test_ping_pong_and_pipelining(self) -> None:
        """Seven requests that wait for each other take seven round trips; pipelined, one."""
        network = network_of()
        near, _ = pair(network, Echo)
        begun_s = network.clock.seconds()
        for n in range(1, 8):
            near.transport.write(b"request")
            run(network.clock, near.when(7 * n))
        middle_s = network.clock.seconds()
        for _ in range(7):
            near.transport.write(b"request")
        run(network.clock, near.when(14 * 7))
        end_s = network.clock.seconds()
        self.assertEqual(network.round_trips(middle_s - begun_s, "client", "server"), 7)
        self.assertEqual(network.round_trips(end_s - middle_s, "client", "server"), 1)

    def test_both_directions_at_once(self) -> None:
        """An echo of a bulk transfer overlaps with it: bytes ÷ rate + 1 RTT + the last packet."""
        network = network_of(MB)
        near, _ = pair(network, Echo)
        begun_s = network.clock.seconds()
        near.transport.write(b"x" * MB)
        end_s = run(network.clock, near.when(MB))
        self.assertEqual(round(end_s - begun_s, 9), 1 + RTT_S + 0.01)

    def test_the_window_limits_throughput(self) -> None:
        """With 64 KiB of window, 64 KiB pass in a round trip, however fast the line."""
        network = network_of(window_bytes=1 << 16)
        near, far = pair(network)
        begun_s = network.clock.seconds()
        near.transport.write(b"x" * (10 << 16))
        end_s = run(network.clock, far.when(10 << 16))
        self.assertEqual(network.round_trips(end_s - begun_s, "client", "server"), 9.5)

    def test_slow_start(self) -> None:
        """Where it is asked for, a new connection doubles its bytes each round trip."""
        network = network_of(initial_window_bytes=14_600)
        near, far = pair(network)
        begun_s = network.clock.seconds()
        near.transport.write(b"x" * (7 * 14_600))
        end_s = run(network.clock, far.when(7 * 14_600))
        self.assertEqual(network.round_trips(end_s - begun_s, "client", "server"), 2.5)
        sizes = [s.size_bytes for s in bursts(network.log) if s.kind == "data"]
        self.assertEqual(sizes, [14_600, 29_200, 58_400])

    def test_two_servers_share_one_line(self) -> None:
        """Uploads to two servers behind one modem take the sum of their bytes, and end together."""
        clock = HeapClock()
        network = SimulatedNetwork(clock)
        modem = Bottleneck(MB)
        network.join("client", "near", 0.01, there=modem)
        network.join("client", "far", 0.1, there=modem)
        ends = [pair(network, server=name) for name in ("near", "far")]
        begun_s = clock.seconds()
        for near, _ in ends:
            near.transport.write(b"x" * MB)
        times = [run(clock, far.when(MB)) - begun_s for _, far in ends]
        self.assertEqual(round(times[1], 9), 2.1)
        self.assertEqual(round(times[0], 9), round(2.01 - 2 * modem.packet_bytes / MB, 9))
        self.assertRaises(ValueError, network.join, "client", "far", 1)

    def test_a_line_for_each_connection(self) -> None:
        """Where each connection has its own bottleneck, two take the time of one."""
        clock = HeapClock()
        network = SimulatedNetwork(clock)
        network.join("client", "server", 0.05, there=Bottleneck(MB), line_per_connection=True)
        ends = [pair(network) for _ in range(2)]
        begun_s = clock.seconds()
        for near, _ in ends:
            near.transport.write(b"x" * MB)
        for _, far in ends:
            self.assertEqual(round(run(clock, far.when(MB)) - begun_s, 9), 1.05)

    def test_the_log(self) -> None:
        """The log tells what was sent and when, burst by burst, and reads as a table."""
        network = network_of(MB)
        near, _ = pair(network, Echo)
        near.transport.write(b"x" * 50_000)
        run(network.clock, near.when(50_000))
        near.transport.loseConnection()
        network.clock.advance(1)
        found = [(s.from_host, s.kind, s.size_bytes) for s in bursts(network.log)]
        self.assertEqual(
            found,
            [
                ("client", "syn", 0),
                ("server", "syn-ack", 0),
                ("client", "ack", 0),
                ("client", "data", 50_000),
                ("server", "data", 50_000),
                ("client", "fin", 0),
                ("server", "fin", 0),
            ],
        )
        self.assertIn("#0 client → server  data 10000 B", timeline(network.log))

    def test_a_thousand_hosts(self) -> None:
        """A thousand servers, one request each, take one round trip together."""
        network = network_of()
        clock = network.clock
        for n in range(1000):
            network.host(f"server{n}").listen(80, Keeping(Echo))
        connecting = [
            network.endpoint("client", f"server{n}", 80).connect(Factory.forProtocol(Recorder))
            for n in range(1000)
        ]
        ends = [run(clock, deferred) for deferred in connecting]
        self.assertEqual(network.round_trips(clock.seconds(), "client", "server0"), 1)
        for near in ends:
            assert isinstance(near, Recorder)
            near.transport.write(b"?")
        for near in ends:
            assert isinstance(near, Recorder)
            run(clock, near.when(1))
        self.assertEqual(network.round_trips(clock.seconds(), "client", "server0"), 2)
