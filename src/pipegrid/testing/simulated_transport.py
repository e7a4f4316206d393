"""Twisted's TCP transport over a simulated socket, with the same behaviour as ``twisted.internet.tcp``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

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

from pipegrid.testing.simulated_socket import ByteQueue, Socket

_log = Logger()

BUFFER_BYTES = 1 << 16


@implementer(ITCPTransport, IConsumer, IPushProducer, ILoggingContext)
class SimulatedTransport:
    """
    One end of a connection as a protocol sees it.

    As in Twisted: writes are buffered and reach the kernel in the next turn; a streaming producer is paused
    when more than 64 KiB are buffered and resumed when none are; a pull producer is asked whenever none
    are; ``loseConnection`` stops reading and closes after the last buffered byte; a paused transport
    notices neither the end of the stream nor, unless it has data to write, a reset; an exception in the
    protocol is logged and closes the connection. A protocol is always called from the clock, never from
    within its own call. (Twisted makes one exception, ``loseConnection`` after a half-close; here that
    waits a turn as well.)

    Attributes:
        protocol: the current one; a protocol may replace itself.
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
            host, peer: the two addresses.
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
        """Stop reading, and close when all buffered bytes were sent."""
        if self.connected and not self.disconnecting:
            self._reading = False
            self.disconnecting = True
            self._flush_soon()

    def loseWriteConnection(self) -> None:
        """Close the sending half when all buffered bytes were sent."""
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
        """The address of the other end."""
        return self._peer

    def getHost(self) -> IPv4Address:
        """The address of this end."""
        return self._host

    def getTcpNoDelay(self) -> bool:
        """Always true: Nagle's algorithm is not simulated."""
        return True

    def setTcpNoDelay(self, enabled: bool) -> None:
        """Do nothing: protocols set this option, and here it has no effect."""

    def getTcpKeepAlive(self) -> bool:
        """Always false: keep-alive is not simulated."""
        return False

    def setTcpKeepAlive(self, enabled: bool) -> None:
        """Do nothing: protocols set this option, and here it has no effect."""

    def logPrefix(self) -> str:
        """The name for the log."""
        return f"{self.socket.host}#{self.socket.connection}"

    # IPushProducer: received bytes

    def pauseProducing(self) -> None:
        """Deliver nothing until ``resumeProducing``; after some time the sender has to stop as well."""
        self._reading = False

    def resumeProducing(self) -> None:
        """Deliver again, from the next turn."""
        if self.connected and not self.disconnecting:
            self._reading = True
            self._read_soon()

    def stopProducing(self) -> None:
        self.loseConnection()

    # IConsumer: sent bytes

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        """Let a producer fill the buffer: a streaming one is paused, a pull producer is asked."""
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

    # Turns of the clock

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            self._soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if not self.connected or self._aborting or self._write_ended:
            # A half-closed connection has nothing to flush, but it can be closed.
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
        """Read from the socket; a reset is also noticed if there is data to write."""
        if self.socket.broken and self._buffer.size_bytes and not self._reading:
            self._flush_soon()
        else:
            self._read()

    def writable(self) -> None:
        """Send again, since the socket accepts data."""
        self._flush_soon()

    def crashed(self) -> None:
        """End: the host has crashed, and this program with it."""
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
