"""
TCP in virtual time: one end of a simulated connection as a kernel implements it, with windows,
acknowledgements, the end of a stream and resets; and Twisted's TCP transport over it, with the same behaviour
as ``twisted.internet.tcp``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, Protocol, cast

import attrs
from twisted.internet.address import IPv4Address
from twisted.internet.error import ConnectionAborted, ConnectionDone, ConnectionLost
from twisted.internet.interfaces import (
    IConsumer,
    IHalfCloseableProtocol,
    ILoggingContext,
    IProducer,
    IProtocol,
    IPullProducer,
    IPushProducer,
    ITCPTransport,
)
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.testing.link_model import Flow, LinkPath, Packet


@attrs.frozen
class TcpOptions:
    """
    The behaviour of all connections of a network.

    Attributes:
        window_bytes: how many bytes the receiver's kernel accepts before its program has read them.
        send_buffer_bytes: how many unsent bytes a kernel accepts; at least two packets keep every bottleneck
            busy.
        initial_window_bytes: the first window of slow start (Linux: ten segments, 14600); None for no slow
            start.
        shred: deliver in pieces of random sizes, to find parsers that rely on boundaries.
    """

    window_bytes: int = 4 << 20
    send_buffer_bytes: int = 128 << 10
    initial_window_bytes: int | None = None
    shred: bool = False


class ByteQueue:
    """A queue of bytes, which copies each byte at most once."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._offset = 0
        self.size_bytes = 0

    def append(self, data: bytes) -> None:
        """Add bytes at the end."""
        if data:
            self._chunks.append(data)
            self.size_bytes += len(data)

    def take(self, size_bytes: int) -> bytes:
        """Remove exactly that many bytes from the front, and return them."""
        assert size_bytes <= self.size_bytes
        self.size_bytes -= size_bytes
        parts: list[bytes] = []
        while size_bytes:
            head = self._chunks[0]
            part = head[self._offset : self._offset + size_bytes]
            parts.append(part)
            size_bytes -= len(part)
            self._offset += len(part)
            if self._offset == len(head):
                self._chunks.popleft()
                self._offset = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def clear(self) -> None:
        """Remove all bytes from the queue."""
        self._chunks.clear()
        self._offset = self.size_bytes = 0


class Net(Protocol):
    """The methods of the network that a socket uses."""

    random: Random

    def now_ns(self) -> int:
        """Return the virtual time, in nanoseconds."""

    def at(self, time_ns: int, call: Callable[..., object], *args: Any) -> None:
        """Make the call ``call(*args)`` at a virtual time, in nanoseconds."""

    def offer(self, flow: Flow, size_bytes: int) -> None:
        """Queue bytes of a flow, and start the packets that can start."""

    def pass_through(self, path: LinkPath, call: Callable[[], object]) -> None:
        """Make a call now, or when the path is no longer stalled."""

    def note(self, socket: Socket, packet: Packet, kind: str) -> None:
        """Log a packet that a socket sends."""


