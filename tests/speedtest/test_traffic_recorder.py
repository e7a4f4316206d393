"""The timeline of an upload: who sent how much, when."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred, succeed
from twisted.internet.protocol import ClientFactory, Protocol
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.reactor.trace import Tracer
from pipegrid.speedtest import runner, traffic_recorder
from pipegrid.speedtest.run_results import DOWN, UP, Burst, RoundTrip
from pipegrid.speedtest.traffic_recorder import Recorder, RecordingReactor, from_spans


class RecorderTests(SynchronousTestCase):
    """``Recorder``."""

    def test_bursts(self) -> None:
        """Bytes of one moment, server and direction are one burst; what was before the start is none."""
        clock = Clock()
        recorder = Recorder(clock.seconds)
        recorder.note("a", UP, 1)
        clock.advance(5)
        recorder.start()
        for server, direction, size in (
            ("a", UP, 10),
            ("b", UP, 20),
            ("a", UP, 30),
            ("a", DOWN, 1),
        ):
            recorder.note(server, direction, size)
        clock.advance(0.125)
        recorder.note("a", UP, 5)
        recorder.note("a", UP, 0)
        found = recorder.stop()
        recorder.note("a", UP, 7)
        self.assertEqual(
            found,
            (
                Burst("a", 0, UP, 40),
                Burst("b", 0, UP, 20),
                Burst("a", 0, DOWN, 1),
                Burst("a", 0.125, UP, 5),
            ),
        )

    def test_it_is_bounded(self) -> None:
        """A long upload fills no memory."""
        self.patch(traffic_recorder, "MAX_BURSTS", 3)
        clock = Clock()
        recorder = Recorder(clock.seconds)
        recorder.start()
        for _ in range(5):
            clock.advance(1)
            recorder.note("a", UP, 1)
        self.assertEqual(len(recorder.stop()), 3)


class ReactorTests(SynchronousTestCase):
    """``RecordingReactor``."""

    def connect(self, port: int) -> tuple[Recorder, StringTransport, Protocol]:
        """Connect through a recording reactor; return also the ends of the connection."""
        reactor = MemoryReactorClock()
        recorder = Recorder(reactor.seconds)
        watching = RecordingReactor(reactor, recorder, {("127.0.0.1", 5): "a"})
        watching.connectTCP("127.0.0.1", port, ClientFactory.forProtocol(Echo))
        factory = reactor.tcpClients[0][2]
        protocol: Protocol = factory.buildProtocol(IPv4Address("TCP", "127.0.0.1", port))  # type: ignore[assignment]
        transport = StringTransport()
        protocol.makeConnection(transport)
        return recorder, transport, protocol

    def test_what_passes_is_noted(self) -> None:
        """Both directions of a server's connection, and the bytes arrive."""
        recorder, transport, protocol = self.connect(5)
        recorder.start()
        protocol.dataReceived(b"hello")
        self.assertEqual(transport.value(), b"hellohello")
        self.assertEqual(recorder.stop(), (Burst("a", 0, DOWN, 5), Burst("a", 0, UP, 10)))

    def test_others_are_not(self) -> None:
        """A connection to elsewhere goes by."""
        recorder, transport, protocol = self.connect(6)
        recorder.start()
        protocol.dataReceived(b"hello")
        self.assertEqual((transport.value(), recorder.stop()), (b"hellohello", ()))


class Echo(Protocol):
    """Sends back what comes, twice, by both ways of writing."""

    def dataReceived(self, data: bytes) -> None:
        """Send it."""
        assert self.transport is not None
        self.transport.write(data)
        self.transport.writeSequence([data[:2], data[2:]])


class SpansTests(SynchronousTestCase):
    """``from_spans``."""

    def test_requests_stand_for_bursts(self) -> None:
        """A write's bytes go when it begins, its answer comes when it ends; what was before is left out."""
        clock = Clock()
        tracer = Tracer(clock.seconds)
        with tracer.span("write", "a", bytes=1):
            clock.advance(1)
        write = tracer.begin("write", "b", bytes=900)
        with tracer.span("encode", "cpu"):
            clock.advance(0.125)
        tracer.end(write)
        found = from_spans(tracer.events(), 1e6)
        self.assertEqual(
            [(each.server, each.direction, each.at_s) for each in found],
            [("b", UP, 0.0), ("b", DOWN, 0.125)],
        )
        self.assertEqual(found[0].size_bytes, 900)


class FakeTarget:
    """A target whose uploads take these times, one after the other; the first one is the warm-up."""

    adjustable = True
    names: ClassVar[dict[Any, str]] = {("127.0.0.1", 1): "server"}

    def __init__(self, times_s: Sequence[float]) -> None:
        self.times_s = list(times_s)
        self.now_s = 0.0
        self.recorder: Any = None
        self.closed = False

    def open(self, reactor: Any, tracer: Any) -> Deferred[Any]:
        self.recorder = reactor._recorder
        return succeed(self)

    def put(self, file: Any) -> Deferred[None]:
        took_s = self.times_s.pop(0)
        self.recorder.note("server", UP, round(1000 * took_s))
        self.now_s += took_s
        self.recorder.note("server", DOWN, 1)
        return succeed(None)

    def close(self) -> Deferred[None]:
        self.closed = True
        return succeed(None)


class RecordTests(SynchronousTestCase):
    """``runner.record``."""

    def test_the_median_is_shown(self) -> None:
        """Of several uploads, neither the luckiest nor one that met with something else."""
        target: Any = FakeTarget([9.0, 0.5, 0.1, 0.3, 7.0, 0.2])
        self.patch(time, "perf_counter", lambda: target.now_s)
        trip = RoundTrip("server", (0.1, 0.3))
        shown = self.successResultOf(Deferred.fromCoroutine(runner.record(Clock(), target, [trip])))
        assert shown is not None
        self.assertEqual((round(shown.took_s, 6), shown.samples), (0.3, runner.TIMELINES))
        self.assertAlmostEqual(shown.rtt_s, 0.2)
        self.assertEqual(
            [(each.direction, each.size_bytes, round(each.at_s, 6)) for each in shown.bursts],
            [(UP, 300, 0.0), (DOWN, 1, 0.3)],
        )
        self.assertTrue(target.closed)
        self.assertEqual(target.times_s, [])

    def test_spans_of_one_upload(self) -> None:
        """In a trace of several, one is found by its times."""
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "args": {"name": "server"}},
            *(
                {"ph": "X", "pid": 1, "name": "write", "ts": at, "dur": 50.0, "args": {"bytes": at}}
                for at in (100.0, 200.0, 300.0)
            ),
        ]
        found = from_spans(events, 150.0, 250.0)
        self.assertEqual([each.size_bytes for each in found if each.direction == UP], [200.0])
