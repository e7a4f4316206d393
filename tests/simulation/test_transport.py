"""A simulated transport does to a protocol what Twisted's TCP transport does."""

from __future__ import annotations

from twisted.internet.error import ConnectionAborted, ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IConsumer, IPullProducer, IPushProducer, ITCPTransport
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer
from zope.interface.verify import verifyObject

from pipegrid.testing.clock import HeapClock
from pipegrid.testing.network import SimulatedNetwork, leaks, run
from pipegrid.testing.simulated_tcp import BUFFER_BYTES, ByteQueue, SimulatedTransport, TcpOptions
from tests.simulation.programs import Echo, HalfClosing, Recorder, pair

LATENCY_S = 0.05
KB = 1000


@implementer(IPushProducer)
class Pushing:
    """Writes pieces until paused, to an end."""

    def __init__(self, transport: SimulatedTransport, size_bytes: int) -> None:
        self.transport = transport
        self.left = size_bytes
        self.paused = False
        self.stopped = False
        self.pauses = 0

    def start(self) -> None:
        self.transport.registerProducer(self, True)
        self.resumeProducing()

    def resumeProducing(self) -> None:
        self.paused = False
        while self.left and not self.paused:
            piece = min(10 * KB, self.left)
            self.left -= piece
            self.transport.write(b"p" * piece)
        if not self.left:
            self.transport.unregisterProducer()

    def pauseProducing(self) -> None:
        self.paused = True
        self.pauses += 1

    def stopProducing(self) -> None:
        self.stopped = True


@implementer(IPullProducer)
class Pulled:
    """Writes one piece each time it is asked."""

    def __init__(self, transport: SimulatedTransport, pieces: int) -> None:
        self.transport = transport
        self.pieces = pieces
        self.stopped = False

    def resumeProducing(self) -> None:
        self.pieces -= 1
        self.transport.write(b"q" * KB)
        if not self.pieces:
            self.transport.unregisterProducer()

    def stopProducing(self) -> None:
        self.stopped = True


class Case(SynchronousTestCase):
    """One connection at 1 MB/s and 100 ms."""

    options = TcpOptions()
    make: type[Recorder] = Recorder

    def setUp(self) -> None:
        self.clock = HeapClock()
        self.network = SimulatedNetwork(self.clock, 1, LATENCY_S, 1000 * KB, self.options)
        self.near, self.far = pair(self.network, self.make)
        self.begun_s = self.clock.seconds()

    def since(self, time_s: float | None) -> float:
        assert time_s is not None
        return round(time_s - self.begun_s, 9)


