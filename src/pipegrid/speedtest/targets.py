"""The targets of the speed test: a private grid, a configured grid, or a gateway."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import connectProtocol
from twisted.internet.protocol import Protocol as Connection

from pipegrid.core.caps import ChkCap, parse_cap
from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import GridError, ServerUnreachable, UsageError
from pipegrid.grid import client_config
from pipegrid.grid.client_paths import default_directory, is_configured
from pipegrid.grid.file_grid import Grid
from pipegrid.reactor.connection_policy import (
    DIRECT_CONNECTIONS,
    ConnectionPolicy,
    is_overlay_name,
)
from pipegrid.reactor.tcp_socks5_endpoints import endpoint_through
from pipegrid.reactor.trace import Tracing
from pipegrid.speedtest.benchmark_clients import GatewaySession, GridSession, Session
from pipegrid.speedtest.child_processes import (
    LOOPBACK,
    ChildProcess,
    FileEncoding,
    Servers,
    at_ports,
    in_thread,
    make_client,
    server_name,
)
from pipegrid.speedtest.link_proxies import describe, shape_of, start_proxy
from pipegrid.speedtest.raw_tcp_baseline import Responder, ping_responders
from pipegrid.speedtest.responder import RunningResponders, start_responders
from pipegrid.speedtest.run_results import EmulatedLink, RoundTrip
from pipegrid.speedtest.traffic_recorder import HostPort

# The common base of all targets of the speed test, and the checks before a target is measured.

GBS = "gbs"
FOOLSCAP = "foolscap"
GATEWAY = "gateway"
CONNECT_TIMEOUT_S = 10.0
SPARE_BYTES = 100 * 10**6
"""How many bytes a disk should have free after everything is stored."""


class FileTarget:
    """
    A target that stores files.

    Attributes:
        kind: as ``Parameters.target``.
        transport: as ``Parameters.transport``.
        servers: how many servers.
        params, happy: the encoding, unless a scenario has its own.
        link: the emulated link to the servers; None for none.
        durability: the durability policy of the servers, if they are local.
        responders: for measuring raw TCP on the same path; may be empty.
        directory: a client's directory, for measuring the command itself; None if the command cannot be used.
        names: the names of the servers by their addresses, if their connections can be recorded.
        adjustable: whether windows and encodings can be chosen.
        alike: whether all servers are equally fast, so that a put should wait for every one of them.
    """

    kind = ""
    transport = GBS
    servers = 1
    params = Params()
    happy = 0
    link: EmulatedLink | None = None
    durability: str | None = None
    responders: Sequence[Responder] = ()
    directory: Path | None = None
    adjustable = True
    alike = False

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor
        self.names: dict[HostPort, str] = {}

    async def start(self) -> None:
        """Start everything that the target needs, and check that it works."""
        raise NotImplementedError

    async def open(
        self,
        window_bytes: int | None = None,
        *,
        reactor: Any = None,
        tracer: Tracing | None = None,
    ) -> Session:
        """Return a client that has no connections yet."""
        assert self.directory is not None, "not started"
        grid = await Grid.open(
            reactor or self._reactor, self.directory, window_bytes=window_bytes, tracer=tracer
        )
        return GridSession(grid, self.alike)

    async def round_trips(self, count: int) -> list[RoundTrip]:
        """Measure each server's round trip ``count`` times."""
        raise NotImplementedError

    async def free_bytes(self) -> int | None:
        """Return how many bytes of shares the servers can store together; None if unknown."""
        return None

    async def stop(self) -> None:
        """Stop all that was started."""


async def check_space(target: FileTarget, needed_bytes: int) -> None:
    """
    Check that the servers have enough space.

    Raises:
        UsageError: there is less space than all shares need.
    """
    free = await target.free_bytes()
    if free is not None and free < needed_bytes + SPARE_BYTES:
        raise UsageError(
            f"the shares of this run need {needed_bytes / 1e9:.2f} GB, and there are {free / 1e9:.2f} GB"
            " free; choose fewer --rounds, other scenarios with --only, or another disk with --scratch"
        )


async def connect_s(reactor: Any, policy: ConnectionPolicy, host: str, port: int) -> float:
    """
    Return how many seconds opening a TCP connection takes; only the other end's kernel answers.

    Args:
        policy: decides the way to the host.

    Raises:
        ServerUnreachable: no server listens at the address.
    """
    began = time.perf_counter()
    try:
        endpoint = endpoint_through(policy, reactor, host, port)
        connecting: Deferred[Any] = connectProtocol(endpoint, Connection())
        connection = await connecting.addTimeout(CONNECT_TIMEOUT_S, reactor)
    except Exception as error:
        raise ServerUnreachable(
            f"cannot connect to {host}:{port}: {str(error).rstrip('.')}; is it running?",
            f"{host}:{port}",
        ) from error
    took_s = time.perf_counter() - began
    transport: Any = connection.transport
    transport.abortConnection()
    return took_s


