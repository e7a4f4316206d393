"""
Hosts, the paths between them, and connections: a network in virtual time.

    clock = HeapClock()
    network = SimulatedNetwork(clock, seed=1, latency_s=0.05)
    network.host("server0").listen(80, factory)
    endpoint = network.endpoint("client", "server0", 80)
    run(clock, endpoint.connect(client_factory))

Connecting takes what TCP takes: the client has its connection after one round trip, and the server half
a round trip later, with the acknowledgement that the client's first bytes travel behind. Nothing
happens but from the clock: all that the network does is due at whole nanoseconds, at the same
instant in order of cause, so that one seed gives one history, to the byte.

Programs on a host get ``host.clock`` as their reactor. The ``SimulatedNetwork`` works on any ``Clock``, but
one that is advanced past several events runs them late; ``driver.run`` and ``HeapClock`` do not.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count
from random import Random
from typing import Any

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
    IDelayedCall,
    IListeningPort,
    IProtocol,
    IProtocolFactory,
    IStreamClientEndpoint,
)
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.simulation.clock import HostClock
from pipegrid.simulation.link import Flow, Line, Packet, Path, to_ns, to_seconds
from pipegrid.simulation.log import Sent
from pipegrid.simulation.tcp import Socket, TcpOptions
from pipegrid.simulation.transport import SimulatedTransport

_FIRST_EPHEMERAL_PORT = 49152


class SimulatedNetwork:
    """
    Everything between the hosts.

    Attributes:
        random: the one source of chance.
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
            latency_s: one way, half a round trip, between hosts that ``join`` says nothing about.
            bytes_per_s: of each direction of each such pair; None for infinite.
        """
        self.clock = clock
        self.random = Random(seed)
        self.options = options or TcpOptions()
        self.log: deque[Sent] = deque(maxlen=log_limit)
        self.hosts: dict[str, Host] = {}
        self.transports: dict[SimulatedTransport, None] = {}
        self.connecting: dict[_Connecting, None] = {}
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._paths: dict[tuple[str, str], Path] = {}
        self._held: dict[Path, deque[Callable[[], object]]] = {}
        self._line_wakes: set[Line] = set()
        self._cuts: dict[tuple[str, str, int], list[tuple[str, int, bool]]] = {}
        self._connections_between: dict[tuple[str, str], int] = {}
        self._numbers = count()
        # What is due: (time, order, call, arguments), and the one timer for the first of it.
        self._agenda: list[tuple[int, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = count()
        self._timer: IDelayedCall | None = None
        self._timer_ns = 0
        self._in_turn = False

    # The shape of the network

    def host(self, name: str) -> Host:
        """Return the host of that name; it is made when it is first asked for."""
        if name not in self.hosts:
            self.hosts[name] = Host(self, name, len(self.hosts))
        return self.hosts[name]

    def path(self, from_host: str, to_host: str) -> Path:
        """Return one direction between two hosts."""
        key = (from_host, to_host)
        if key not in self._paths:
            latency_s = 0.0 if from_host == to_host else self._latency_s
            self._paths[key] = Path(latency_s, Line(self._bytes_per_s))
        return self._paths[key]

    def join(
        self,
        one: str,
        other: str,
        latency_s: float,
        there: Line | None = None,
        back: Line | None = None,
        line_per_connection: bool = False,
    ) -> None:
        """
        Say how two hosts are joined, before the first connection between them.

        Args:
            latency_s: one way.
            there, back: the bottlenecks from ``one`` to ``other`` and back; give the same ones for
                several pairs to have them share, say, the two directions of a DSL line.
            line_per_connection: every connection has such bottlenecks of its own.
        """
        for key, line in (((one, other), there), ((other, one), back)):
            if key in self._paths:
                raise ValueError(f"{one} and {other} are joined already; join them before use")
            self._paths[key] = Path(latency_s, line or Line(), line_per_connection)

    def endpoint(
        self, from_host: str, to_host: str, port: int, timeout_s: float = 30.0
    ) -> SimulatedEndpoint:
        """Return an endpoint that connects from one host to a port of another."""
        return SimulatedEndpoint(self, from_host, to_host, port, timeout_s)

    # Answers

    def rtt_s(self, from_host: str, to_host: str) -> float:
        """The round trip between two hosts now, without time for bytes."""
        there, back = self.path(from_host, to_host), self.path(to_host, from_host)
        return to_seconds(there.latency_ns + back.latency_ns)

    def round_trips(self, elapsed_s: float, from_host: str, to_host: str) -> float:
        """How many round trips between two hosts a time is: exact, but for the last of 9 digits."""
        there, back = self.path(from_host, to_host), self.path(to_host, from_host)
        return round(to_ns(elapsed_s) / (there.latency_ns + back.latency_ns), 9)

    def owns(self, call: IDelayedCall) -> bool:
        """Whether a pending call is the network's own."""
        return call is self._timer

    def describe(self) -> list[str]:
        """What is open, and what is stalled, for people."""
        return (
            [f"{connecting!r}" for connecting in self.connecting]
            + [f"{transport!r}" for transport in self.transports]
            + [f"{a} → {b} is stalled" for (a, b), path in self._paths.items() if path.stalled]
            + [f"{host.name} is down" for host in self.hosts.values() if not host.up]
        )

    # Faults; ``faults`` makes plans of them

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
        Break a connection behind a byte.

        The end it goes ``towards`` gets that many bytes and sees the connection lost with the last of
        them, the other end one latency later; what is behind them is lost.

        Args:
            connection: which one from ``client`` to ``server``, counted from 0, not made yet.
            silently: neither end is told anything, and nothing arrives any more.
        """
        cuts = self._cuts.setdefault((client, server, connection), [])
        cuts.append((towards, after_bytes, silently))

    def stall(self, from_host: str, to_host: str, for_s: float | None = None) -> None:
        """Let nothing into one direction for a time, or until ``resume``."""
        self.path(from_host, to_host).stall()
        if for_s is not None:
            self.later(for_s, self.resume, from_host, to_host)

    def resume(self, from_host: str, to_host: str) -> None:
        """End one stall."""
        path = self.path(from_host, to_host)
        path.resume(self.now_ns())
        if path.stalled:
            return
        for call in self._held.pop(path, ()):
            call()
        for line in path.lines:
            self._run_line(line)

    def partition(self, one: str, other: str | None = None, for_s: float | None = None) -> None:
        """Stall both directions between two hosts, or between one and all others there are."""
        for name in [other] if other is not None else [name for name in self.hosts if name != one]:
            self.stall(one, name, for_s)
            self.stall(name, one, for_s)

    def heal(self, one: str, other: str | None = None) -> None:
        """End one ``partition`` that has no end."""
        for name in [other] if other is not None else [name for name in self.hosts if name != one]:
            self.resume(one, name)
            self.resume(name, one)

    def slow_down(self, one: str, other: str, factor: int, for_s: float) -> None:
        """Multiply latency, and divide the rates of the lines, between two hosts by ``factor``."""
        now_ns = self.now_ns()
        for path in (self.path(one, other), self.path(other, one)):
            path.slow_down(now_ns, factor)
            self.later(for_s, self._speed_up, path, factor)

    def _speed_up(self, path: Path, factor: int) -> None:
        path.speed_up(self.now_ns(), factor)

    # Time

    def now_ns(self) -> int:
        """The time in whole nanoseconds."""
        return to_ns(self.clock.seconds())

    def later(self, delay_s: float, call: Callable[..., object], *args: Any) -> None:
        """Make a call of the network's own after some time."""
        self.at(self.now_ns() + to_ns(delay_s), call, *args)

    def soon(self, call: Callable[[], None]) -> None:
        """Make a call in the next turn."""
        self.at(self.now_ns(), call)

    def at(self, time_ns: int, call: Callable[..., object], *args: Any) -> None:
        """Make a call at a time; at the same time, in the order in which they were asked for."""
        heapq.heappush(self._agenda, (time_ns, next(self._order), call, args))
        if not self._in_turn and (self._timer is None or time_ns < self._timer_ns):
            self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._agenda:
            self._timer_ns = self._agenda[0][0]
            delay_s = max(0.0, to_seconds(self._timer_ns) - self.clock.seconds())
            self._timer = self.clock.callLater(delay_s, self._turn)

    def _turn(self) -> None:
        # One turn is what was due when it began: whoever makes more work at this instant waits
        # for the next, so that zero-delay timers of programs get theirs in between.
        self._timer = None
        now_ns = self.now_ns()
        end = next(self._order)
        agenda = self._agenda
        self._in_turn = True
        try:
            while agenda and agenda[0][0] <= now_ns and agenda[0][1] < end:
                _, _, call, args = heapq.heappop(agenda)
                call(*args)
        finally:
            self._in_turn = False
            self._set_timer()

    # What sockets need

    def offer(self, flow: Flow, size_bytes: int) -> None:
        """Queue bytes of a flow and start what can start."""
        flow.line.offer(self.now_ns(), flow, size_bytes)
        if flow.line not in self._line_wakes:
            self._run_line(flow.line)

    def _run_line(self, line: Line) -> None:
        for packet in line.transmit(self.now_ns()):
            owner = packet.flow.owner
            assert isinstance(owner, Socket)
            owner.packet_started(packet)
        next_ns = line.next_ns()
        if next_ns is not None and line not in self._line_wakes:
            self._line_wakes.add(line)
            self.at(next_ns, self._wake_line, line)

    def _wake_line(self, line: Line) -> None:
        self._line_wakes.discard(line)
        self._run_line(line)

    def pass_through(self, path: Path, call: Callable[[], object]) -> None:
        """Call now, or when the path is no longer stalled."""
        if path.stalled:
            self._held.setdefault(path, deque()).append(call)
        else:
            call()

    def note(self, socket: Socket, packet: Packet, kind: str) -> None:
        """Write something that a socket sends into the log."""
        self.log.append(
            Sent(
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
        """Return the two ends of a new connection, with the cuts that are planned for it."""
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


class Host:
    """
    One machine, by name.

    Attributes:
        clock: the reactor of programs on it; a crash takes their timers.
        up: False between a crash and the restart.
        on_crash, on_restart: called in order; a restart is where to rebuild servers from their disks.
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
        self._ports: dict[int, SimulatedPort] = {}
        self._refusals = 0
        self._ephemeral = count(_FIRST_EPHEMERAL_PORT)

    def __repr__(self) -> str:
        return f"<Host {self.name}, {'up' if self.up else 'down'}, ports {sorted(self._ports)}>"

    def listen(self, port: int, factory: IProtocolFactory) -> SimulatedPort:
        """Accept connections to a port."""
        if port in self._ports:
            raise CannotListenError(self.name, port, OSError("somebody listens there already"))
        self._ports[port] = SimulatedPort(self, port, factory)
        self._ports[port].startListening()
        return self._ports[port]

    def close_port(self, port: int) -> None:
        """Accept no more connections to a port."""
        self._ports.pop(port, None)

    def listener(self, port: int) -> SimulatedPort | None:
        """Whoever listens there."""
        return self._ports.get(port)

    @property
    def refuses(self) -> bool:
        """Whether new connections are refused, whoever listens."""
        return self._refusals > 0

    def answers(self) -> bool:
        """Whether there is a kernel at work."""
        return self._kernel_up

    def next_port(self) -> int:
        """A port for an outgoing connection."""
        return next(self._ephemeral)

    def refuse(self, for_s: float) -> None:
        """Refuse new connections for a time."""
        self._refusals += 1
        self.network.later(for_s, self._stop_refusing)

    def _stop_refusing(self) -> None:
        self._refusals -= 1

    def crash(self, down_s: float | None = None, silently: bool = False) -> None:
        """
        Stop all programs on this host, without a word to them.

        Their connections are reset, their ports refuse, their timers are gone.

        Args:
            down_s: when to restart; None for never, or until ``restart``.
            silently: the whole machine is gone: nobody is told, and nothing answers until it is up.
        """
        if not self.up:
            return
        self.up = False
        self._kernel_up = not silently
        self._ports.clear()
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
        """Come up again, with nothing listening but what ``on_restart`` starts."""
        if self.up:
            return
        self.up = self._kernel_up = True
        for call in self.on_restart:
            call()


@implementer(IListeningPort)
class SimulatedPort:
    """A port that somebody listens on."""

    def __init__(self, host: Host, number: int, factory: IProtocolFactory) -> None:
        self._host = host
        self._number = number
        self._factory = factory

    def startListening(self) -> None:
        """Called by ``Host.listen``."""
        self._factory.doStart()

    def stopListening(self) -> Deferred[None]:
        """Accept no more; connections that are there stay."""
        if self._host.listener(self._number) is self:
            self._host.close_port(self._number)
            self._factory.doStop()
        return succeed(None)

    def getHost(self) -> IPv4Address:
        """The address."""
        return IPv4Address("TCP", self._host.address, self._number)

    def accept(self, socket: Socket, peer: IPv4Address) -> None:
        """Make a protocol for a connection."""
        protocol = self._factory.buildProtocol(peer)
        if protocol is None:
            socket.close()
        else:
            _start(self._host, socket, protocol, self.getHost(), peer, lambda: None)


def _start(
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
    """The way from one host to a port of another."""

    network: SimulatedNetwork = attrs.field(repr=False)
    from_host: str
    to_host: str
    port: int
    timeout_s: float = 30.0

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """
        Connect; fires with the protocol after one round trip.

        Raises (in the Deferred), as a TCP endpoint does:
            ConnectionRefusedError: nobody listens there.
            TimeoutError: no answer within ``timeout_s``.
            NoProtocol: the factory did not want the connection.
            ConnectingCancelledError: the Deferred was cancelled.
        """
        return _Connecting(self, protocolFactory).deferred


class _Connecting:
    """The handshake of one connection."""

    def __init__(self, endpoint: SimulatedEndpoint, factory: IProtocolFactory) -> None:
        network = endpoint.network
        self._network = network
        self._factory = factory
        self._client = network.host(endpoint.from_host)
        self._server = network.host(endpoint.to_host)
        self._near, self._far = network.make_pair(self._client, self._server)
        self._address = IPv4Address("TCP", self._client.address, self._client.next_port())
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
        if not self._server.refuses:
            self._port = self._server.listener(self._peer.port)
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
        # First the acknowledgement, so that nothing the protocol sends overtakes it.
        self._near.control("ack", self._ack_arrived)
        stop = self._factory.doStop
        _start(self._client, self._near, protocol, self._address, self._peer, stop)
        self.deferred.callback(protocol)

    def _ack_arrived(self) -> None:
        port = self._port
        if not self._server.answers():
            self._far.abandon()
        elif port is None or self._server.listener(self._peer.port) is not port:
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
        """The program that was connecting is gone; nobody is told."""
        if host is self._client:
            self._done()
            self._near.abandon()

    def _done(self) -> None:
        self._network.connecting.pop(self, None)
        if self._timeout.active():
            self._timeout.cancel()
