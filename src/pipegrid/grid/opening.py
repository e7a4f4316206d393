"""
Opening a grid: from what a directory says to servers with their windows, workers, and discovery.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFromThreads, IReactorTime

from pipegrid.arguments import check_has, check_kind, check_whole, shown
from pipegrid.errors import UsageError
from pipegrid.flow.pipeline import Pipeline
from pipegrid.flow.window import FixedWindow
from pipegrid.grid import config as configuration
from pipegrid.grid.config import GridConfig
from pipegrid.grid.homes import CONFIG_NAME, SERVERS_NAME, default_directory, is_configured
from pipegrid.grid.introducers import INTRODUCERS_NAME
from pipegrid.grid.members import Members, Warnings
from pipegrid.grid.servers import Windows, open_server
from pipegrid.reactor.trace import Tracing
from pipegrid.reactor.workers import CpuWorkers, Workers
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.settings import Limits
from pipegrid.wire.announcements import KnownServer

if TYPE_CHECKING:
    from pipegrid.grid.discovery import Discovery
    from pipegrid.reactor.ahead import Ahead


@attrs.frozen(kw_only=True)
class Opened:
    """
    What a grid works with.

    Attributes:
        peers: the servers; the list changes as servers are found.
        created: what to tell the user if an embedded grid was just made, or None.
        on_close: lets go of what nobody else knows of.
        members: knows of the servers that cannot be used.
        discovery: asks introducers; None if there are none.
    """

    config: GridConfig
    peers: list[Peer]
    workers: CpuWorkers
    created: str | None
    on_close: Callable[[], Deferred[None]]
    members: Members
    discovery: Discovery | None
    warnings: Warnings


def open_grid(
    reactor: IReactorTime,
    directory: str | os.PathLike[str] | None,
    tracer: Tracing | None,
    fixed_window_bytes: int | None,
    limits: Limits | None = None,
    ahead: Ahead | None = None,
) -> Opened:
    """
    Prepare what a directory configures; nothing is waited for. See ``Grid.open``.

    Raises:
        UsageError: the directory is not configured, or says something impossible.
    """
    if directory is not None:
        check_kind(directory, (str, os.PathLike), "a client's directory", "a path")
    if fixed_window_bytes is not None:
        check_whole(fixed_window_bytes, "window_bytes", least=1)
    if tracer is not None:
        check_has(tracer, ("span",), "a tracer", "a Tracer")
    created = None
    path = default_directory() if directory is None else Path(directory)
    if directory is None and not is_configured(path):
        from pipegrid.grid.creation import create_local

        create_local(path)
        created = (
            f"no grid is configured, so an embedded one of {configuration.DEFAULT_SERVERS} "
            f"storage directories was made in {path}; it is as safe as that disk"
        )
    config = configuration.load(path)
    static, introducers = config.static.servers, config.introducers.addresses
    if config.local is None and not static and not introducers:
        raise UsageError(
            f"{path} names no servers that can be used; list some in {SERVERS_NAME}, or introducers"
            f" in {INTRODUCERS_NAME}, or add a [local] section to {CONFIG_NAME}"
            + "".join(f" ({warning})" for warning in config.warnings[:1])
        )
    if not IReactorFromThreads.providedBy(reactor):
        raise UsageError(f"a grid needs the running reactor, not {shown(reactor)}")
    real_reactor: Any = reactor
    total_shares = config.params.total_shares
    shares = total_shares if introducers else min(len(static) or 1, total_shares)
    limits = limits or Limits()
    windows = Windows.shared_by(shares, limits.memory_bytes)
    throttle = None
    if limits.bytes_per_s is not None:
        from pipegrid.transport.throttled import Throttle

        throttle = Throttle(reactor, limits.bytes_per_s)

    def finished(peer: Peer) -> Peer:
        if tracer is not None:
            from pipegrid.grid.tracing import TracedServer

            peer.server = TracedServer(peer.server, tracer)
        if fixed_window_bytes is not None:
            peer.pipeline = Pipeline(FixedWindow(fixed_window_bytes), reactor)
        return peer

    def open_finished(known: KnownServer) -> Peer:
        peer = open_server(
            real_reactor,
            known,
            windows,
            force_foolscap=config.force_foolscap,
            throttle=throttle,
            ahead=ahead,
        )
        return finished(peer)

    warnings = Warnings(config.warnings)
    members = Members([], open_finished, config.preferred, warnings)
    for server in static:
        members.add_static(server)
    local = None
    if config.local is not None:
        from pipegrid.grid.local import open_local  # with all that keeps shares on a disk

        local = open_local(real_reactor, config.local)
        members.peers += map(finished, local.peers)
        if throttle is not None:
            warnings.add(
                "an embedded grid sends nothing over a network, so --limit-rate bounds nothing on its disks"
            )
    if not members.peers and not introducers:
        raise UsageError(
            f"{path} names no servers that can be used; "
            + "".join(f" ({warning})" for warning in warnings()[:1]).strip()
        )
    discovery, tub = None, None
    if introducers:
        # Foolscap takes long to import.
        from pipegrid.grid.discovery import Discovery
        from pipegrid.wire.introducing import BOUNDS, LOST_AFTER_S
        from pipegrid.wire.tub import make_tub

        tub = make_tub(LOST_AFTER_S, BOUNDS)
        tub.startService()
        discovery = Discovery(
            introducers,
            tub.getReference,
            reactor,
            caches=config.caches,
            found=members.found,
            warn=warnings.add,
            nickname=config.nickname,
        )
        discovery.start()

    async def close() -> None:
        if ahead is not None:
            ahead.close()
        if tub is not None:
            await tub.stopService()
        if local is not None:
            await local.close()

    workers: CpuWorkers = Workers(reactor)
    if tracer is not None:
        from pipegrid.grid.tracing import TracedWorkers

        workers = TracedWorkers(workers, tracer)
    return Opened(
        config=config,
        peers=members.peers,
        workers=workers,
        created=created,
        on_close=lambda: Deferred.fromCoroutine(close()),
        members=members,
        discovery=discovery,
        warnings=warnings,
    )