# A target is started, opened once for each client, and stopped; afterwards nothing that it started still
# runs.

DEFAULT_SERVERS = 10
MAX_SERVERS = 100


class PrivateGrid(FileTarget):
    """
    Storage servers that are started for the test, each a process on this machine, with an emulated link if
    required.

    Args:
        count: how many servers.
        encoding: of the client; None for ``fitting_params(count)``.
        scratch: where the servers store their shares; None for the usual directory of temporary files.
    """

    alike = True
    kind = "private grid"

    def __init__(
        self,
        reactor: Any,
        count: int = DEFAULT_SERVERS,
        *,
        transport: str = GBS,
        link: EmulatedLink | None = None,
        encoding: FileEncoding | None = None,
        durability: str = "batch",
        scratch: Path | None = None,
    ) -> None:
        super().__init__(reactor)
        self._scratch = scratch
        self.servers = count
        self.transport = transport
        self.link = link
        encoding = encoding or FileEncoding.for_servers(count, fitting_params(count))
        self.params, self.happy = encoding.params, encoding.happy
        self.durability = durability
        self._stack = ExitStack()
        self._lock = Lock()
        self._left = False
        self._responding: RunningResponders | None = None
        self._proxy: ChildProcess | None = None

    def __str__(self) -> str:
        return (
            f"a private grid of {self.servers} servers ({self.transport}, {self.params.required_shares}"
            f" of {self.params.total_shares}, durability {self.durability}), {describe(self.link)}"
        )

    async def start(self) -> None:
        """Start servers, responders, and the link to them."""
        client_config.check_happy(self.happy, self.params)
        assert self.durability is not None
        self._left = False
        running = Servers(
            self.servers,
            durability=self.durability,
            scratch=self._scratch,
            encoding=FileEncoding(self.params, self.happy),
        )
        try:
            await in_thread(self._reactor, self._enter, running)
        except RuntimeError as error:
            raise GridError(
                f"a storage server of the private grid did not start: {error}"
            ) from error
        self._responding = await start_responders(self._reactor, self.servers)
        self.responders = list(self._responding.responders)
        ports = [address.port for address in running.addresses]
        if self.link is not None:
            targets = [(LOOPBACK, port) for port in ports]
            targets += [(each.host, each.port) for each in self.responders]
            self._proxy = await start_proxy(self._reactor, shape_of(self.link), targets)
            ports = self._proxy.said[: self.servers]
            self.responders = at_ports(self.responders, self._proxy.said[self.servers :])
        scratch = tempfile.TemporaryDirectory(dir=self._scratch)
        self.directory = Path(self._stack.enter_context(scratch)) / "client"
        addresses: list[Any] = at_ports(running.addresses, ports)
        if self.transport == FOOLSCAP:
            addresses = [
                attrs.evolve(furl, hints=(f"tcp:{LOOPBACK}:{port}",))
                for furl, port in zip(running.furls, ports, strict=True)
            ]
        make_client(self.directory, addresses, self.params, self.happy)
        if self.transport == GBS:
            self.names = {(LOOPBACK, port): server_name(at) for at, port in enumerate(ports)}

    async def round_trips(self, count: int) -> list[RoundTrip]:
        """Measure the round-trip time to each server, over the servers' emulated link if there is one."""
        trips = await ping_responders(self._reactor, self.responders, count)
        return [attrs.evolve(trip, server=server_name(number)) for number, trip in enumerate(trips)]

    async def free_bytes(self) -> int | None:
        """Return the free space on the file system of the servers' directories."""
        return shutil.disk_usage(self._scratch or tempfile.gettempdir()).free

    async def stop(self) -> None:
        """Stop all processes, and remove the stored files."""
        try:
            for child in (self._proxy, self._responding):
                if child is not None:
                    await child.stop()
        finally:
            await in_thread(self._reactor, self._leave)

    def _enter(self, running: Servers) -> None:
        """
        Start servers, in a thread; ``_leave`` waits for the end of this start, even after a cancellation.
        """
        with self._lock:
            if not self._left:  # _leave may run first, if the thread pool is busy
                self._stack.enter_context(running)

    def _leave(self) -> None:
        with self._lock:
            self._left = True
            self._stack.close()


