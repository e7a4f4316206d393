"""
The simulated network in virtual time: its hosts, paths, connections and log; and functions that run
operations on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from random import Random
from typing import NamedTuple, TypeVar

import attrs
from twisted.internet.address import IPv4Address
from twisted.internet.defer import Deferred, succeed
from twisted.internet.error import (
    CannotListenError,
    ConnectingCancelledError,
    ConnectionRefusedError,
    NoProtocol,
    TimeoutError,
)
from twisted.internet.interfaces import (
    IListeningPort,
    IProtocol,
    IProtocolFactory,
    IStreamClientEndpoint,
)
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.testing.clock import Agenda, HeapClock, HostClock
from pipegrid.testing.link_model import Bottleneck, Flow, LinkPath, Packet, to_ns, to_seconds
from pipegrid.testing.simulated_tcp import SimulatedTransport, Socket, TcpOptions

_FIRST_EPHEMERAL_PORT = 49152


class Host:
    """
    One machine, by name.

    Attributes:
        clock: the reactor of programs on this host; a crash drops their timers.
        up: False between a crash and the restart.
        on_crash, on_restart: functions, called in order; ``on_restart`` creates servers again from
            their disks.
        ports: the ports on which programs listen, by number.
        ephemeral: the ports for outgoing connections.
        refusals: how many ``refuse`` calls are in effect; if any, new connections are refused.
    """

    def __init__(self, network: SimulatedNetwork, name: str, index: int) -> None:
        self.network = network
        self.name = name
        self.address = f"10.{index >> 16 & 255}.{index >> 8 & 255}.{index & 255}"
        self.clock = HostClock(network.clock)
        self.up = True
        self.on_crash: list[Callable[[], object]] = []
        self.on_restart: list[Callable[[], object]] = []
        self.sockets: dict[Socket, None] = {}
        self._kernel_up = True
        self.ports: dict[int, SimulatedPort] = {}
        self.refusals = 0
        self.ephemeral = count(_FIRST_EPHEMERAL_PORT)

    def __repr__(self) -> str:
        return f"<Host {self.name}, {'up' if self.up else 'down'}, ports {sorted(self.ports)}>"

    def listen(self, port: int, factory: IProtocolFactory) -> SimulatedPort:
        """Accept connections on a port."""
        if port in self.ports:
            raise CannotListenError(
                self.name, port, OSError("another host's port listens there already")
            )
        listening = self.ports[port] = SimulatedPort(self, port, factory)
        listening.startListening()
        return listening

    def answers(self) -> bool:
        """Return whether the host's kernel runs, and so answers."""
        return self._kernel_up

    def refuse(self, for_s: float) -> None:
        """Refuse new connections for a time."""
        self.refusals += 1
        self.network.later(for_s, self._stop_refusing)

    def _stop_refusing(self) -> None:
        self.refusals -= 1

    def crash(self, down_s: float | None = None, silently: bool = False) -> None:
        """
        Stop all programs on this host, without notifying them.

        Their connections are reset, their ports refuse connections, and their timers are dropped.

        Args:
            down_s: seconds until the restart; None: until ``restart`` is called.
            silently: the whole machine is off: connections are not reset, and nothing answers until the
                restart.
        """
        if not self.up:
            return
        self.up = False
        self._kernel_up = not silently
        self.ports.clear()
        self.clock.crash()
        for connecting in list(self.network.connecting):
            connecting.host_crashed(self)
        for socket in list(self.sockets):
            socket.crash(silently)
        self.sockets.clear()
        for call in self.on_crash:
            call()
        if down_s is not None:
            self.network.later(down_s, self.restart)

    def restart(self) -> None:
        """Start the host again; only ``on_restart`` starts programs."""
        if self.up:
            return
        self.up = self._kernel_up = True
        for call in self.on_restart:
            call()


@implementer(IListeningPort)
class SimulatedPort:
    """A port on which a program listens."""

    def __init__(self, host: Host, number: int, factory: IProtocolFactory) -> None:
        self._host = host
        self._number = number
        self._factory = factory

    def startListening(self) -> None:
        self._factory.doStart()

    def stopListening(self) -> Deferred[None]:
        """Accept no more connections; existing ones stay."""
        if self._host.ports.get(self._number) is self:
            del self._host.ports[self._number]
            self._factory.doStop()
        return succeed(None)

    def getHost(self) -> IPv4Address:
        return IPv4Address("TCP", self._host.address, self._number)

    def accept(self, socket: Socket, peer: IPv4Address) -> None:
        """Make a protocol for a new connection."""
        protocol = self._factory.buildProtocol(peer)
        if protocol is None:
            socket.close()
        else:
            _give_to_program(self._host, socket, protocol, self.getHost(), peer, lambda: None)


