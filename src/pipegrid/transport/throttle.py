"""The rate limit for all connections of a client (token bucket)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from socket import SO_RCVBUF, SOL_SOCKET
from socket import socket as Socket
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import (
    IDelayedCall,
    IProtocol,
    IProtocolFactory,
    IReactorTime,
    IStreamClientEndpoint,
)
from twisted.internet.protocol import connectionDone
from twisted.python.failure import Failure
from zope.interface import directlyProvides, implementer, providedBy

from pipegrid.flow.rate_timetable import LOOK_S, RateLimit, as_timetable, minute_of_week
from pipegrid.reactor.deferreds import Timer
from pipegrid.reactor.tcp_transport import Backpressure

# How many bytes may pass: a rate on average, with bursts.
#
# Pure: the caller passes times. Bytes are counted after they have passed, so the balance may be negative;
# then nothing passes until the balance is positive again. If the clock jumps back, bytes are delayed by at
# most the jump. If the clock jumps forward, the bucket is filled once.


class TokenBucket:
    """
    The bytes that may pass in one direction of a link.

    Args:
        bytes_per_s: more than 0; None: no limit.
        burst_bytes: maximum number of bytes that may pass at once after a long pause; None: the bytes of a
            quarter of a second.
    """

    def __init__(self, bytes_per_s: float | None, burst_bytes: float | None = None) -> None:
        self._given_burst_bytes = burst_bytes
        self._at_s: float | None = None
        self._use(bytes_per_s)
        self._left = self._burst_bytes

    def __repr__(self) -> str:
        rate = "any number of" if self.bytes_per_s is None else f"{self.bytes_per_s:g}"
        return f"<TokenBucket of {rate} bytes a second, {self._left:g} left>"

    def _use(self, bytes_per_s: float | None) -> None:
        assert bytes_per_s is None or bytes_per_s > 0
        self.bytes_per_s = bytes_per_s
        burst_bytes = self._given_burst_bytes
        if burst_bytes is None:
            burst_bytes = 1.0 if bytes_per_s is None else bytes_per_s / 4
        self._burst_bytes = max(1.0, burst_bytes)

    def change(self, now_s: float, bytes_per_s: float | None) -> None:
        """
        Change the rate now.

        Bytes that passed at the old rate delay the next bytes by at most a quarter of a second.
        """
        if bytes_per_s == self.bytes_per_s:
            return
        self._fill(now_s)
        self._use(bytes_per_s)
        self._left = max(-self._burst_bytes, min(self._burst_bytes, self._left))

    def take(self, now_s: float, size: int) -> None:
        """Record that ``size`` bytes pass now, even if fewer are left; ``wait_s`` is then longer."""
        self._fill(now_s)
        self._left -= size

    def wait_s(self, now_s: float) -> float:
        """Return how many seconds to wait until the next bytes may pass; 0 if they may pass now."""
        self._fill(now_s)
        if self.bytes_per_s is None or self._left > 0:
            return 0.0
        return (1 - self._left) / self.bytes_per_s

    def _fill(self, now_s: float) -> None:
        passed_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._at_s = now_s
        if self.bytes_per_s is None:
            self._left = self._burst_bytes
            return
        self._left = min(self._burst_bytes, self._left + passed_s * self.bytes_per_s)


# Limiting all connections of a client together to a rate: ``--limit-rate``.
#
# The limit applies between TCP and TLS, so that every byte counts. To the layers above, the limit looks like
# a slow link: windows measure it, and timeouts behave as on a slow link. Limits in higher layers would not
# work: small files have megabytes in flight before the first acknowledgement, and servers send responses at
# their own rate.
#
# Written bytes wait here until they may be sent, piece by piece, and the connections take turns; the writer
# is asked to pause, as by a full socket. Received bytes are delivered, and no more are read until the rate
# permits it.

FULL_BYTES = 64 << 10
"""The maximum number of bytes that wait on one connection before the writer is asked to pause."""

_TURN_S = 0.05
"""A piece has as many bytes as the rate permits in this time, but at least 512 and at most 16 KiB."""

_LEAST_PIECE_BYTES = 512
_MOST_PIECE_BYTES = 16 << 10
_LEAST_KEPT_BYTES = 16 << 10
"""Minimum size of the kernel's receive buffer: a few packets, which count about twice their size."""

