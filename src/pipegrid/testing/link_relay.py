"""
A TCP relay that delays and throttles real connections as the link model computes, without netem or root
privileges.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import attrs
from twisted.internet.interfaces import (
    IDelayedCall,
    IPushProducer,
    IReactorTime,
    IStreamClientEndpoint,
)
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.tcp import Connection as TCPTransport
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.reactor.tcp_transport import Buffer, is_free, send_now, set_bulk_buffers, socket_of
from pipegrid.testing.link_model import Bottleneck, Flow, LinkPath, Packet, to_ns, to_seconds

# A relay represents a network, so it should use little CPU time. Linux can move pages from a socket to a
# pipe, and from the pipe to another socket (``splice``); reading and writing would copy each byte twice. So
# each bulk read waits in its own pipe (``Pages``). Data is copied (``Copied``) if the read is small, if
# splice is missing, or if all pipes are in use. This module overrides ``doRead`` of Twisted's sockets, which
# reactors call.

BULK_BYTES = 32 << 10
"""After a read of at least this size, the next read uses pages; for less, copying beats two more calls."""

PIPE_BYTES = 256 << 10
"""
The size requested for each pipe: enough pages for the pieces of one read.

A user without privileges may have 64 MiB in all pipes together, used or not.
"""

MAX_PIPES = 192
"""The most pipes for all connections of a link together."""


class Copied:
    """Bytes that were read into memory; bytes that stay in the kernel are ``Pages``."""

    __slots__ = ("_data",)

    def __init__(self, data: Buffer) -> None:
        self._data = memoryview(data)

    def __len__(self) -> int:
        return len(self._data)

    def deliver(self, size_bytes: int, socket: Any) -> Buffer:
        """
        Send and remove the first bytes.

        Args:
            socket: from ``reactor.tcp_transport.socket_of``; None: send nothing.

        Returns:
            The bytes that the socket did not accept.
        """
        part, self._data = self._data[:size_bytes], self._data[size_bytes:]
        sent = send_now(socket, part) if socket is not None else 0
        return part[sent:]

    def cut(self, size_bytes: int) -> None:
        """Remove that many bytes at the end."""
        self._data = self._data[: len(self._data) - size_bytes]


class Pages:
    """Bytes in a pipe of the kernel; the pipe is released when its last byte has left."""

    __slots__ = ("_inside_bytes", "_length", "_pipe", "_pipes")

    def __init__(self, pipes: Pipes, pipe: tuple[int, int], size_bytes: int) -> None:
        self._pipes = pipes
        self._pipe = pipe
        self._length = self._inside_bytes = size_bytes

    def __len__(self) -> int:
        return self._length

    def deliver(self, size_bytes: int, socket: Any) -> Buffer:
        """Send and remove the first bytes, as ``Copied.deliver`` does; only the returned bytes are copied."""
        sent = 0
        if socket is not None and is_free(socket):
            with suppress(OSError):  # full or lost, as the reactor will notice
                sent = os.splice(
                    self._pipe[0], socket.fileno(), size_bytes, flags=os.SPLICE_F_NONBLOCK
                )
        rest = os.read(self._pipe[0], size_bytes - sent) if sent < size_bytes else b""
        self._inside_bytes -= size_bytes
        self.cut(size_bytes)
        return rest

    def cut(self, size_bytes: int) -> None:
        """Remove that many bytes at the end."""
        self._length -= size_bytes
        if not self._length:
            self._pipes.give_back(self._pipe, self._inside_bytes == 0)


class Pipes:
    """
    The pipes of a link: a limited number, kept as long as the link has connections.

    Args:
        limit: the largest number of pipes.
    """

    def __init__(self, limit: int = MAX_PIPES) -> None:
        self._limit = limit
        self._idle: list[tuple[int, int]] = []
        self._count = 0
        self._users = 0

    def __len__(self) -> int:
        return self._count

    def join(self) -> None:
        """Count one more connection of the link."""
        self._users += 1

    def leave(self) -> None:
        """Count one connection fewer; after the last one all pipes are closed."""
        self._users -= 1
        while self._idle and not self._users:
            self._close(self._idle.pop())

    def take(self) -> tuple[int, int] | None:
        """Return an empty pipe as two descriptors, for reading and writing; None if no pipe is free."""
        if self._idle:
            return self._idle.pop()
        if self._count >= self._limit or not hasattr(os, "splice"):
            return None
        try:
            pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:  # too many open files
            return None
        import fcntl  # exists wherever splice does

        with suppress(OSError, AttributeError):  # a smaller pipe is enough
            fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._count += 1
        return pipe

    def give_back(self, pipe: tuple[int, int], empty: bool = True) -> None:
        """Take a pipe back; close it if it is not empty."""
        if empty and self._users:
            self._idle.append(pipe)
        else:
            self._close(pipe)

    def _close(self, pipe: tuple[int, int]) -> None:
        self._count -= 1
        for end in pipe:
            os.close(end)


class PageReader:
    """
    Reads a Twisted socket: bulk data as pages, other data as Twisted does.

    Args:
        socket: from ``reactor.tcp_transport.socket_of``.
        read_bytes: the most bytes of one read.
        received: called with the pages of each bulk read.
    """

    def __init__(
        self, socket: Any, pipes: Pipes, read_bytes: int, received: Callable[[Pages], object]
    ) -> None:
        self._socket = socket
        self._pipes = pipes
        self._read_bytes = read_bytes
        self._received = received
        self._copying = socket.doRead
        self._bulk = False
        socket.doRead = self._read

    def note(self, size_bytes: int) -> None:
        """Record the size of a read, which decides whether the next read uses pages."""
        self._bulk = size_bytes >= BULK_BYTES

    def _read(self) -> Any:
        pipe = self._pipes.take() if self._bulk else None
        if pipe is None:
            return self._copying()
        size_bytes = 0
        with suppress(OSError):  # no data now, or the connection is lost
            size_bytes = os.splice(
                self._socket.fileno(), pipe[1], self._read_bytes, flags=os.SPLICE_F_NONBLOCK
            )
        self.note(size_bytes)
        if not size_bytes:
            self._pipes.give_back(pipe)
            return self._copying()  # Twisted reports an end or a loss, or reads nothing
        self._received(Pages(self._pipes, pipe, size_bytes))
        return None


# A connection to the relay is continued by a second connection from the relay to a target. Each direction
# uses a ``LinkPath``, as in the simulated network, so many connections share one bottleneck, as at a DSL
# modem.
#
# Exactness: bytes are written when the clock's timers allow. A reactor rounds timers up to milliseconds, so
# on the reactor's clock bytes that are due within half a millisecond (``EARLY_S``) are delivered at once, and
# a round trip of less than a millisecond vanishes; with a finer clock (``pipegrid.testing.clock``) pass a
# smaller ``early_s``. Errors do not add up, since the model derives times from the bytes and not from when
# its timers ran.
#
# Handshake: the kernel accepts a connection at once, but over the link accepting would take a round trip. So
# the client's first bytes enter the link one round trip after the accept, and the server's first bytes half a
# round trip later.
#
# Limits: a sender is paused when it has queued as many bytes as the bottleneck sends in ``QUEUE_S``, so that
# the bottleneck stays busy while this process is delayed for a moment. After a longer delay the model is
# corrected: if a read left bytes in the socket, the next bytes count as present since that read, but at most
# since ``LATE_S`` ago. Bytes in flight are limited to rate times latency, or ``FLYING_BYTES``. A slow
# receiver stops its sender as a full receive window does, at ``WINDOW_BYTES``; bytes already in flight wait
# in the relay.

QUEUE_S = 0.05
MIN_QUEUE_BYTES = 256 << 10
MAX_QUEUE_BYTES = 8 << 20
"""The most bytes that one sender may have queued: about a kernel's send buffer."""