class TransportTests(Case):
    """Data and the end of it."""

    def test_interfaces(self) -> None:
        """It provides what protocols look for."""
        for interface in (ITCPTransport, IConsumer, IPushProducer):
            self.assertTrue(verifyObject(interface, self.near.transport))

    def test_only_bytes(self) -> None:
        """Text and views are refused at once, as Twisted refuses them."""
        self.assertRaises(TypeError, self.near.transport.write, "text")
        self.assertRaises(TypeError, self.near.transport.write, memoryview(b"view"))

    def test_writes_of_one_turn_travel_together(self) -> None:
        """Small writes are joined, and nothing is sent before the next turn."""
        sent = len(self.network.log)
        self.near.transport.write(b"a")
        self.near.transport.writeSequence([b"b", b"c"])
        self.assertEqual(len(self.network.log), sent)
        run(self.clock, self.far.when(3))
        self.assertEqual([size for _, size in self.far.pieces], [3])

    def test_closing_flushes_first(self) -> None:
        """Everything written before loseConnection arrives, then the end."""
        self.near.transport.write(b"x" * 500 * KB)
        self.near.transport.loseConnection()
        run(self.clock, self.far.over)
        self.assertEqual(self.far.received, b"x" * 500 * KB)
        self.assertEqual(self.since(self.far.lost_s), 0.5 + LATENCY_S)
        for end in (self.near, self.far):
            assert end.lost is not None
            self.assertIsInstance(end.lost.value, ConnectionDone)
        # The kernel takes the last of it before the line has sent it: the program is free earlier.
        self.assertLess(self.since(self.near.lost_s), 0.5)
        self.clock.advance(1)
        self.assertEqual(leaks(self.clock, self.network), [])

    def test_aborting_resets(self) -> None:
        """What was not on the line yet is lost, and both ends are told in their words."""
        self.near.transport.write(b"x" * 500 * KB)
        self.clock.advance(0.1)
        self.near.transport.abortConnection()
        self.assertIsNone(self.near.lost)
        run(self.clock, self.near.over)
        run(self.clock, self.far.over)
        assert self.near.lost is not None
        assert self.far.lost is not None
        self.assertIsInstance(self.near.lost.value, ConnectionAborted)
        self.assertIsInstance(self.far.lost.value, ConnectionLost)
        self.assertEqual(self.since(self.near.lost_s), 0.1)
        # The packet that was on the line at 0.1 s ends the transfer.
        self.assertEqual(self.since(self.far.lost_s), 0.11 + LATENCY_S)
        self.assertEqual(len(self.far.received), 110 * KB)

    def test_nothing_after_the_end(self) -> None:
        """Who has closed hears nothing more, and may write into the void."""
        self.far.transport.write(b"on its way")
        self.near.transport.loseConnection()
        run(self.clock, self.near.over)
        self.near.transport.write(b"late")
        self.clock.advance(1)
        self.assertEqual(self.near.received, b"")
        self.assertEqual(self.far.received, b"")

    def test_bytes_for_who_has_closed_reset_the_connection(self) -> None:
        """A peer that goes on sending after the end learns that nobody listens."""
        self.far.transport.pauseProducing()
        self.near.transport.loseConnection()
        self.clock.advance(0.2)
        self.assertIsNone(self.far.lost, "a paused transport does not see the end")
        self.far.transport.write(b"hello?")
        self.far.transport.resumeProducing()
        run(self.clock, self.far.over)
        assert self.far.lost is not None
        self.assertIsInstance(self.far.lost.value, ConnectionDone)

    def test_closing_with_bytes_unread(self) -> None:
        """As on Linux: it costs the peer what was not on the line yet; a short answer gets through."""
        for size_bytes, reason in ((6, ConnectionDone), (500 * KB, ConnectionLost)):
            near, far = pair(self.network)
            far.transport.pauseProducing()
            near.transport.write(b"unread")
            self.clock.advance(0.1)
            far.transport.write(b"x" * size_bytes)
            far.transport.loseConnection()
            run(self.clock, near.over)
            assert near.lost is not None
            self.assertIsInstance(near.lost.value, reason)
            self.assertEqual(len(near.received) == size_bytes, reason is ConnectionDone)

    def test_pause_and_resume(self) -> None:
        """A paused receiver gets nothing, and all of it later, from the clock."""
        self.far.transport.pauseProducing()
        self.near.transport.write(b"x" * 10 * KB)
        self.clock.advance(1)
        self.assertEqual(self.far.received, b"")
        self.far.transport.resumeProducing()
        self.assertEqual(self.far.received, b"")
        self.clock.advance(0)
        self.assertEqual(len(self.far.received), 10 * KB)

    def test_a_failing_protocol_loses_its_connection(self) -> None:
        """What a protocol raises is logged, and ends its connection with that reason."""

        def fail(data: bytes) -> None:
            raise ZeroDivisionError

        self.far.dataReceived = fail  # type: ignore[method-assign]
        self.near.transport.write(b"x")
        run(self.clock, self.near.over)
        assert self.far.lost is not None
        self.assertIsInstance(self.far.lost.value, ZeroDivisionError)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_the_state_shows(self) -> None:
        """A transport says where it stands."""
        self.near.transport.write(b"x" * 300 * KB)
        self.far.transport.pauseProducing()
        self.clock.advance(0.1)
        self.assertIn("#0 at client, open", repr(self.near.transport))
        self.assertIn("paused", repr(self.far.transport))
        self.near.transport.loseConnection()
        self.assertIn("closing", repr(self.near.transport))


class ProducerTests(Case):
    """Those who write as there is room."""

    def test_a_streaming_producer_is_paced(self) -> None:
        """It is paused above 64 KiB and resumed at none; the line is never idle."""
        producer = Pushing(self.near.transport, 1000 * KB)
        producer.start()
        self.assertTrue(producer.paused)
        self.assertLessEqual(1000 * KB - producer.left, BUFFER_BYTES + 10 * KB)
        end_s = run(self.clock, self.far.when(1000 * KB))
        self.assertGreater(producer.pauses, 3)
        self.assertEqual(self.since(end_s), 1 + LATENCY_S)

    def test_a_pull_producer_is_asked(self) -> None:
        """It is asked whenever the buffer is empty, and closes behind the last piece."""
        producer = Pulled(self.near.transport, 100)
        self.near.transport.registerProducer(producer, False)
        self.assertEqual(producer.pieces, 99)
        run(self.clock, self.far.when(100 * KB))
        self.near.transport.loseConnection()
        run(self.clock, self.far.over)
        self.assertEqual(len(self.far.received), 100 * KB)
        self.assertFalse(producer.stopped)

    def test_one_at_a_time(self) -> None:
        """A second producer is an error; one that comes too late is stopped."""
        producer = Pushing(self.near.transport, 1000 * KB)
        producer.start()
        self.assertRaises(RuntimeError, self.near.transport.registerProducer, producer, True)
        self.far.transport.abortConnection()
        run(self.clock, self.near.over)
        self.assertTrue(producer.stopped)
        late = Pulled(self.near.transport, 1)
        self.near.transport.registerProducer(late, False)
        self.assertTrue(late.stopped)