_LONGEST_WAIT_S = 5.0
"""The longest wait under a timetable, which may permit a higher rate meanwhile."""


class Throttle:
    """
    The rate limit of all connections that go through this object.

    The timetable is read when bytes pass or wait, so it needs no timer.

    Args:
        limit: for sending and receiving.
        local_minute: returns the minute of the week in local time.
    """

    def __init__(
        self,
        clock: IReactorTime,
        limit: RateLimit,
        local_minute: Callable[[], int] = lambda: minute_of_week(time.localtime()),
    ) -> None:
        self.clock = clock
        self._timetable = as_timetable(limit)
        self._varies = len(self._timetable.rates) > 1
        self._local_minute = local_minute
        self._looked_s = clock.seconds()
        rates = self._timetable.at(local_minute())
        self.sent = TokenBucket(rates.sent)
        self.received = TokenBucket(rates.received)
        self._waiting: deque[Throttled] = deque()
        self._timer = Timer(clock, self._go_on)

    @property
    def piece_bytes(self) -> int:
        """How many bytes one connection sends before the next connection sends."""
        rate = self.sent.bytes_per_s
        if rate is None:
            return _MOST_PIECE_BYTES
        return int(min(_MOST_PIECE_BYTES, max(_LEAST_PIECE_BYTES, rate * _TURN_S)))

    def wait_s(self, bucket: TokenBucket) -> float:
        """
        Return how many seconds to wait until the next bytes may pass, or until this method must be called
        again.
        """
        now_s = self.clock.seconds()
        if self._varies and not 0 <= now_s - self._looked_s < LOOK_S:
            self._looked_s = now_s
            rates = self._timetable.at(self._local_minute())
            self.sent.change(now_s, rates.sent)
            self.received.change(now_s, rates.received)
        wait_s = bucket.wait_s(now_s)
        return min(wait_s, _LONGEST_WAIT_S) if self._varies else wait_s

    def endpoint(
        self, inner: IStreamClientEndpoint, kind: type[Throttled] | None = None
    ) -> IStreamClientEndpoint:
        """
        Return an endpoint whose connections share the limit with all others.

        Args:
            kind: class of the connections; None: ``Throttled``.
        """
        return _ThrottledEndpoint(self, inner, kind or Throttled)

    def wants_to_send(self, connection: Throttled) -> None:
        """Queue a connection that has bytes to send."""
        self._waiting.append(connection)
        if not self._timer.is_set:
            self._go_on()

    def leaves(self, connection: Throttled) -> None:
        """Remove a connection from the queue, since it has nothing to send now."""
        if connection in self._waiting:
            self._waiting.remove(connection)
        if not self._waiting:
            self._timer.stop()

    def _go_on(self) -> None:
        while self._waiting:
            wait_s = self.wait_s(self.sent)
            if wait_s:
                self._timer.set(wait_s)
                return
            connection = self._waiting.popleft()
            size = connection.send_piece(self.piece_bytes)
            self.sent.take(self.clock.seconds(), size)
            if connection.wants_turn:
                self._waiting.append(connection)


@implementer(IStreamClientEndpoint)
class _ThrottledEndpoint:
    def __init__(
        self, throttle: Throttle, inner: IStreamClientEndpoint, kind: type[Throttled]
    ) -> None:
        self._throttle = throttle
        self._inner = inner
        self._kind = kind

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """Connect; fires with the protocol that the factory has built."""
        factory: Any = _Factory(self._throttle, protocolFactory, self._kind)
        connected: Deferred[Any] = self._inner.connect(factory)
        return connected.addCallback(lambda connection: connection.protocol)


