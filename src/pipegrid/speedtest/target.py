"""
What every target of the speed test has, and what is asked of each before it is measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twisted.internet.endpoints import HostnameEndpoint, connectProtocol
from twisted.internet.protocol import Protocol as Connection

from pipegrid.core.params import Params
from pipegrid.errors import ServerUnreachable, UsageError
from pipegrid.grid.grid import Grid
from pipegrid.reactor.trace import Tracing
from pipegrid.speedtest.baseline import Responder
from pipegrid.speedtest.clients import GridSession, Session
from pipegrid.speedtest.results import EmulatedLink, RoundTrip
from pipegrid.speedtest.timeline import HostPort

GBS = "gbs"
FOOLSCAP = "foolscap"
GATEWAY = "gateway"
CONNECT_TIMEOUT_S = 10.0
SPARE_BYTES = 100 * 10**6
"""What a disk should have left when all is stored."""


class FileTarget:
    """
    Something to put files on.

    Attributes:
        kind: as ``results.Parameters.target``.
        transport: as ``results.Parameters.transport``.
        servers: how many.
        params, happy: how files are encoded unless a scenario says otherwise.
        link: that is emulated before the servers; None for none.
        durability: of the servers, if they are ours.
        responders: what raw TCP is measured with, on the same path; none if there are none.
        directory: of a client, for the command itself; None if the command cannot use it.
        names: of the servers, by their addresses, where their connections can be looked at.
        adjustable: whether windows and encodings can be chosen.
        alike: whether all servers are, so that none should be too slow to wait for.
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
        """Start what has to be started, and see whether it is there."""
        raise NotImplementedError

    async def open(
        self,
        window_bytes: int | None = None,
        *,
        reactor: Any = None,
        tracer: Tracing | None = None,
    ) -> Session:
        """Return a client with no connections yet."""
        assert self.directory is not None, "not started"
        grid = await Grid.open(
            reactor or self._reactor, self.directory, window_bytes=window_bytes, tracer=tracer
        )
        return GridSession(grid, self.alike)

    async def round_trips(self, count: int) -> list[RoundTrip]:
        """Measure each server's round trip so many times."""
        raise NotImplementedError

    async def free_bytes(self) -> int | None:
        """Return how much the servers can store, all shares together; None if nobody knows."""
        return None

    async def stop(self) -> None:
        """End all that was started."""


async def check_room(target: FileTarget, needed_bytes: int) -> None:
    """
    Raises:
        UsageError: there is less room than all shares need.
    """
    free = await target.free_bytes()
    if free is not None and free < needed_bytes + SPARE_BYTES:
        raise UsageError(
            f"the shares of this run need {needed_bytes / 1e9:.2f} GB, and there are {free / 1e9:.2f} GB"
            " free; choose fewer --rounds, other scenarios with --only, or another disk with --scratch"
        )


async def connect_s(reactor: Any, host: str, port: int) -> float:
    """
    Return how long it takes to open a TCP connection, which the other end's kernel answers.

    Raises:
        ServerUnreachable: nobody listens there.
    """
    endpoint = HostnameEndpoint(reactor, host, port, CONNECT_TIMEOUT_S)
    began = time.perf_counter()
    try:
        connection = await connectProtocol(endpoint, Connection())
    except Exception as error:
        raise ServerUnreachable(
            f"cannot connect to {host}:{port}: {str(error).rstrip('.')}; is it running?",
            f"{host}:{port}",
        ) from error
    took_s = time.perf_counter() - began
    transport: Any = connection.transport
    transport.abortConnection()
    return took_s
