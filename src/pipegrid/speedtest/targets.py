"""
What is measured: a private grid that is started for it, the grid of a client's directory, or a gateway.

A target is started, opened as often as clients are wanted, and stopped; nothing that it started outlives it.
"""

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

from pipegrid.core.params import Params
from pipegrid.errors import GridError, ServerUnreachable, UsageError
from pipegrid.grid import config
from pipegrid.grid.grid import Grid
from pipegrid.grid.homes import default_directory, is_configured
from pipegrid.reactor.trace import Tracing
from pipegrid.speedtest.baseline import Responder, ping_responders
from pipegrid.speedtest.children import in_thread
from pipegrid.speedtest.clients import GatewaySession, Session
from pipegrid.speedtest.links import describe, shape_of
from pipegrid.speedtest.processes import LOOPBACK, Servers, at_ports, make_client, server_name
from pipegrid.speedtest.proxy import RunningProxy, start_proxy
from pipegrid.speedtest.responders import RunningResponders, start_responders
from pipegrid.speedtest.results import EmulatedLink, RoundTrip
from pipegrid.speedtest.target import FOOLSCAP, GATEWAY, GBS, FileTarget, connect_s
from pipegrid.speedtest.timeline import HostPort

_TRANSPORT_NAMES = {"https": GBS}

DEFAULT_SERVERS = 10
MAX_SERVERS = 100


class PrivateGrid(FileTarget):
    """
    Storage servers of its own, each a process on this machine, perhaps behind an emulated link.

    Args:
        count: of servers.
        params, happy: of the client; None for the usual, as far as so many servers allow.
        scratch: where the servers keep their shares; None for the usual place.
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
        params: Params | None = None,
        happy: int | None = None,
        durability: str = "batch",
        scratch: Path | None = None,
    ) -> None:
        super().__init__(reactor)
        self._scratch = scratch
        self.servers = count
        self.transport = transport
        self.link = link
        self.params = params or fitting_params(count)
        self.happy = min(7, count, self.params.total_shares) if happy is None else happy
        self.durability = durability
        self._stack = ExitStack()
        self._lock = Lock()
        self._left = False
        self._responding: RunningResponders | None = None
        self._proxy: RunningProxy | None = None

    def __str__(self) -> str:
        return (
            f"a private grid of {self.servers} servers ({self.transport}, {self.params.required_shares}"
            f" of {self.params.total_shares}, durability {self.durability}), {describe(self.link)}"
        )

    async def start(self) -> None:
        """Start servers, responders, and the link before them."""
        config.check_happy(self.happy, self.params)
        assert self.durability is not None
        self._left = False
        running = Servers(
            self.servers,
            durability=self.durability,
            scratch=self._scratch,
            params=self.params,
            happy=self.happy,
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
            ports = self._proxy.ports[: self.servers]
            self.responders = at_ports(self.responders, self._proxy.ports[self.servers :])
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
        """Measure the way to each server, over the same link."""
        trips = await ping_responders(self._reactor, self.responders, count)
        return [attrs.evolve(trip, server=server_name(number)) for number, trip in enumerate(trips)]

    async def free_bytes(self) -> int | None:
        """Return what is free where the servers' directories are."""
        return shutil.disk_usage(self._scratch or tempfile.gettempdir()).free

    async def stop(self) -> None:
        """End all processes, and remove what they stored."""
        try:
            for child in (self._proxy, self._responding):
                if child is not None:
                    await child.stop()
        finally:
            await in_thread(self._reactor, self._leave)

    def _enter(self, running: Servers) -> None:
        """Start servers, in a thread: whoever is cancelled meanwhile waits for it in ``_leave``."""
        with self._lock:
            if not self._left:  # a busy pool of threads may get to leaving first
                self._stack.enter_context(running)

    def _leave(self) -> None:
        with self._lock:
            self._left = True
            self._stack.close()


