"""
The link model on real connections: a TCP relay that delays and throttles what passes through it.

Kernels often lack netem, and it needs root; this needs neither. Connections to the relay go on to a target,
each direction over a ``Path`` of the same model that the virtual network uses, so that many
connections share one line as behind a DSL modem.

**Exactness.** What arrives is written within a millisecond of when it should be: reactors round timers up to
milliseconds, so whatever is due within half of one is delivered at once. Nothing adds up, since the
model derives times from the bytes and not from when its timers ran.

**The handshake.** The kernel accepts at once, while over the link it would have taken a round trip. So what a
client sends first enters the link one round trip after it was accepted.

**Bounds.** A sender whose bytes wait for the line is paused at ``QUEUE_BYTES``, as a full socket buffer would
pause it; what is under way on the link is bounded by rate times latency, or ``FLYING_BYTES``.
"""

from __future__ import annotations

from collections import deque
from typing import cast

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

from pipegrid.simulation.link import Flow, Line, Packet, Path, to_ns, to_seconds

QUEUE_BYTES = 256 << 10
"""What one sender may have waiting for the line: about what a kernel's send buffer holds."""

FLYING_BYTES = 64 << 20
"""What one direction of a connection may have under way."""

_EARLY_NS = to_ns(0.0005)


@attrs.frozen
class LinkShape:
    """
    What a link is like.

    Attributes:
        rtt_s: round trip, half of it each way.
        up_bytes_per_s, down_bytes_per_s: from the client to the servers and back; None: unlimited.
    """

    rtt_s: float = 0.0
    up_bytes_per_s: int | None = None
    down_bytes_per_s: int | None = None


class Link:
    """One link, which all connections of one or more relays share."""

    def __init__(self, reactor: IReactorTime, shape: LinkShape) -> None:
        self.shape = shape
        self.clock = reactor
        self.up = Wire(reactor, Path(shape.rtt_s / 2, Line(shape.up_bytes_per_s)))
        self.down = Wire(reactor, Path(shape.rtt_s / 2, Line(shape.down_bytes_per_s)))


class Wire:
    """One direction of a link: starts packets when the line is free, and hands them over in time."""

    def __init__(self, clock: IReactorTime, path: Path) -> None:
        self.path = path
        self._clock = clock
        self._arrivals: deque[Packet] = deque()
        self._timer: IDelayedCall | None = None

    def now_ns(self) -> int:
        """Return the time as the link model counts it."""
        return to_ns(self._clock.seconds())

    def offer(self, stream: Stream, size_bytes: int) -> None:
        """Queue bytes of a stream for the line."""
        now_ns = self.now_ns()
        self.path.line.offer(now_ns, stream.flow, size_bytes)
        self._turn()

    def _turn(self) -> None:
        now_ns = self.now_ns() + _EARLY_NS
        # All packets of a path take equally long, so they arrive in the order in which they start.
        self._arrivals.extend(self.path.line.transmit(now_ns))
        while self._arrivals and self._arrivals[0].arrival_ns <= now_ns:
            packet = self._arrivals.popleft()
            owner = packet.flow.owner
            assert isinstance(owner, Stream)
            owner.arrived(packet.size_bytes)
        self._set_timer()

    def _set_timer(self) -> None:
        due = [self._arrivals[0].arrival_ns] if self._arrivals else []
        line_ns = self.path.line.next_ns()
        if line_ns is not None:
            due.append(line_ns)
        if self._timer is not None and self._timer.active():
            self._timer.cancel()
        self._timer = None
        if due:
            delay_ns = max(0, min(due) - self.now_ns() - _EARLY_NS)
            self._timer = self._clock.callLater(to_seconds(delay_ns), self._turn)


