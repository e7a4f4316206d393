"""
Opens a grid: makes the servers with their windows, the workers, and the discovery from a directory's
settings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFromThreads, IReactorTime

from pipegrid.argument_checks import check_has, check_kind, check_whole, shown
from pipegrid.disk.file_system_calls import few_files
from pipegrid.errors import UsageError
from pipegrid.flow.pipeline import Pipeline
from pipegrid.flow.window import FixedWindow
from pipegrid.grid import client_config as configuration
from pipegrid.grid.access_blacklist import AccessBlacklist
from pipegrid.grid.client_cache_files import BundleLimits
from pipegrid.grid.client_config import GridConfig, LocalGrid
from pipegrid.grid.client_paths import (
    ALIASES_NAME,
    CATALOGUE_NAME,
    CONFIG_NAME,
    INTRODUCERS_NAME,
    SERVERS_NAME,
    default_directory,
    is_configured,
)
from pipegrid.grid.server_opening import ConnectionOptions, Windows, open_server
from pipegrid.grid.server_registry import ServerRegistry, Warnings
from pipegrid.reactor.connection_policy import ConnectionPolicy
from pipegrid.reactor.trace import Tracing
from pipegrid.reactor.workers import CpuWorkers, Workers
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.settings import Limits
from pipegrid.wire.announcements import KnownServer
from pipegrid.wire.grid_manager_certificates import Certification, certified_by

if TYPE_CHECKING:
    from pipegrid.grid.introducer_discovery import Discovery
    from pipegrid.grid.local_grid import OpenLocalGrid
    from pipegrid.reactor.preconnect import Preconnector


_JOINING = "'pipegrid init NURL...' or 'pipegrid init --introducer FURL'"


_NO_RATE = "an embedded grid sends nothing over a network, so a rate limit has no effect on it"


class Opened(NamedTuple):
    """
    The parts of an open grid.

    Attributes:
        peers: the servers; the list changes as servers are found.
        created: a sentence for the user if an embedded grid was created, else None.
        on_close: releases the resources that the other parts do not own.
        members: the registry of servers, including those that cannot be used.
        discovery: receives the announcements of introducers; None if there are none.
        blacklist: the files that no caller gets; None if no blacklist is followed.
        starting: fires when the proxy that the settings start can be used, or fails; None if no proxy is
            started.
    """

    config: GridConfig
    peers: list[Peer]
    workers: CpuWorkers
    created: str | None
    on_close: Callable[[], Deferred[None]]
    members: ServerRegistry
    discovery: Discovery | None
    warnings: Warnings
    blacklist: AccessBlacklist | None = None
    starting: Deferred[None] | None = None


class OpenOptions(NamedTuple):
    """
    How a grid is opened; see ``Grid.open``.

    Attributes:
        fixed_window_bytes: the most unacknowledged bytes per server; None: the limit follows the measured
            connection.
    """

    tracer: Tracing | None = None
    fixed_window_bytes: int | None = None
    limits: Limits | None = None
    ahead: Preconnector | None = None
    make: bool = True
    follows_blacklist: bool = False


def open_grid(
    reactor: IReactorTime, directory: str | os.PathLike[str] | None, options: OpenOptions
) -> Opened:
    """
    Make the parts of the grid that a directory configures, without waiting for servers. See ``Grid.open``.

    Raises:
        UsageError: the directory is not configured, or one of its settings is not valid.
    """
    tracer, limits, follows_blacklist = options.tracer, options.limits, options.follows_blacklist
    if options.fixed_window_bytes is not None:
        check_whole(options.fixed_window_bytes, "window_bytes", least=1)
    if tracer is not None:
        check_has(tracer, ("span",), "a tracer", "a Tracer")
    path, created = _directory_of(directory, options.make)
    config = configuration.load(path, follows_blacklist=follows_blacklist)
    introducers = config.introducers.addresses
    _check_names_servers(config)
    _check_process(reactor)
    opener = _Opener(reactor, config, options)
    warnings = Warnings(config.warnings)
    members = ServerRegistry([], opener.open, config.preferred, warnings, opener.certify)
    for server in config.static.servers:
        members.add_static(server)
    local = _open_local(reactor, config.local, members, opener, warnings)
    if local is not None and limits is not None and limits.bytes_per_s is not None:
        warnings.add(_NO_RATE)
    if not members.peers and not introducers:
        raise UsageError(
            f"{path} names no servers that can be used; "
            + "".join(f" ({warning})" for warning in warnings()[:1]).strip()
        )
    discovery, tubs = _discover(reactor, config, members, warnings) if introducers else (None, ())
    starting = _start(reactor, config, discovery)

    async def close() -> None:
        opener.bundle_limits.save()
        if options.ahead is not None:
            options.ahead.close()
        for tub in tubs:
            await tub.stopService()
        if local is not None:
            await local.close()

    return Opened(
        config=config,
        peers=members.peers,
        workers=_workers(reactor, tracer),
        created=created,
        on_close=lambda: Deferred.fromCoroutine(close()),
        members=members,
        discovery=discovery,
        warnings=warnings,
        blacklist=AccessBlacklist(path) if follows_blacklist else None,
        starting=starting,
    )


def _check_process(reactor: object) -> None:
    """
    Check the reactor and the process's limit on open files.

    Raises:
        UsageError: the object is not a usable reactor, or the process may open too few files.
    """
    if not IReactorFromThreads.providedBy(reactor):
        raise UsageError(f"a grid needs the running reactor, not {shown(reactor)}")
    if (why := few_files()) is not None:
        raise UsageError(why)


def _check_names_servers(config: GridConfig) -> None:
    """
    Check that a directory has servers or introducers.

    Raises:
        UsageError: the directory has neither.
    """
    if config.local is None and not config.static.servers and not config.introducers.addresses:
        raise UsageError(
            f"{config.directory} names no servers that can be used; list some in {SERVERS_NAME},"
            f" or introducers in {INTRODUCERS_NAME}, or add a [local] section to {CONFIG_NAME}"
            + "".join(f" ({warning})" for warning in config.warnings[:1])
        )


def _directory_of(directory: str | os.PathLike[str] | None, make: bool) -> tuple[Path, str | None]:
    """
    Return the client's directory, and a sentence for the user if a grid was created in it.

    Args:
        directory: None for the user's default directory.

    Raises:
        UsageError: the directory is not configured, and a grid must not be created or the directory has files
            of another grid.
    """
    if directory is not None:
        check_kind(directory, (str, os.PathLike), "a client's directory", "a path")
        return Path(directory), None
    path = default_directory()
    if is_configured(path):
        return path, None
    _check_is_nobodys(path)
    if not make:
        raise UsageError(
            f"no grid is configured in {path}, so there are no servers to ask; join the grid that has "
            f"what you look for with {_JOINING}, or name a client's directory with 'pipegrid -d DIR'"
        )
    from pipegrid.grid.client_creation import create_local

    create_local(path, automatic=True)
    return path, (
        f"no grid is configured, so an embedded one of {configuration.DEFAULT_SERVERS} "
        f"storage directories was made in {path}; it is as safe as that disk"
    )


def _check_is_nobodys(path: Path) -> None:
    """
    Check that a directory without a configuration has no files of another grid's client.

    A new embedded grid in such a directory would have none of the files of existing caps. It would store on
    one disk the shares that belong on the other grid's servers.

    Raises:
        UsageError: the directory has such files.
    """
    if os.path.lexists(
        path / CONFIG_NAME
    ):  # creating the configuration reports that the path is not a regular file
        return
    for name in (SERVERS_NAME, INTRODUCERS_NAME, CATALOGUE_NAME, ALIASES_NAME):
        if os.path.lexists(path / name):
            tells = name in (SERVERS_NAME, INTRODUCERS_NAME)
            how = "'pipegrid init'" if tells else _JOINING
            raise UsageError(
                f"no grid is configured in {path}, but its {name} comes from one; join that with "
                f"{how}, or make a new one on this machine with 'pipegrid init --local'"
            )


class _Opener:
    """Makes the peers of one grid, each with its own window and its own tracing."""

    def __init__(self, reactor: Any, config: GridConfig, options: OpenOptions) -> None:
        self._reactor = reactor
        self._config = config
        self._options = options
        limits = options.limits or Limits()
        total_shares = config.params.total_shares
        known = total_shares if config.introducers.addresses else len(config.static.servers) or 1
        self._windows = Windows.shared_by(min(known, total_shares), limits.memory_bytes)
        self.bundle_limits = BundleLimits(config.caches)
        throttle = None
        if limits.bytes_per_s is not None:
            from pipegrid.transport.throttle import Throttle

            throttle = Throttle(reactor, limits.bytes_per_s)
        self._connections = ConnectionOptions(
            config.connections, throttle, options.ahead, self.bundle_limits
        )

    def open(self, known: KnownServer) -> Peer:
        """
        Return a peer for a server, without connecting to it.

        Raises:
            ValueError: the server speaks no protocol that this client can use; the text says why.
        """
        policy = self._config.connections_to(known.identity.server_id)
        peer = open_server(
            self._reactor,
            known,
            self._windows,
            self._connections._replace(policy=policy),
            force_foolscap=self._config.force_foolscap,
            foolscap_beside=self._config.foolscap_beside,
        )
        self.certify(peer, known)
        return self.finished(peer)

    def certify(self, peer: Peer, known: KnownServer | None) -> None:
        """If the grid has managers, allow uploads to a peer only while its certificate is valid."""
        if managers := self._config.managers:
            certificates = () if known is None else known.certificates
            certified = certified_by(peer.identity.server_id, certificates, managers)
            peer.no_uploads = Certification(certified)
            if certified is not None:
                peer.certified_by, peer.certified_until = certified.manager, certified.expires

    def finished(self, peer: Peer) -> Peer:
        """Add tracing and a fixed window to a peer, if the grid's options say so, and return it."""
        tracer, window_bytes = self._options.tracer, self._options.fixed_window_bytes
        if tracer is not None:
            from pipegrid.grid.server_tracing import TracedServer

            peer.server = TracedServer(peer.server, tracer)
        if window_bytes is not None:
            peer.pipeline = Pipeline(FixedWindow(window_bytes), self._reactor)
        return peer