class Socket:
    """
    One end of a connection: TCP without loss, with the rules that programs can observe.

    * Bytes accepted from the program and not yet sent are limited (``send_buffer_bytes``); bytes that the
      other program has not read are limited by its window (``window_bytes``). Both make the sender wait.
    * With ``initial_window_bytes`` a connection starts slowly: it sends that many bytes in the first round
      trip, and in each further round trip as many more as were acknowledged. Without slow start, only the
      receiver's window limits sending.
    * When a program closes the connection, its kernel sends the remaining bytes and the end. If received
      bytes are still unread, or arrive later, the remaining bytes are lost, and the other end is reset.
      (Twisted shuts a socket down before closing it, so without loss the end comes before the reset.)
    * A reset follows the bytes that are already in flight, and drops the bytes that are still queued.

    Packets without data (handshake, acknowledgement, end, reset) have latency but no size. Headers,
    retransmission and congestion by loss are left out.

    Attributes:
        peer: the other end; set by the code that makes the pair.
        program: gets notifications, always from the clock; None before the program on this side has the
            connection.
        open: whether the program still holds the connection.
        eof: whether the peer's stream has ended; unread bytes precede the end.
        broken: whether the connection was reset.
        unread_bytes: how many bytes have arrived and were not read.
        cut_after_bytes: the connection breaks after this many bytes *towards this end*.
        cut_silently: whether neither end is notified of that break.
    """

    peer: Socket

    def __init__(
        self,
        net: Net,
        connection: int,
        host: str,
        path: LinkPath,
        options: TcpOptions,
        answers: Callable[[], bool],
    ) -> None:
        """
        Args:
            host: the name of the host of this end.
            path: the path towards the peer.
            answers: returns whether the host's kernel runs, and so resets unknown connections.
        """
        self.connection = connection
        self.host = host
        self.path = path
        self.flow = path.open(self)
        self.program: SimulatedTransport | None = None
        self.open = True
        self.eof = False
        self.broken = False
        self.cut_after_bytes: int | None = None
        self.cut_silently = False
        self._net = net
        self._options = options
        self._answers = answers
        self._deaf = False
        # Bytes to send are queued until sent, and in flight until acknowledged.
        self._outgoing = ByteQueue()
        self._in_flight_bytes = 0
        self._congestion_bytes = options.initial_window_bytes
        self._acks: deque[tuple[int, int]] = deque()
        self._ack_wake = False
        self._wants_space = False
        self._ending = False
        self._gone = False
        # Receiving.
        self._unread: deque[bytes] = deque()
        self.unread_bytes = 0
        self._arrived_bytes = 0

    # Sending

    def space_bytes(self) -> int:
        """
        Return how many bytes ``send`` accepts now; after a 0, ``writable`` is called when it accepts bytes
        again.
        """
        self._collect_acks()
        window_bytes = self._options.window_bytes
        if self._congestion_bytes is not None:
            window_bytes = min(window_bytes, self._congestion_bytes)
        room = min(
            self._options.send_buffer_bytes - self.flow.queued_bytes,
            window_bytes - self._in_flight_bytes,
        )
        if room <= 0:
            self._wants_space = True
            self._wake_at_next_ack()
            return 0
        return room

    def send(self, data: bytes) -> None:
        """Accept bytes, at most ``space_bytes``; they are sent as windows and bottleneck allow."""
        if self._gone:
            return
        self._in_flight_bytes += len(data)
        self._outgoing.append(data)
        self._net.offer(self.flow, len(data))

    def packet_started(self, packet: Packet) -> None:
        """Send the next packet that the bottleneck has started; called for each packet in order."""
        if self._gone:
            return  # the program has dropped the connection meanwhile
        data = self._outgoing.take(packet.size_bytes)
        self._net.note(self, packet, "data")
        self._net.at(packet.arrival_ns, self.peer._data_arrived, data)
        self._space_freed()
        if self._ending and not self._outgoing.size_bytes:
            self._send_end()

    def _acknowledged(self, size_bytes: int, arrival_ns: int) -> None:
        if self._deaf:
            return
        if self._acks and self._acks[-1][0] >= arrival_ns:
            arrival_ns, more = self._acks.pop()
            size_bytes += more
        self._acks.append((arrival_ns, size_bytes))
        if self._wants_space:
            self._wake_at_next_ack()

    def _collect_acks(self) -> None:
        now_ns = self._net.now_ns()
        while self._acks and self._acks[0][0] <= now_ns:
            size_bytes = self._acks.popleft()[1]
            self._in_flight_bytes -= size_bytes
            if self._congestion_bytes is not None:
                self._congestion_bytes += size_bytes

    def _wake_at_next_ack(self) -> None:
        if self._acks and not self._ack_wake:
            self._ack_wake = True
            self._net.at(self._acks[0][0], self._ack_arrived)

    def _ack_arrived(self) -> None:
        self._ack_wake = False
        self._space_freed()

    def _space_freed(self) -> None:
        if self._wants_space and self.open and self.program is not None:
            self._wants_space = False
            self.program.writable()

    def end(self) -> None:
        """Send the end of the stream, after all bytes."""
        if self._ending or self._gone:
            return
        self._ending = True
        if not self.flow.queued_bytes:
            self._send_end()

    def _send_end(self) -> None:
        self.control("fin", self.peer._end_arrived)
        if not self.open:
            self._stop_sending()

    def control(self, kind: str, arrived: Callable[..., object], *args: Any) -> None:
        """Send a signal without a size after everything sent so far."""

        def depart() -> None:
            now_ns = self._net.now_ns()
            arrival_ns = self.flow.arrival_ns(now_ns)
            self._net.note(self, Packet(self.flow, 0, now_ns, now_ns, arrival_ns), kind)
            self._net.at(arrival_ns, arrived, *args)

        self._net.pass_through(self.path, depart)

    def _stop_sending(self) -> None:
        self._gone = True
        self.path.close(self.flow)
        self._outgoing.clear()

    # Receiving

    def read(self) -> bytes | None:
        """Return the next piece of received bytes; None if no bytes are unread."""
        if not self._unread:
            return None
        data = self._unread.popleft()
        self.unread_bytes -= len(data)
        peer = self.peer

        def depart() -> None:
            peer._acknowledged(len(data), self._net.now_ns() + self.path.latency_ns)

        self._net.pass_through(self.path, depart)
        return data

    def _data_arrived(self, data: bytes) -> None:
        if self._deaf:
            return
        if not self.open:
            self._refuse()
            return
        cut = False
        if self.cut_after_bytes is not None:
            left = self.cut_after_bytes - self._arrived_bytes
            cut = len(data) >= left
            data = data[:left]
        self._arrived_bytes += len(data)
        self.unread_bytes += len(data)
        self._unread.extend(self._shredded(data) if self._options.shred else [data] if data else [])
        if cut:
            self._cut()
        elif self.program is not None:
            self.program.readable()

    def _shredded(self, data: bytes) -> list[bytes]:
        pieces = []
        while data:
            size_bytes = self._net.random.choice((1, 2, 7, 60, 1460, 1 << 16))
            pieces.append(data[:size_bytes])
            data = data[size_bytes:]
        return pieces

    def _cut(self) -> None:
        now_ns = self._net.now_ns()
        self._net.note(self, Packet(self.flow, 0, now_ns, now_ns, now_ns), "cut")
        if self.cut_silently:
            self._deaf = self.peer._deaf = True
            if self.program is not None:
                self.program.readable()
        else:
            self.control("rst", self.peer.reset_arrived)
            self.reset_arrived()

    def _end_arrived(self) -> None:
        if self.open and not self._deaf:
            self.eof = True
            if self.program is not None:
                self.program.readable()

    def reset_arrived(self) -> None:
        """Record that the connection was reset, by the other end or on the path."""
        if self._deaf:
            return
        self._stop_sending()
        if self.open:
            self.broken = True
            if self.program is not None:
                self.program.readable()

    def _refuse(self) -> None:
        if self._answers():
            self.control("rst", self.peer.reset_arrived)
            self._stop_sending()

    # The end

    def close(self) -> None:
        """Close for the program: unread bytes cause a reset; otherwise the kernel still sends the rest."""
        if not self.open:
            return
        if self._unread:
            if not self.flow.queued_bytes:
                self.end()
            self.reset()
        else:
            self.open = False
            if self.broken:
                return
            if self._ending and not self.flow.queued_bytes:
                self._stop_sending()
            self.end()

    def reset(self) -> None:
        """Drop all bytes, and reset the peer."""
        if not self.open:
            return
        self.open = False
        self._unread.clear()
        if not self.broken:
            self.control("rst", self.peer.reset_arrived)
        self._stop_sending()

    def abandon(self) -> None:
        """Drop the connection without notifying the peer; packets that the peer sends later get a reset."""
        self.open = False
        self._unread.clear()
        self._stop_sending()

    def crash(self, silently: bool) -> None:
        """End the program; the kernel resets the connection, unless the kernel has stopped as well."""
        if silently:
            self.abandon()
        else:
            self.reset()
        if self.program is not None:
            self.program.crashed()