@implementer(IPushProducer)
class Stream:
    """
    One direction of one connection: from the transport that it was read from to the one it goes to.

    Args:
        opens_at_s: nothing enters the link before.
    """

    def __init__(self, wire: Wire, clock: IReactorTime, opens_at_s: float) -> None:
        self.flow: Flow = wire.path.open(self)
        self._wire = wire
        self._clock = clock
        self._opens_at_s = opens_at_s
        self._chunks: deque[bytes] = deque()
        self._held_bytes = 0
        self._arrived: list[bytes] = []
        self._source: TCPTransport | None = None
        self._source_ended = False
        self._all_arrived = False
        self._paused = False
        self._sink: TCPTransport | None = None
        self._sink_full = False
        self._sink_gone = False

    def read_from(self, source: TCPTransport) -> None:
        """Pause this transport while too much of it is on its way."""
        self._source = source
        self._pace()

    def write_to(self, sink: TCPTransport) -> None:
        """Hand over to this transport what has arrived and what will."""
        self._sink = sink
        sink.registerProducer(self, True)
        sink.writeSequence(self._arrived)
        self._arrived.clear()
        self._end_if_done()

    def send(self, data: bytes) -> None:
        """Take bytes from the sender."""
        self._chunks.append(data)
        self._held_bytes += len(data)
        self._pace()
        wait_s = self._opens_at_s - self._clock.seconds()
        if wait_s > 0:
            self._clock.callLater(wait_s, self._wire.offer, self, len(data))
        else:
            self._wire.offer(self, len(data))

    def arrived(self, size_bytes: int) -> None:
        """The next bytes have come through the link."""
        self._held_bytes -= size_bytes
        while size_bytes:
            chunk = self._chunks.popleft()
            if len(chunk) > size_bytes:
                self._chunks.appendleft(chunk[size_bytes:])
                chunk = chunk[:size_bytes]
            size_bytes -= len(chunk)
            if self._sink is not None:
                self._sink.write(chunk)
            elif not self._sink_gone:
                self._arrived.append(chunk)
        self._pace()
        self._check_all_arrived()

    def source_ended(self) -> None:
        """The sender has closed; what is under way still arrives, and then the end."""
        self._source, self._source_ended = None, True
        if not self._held_bytes:
            latency_s = to_seconds(self._wire.path.latency_ns)
            self._clock.callLater(latency_s, self._check_all_arrived)

    def sink_gone(self) -> None:
        """There is nobody to hand anything to; what is under way goes nowhere."""
        self._sink, self._sink_gone = None, True
        self._arrived.clear()
        self.resumeProducing()

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
            self.flow.queued_bytes > QUEUE_BYTES
            or self._held_bytes > FLYING_BYTES
            or self._sink_full
        )
        if self._source is None or full == self._paused:
            return
        self._paused = full
        if full:
            self._source.pauseProducing()
        else:
            self._source.resumeProducing()

    def pauseProducing(self) -> None:
        """The receiver reads too slowly: what a full receive window does, pausing the sender does."""
        self._sink_full = True
        self._pace()

    def resumeProducing(self) -> None:
        """The receiver has room again."""
        self._sink_full = False
        self._pace()

    def stopProducing(self) -> None:
        """The receiver's connection is lost; its protocol hears of it too."""


class Side(Protocol):
    """One end of a relayed connection: the client's at the relay, or the relay's at the target."""

    def __init__(self, outgoing: Stream, incoming: Stream) -> None:
        self._outgoing = outgoing
        self._incoming = incoming

    def connectionMade(self) -> None:
        """Join both directions to this transport."""
        assert self.transport is not None
        transport = cast(TCPTransport, self.transport)
        transport.setTcpNoDelay(True)
        self._outgoing.read_from(transport)
        self._incoming.write_to(transport)

    def dataReceived(self, data: bytes) -> None:
        """Send on what came."""
        self._outgoing.send(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Tell the other end, after the bytes."""
        self._incoming.sink_gone()
        self._outgoing.source_ended()


class RelayFactory(Factory):
    """
    Listens for connections that go on, over the link, to a target.

    Args:
        target: connects to it.
    """

    noisy = False

    def __init__(self, link: Link, target: IStreamClientEndpoint) -> None:
        self._link = link
        self._target = target

    def buildProtocol(self, _address: object) -> Side:
        """Relay one connection."""
        link = self._link
        up = Stream(link.up, link.clock, link.clock.seconds() + link.shape.rtt_s)
        down = Stream(link.down, link.clock, 0.0)
        connecting = self._target.connect(Factory.forProtocol(lambda: Side(down, up)))

        def refused(_failure: Failure) -> None:
            up.sink_gone()
            down.source_ended()

        connecting.addErrback(refused)
        return Side(up, down)