def _give_to_program(
    host: Host,
    socket: Socket,
    protocol: IProtocol,
    address: IPv4Address,
    peer: IPv4Address,
    lost: Callable[[], object],
) -> None:
    network = host.network

    def forget(transport: SimulatedTransport) -> None:
        network.transports.pop(transport, None)
        host.sockets.pop(socket, None)
        lost()

    transport = SimulatedTransport(socket, network.soon, address, peer, forget)
    network.transports[transport] = None
    host.sockets[socket] = None
    transport.start(protocol)


@implementer(IStreamClientEndpoint)
@attrs.frozen
class SimulatedEndpoint:
    """An endpoint that connects from one host to a port of another."""

    network: SimulatedNetwork = attrs.field(repr=False)
    from_host: str
    to_host: str
    port: int
    timeout_s: float = 30.0

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """
        Connect; fires with the protocol after one round trip.

        Raises (in the Deferred), as a TCP endpoint does:
            ConnectionRefusedError: no program listens on the port.
            TimeoutError: no answer within ``timeout_s``.
            NoProtocol: the factory returned no protocol.
            ConnectingCancelledError: the Deferred was cancelled.
        """
        return Connecting(self, protocolFactory).deferred


class Connecting:
    """The handshake of one connection."""

    def __init__(self, endpoint: SimulatedEndpoint, factory: IProtocolFactory) -> None:
        network = endpoint.network
        self._network = network
        self._factory = factory
        self._client = network.host(endpoint.from_host)
        self._server = network.host(endpoint.to_host)
        self._near, self._far = network.make_pair(self._client, self._server)
        self._address = IPv4Address("TCP", self._client.address, next(self._client.ephemeral))
        self._peer = IPv4Address("TCP", self._server.address, endpoint.port)
        self._port: SimulatedPort | None = None
        self.deferred: Deferred[IProtocol] = Deferred(self._cancel)
        self._timeout = self._client.clock.callLater(
            endpoint.timeout_s, self._fail, TimeoutError("no answer from " + endpoint.to_host)
        )
        network.connecting[self] = None
        factory.doStart()
        self._near.control("syn", self._syn_arrived)

    def __repr__(self) -> str:
        return f"<connecting {self._client.name} → {self._server.name}:{self._peer.port}>"

    def _syn_arrived(self) -> None:
        if not self._server.answers():
            self._far.abandon()
            return
        if not self._server.refusals:
            self._port = self._server.ports.get(self._peer.port)
        if self._port is None:
            self._far.control("rst", self._fail, ConnectionRefusedError())
            self._far.abandon()
        else:
            self._far.control("syn-ack", self._syn_ack_arrived)

    def _syn_ack_arrived(self) -> None:
        if self not in self._network.connecting:
            if self._client.answers():
                self._near.control("rst", self._far.reset_arrived)
            return
        self._done()
        try:
            protocol = self._factory.buildProtocol(self._peer)
            if protocol is None:
                raise NoProtocol()
        except Exception:
            self._near.reset()
            self._factory.doStop()
            self.deferred.errback(Failure())
            return
        # Send the acknowledgement first, so that it precedes everything that the protocol sends.
        self._near.control("ack", self._ack_arrived)
        stop = self._factory.doStop
        _give_to_program(self._client, self._near, protocol, self._address, self._peer, stop)
        self.deferred.callback(protocol)

    def _ack_arrived(self) -> None:
        port = self._port
        if not self._server.answers():
            self._far.abandon()
        elif port is None or self._server.ports.get(self._peer.port) is not port:
            self._far.reset()
        elif not self._far.broken:
            port.accept(self._far, self._address)

    def _cancel(self, deferred: Deferred[IProtocol]) -> None:
        self._fail(ConnectingCancelledError(self._peer))

    def _fail(self, error: Exception) -> None:
        if self not in self._network.connecting:
            return
        self._done()
        self._near.abandon()
        self._factory.doStop()
        self.deferred.errback(Failure(error))

    def host_crashed(self, host: Host) -> None:
        """Drop the handshake, since the host has crashed."""
        if host is self._client:
            self._done()
            self._near.abandon()

    def _done(self) -> None:
        self._network.connecting.pop(self, None)
        if self._timeout.active():
            self._timeout.cancel()


