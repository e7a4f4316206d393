"""Hosts of the simulated network: ports, endpoints, and the handshake of connections."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

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

from pipegrid.testing.clock import HostClock
from pipegrid.testing.simulated_socket import Socket
from pipegrid.testing.simulated_transport import SimulatedTransport

_FIRST_EPHEMERAL_PORT = 49152


class Between(Protocol):
    """
    What hosts use of the network.

    Attributes:
        clock: shared by all.
        connecting: the pending handshakes, in the order in which they began.
        transports: those of all programs, in the order in which they were made.
    """

    clock: Clock
    connecting: dict[Connecting, None]
    transports: dict[SimulatedTransport, None]

    def host(self, name: str) -> Host:
        """Return a host, which is created at its first use."""

    def make_pair(self, client: Host, server: Host) -> tuple[Socket, Socket]:
        """Return the two ends of a new connection."""

    def later(self, delay_s: float, call: Callable[[], object]) -> Any:
        """Call a function after a delay, whichever hosts are up."""

    def soon(self, call: Callable[[], None]) -> None:
        """Call it in the next turn."""


class Host:
    """
    One machine, by name.

    Attributes:
        clock: the reactor of programs on it; a crash drops their timers.
        up: False between a crash and the restart.
        on_crash, on_restart: called in order; servers are created again from their disks at a restart.
    """

    def __init__(self, network: Between, name: str, index: int) -> None:
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
        """Accept connections on a port."""
        if port in self._ports:
            raise CannotListenError(
                self.name, port, OSError("another host's port listens there already")
            )
        self._ports[port] = SimulatedPort(self, port, factory)
        self._ports[port].startListening()
        return self._ports[port]

    def close_port(self, port: int) -> None:
        """Accept no more connections on a port."""
        self._ports.pop(port, None)

    def listener(self, port: int) -> SimulatedPort | None:
        """Return the port of that number, or None if no program listens on it."""
        return self._ports.get(port)

    @property
    def refuses(self) -> bool:
        """Whether new connections are refused, even if a program listens."""
        return self._refusals > 0

    def answers(self) -> bool:
        """Return whether the kernel runs."""
        return self._kernel_up

    def next_port(self) -> int:
        """Return a port for an outgoing connection."""
        return next(self._ephemeral)

    def refuse(self, for_s: float) -> None:
        """Refuse new connections for a time."""
        self._refusals += 1
        self.network.later(for_s, self._stop_refusing)

    def _stop_refusing(self) -> None:
        self._refusals -= 1

    def crash(self, down_s: float | None = None, silently: bool = False) -> None:
        """
        Stop all programs on this host, without notifying them.

        Their connections are reset, their ports refuse, their timers are dropped.

        Args:
            down_s: when to restart; None for never, or until ``restart``.
            silently: the whole machine is off: connections are not reset, and nothing answers until it is
                up.
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
        """Start again, with no program but what ``on_restart`` starts."""
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
        if self._host.listener(self._number) is self:
            self._host.close_port(self._number)
            self._factory.doStop()
        return succeed(None)

    def getHost(self) -> IPv4Address:
        return IPv4Address("TCP", self._host.address, self._number)

    def accept(self, socket: Socket, peer: IPv4Address) -> None:
        """Make a protocol for a connection."""
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

    network: Between = attrs.field(repr=False)
    from_host: str
    to_host: str
    port: int
    timeout_s: float = 30.0

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """
        Connect; fires with the protocol after one round trip.

        Raises (in the Deferred), as a TCP endpoint does:
            ConnectionRefusedError: no program listens there.
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
        _give_to_program(self._client, self._near, protocol, self._address, self._peer, stop)
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
        """Drop the handshake, since the host has crashed."""
        if host is self._client:
            self._done()
            self._near.abandon()

    def _done(self) -> None:
        self._network.connecting.pop(self, None)
        if self._timeout.active():
            self._timeout.cancel()