_log = Logger()

BUFFER_BYTES = 1 << 16


@implementer(ITCPTransport, IConsumer, IPushProducer, ILoggingContext)
class SimulatedTransport:
    """
    One end of a connection as a protocol sees it.

    As in Twisted: writes are buffered and reach the kernel in the next turn. A streaming producer is paused
    when more than 64 KiB are buffered, and resumed when the buffer is empty; a pull producer is asked for
    data whenever the buffer is empty. ``loseConnection`` stops reading and closes after the last buffered
    byte. A paused transport does not notice the end of the stream, and notices a reset only if it has data
    to write. An exception in the protocol is logged and closes the connection. The clock makes all calls of
    a protocol; none happens within a call that the protocol makes. (Twisted makes one exception,
    ``loseConnection`` after a half-close; this transport waits a turn in that case, too.)

    Attributes:
        protocol: the current protocol; a protocol may replace itself.
        socket: the kernel's part.
        connected, disconnecting, disconnected: as in Twisted.
    """

    disconnecting = False
    disconnected = False
    connected = True
    producer: IProducer | None = None
    producerPaused = False
    streamingProducer = False

    def __init__(
        self,
        socket: Socket,
        soon: Callable[[Callable[[], None]], None],
        host: IPv4Address,
        peer: IPv4Address,
        lost: Callable[[SimulatedTransport], None],
    ) -> None:
        """
        Args:
            soon: makes a call in the next turn of the clock.
            host, peer: the addresses of this end and the other end.
            lost: called once, after the protocol's ``connectionLost``.
        """
        self.socket = socket
        self.protocol: IProtocol | None = None
        self._soon = soon
        self._host = host
        self._peer = peer
        self._lost = lost
        self._buffer = ByteQueue()
        self._reading = True
        self._aborting = False
        self._end_seen = False
        self._write_ending = False
        self._write_ended = False
        self._flush_due = False
        self._read_due = False

    def __repr__(self) -> str:
        state = (
            "crashed or lost"
            if not self.connected
            else "closing"
            if self.disconnecting
            else "paused"
            if not self._reading
            else "open"
        )
        return (
            f"<connection #{self.socket.connection} at {self.socket.host}, {state}, "
            f"{self._buffer.size_bytes + self.socket.flow.queued_bytes} B to send, "
            f"{self.socket.unread_bytes} B unread, {self.protocol!r}>"
        )

    def start(self, protocol: IProtocol) -> None:
        """Give the connection to its protocol."""
        self.protocol = protocol
        self.socket.program = self
        self._guarded(protocol.makeConnection, self)
        self._read_soon()

    # ITransport

    def write(self, data: bytes) -> None:
        """Buffer bytes; they are sent in the next turn at the earliest."""
        if not isinstance(data, bytes):
            raise TypeError(f"Data must be bytes, not {type(data).__name__}")
        if not self.connected or self._write_ended:
            return
        if data:
            self._buffer.append(data)
            self._pause_producer_if_full()
            self._flush_soon()

    def writeSequence(self, data: Iterable[bytes]) -> None:
        self.write(b"".join(data))

    def loseConnection(self) -> None:
        """Stop reading, and close when all buffered bytes have been sent."""
        if self.connected and not self.disconnecting:
            self._reading = False
            self.disconnecting = True
            self._flush_soon()

    def loseWriteConnection(self) -> None:
        """Close the sending half when all buffered bytes have been sent."""
        self._write_ending = True
        self._flush_soon()

    def abortConnection(self) -> None:
        """Reset the connection now; the protocol is notified in the next turn."""
        if self.disconnected or self._aborting:
            return
        self._aborting = True
        self._reading = False
        self._buffer.clear()
        self.socket.reset()
        self._soon(lambda: self._lose(Failure(ConnectionAborted())))

    def getPeer(self) -> IPv4Address:
        """Return the address of the other end."""
        return self._peer

    def getHost(self) -> IPv4Address:
        """Return the address of this end."""
        return self._host

    def getTcpNoDelay(self) -> bool:
        """Return True: Nagle's algorithm is not simulated."""
        return True

    def setTcpNoDelay(self, enabled: bool) -> None:
        """Do nothing: protocols set this option, and here it has no effect."""

    def getTcpKeepAlive(self) -> bool:
        """Return False: keep-alive is not simulated."""
        return False

    def setTcpKeepAlive(self, enabled: bool) -> None:
        """Do nothing: protocols set this option, and here it has no effect."""

    def logPrefix(self) -> str:
        """Return the name for the log."""
        return f"{self.socket.host}#{self.socket.connection}"

    # IPushProducer: received bytes.

    def pauseProducing(self) -> None:
        """
        Deliver nothing until ``resumeProducing``; when the window is full, the sender has to stop as well.
        """
        self._reading = False

    def resumeProducing(self) -> None:
        """Deliver bytes again, from the next turn on."""
        if self.connected and not self.disconnecting:
            self._reading = True
            self._read_soon()

    def stopProducing(self) -> None:
        self.loseConnection()

    # IConsumer: sent bytes.

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        """
        Let a producer fill the buffer: a streaming producer is paused and resumed, a pull producer is asked
        for data.
        """
        if self.producer is not None:
            raise RuntimeError(
                f"Cannot register producer {producer}: {self.producer} was never unregistered."
            )
        if self.disconnected:
            producer.stopProducing()
            return
        self.producer = producer
        self.streamingProducer = streaming
        if not streaming:
            cast(IPullProducer, producer).resumeProducing()

    def unregisterProducer(self) -> None:
        self.producer = None
        if self.connected and self.disconnecting:
            self._flush_soon()

    def _pause_producer_if_full(self) -> None:
        if (
            self.producer is not None
            and self.streamingProducer
            and self._buffer.size_bytes > BUFFER_BYTES
        ):
            self.producerPaused = True
            cast(IPushProducer, self.producer).pauseProducing()

    # Turns of the clock.

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if not self.connected or self._aborting or self._write_ended:
            # A half-closed connection has nothing to flush, but can still be closed.
            if self.connected and self.disconnecting and not self._aborting:
                self._lose(Failure(ConnectionDone()))
            return
        if self.socket.broken:
            self._lose(Failure(ConnectionLost()))
            return
        while self._buffer.size_bytes and (space_bytes := self.socket.space_bytes()):
            self.socket.send(self._buffer.take(min(space_bytes, self._buffer.size_bytes)))
        if not self._buffer.size_bytes:
            self._guarded(self._flushed)

    def _flushed(self) -> None:
        if self.producer is not None and (not self.streamingProducer or self.producerPaused):
            self.producerPaused = False
            cast(IPushProducer, self.producer).resumeProducing()
        elif self.disconnecting:
            self._lose(Failure(ConnectionDone()))
        elif self._write_ending:
            self._write_ended = True
            self.socket.end()
            protocol = IHalfCloseableProtocol(self.protocol, None)
            if protocol is not None:
                protocol.writeConnectionLost()

    def _read_soon(self) -> None:
        if not self._read_due:
            self._read_due = True
            self._soon(self._read)

    def _read(self) -> None:
        self._read_due = False
        protocol: Any
        while self.connected and self._reading and (data := self.socket.read()) is not None:
            protocol = self.protocol
            self._guarded(protocol.dataReceived, data)
        if not self.connected or not self._reading:
            return
        if self.socket.eof and not self._end_seen:
            self._end_seen = True
            protocol = IHalfCloseableProtocol(self.protocol, None)
            if protocol is None:
                self._lose(Failure(ConnectionDone()))
            else:
                self._guarded(protocol.readConnectionLost)
        if self.connected and self.socket.broken:
            self._lose(Failure(ConnectionLost()))

    def readable(self) -> None:
        """Read bytes, the end or a reset; with data to write, a reset is noticed even while paused."""
        if self.socket.broken and self._buffer.size_bytes and not self._reading:
            self._flush_soon()
        else:
            self._read()

    def writable(self) -> None:
        """Send again, since the socket accepts data after ``space_bytes`` was 0."""
        self._flush_soon()

    def crashed(self) -> None:
        """End the connection: the host has crashed, and this program with it."""
        if self.disconnected:
            return
        self.connected = False
        self.disconnected = True
        self.producer = None
        self._buffer.clear()
        self._lost(self)

    def _guarded(self, call: Callable[..., object], *args: Any) -> None:
        """Call a protocol as a reactor does: an exception is logged and closes the connection."""
        try:
            call(*args)
        except Exception:
            failure = Failure()
            _log.failure("A protocol on {host} failed", failure, host=self.socket.host)
            self._lose(failure)

    def _lose(self, reason: Failure) -> None:
        if self.disconnected:
            return
        self.connected = False
        self.disconnected = True
        self._buffer.clear()
        self.socket.close()
        producer, self.producer = self.producer, None
        try:
            if producer is not None:
                producer.stopProducing()
            if self.protocol is not None:
                self.protocol.connectionLost(reason)
        except Exception:
            _log.failure("A protocol on {host} failed in connectionLost", host=self.socket.host)
        finally:
            self._lost(self)