class SentAcross(NamedTuple):
    """
    One packet sent from one host to another.

    Attributes:
        start_ns, end_ns: when it entered and left the bottleneck.
        arrival_ns: when its last byte arrives (or would have, if the connection had not been cut).
        connection: the number of the connection, counted from 0 over the whole network.
        kind: ``syn``, ``syn-ack``, ``ack`` (of the handshake only), ``data``, ``fin``, ``rst``, or ``cut``
            for the fault, where and when it happens.
        size_bytes: for data.
    """

    start_ns: int
    end_ns: int
    arrival_ns: int
    connection: int
    from_host: str
    to_host: str
    kind: str
    size_bytes: int


def bursts(log: Iterable[SentAcross]) -> list[SentAcross]:
    """Join consecutive data packets of one connection and direction that were sent without a pause."""
    joined: list[SentAcross] = []
    last: dict[tuple[int, str], int] = {}
    for sent in log:
        key = (sent.connection, sent.from_host)
        at = last.get(key)
        if sent.kind == "data" and at is not None and sent.start_ns <= joined[at].end_ns:
            size_bytes = joined[at].size_bytes + sent.size_bytes
            joined[at] = sent._replace(start_ns=joined[at].start_ns, size_bytes=size_bytes)
            continue
        if sent.kind == "data":
            last[key] = len(joined)
        joined.append(sent)
    return joined


def timeline(log: Iterable[SentAcross]) -> str:
    """Return one line of text for each entry, for people."""
    return "\n".join(
        f"{to_seconds(sent.start_ns):12.6f} → {to_seconds(sent.arrival_ns):12.6f}  "
        f"#{sent.connection} {sent.from_host} → {sent.to_host}  {sent.kind}"
        + (f" {sent.size_bytes} B" if sent.size_bytes else "")
        for sent in log
    )