class ConfiguredGrid(FileTarget):
    """
    The grid that a client's directory configures.

    Args:
        directory: the client's directory; None for the user's usual one.
        responders: responders near the servers, if any.
    """

    kind = "grid"

    def __init__(
        self, reactor: Any, directory: Path | None, responders: Sequence[Responder] = ()
    ) -> None:
        super().__init__(reactor)
        self.directory = directory or default_directory()
        self.responders = responders
        self._ways: dict[str, tuple[ConnectionPolicy, str, int]] = {}
        self._free: int | None = None

    def __str__(self) -> str:
        return (
            f"the grid of {self.directory} ({self.servers} servers, {self.transport},"
            f" {self.params.required_shares} of {self.params.total_shares})"
        )

    async def start(self) -> None:
        """Find out which servers can be reached."""
        assert self.directory is not None
        if not is_configured(self.directory):
            raise UsageError(
                f"{self.directory} configures no grid; give -d DIR, or measure a private grid"
            )
        grid = await Grid.open(self._reactor, self.directory)
        try:
            statuses = await grid.status()
            self.params, self.happy = grid.config.params, grid.config.happy
            self._check_responders(grid.config.connections)
        finally:
            await grid.close()
        config = grid.config
        there = [each for each in statuses if each.reachable]
        if len(there) < self.happy:
            gone = next((each for each in statuses if not each.reachable), None)
            why = "" if gone is None else f" ({gone.nickname}: {(gone.reason or '').rstrip('.')})"
            raise ServerUnreachable(
                f"{len(there)} of {len(statuses)} servers of {self.directory} can be reached, and an"
                f" upload needs {self.happy}{why}; see 'pipegrid status'"
            )
        self.servers = len(there)
        protocols = {each.protocol for each in there}
        if len(protocols) == 1:
            [protocol] = protocols
            self.transport = GBS if protocol == "https" else protocol
        for each in there:
            host, _, port = each.address.rpartition(":")
            if each.protocol in ("https", "foolscap") and port.isdigit():
                policy = config.connections_to(each.server_id)
                self._ways[each.nickname] = (policy, host, int(port))
                if each.protocol == "https":
                    self.names[host, int(port)] = each.nickname
        rooms = [each.available_bytes for each in there if each.available_bytes is not None]
        if rooms:
            # Shares are spread evenly, so the server with least space is the first to reject a share.
            self._free = min(rooms) * self.servers

    def _check_responders(self, policy: ConnectionPolicy) -> None:
        """
        Check that the settings permit direct connections to responders, since the speed test uses no others.

        Raises:
            UsageError: the directory's settings permit no direct connections.
        """
        if self.responders and not policy.is_direct:
            raise UsageError(
                f"responders are connected to directly, and the settings of {self.directory} forbid that; "
                "leave --responder out"
            )

    async def round_trips(self, count: int) -> list[RoundTrip]:
        """Measure how long connecting to each server takes, which is one round trip of TCP."""
        measured = []
        for name, way in self._ways.items():
            times_s = [await connect_s(self._reactor, *way) for _ in range(count)]
            measured.append(RoundTrip(name, times_s))
        return measured

    async def free_bytes(self) -> int | None:
        """
        Return the least free space that a server reports, times the number of servers; None if no server
        reports it.
        """
        return self._free


class Gateway(FileTarget):
    """A gateway, by its URL."""

    kind = "gateway"
    transport = GATEWAY
    adjustable = False

    def __init__(self, reactor: Any, url: str, responders: Sequence[Responder] = ()) -> None:
        """
        Raises:
            UsageError: the text is not the URL of a gateway.
        """
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise UsageError(
                f"{url!r} is not a gateway; give its URL, such as http://127.0.0.1:3456"
            )
        if is_overlay_name(parts.hostname):
            raise UsageError(
                f"{parts.hostname} is known only to Tor or I2P, and a gateway is asked without them; give a "
                "gateway on this machine"
            )
        super().__init__(reactor)
        self._url = url.rstrip("/").removesuffix("/uri")
        port = port or (443 if parts.scheme == "https" else 80)
        self._way = DIRECT_CONNECTIONS, parts.hostname, port
        self._name = f"{parts.hostname}:{port}"
        self.responders = responders

    def __str__(self) -> str:
        return f"the gateway {self._url}"

    async def start(self) -> None:
        """Store a file, and read the gateway's encoding from the file's cap."""
        session = await self.open()
        try:
            cap = parse_cap(await session.put(time.time_ns().to_bytes(64, "big")))
        finally:
            await session.close()
        if isinstance(cap, ChkCap):
            self.params = Params(cap.required_shares, cap.total_shares)

    async def open(self, *_: object, **_options: object) -> Session:
        """
        Return a client that has no connections yet; the gateway keeps its own windows, and its connections to
        servers.
        """
        return GatewaySession(self._reactor, self._url)

    async def round_trips(self, count: int) -> list[RoundTrip]:
        """Measure how long connecting to the gateway takes; its servers are not visible."""
        samples = [await connect_s(self._reactor, *self._way) for _ in range(count)]
        return [RoundTrip(self._name, samples)]


def fitting_params(servers: int) -> Params:
    """
    Return the encoding 3 of 10; with fewer than ten servers, as many shares as servers, about a third of them
    required.
    """
    if servers >= Params().total_shares:
        return Params()
    return Params(max(1, servers * 3 // 10), servers)
