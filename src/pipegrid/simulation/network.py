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

from collections import deque
from collections.abc import Callable
from itertools import count
from random import Random

from twisted.internet.task import Clock

from pipegrid.links.link import Bottleneck, Flow, LinkPath, Packet, to_ns, to_seconds
from pipegrid.simulation.agenda import Agenda
from pipegrid.simulation.hosts import Connecting, Host, SimulatedEndpoint
from pipegrid.simulation.log import SentAcross
from pipegrid.simulation.tcp import Socket, TcpOptions
from pipegrid.simulation.transport import SimulatedTransport


class SimulatedNetwork(Agenda):
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
        super().__init__(clock)
        self.random = Random(seed)
        self.options = options or TcpOptions()
        self.log: deque[SentAcross] = deque(maxlen=log_limit)
        self.hosts: dict[str, Host] = {}
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

    # The shape of the network

    def host(self, name: str) -> Host:
        """Return the host of that name; it is made when it is first asked for."""
        if name not in self.hosts:
            self.hosts[name] = Host(self, name, len(self.hosts))
        return self.hosts[name]

    def path(self, from_host: str, to_host: str) -> LinkPath:
        """Return one direction between two hosts."""
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
            self._paths[key] = LinkPath(latency_s, line or Bottleneck(), line_per_connection)

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
        """End one stall of a direction; when none is left, what was held goes on."""
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

    def _speed_up(self, path: LinkPath, factor: int) -> None:
        path.speed_up(self.now_ns(), factor)

    # What sockets need

    def offer(self, flow: Flow, size_bytes: int) -> None:
        """Queue bytes of a flow and start what can start."""
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
        """Call now, or when the path is no longer stalled."""
        if path.stalled:
            self._held.setdefault(path, deque()).append(call)
        else:
            call()

    def note(self, socket: Socket, packet: Packet, kind: str) -> None:
        """Write something that a socket sends into the log."""
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