class SimulatedNetwork(Agenda):
    """
    All hosts, paths and connections.

        clock = HeapClock()
        network = SimulatedNetwork(clock, seed=1, latency_s=0.05)
        network.host("server0").listen(80, factory)
        endpoint = network.endpoint("client", "server0", 80)
        run(clock, endpoint.connect(client_factory))

    Connecting takes as long as in TCP: the client has its connection after one round trip, and the server
    half a round trip later, with the acknowledgement that precedes the client's first bytes. All events are
    scheduled on the clock at whole nanoseconds; events at the same instant keep the order of their causes, so
    that one seed gives one history, to the byte.

    Programs on a host get ``host.clock`` as their reactor. Any ``Clock`` works, but a clock that is advanced
    past several events runs them late; ``run`` and ``HeapClock`` run every event at its time.

    Attributes:
        random: the only source of randomness.
        log: what was sent, the oldest first; the last ``log_limit`` entries.
    """

    def __init__(
        self,
        clock: Clock,
        seed: int = 0,
        latency_s: float = 0.05,
        bytes_per_s: int | None = None,
        options: TcpOptions | None = None,
        log_limit: int = 100_000,
    ) -> None:
        """
        Args:
            latency_s: one way, half a round trip, between hosts that were not joined by ``join``.
            bytes_per_s: the rate of each direction between such hosts; None for unlimited.
        """
        super().__init__(clock)
        self.random = Random(seed)
        self.options = options or TcpOptions()
        self.log: deque[SentAcross] = deque(maxlen=log_limit)
        self.hosts: dict[str, Host] = {}
        # In the order of creation: the transports of all programs, and the pending handshakes.
        self.transports: dict[SimulatedTransport, None] = {}
        self.connecting: dict[Connecting, None] = {}
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._paths: dict[tuple[str, str], LinkPath] = {}
        self._held: dict[LinkPath, deque[Callable[[], object]]] = {}
        self._line_wakes: set[Bottleneck] = set()
        self._cuts: dict[tuple[str, str, int], list[tuple[str, int, bool]]] = {}
        self._connections_between: dict[tuple[str, str], int] = {}
        self._numbers = count()

    # The shape of the network.

    def host(self, name: str) -> Host:
        """Return the host with this name; the first call creates it."""
        if name not in self.hosts:
            self.hosts[name] = Host(self, name, len(self.hosts))
        return self.hosts[name]

    def path(self, from_host: str, to_host: str) -> LinkPath:
        """Return the path of one direction between two hosts."""
        key = (from_host, to_host)
        if key not in self._paths:
            latency_s = 0.0 if from_host == to_host else self._latency_s
            self._paths[key] = LinkPath(latency_s, Bottleneck(self._bytes_per_s))
        return self._paths[key]

    def join(
        self,
        one: str,
        other: str,
        latency_s: float,
        there: Bottleneck | None = None,
        back: Bottleneck | None = None,
        line_per_connection: bool = False,
    ) -> None:
        """
        Define the paths between two hosts, before the first connection between them.

        Args:
            latency_s: one way.
            there, back: the bottlenecks from ``one`` to ``other`` and back; None for unlimited. Several pairs
                share, for example, the two directions of a DSL link if they get the same bottlenecks.
            line_per_connection: give every connection its own bottlenecks of these rates.
        """
        for key, line in (((one, other), there), ((other, one), back)):
            if key in self._paths:
                raise ValueError(f"{one} and {other} are joined already; join them before use")
            self._paths[key] = LinkPath(latency_s, line or Bottleneck(), line_per_connection)

    def endpoint(
        self, from_host: str, to_host: str, port: int, timeout_s: float = 30.0
    ) -> SimulatedEndpoint:
        """Return an endpoint that connects from one host to a port of another."""
        return SimulatedEndpoint(self, from_host, to_host, port, timeout_s)

    # State of the network.

    def rtt_s(self, from_host: str, to_host: str) -> float:
        """Return the current round-trip time between two hosts, without the time for sending bytes."""
        there, back = self.path(from_host, to_host), self.path(to_host, from_host)
        return to_seconds(there.latency_ns + back.latency_ns)

    def round_trips(self, elapsed_s: float, from_host: str, to_host: str) -> float:
        """Return a duration in round trips between two hosts: exact, except for the last of 9 digits."""
        there, back = self.path(from_host, to_host), self.path(to_host, from_host)
        return round(to_ns(elapsed_s) / (there.latency_ns + back.latency_ns), 9)

    def describe(self) -> list[str]:
        """Return the open connections and the stalled paths as text, for people."""
        return [
            *map(repr, [*self.connecting, *self.transports]),
            *(f"{a} → {b} is stalled" for (a, b), path in self._paths.items() if path.stalled),
            *(f"{host.name} is down" for host in self.hosts.values() if not host.up),
        ]

    # Faults; ``fault_plan`` makes plans of them.

    def cut(
        self,
        client: str,
        server: str,
        connection: int,
        towards: str,
        after_bytes: int,
        silently: bool = False,
    ) -> None:
        """
        Break a connection after some bytes.

        The host ``towards`` gets that many bytes of the connection, and loses it with the last byte; the
        other end loses the connection one latency later. Later bytes are lost.

        Args:
            connection: the number of the connection from ``client`` to ``server``, counted from 0; it must
                not exist yet.
            silently: neither end is notified, and nothing arrives any more.
        """
        cuts = self._cuts.setdefault((client, server, connection), [])
        cuts.append((towards, after_bytes, silently))

    def stall(self, from_host: str, to_host: str, for_s: float | None = None) -> None:
        """Let nothing enter the path from one host to another, for a time or until ``resume``."""
        self.path(from_host, to_host).stall()
        if for_s is not None:
            self.later(for_s, self.resume, from_host, to_host)

    def resume(self, from_host: str, to_host: str) -> None:
        """End one stall of a path; after the end of the last stall, queued bytes are sent."""
        path = self.path(from_host, to_host)
        path.resume(self.now_ns())
        if path.stalled:
            return
        for call in self._held.pop(path, ()):
            call()
        for line in path.lines:
            self._run_line(line)

    def partition(self, one: str, other: str | None = None, for_s: float | None = None) -> None:
        """
        Stall both directions between two hosts, or between one host and all other existing hosts, for a time
        or until ``heal``.
        """
        for name in [other] if other is not None else [name for name in self.hosts if name != one]:
            self.stall(one, name, for_s)
            self.stall(name, one, for_s)

    def heal(self, one: str, other: str | None = None) -> None:
        """End one ``partition`` that was made without a duration."""
        for name in [other] if other is not None else [name for name in self.hosts if name != one]:
            self.resume(one, name)
            self.resume(name, one)

    def slow_down(self, one: str, other: str, factor: int, for_s: float) -> None:
        """
        For a time, multiply the latency between two hosts and divide the bottlenecks' rates by ``factor``.
        """
        now_ns = self.now_ns()
        for path in (self.path(one, other), self.path(other, one)):
            path.slow_down(now_ns, factor)
            self.later(for_s, self._speed_up, path, factor)

    def _speed_up(self, path: LinkPath, factor: int) -> None:
        path.speed_up(self.now_ns(), factor)

    # For sockets

    def offer(self, flow: Flow, size_bytes: int) -> None:
        """Queue bytes of a flow, and start the packets that can start."""
        flow.line.offer(self.now_ns(), flow, size_bytes)
        if flow.line not in self._line_wakes:
            self._run_line(flow.line)

    def _run_line(self, line: Bottleneck) -> None:
        for packet in line.transmit(self.now_ns()):
            owner = packet.flow.owner
            assert isinstance(owner, Socket)
            owner.packet_started(packet)
        next_ns = line.next_ns()
        if next_ns is not None and line not in self._line_wakes:
            self._line_wakes.add(line)
            self.at(next_ns, self._wake_line, line)

    def _wake_line(self, line: Bottleneck) -> None:
        self._line_wakes.discard(line)
        self._run_line(line)

    def pass_through(self, path: LinkPath, call: Callable[[], object]) -> None:
        """Make a call now, or when the path is no longer stalled."""
        if path.stalled:
            self._held.setdefault(path, deque()).append(call)
        else:
            call()

    def note(self, socket: Socket, packet: Packet, kind: str) -> None:
        """Log a packet that a socket sends."""
        self.log.append(
            SentAcross(
                packet.start_ns,
                packet.end_ns,
                packet.arrival_ns,
                socket.connection,
                socket.host,
                socket.peer.host,
                kind,
                packet.size_bytes,
            )
        )

    def make_pair(self, client: Host, server: Host) -> tuple[Socket, Socket]:
        """Return the two ends of a new connection, with the cuts that are planned for the connection."""
        number = next(self._numbers)
        there, back = self.path(client.name, server.name), self.path(server.name, client.name)
        near = Socket(self, number, client.name, there, self.options, client.answers)
        far = Socket(self, number, server.name, back, self.options, server.answers)
        near.peer, far.peer = far, near
        between = (client.name, server.name)
        index = self._connections_between.get(between, 0)
        self._connections_between[between] = index + 1
        for towards, after_bytes, silently in self._cuts.pop((*between, index), ()):
            end = far if towards == server.name else near
            end.cut_after_bytes, end.cut_silently = after_bytes, silently
        return near, far