def _open_local(
    reactor: Any,
    grid: LocalGrid | None,
    members: ServerRegistry,
    opener: _Opener,
    warnings: Warnings,
) -> OpenLocalGrid | None:
    if grid is None:
        return None
    from pipegrid.grid.local_grid import open_local  # this imports the storage server

    local = open_local(reactor, grid)
    for peer in local.peers:
        opener.certify(peer, None)
    for warning in local.warnings:
        warnings.add(warning)
    members.peers += map(opener.finished, local.peers)
    return local


def _discover(
    reactor: IReactorTime, config: GridConfig, members: ServerRegistry, warnings: Warnings
) -> tuple[Discovery, Collection[Any]]:
    """
    Make the discovery through introducers; returns it, and the tubs that must be stopped.

    An introducer at a listed server is reached in the same way as the server: ``connections`` in the server's
    entry applies to both.
    """
    # Imported here since Foolscap is slow to import.
    from pipegrid.grid.introducer_discovery import Discovery, DiscoverySettings
    from pipegrid.wire.foolscap_broker import make_tub
    from pipegrid.wire.introducer_protocol import BOUNDS, LOST_AFTER_S

    policies = {
        each.furl.tub_id: config.connections_to(each.identity.server_id)
        for each in config.static.servers
        if each.furl is not None
    }
    addresses = []
    tubs: dict[ConnectionPolicy, Any] = {}
    tub_for: dict[str, Any] = {}
    for each in config.introducers.addresses:
        policy = policies.get(each.furl.tub_id, config.connections)
        try:
            furl = each.furl.reachable(policy)
        except ValueError as error:
            warnings.add(f"introducer {each.name} is skipped: {error}")
            continue
        addresses.append(each._replace(furl=furl))
        if policy not in tubs:
            tubs[policy] = make_tub(LOST_AFTER_S, policy, BOUNDS)
            tubs[policy].startService()
        tub_for[str(furl)] = tubs[policy]
    settings = DiscoverySettings(addresses, config.caches, config.nickname, config.managers)

    def connect(furl: str) -> Deferred[Any]:
        reference: Deferred[Any] = tub_for[furl].getReference(furl)
        return reference

    discovery = Discovery(settings, connect, reactor, found=members.found, warn=warnings.add)
    return discovery, tubs.values()


def _start(
    reactor: IReactorTime, config: GridConfig, discovery: Discovery | None
) -> Deferred[None] | None:
    """Start the proxy, if the settings name one to start, and then the discovery; see ``Opened.starting``."""
    find = config.connections.starting
    if find is None:
        if discovery is not None:
            discovery.start()
        return None

    async def start() -> None:
        try:
            await find(reactor)
        finally:
            if discovery is not None:  # without the proxy, introducers would seem unreachable
                discovery.start()

    return Deferred.fromCoroutine(start())


def _workers(reactor: Any, tracer: Tracing | None) -> CpuWorkers:
    if tracer is None:
        return Workers(reactor)
    from pipegrid.grid.server_tracing import TracedWorkers

    return TracedWorkers(Workers(reactor), tracer)