class FlowControlTests(Case):
    """A reader that pauses stops the writer."""

    options = TcpOptions(window_bytes=100 * KB)

    def test_a_paused_receiver_stops_the_sender(self) -> None:
        """No more than a window and a buffer leave a producer whose peer does not read."""
        self.far.transport.pauseProducing()
        producer = Pushing(self.near.transport, 1000 * KB)
        producer.start()
        self.clock.advance(100)
        self.assertTrue(producer.paused)
        self.assertEqual(self.far.transport.socket.unread_bytes, 100 * KB)
        self.assertLessEqual(1000 * KB - producer.left, 100 * KB + BUFFER_BYTES + 10 * KB)
        self.far.transport.resumeProducing()
        run(self.clock, self.far.when(1000 * KB))
        self.assertEqual(self.far.received, b"p" * 1000 * KB)


class HalfCloseTests(Case):
    """One direction may end before the other."""

    make = HalfClosing

    def test_half_close(self) -> None:
        """The far end hears that no more comes, and can still answer."""
        near, far = self.near, self.far
        assert isinstance(near, HalfClosing)
        assert isinstance(far, HalfClosing)
        near.transport.write(b"question")
        near.transport.loseWriteConnection()
        self.clock.advance(0.2)
        self.assertEqual(far.received, b"question")
        self.assertIsNotNone(near.write_lost_s)
        self.assertIsNotNone(far.read_lost_s)
        self.assertEqual((near.lost, far.lost), (None, None))
        near.transport.write(b"not any more")
        far.transport.write(b"answer")
        far.transport.loseConnection()
        self.clock.advance(0.2)
        self.assertEqual(near.received, b"answer")
        self.assertIsNotNone(near.read_lost_s)
        self.assertEqual(far.received, b"question")
        near.transport.loseConnection()
        self.clock.advance(0.2)
        self.assertIsNotNone(near.lost)
        self.assertEqual(leaks(self.clock, self.network), [])


class NoLatencyTests(SynchronousTestCase):
    """Where everything takes no time at all."""

    def test_no_call_comes_from_within_a_call(self) -> None:
        """Without latency, too, data comes from the clock; Recorder asserts it."""
        clock = HeapClock()
        network = SimulatedNetwork(clock, latency_s=0)
        near, far = pair(network, Echo)
        near.busy = True
        near.transport.write(b"x" * 200_000)
        near.busy = False
        self.assertEqual(far.received, b"")
        run(clock, near.when(200_000))
        self.assertEqual(clock.seconds(), 0)

    def test_shredded(self) -> None:
        """On request, bytes come in pieces of any size, and are the same bytes."""
        clock = HeapClock()
        network = SimulatedNetwork(clock, options=TcpOptions(shred=True))
        near, _ = pair(network, Echo)
        sent = bytes(range(256)) * 40
        near.transport.write(sent)
        run(clock, near.when(len(sent)))
        self.assertEqual(near.received, sent)
        self.assertIn(1, {size for _, size in near.pieces})


class ByteQueueTests(SynchronousTestCase):
    """The buffer under it all."""

    def test_order(self) -> None:
        """What goes in comes out, however it is cut."""
        queue = ByteQueue()
        for part in (b"abc", b"", b"defgh", b"i"):
            queue.append(part)
        self.assertEqual(
            [queue.take(n) for n in (1, 2, 3, 0, 3)], [b"a", b"bc", b"def", b"", b"ghi"]
        )
        self.assertEqual(queue.size_bytes, 0)


class ResetTests(Case):
    """Who notices a reset, and when."""

    def test_a_paused_reader_notices_late(self) -> None:
        """Paused and with nothing to write, a reset is seen on resuming; what came before, first."""
        self.far.transport.pauseProducing()
        self.near.transport.write(b"before")
        self.clock.advance(0.01)
        self.near.transport.abortConnection()
        self.clock.advance(10)
        self.assertIsNone(self.far.lost)
        self.far.transport.resumeProducing()
        self.clock.advance(0)
        self.assertEqual(self.far.received, b"before")
        assert self.far.lost is not None
        self.assertIsInstance(self.far.lost.value, ConnectionLost)

    def test_a_writer_notices_at_once(self) -> None:
        """Paused, but with something to write, a reset is seen when it comes, or on writing."""
        self.far.transport.pauseProducing()
        self.far.transport.write(b"x" * 5000 * KB)
        self.near.transport.abortConnection()
        self.clock.advance(LATENCY_S)
        self.assertIsNotNone(self.far.lost)
        near, far = pair(self.network)
        far.transport.pauseProducing()
        near.transport.abortConnection()
        self.clock.advance(10)
        self.assertIsNone(far.lost)
        far.transport.write(b"x")
        self.clock.advance(0)
        self.assertIsNotNone(far.lost)

    def test_errors_in_connection_lost_are_logged(self) -> None:
        """A protocol that fails in connectionLost harms nobody else."""

        def fail(reason: object) -> None:
            raise ZeroDivisionError

        self.near.connectionLost = fail  # type: ignore[assignment, method-assign]
        self.near.transport.stopProducing()
        run(self.clock, self.far.over)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)
        self.assertEqual(leaks(self.clock, self.network), [])