# Running a simulation until an operation ends, a time limit is reached, or nothing more can happen.

T = TypeVar("T")

_SHOWN = 20
_STANDSTILL = 100_000


class Hung(AssertionError):
    """The operation did not end; the text lists what is pending."""


def run(
    clock: Clock,
    deferred: Deferred[T],
    limit_s: float = 3600.0,
    network: SimulatedNetwork | None = None,
) -> T:
    """
    Let time pass from one scheduled call to the next until ``deferred`` fires.

    Args:
        limit_s: the limit of virtual time, from now.
        network: described in the error if the operation hangs.

    Returns:
        The result; if that is a failure, its exception is raised.

    Raises:
        Hung: the limit was reached, nothing is scheduled, or calls without delay follow one another for ever.
    """
    results: list[T | Failure] = []
    deferred.addBoth(results.append)
    end_s = clock.seconds() + limit_s
    calls, since_s = 0, clock.seconds()
    while not results:
        next_s = _next_time(clock)
        if next_s is None:
            raise Hung(_report("nothing is scheduled that could end it", clock, network))
        if next_s > end_s:
            raise Hung(_report(f"not done after {limit_s:g} s", clock, network))
        if isinstance(clock, HeapClock):
            clock.step()
        else:
            clock.advance(max(0.0, next_s - clock.seconds()))
        calls += 1
        if clock.seconds() > since_s:
            calls, since_s = 0, clock.seconds()
        elif calls > _STANDSTILL:
            raise Hung(_report(f"{calls} calls in no time", clock, network))
    if isinstance(results[0], Failure):
        results[0].raiseException()
    return results[0]


def _next_time(clock: Clock) -> float | None:
    if isinstance(clock, HeapClock):
        return clock.next_time()
    return min((call.getTime() for call in clock.getDelayedCalls()), default=None)


def _report(finding: str, clock: Clock, network: SimulatedNetwork | None) -> str:
    lines = [f"Hung at {clock.seconds():.9f} s: {finding}. Pending:"]
    pending = [repr(call) for call in clock.getDelayedCalls()]
    if network is not None:
        pending = network.describe() + pending
    lines += pending[:_SHOWN] or ["nothing"]
    if len(pending) > _SHOWN:
        lines.append(f"and {len(pending) - _SHOWN} more")
    return "\n  ".join(lines)


def leaks(clock: Clock, network: SimulatedNetwork) -> list[str]:
    """
    Return what a finished operation left: connections that some program still holds, and timers.

    The other end still holds a connection that was just closed: let some time pass before this call.
    """
    timers = [call for call in clock.getDelayedCalls() if not network.owns(call)]
    return [repr(left) for left in (*network.connecting, *network.transports, *timers)]