class ConfiguredGrid(FileTarget):
    """
    The grid that a client's directory configures.

    Args:
        directory: None for the user's own.
        responders: on the servers' side, if there are any.
    """

    kind = "grid"

    def __init__(
        self, reactor: Any, directory: Path | None, responders: Sequence[Responder] = ()
    ) -> None:
        super().__init__(reactor)
        self.directory = directory or default_directory()
        self.responders = responders
        self._places: dict[str, HostPort] = {}
        self._free: int | None = None

    def __str__(self) -> str:
        return (
            f"the grid of {self.directory} ({self.servers} servers, {self.transport},"
            f" {self.params.required_shares} of {self.params.total_shares})"
        )

    async def start(self) -> None:
        """See which servers are there."""
        assert self.directory is not None
        if not is_configured(self.directory):
            raise UsageError(
                f"{self.directory} configures no grid; give -d DIR, or measure a private grid"
            )
        grid = await Grid.open(self._reactor, self.directory)
        try:
            statuses = await grid.status()
            self.params, self.happy = grid.config.params, grid.config.happy
        finally:
            await grid.close()
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
            self.transport = _TRANSPORT_NAMES.get(*protocols, *protocols)
        for each in there:
            host, _, port = each.address.rpartition(":")
            if each.protocol in ("https", "foolscap") and port.isdigit():
                self._places[each.nickname] = (host, int(port))
                if each.protocol == "https":
                    self.names[host, int(port)] = each.nickname
        rooms = [each.available_bytes for each in there if each.available_bytes is not None]
        if rooms:
            # Shares are spread evenly, so that the fullest server is the first to refuse.
            self._free = min(rooms) * self.servers

    async def round_trips(self, count: int) -> list[RoundTrip]:
        """Measure how long connections to each server take to be there: one round trip of TCP."""
        measured = []
        for name, place in self._places.items():
            times_s = [await connect_s(self._reactor, *place) for _ in range(count)]
            measured.append(RoundTrip(name, times_s))
        return measured

    async def free_bytes(self) -> int | None:
        """Return what the servers say they have room for."""
        return self._free


class Gateway(FileTarget):
    """A gateway, by its URL."""

    kind = "gateway"
    transport = GATEWAY
    adjustable = False

    def __init__(self, reactor: Any, url: str, responders: Sequence[Responder] = ()) -> None:
        """
        Raises:
            UsageError: that is no URL of a gateway.
        """
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise UsageError(f"{url!r} is no gateway; give its URL, such as http://127.0.0.1:3456")
        super().__init__(reactor)
        self._url = url.rstrip("/").removesuffix("/uri")
        self._place = (parts.hostname, port or (443 if parts.scheme == "https" else 80))
        self.responders = responders

    def __str__(self) -> str:
        return f"the gateway {self._url}"

    async def start(self) -> None:
        """Store a file, and see from its cap how the gateway encodes."""
        from pipegrid.core.caps import ChkCap, parse_cap

        session = await self.open()
        try:
            cap = parse_cap(await session.put(time.time_ns().to_bytes(64, "big")))
        finally:
            await session.close()
        if isinstance(cap, ChkCap):
            self.params = Params(cap.required_shares, cap.total_shares)

    async def open(
        self,
        window_bytes: int | None = None,
        *,
        reactor: Any = None,
        tracer: Tracing | None = None,
    ) -> Session:
        """Return a client with no connections yet."""
        return GatewaySession(self._reactor, self._url)

    async def round_trips(self, count: int) -> list[RoundTrip]:
        """Measure how long connections to the gateway take to be there; its servers are out of sight."""
        name = f"{self._place[0]}:{self._place[1]}"
        samples = [await connect_s(self._reactor, *self._place) for _ in range(count)]
        return [RoundTrip(name, samples)]


def fitting_params(servers: int) -> Params:
    """Return 3 of 10, or for fewer servers as many shares as there are, and about as many needed."""
    if servers >= Params().total_shares:
        return Params()
    return Params(max(1, servers * 3 // 10), servers)