READ_BYTES = (256 << 10) - 1
"""
The most bytes of one read from a socket: a turn of the reactor costs as much as copying 100 KiB.

An odd number, so that hardly any message fills a read exactly.
"""

WINDOW_BYTES = 4 << 20
"""How many bytes a slow receiver may leave unread before its sender is paused: a receive window."""

LATE_S = 0.1
"""The longest delay of this process during which the bottleneck still counts as busy."""

FLYING_BYTES = 64 << 20
"""The most bytes in flight in one direction of a connection."""

EARLY_S = 0.0005
"""Half of the resolution of a reactor's timers: bytes that are due within this time are delivered at once."""


_LATE_NS = to_ns(LATE_S)


@attrs.frozen
class LinkShape:
    """
    The properties of a link.

    Attributes:
        rtt_s: the round-trip time, half of it each way.
        up_bytes_per_s, down_bytes_per_s: from the client to the servers and back; None: unlimited.
    """

    rtt_s: float = 0.0
    up_bytes_per_s: int | None = None
    down_bytes_per_s: int | None = None


class SharedLink:
    """
    One link, which all connections of one or more relays share.

    Args:
        clock: the reactor, or a more exact clock.
        early_s: bytes that are due within this time are delivered now.
        behind_s: returns how many seconds bytes that are read now have probably waited.
    """

    def __init__(
        self,
        clock: IReactorTime,
        shape: LinkShape,
        early_s: float = EARLY_S,
        behind_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.shape = shape
        self.clock = clock
        self.pipes = Pipes()
        early_ns = to_ns(early_s)
        up, down = Bottleneck(shape.up_bytes_per_s), Bottleneck(shape.down_bytes_per_s)
        self.up = Wire(clock, LinkPath(shape.rtt_s / 2, up), early_ns, behind_s)
        self.down = Wire(clock, LinkPath(shape.rtt_s / 2, down), early_ns, behind_s)


class Wire:
    """One direction of a link: starts packets when the bottleneck is free, and delivers each at its time."""

    def __init__(
        self, clock: IReactorTime, path: LinkPath, early_ns: int, behind_s: Callable[[], float]
    ) -> None:
        self.path = path
        self._behind_s = behind_s
        self.queue_bytes = queue_bytes(path.line.bytes_per_s)
        self._clock = clock
        self._early_ns = early_ns
        self._arrivals: deque[Packet] = deque()
        self._timer: IDelayedCall | None = None
        self._timer_ns = 0

    def now_ns(self) -> int:
        """Return the time in nanoseconds, as the link model needs it."""
        return to_ns(self._clock.seconds())

    def offer(self, stream: RelayedStream, size_bytes: int, since_ns: int | None = None) -> None:
        """Queue bytes of a stream; ``since_ns``: when the bytes could have been sent, if not now."""
        if since_ns is None:
            since_ns = self.now_ns() - to_ns(self._behind_s())
        self.path.line.offer(since_ns, stream.flow, size_bytes)
        self._turn()

    def _turn(self) -> None:
        now_ns = self.now_ns() + self._early_ns
        # All packets of a path have the same latency, so they arrive in the order in which they start.
        self._arrivals.extend(self.path.line.transmit(now_ns))
        while self._arrivals and self._arrivals[0].arrival_ns <= now_ns:
            packet = self._arrivals.popleft()
            owner = packet.flow.owner
            assert isinstance(owner, RelayedStream)
            owner.arrived(packet.size_bytes)
        self._set_timer()

    def _set_timer(self) -> None:
        due = [self._arrivals[0].arrival_ns] if self._arrivals else []
        line_ns = self.path.line.next_ns()
        if line_ns is not None:
            due.append(line_ns)
        first_ns = min(due, default=0)
        if self._timer is not None and self._timer.active():
            if due and first_ns == self._timer_ns:
                return
            self._timer.cancel()
        self._timer = None
        if due:
            self._timer_ns = first_ns
            delay_ns = max(0, first_ns - self.now_ns() - self._early_ns)
            self._timer = self._clock.callLater(to_seconds(delay_ns), self._turn)


def queue_bytes(bytes_per_s: int | None) -> int:
    """Return how many bytes one sender may have queued for a bottleneck of this rate."""
    wanted_bytes = int((bytes_per_s or 0) * QUEUE_S)
    return min(max(wanted_bytes, MIN_QUEUE_BYTES), MAX_QUEUE_BYTES)


@implementer(IPushProducer)
class RelayedStream:
    """
    One direction of one connection, from one transport to another.

    Args:
        opens_at_s: nothing enters the link before this time.
    """

    def __init__(self, wire: Wire, clock: IReactorTime, opens_at_s: float) -> None:
        self.flow: Flow = wire.path.open(self)
        self._wire = wire
        self._clock = clock
        self._opens_at_s = opens_at_s
        self._chunks: deque[Copied | Pages] = deque()
        self._more_since_ns: int | None = None
        self._held_bytes = 0
        self._arrived: list[bytes] = []
        self._source: TCPTransport | None = None
        self._source_ended = False
        self._all_arrived = False
        self._paused = False
        self._sink: TCPTransport | None = None
        self._socket: Any = None
        self._sink_full = False
        self._unread_bytes = 0
        self._sink_gone = False
        self._sender_stopped = False

    def read_from(self, source: TCPTransport) -> None:
        """Set the sender's transport, which is paused while too much of its data is in the relay."""
        self._source = source
        self._pace()

    def write_to(self, sink: TCPTransport) -> None:
        """Set the receiver's transport, which gets all arrived and future data."""
        self._sink, self._socket = sink, socket_of(sink)
        sink.registerProducer(self, True)
        sink.writeSequence(self._arrived)
        self._arrived.clear()
        self._end_if_done()

    def send(self, data: Copied | Pages) -> None:
        """Accept bytes from the sender."""
        if self._sender_stopped:
            data.cut(len(data))
            return
        self._chunks.append(data)
        self._held_bytes += len(data)
        self._pace()
        now_ns, since_ns = self._wire.now_ns(), self._more_since_ns
        if since_ns is not None:
            since_ns = max(since_ns, now_ns - _LATE_NS)
        self._more_since_ns = now_ns if len(data) >= READ_BYTES else None
        wait_s = self._opens_at_s - self._clock.seconds()
        if wait_s > 0:
            self._clock.callLater(wait_s, self._wire.offer, self, len(data))
        else:
            self._wire.offer(self, len(data), since_ns)

    def arrived(self, size_bytes: int) -> None:
        """Deliver the next bytes, which have passed the link."""
        self._held_bytes -= size_bytes
        while size_bytes:
            chunk = self._chunks[0]
            part_bytes = min(size_bytes, len(chunk))
            size_bytes -= part_bytes
            # Write to the socket at once if it accepts the bytes, to save CPU time.
            rest = chunk.deliver(part_bytes, self._socket)
            if not chunk:
                self._chunks.popleft()
            if not rest or self._sink_gone:
                continue
            if self._sink is None:
                self._arrived.append(bytes(rest))
                continue
            self._sink.write(bytes(rest))
            if self._sink_full:
                self._unread_bytes += len(rest)
        self._pace()
        self._check_all_arrived()

    def source_ended(self) -> None:
        """Handle that the sender has closed: bytes in flight still arrive, and after them the end."""
        self._source, self._source_ended = None, True
        if not self._held_bytes:
            self._after_latency(self._check_all_arrived)

    def sink_gone(self) -> None:
        """Handle that the receiver is gone: the sender is notified after the latency."""
        self._sink, self._socket, self._sink_gone = None, None, True
        self._arrived.clear()
        self.resumeProducing()
        if not self._all_arrived:
            self._after_latency(self._sender_knows)

    def _after_latency(self, call: Callable[[], None]) -> None:
        self._clock.callLater(to_seconds(self._wire.path.latency_ns), call)

    def _sender_knows(self) -> None:
        """
        Handle that the sender now knows that the receiver is gone: drop bytes that have not entered the link,
        since other connections may need the bottleneck.
        """
        self._sender_stopped = True
        dropped_bytes, self.flow.queued_bytes = self.flow.queued_bytes, 0
        self._held_bytes -= dropped_bytes
        while dropped_bytes:
            last = self._chunks[-1]
            cut_bytes = min(dropped_bytes, len(last))
            last.cut(cut_bytes)
            dropped_bytes -= cut_bytes
            if not last:
                self._chunks.pop()
        self._pace()
        self._check_all_arrived()

    def _check_all_arrived(self) -> None:
        if self._source_ended and not self._held_bytes and not self._all_arrived:
            self._all_arrived = True
            self._wire.path.close(self.flow)
            self._end_if_done()

    def _end_if_done(self) -> None:
        if self._all_arrived and self._sink is not None:
            self._sink.unregisterProducer()
            self._sink.loseConnection()

    def _pace(self) -> None:
        full = (
            self.flow.queued_bytes > self._wire.queue_bytes
            or self._held_bytes > FLYING_BYTES
            or self._unread_bytes > WINDOW_BYTES
        )
        if self._source is None or full == self._paused:
            return
        self._paused = full
        if full:
            self._source.pauseProducing()
        else:
            self._source.resumeProducing()

    def pauseProducing(self) -> None:
        """Pause: the receiver reads too slowly, and bytes that arrive from now on fill its window."""
        self._sink_full = True

    def resumeProducing(self) -> None:
        """Resume: the receiver accepts data again."""
        self._sink_full = False
        self._unread_bytes = 0
        self._pace()

    def stopProducing(self) -> None:
        """Do nothing: the receiver's connection is lost, which its protocol handles."""


class Side(Protocol):
    """One end of a relayed connection: between client and relay, or between relay and target."""

    def __init__(self, outgoing: RelayedStream, incoming: RelayedStream, pipes: Pipes) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._pipes = pipes
        self._reader: PageReader | None = None

    def connectionMade(self) -> None:
        """Give this transport to the streams of both directions."""
        assert self.transport is not None
        transport = cast(TCPTransport, self.transport)
        transport.setTcpNoDelay(True)
        set_bulk_buffers(transport, READ_BYTES)
        self._pipes.join()
        if socket := socket_of(transport):
            self._reader = PageReader(socket, self._pipes, READ_BYTES, self._outgoing.send)
        self._outgoing.read_from(transport)
        self._incoming.write_to(transport)

    def dataReceived(self, data: bytes) -> None:
        if self._reader is not None:
            self._reader.note(len(data))
        self._outgoing.send(Copied(data))

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Close the other end, after the last bytes have arrived."""
        self._pipes.leave()
        self._incoming.sink_gone()
        self._outgoing.source_ended()


class RelayFactory(Factory):
    """
    Accepts connections and continues them, over the link, to a target.

    Args:
        target: the endpoint that connects to the target.
    """

    noisy = False

    def __init__(self, link: SharedLink, target: IStreamClientEndpoint) -> None:
        self._link = link
        self._target = target

    def buildProtocol(self, _address: object) -> Side:
        """Start to connect to the target, and return the client's end."""
        link = self._link
        now_s, rtt_s = link.clock.seconds(), link.shape.rtt_s
        up = RelayedStream(link.up, link.clock, now_s + rtt_s)
        down = RelayedStream(link.down, link.clock, now_s + 1.5 * rtt_s)
        connecting = self._target.connect(Factory.forProtocol(lambda: Side(down, up, link.pipes)))

        def refused(_failure: Failure) -> None:
            up.sink_gone()
            down.source_ended()

        connecting.addErrback(refused)
        return Side(up, down, link.pipes)