class _Factory:
    def __init__(
        self, throttle: Throttle, factory: IProtocolFactory, kind: type[Throttled]
    ) -> None:
        self._throttle = throttle
        self._factory = factory
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._factory, name)

    def buildProtocol(self, addr: Any) -> Any:
        protocol: Any = self._factory.buildProtocol(addr)
        return None if protocol is None else self._kind(self._throttle, protocol)


class Throttled:
    """
    One connection: the protocol of the real transport, and the transport of the real protocol.

    Attributes:
        protocol: the protocol whose transport this object is.
        wants_turn: whether bytes wait to be sent, and the socket accepts them.
    """

    def __init__(self, throttle: Throttle, protocol: Any) -> None:
        self.protocol = protocol
        self.wants_turn = False
        self._throttle = throttle
        self._transport: Any = None
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._producer: Any = None
        self._streaming = False
        self._producer_paused = False
        self._socket_full = False
        self._closing = False
        self._lost = False
        self._read_wait: IDelayedCall | None = None
        self._reader_paused = False
        self._fitted_rate: float | None = None
        self._usual_buffer_bytes = 0
        self._usual_kept_bytes = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self._transport is None:
            raise AttributeError(name)
        return getattr(self._transport, name)

    # Methods of a protocol, which the transport calls.

    def makeConnection(self, transport: Any) -> None:
        self._transport = transport
        self._usual_buffer_bytes = getattr(transport, "bufferSize", 0)
        self._usual_kept_bytes = _kept_bytes(transport)
        self._fit_buffers()
        directlyProvides(self, providedBy(transport))
        transport.registerProducer(Backpressure(self), True)
        self.protocol.makeConnection(self)

    def dataReceived(self, data: bytes) -> None:
        """Deliver the bytes, then stop reading until the rate permits more."""
        clock, bucket = self._throttle.clock, self._throttle.received
        bucket.take(clock.seconds(), len(data))
        self.protocol.dataReceived(data)
        if not self._lost and self._read_wait is None:
            wait_s = self._throttle.wait_s(bucket)
            if bucket.bytes_per_s != self._fitted_rate:
                self._fit_buffers()
            if wait_s:
                if not self._reader_paused:
                    self._transport.pauseProducing()
                self._read_wait = clock.callLater(wait_s, self._may_read)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._forget()
        self.protocol.connectionLost(reason)

    def _fit_buffers(self) -> None:
        """
        Set the receive buffers to a quarter of a second's bytes; without a rate limit, to their usual size.
        """
        rate = self._fitted_rate = self._throttle.received.bytes_per_s
        transport, usual_bytes = self._transport, self._usual_buffer_bytes
        if usual_bytes:
            fitting_bytes = usual_bytes if rate is None else int(max(2048, rate / 4))
            transport.bufferSize = min(usual_bytes, fitting_bytes)
        if isinstance(socket := getattr(transport, "socket", None), Socket):
            _keep_at_most(socket, self._usual_kept_bytes, rate)

    def _may_read(self) -> None:
        self._read_wait = None
        wait_s = self._throttle.wait_s(self._throttle.received)
        if wait_s:  # other connections have read in the meantime
            self._read_wait = self._throttle.clock.callLater(wait_s, self._may_read)
        elif not self._reader_paused:
            self._transport.resumeProducing()

    def _forget(self) -> None:
        self._lost = True
        self._queue.clear()
        self._queued_bytes = 0
        self._leave()
        if self._read_wait is not None:
            self._read_wait.cancel()
            self._read_wait = None

    def _leave(self) -> None:
        if self.wants_turn:
            self.wants_turn = False
            self._throttle.leaves(self)

    # Methods of a transport, which the protocol calls.

    def write(self, data: bytes) -> None:
        """Send the bytes when the rate permits it."""
        if self._lost or self._closing or not data:
            return
        self._queue.append(memoryview(bytes(data)))
        self._queued_bytes += len(data)
        self._want_turn()
        if self._queued_bytes > FULL_BYTES:
            self._pause_producer()

    def writeSequence(self, data: Any) -> None:
        self.write(b"".join(data))

    def loseConnection(self, *arguments: Any) -> None:
        """Close the connection after the waiting bytes are sent."""
        self._closing = True
        if not self._queue:
            self._transport.unregisterProducer()
            self._transport.loseConnection(*arguments)

    def abortConnection(self) -> None:
        self._forget()
        self._transport.abortConnection()

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """Register a producer, which is asked to pause while too many bytes wait."""
        self._producer, self._streaming, self._producer_paused = producer, streaming, False
        if not streaming or self._queued_bytes > FULL_BYTES:
            self._pause_producer()
            self._resume_producer()

    def unregisterProducer(self) -> None:
        self._producer = None

    def pauseProducing(self) -> None:
        self._reader_paused = True
        if self._read_wait is None:
            self._transport.pauseProducing()

    def resumeProducing(self) -> None:
        """Resume reading when the rate permits it."""
        self._reader_paused = False
        if self._read_wait is None and not self._lost:
            self._transport.resumeProducing()

    def stopProducing(self) -> None:
        self.loseConnection()

    def send_piece(self, most: int) -> int:
        """Send at most ``most`` bytes now; return how many were sent."""
        data = self._queue.popleft()
        if len(data) > most:
            self._queue.appendleft(data[most:])
            data = data[:most]
        size = len(data)
        self._queued_bytes -= size
        if not self._queue:
            self.wants_turn = False
        self._transport.write(bytes(data))
        if self._socket_full:
            self.wants_turn = False
        if not self._queue and self._closing:
            self._transport.unregisterProducer()
            self._transport.loseConnection()
        elif not self._lost:
            self._resume_producer()
        return size

    def output_full(self) -> None:
        """Stop sending while the socket is full."""
        self._socket_full = True
        self._leave()

    def output_free(self) -> None:
        self._socket_full = False
        self._want_turn()

    def _want_turn(self) -> None:
        if self._queue and not (self.wants_turn or self._socket_full or self._lost):
            self.wants_turn = True
            self._throttle.wants_to_send(self)

    def _pause_producer(self) -> None:
        if self._producer is not None and not self._producer_paused:
            self._producer_paused = True
            if self._streaming:
                self._producer.pauseProducing()

    def _resume_producer(self) -> None:
        if self._producer_paused and self._queued_bytes <= FULL_BYTES // 2:
            self._producer_paused = not self._streaming
            if self._producer is not None:
                self._producer.resumeProducing()


def _kept_bytes(transport: Any) -> int:
    """Return the size of the kernel's receive buffer of a connection; 0: unknown."""
    if isinstance(socket := getattr(transport, "socket", None), Socket):
        with suppress(OSError):
            return socket.getsockopt(SOL_SOCKET, SO_RCVBUF)
    return 0


def _keep_at_most(socket: Socket, usual_bytes: int, rate: float | None) -> None:
    """
    Limit the kernel's receive buffer: otherwise the kernel would receive megabytes at once.

    Args:
        usual_bytes: the buffer's size without a limit, which is restored when a limit has ended.
        rate: bytes per second; None: no limit. A buffer that was never limited keeps its size.
    """
    size = usual_bytes if rate is None else int(rate / 4)
    with suppress(OSError):
        now_bytes = socket.getsockopt(SOL_SOCKET, SO_RCVBUF)
        if size < usual_bytes or now_bytes < usual_bytes:
            size = min(max(size, _LEAST_KEPT_BYTES), usual_bytes)
            socket.setsockopt(SOL_SOCKET, SO_RCVBUF, size // 2)
