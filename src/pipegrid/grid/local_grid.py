"""The embedded grid: storage directories on this machine, each served as one server within the process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFromThreads, IReactorTime

from pipegrid.core.hashes import tagged_hash
from pipegrid.core.placement import permutation_seed
from pipegrid.disk.group_commit import GroupCommit
from pipegrid.disk.private_files import keep_private, others_may
from pipegrid.flow.pipeline import Pipeline
from pipegrid.grid.client_config import GridConfig, LocalGrid
from pipegrid.grid.client_paths import CONFIG_NAME
from pipegrid.reactor.workers import Workers
from pipegrid.storage.share_store import KEEP_UNFINISHED_S, ShareStore, StoreSettings
from pipegrid.storage.storage_paths import Paths
from pipegrid.transfer.peers import Peer
from pipegrid.transport.local_server import LocalServer
from pipegrid.wire.storage_messages import ServerIdentity

_WINDOW_BYTES = 1 << 20
"""The window of a storage directory: a disk has no round trip to hide, so one batch in flight is enough."""

_DISK_THREADS = 4

_WAITING_JOBS = 1 << 18
"""
The most reads and writes that may wait for a thread. The number of their callers is limited: at most 1024
objects are checked at the same time, and each may have 256 shares to read.
"""


@attrs.frozen
class OpenLocalGrid:
    """An embedded grid's servers, their stores, the threads for disk work, and warnings."""

    peers: list[Peer]
    stores: list[ShareStore]
    disk_workers: Workers
    warnings: tuple[str, ...] = ()

    def close(self) -> Deferred[None]:
        """Stop the threads, close all files, and delete expired unfinished uploads."""
        return self.disk_workers.stop().addCallback(lambda _: self._release())

    def _release(self) -> None:
        for store in self.stores:
            store.expire_uploads()  # a server process would do this regularly
            store.close()


def lacks(config: GridConfig, storage_index: bytes) -> bool:
    """Return whether the grid is only on this machine and no storage directory has a share of a file."""
    if config.local is None or not config.is_on_this_machine:
        return False
    places = (config.local.directory / f"{n:02d}" for n in range(config.local.servers))
    return not any(os.path.isdir(Paths(each).directory(storage_index)) for each in places)


def local_identity(number: int) -> ServerIdentity:
    """Return the identity of the server for storage directory ``number`` of the embedded grid."""
    server_id = f"local-{number:02d}"
    lease_seed = tagged_hash(b"pipegrid_local_lease_seed_v1", server_id.encode("ascii"))[:20]
    return ServerIdentity(server_id, server_id, permutation_seed(server_id), lease_seed)


def open_local(reactor: IReactorFromThreads, grid: LocalGrid) -> OpenLocalGrid:
    """
    Return a server for every storage directory, without creating anything on disk.

    If the storage is inside the client's directory, other users lose access to it, since shares of mutable
    files contain write enablers.
    """
    workers = Workers(reactor, threads=_DISK_THREADS, waiting_limit=_WAITING_JOBS)
    # All servers share one group commit: the shares of a file become complete at the same time, so one sync
    # makes all of them durable.
    durability = GroupCommit(workers, IReactorTime(reactor), grid.durability)
    peers, stores = [], []
    for number in range(grid.servers):
        directory = grid.directory / f"{number:02d}"
        settings = StoreSettings(keep_unfinished_s=grid.keep_unfinished_s or KEEP_UNFINISHED_S)
        store = ShareStore(directory, settings, clock=time.time)
        stores.append(store)
        server = LocalServer(store, local_identity(number), workers, durability)
        peers.append(Peer(server, Pipeline(_WINDOW_BYTES), "local", str(directory)))
    return OpenLocalGrid(peers, stores, workers, _made_private(grid.directory))


def _made_private(directory: Path) -> tuple[str, ...]:
    """
    Make the storage private if it is inside the client's directory; return a warning if other users can read
    it.
    """
    if (directory.parent / CONFIG_NAME).exists():
        why = keep_private(str(directory))
    else:  # the user chose this directory, perhaps for a group
        why = others_may(str(directory))
    if why is None:
        return ()
    return (
        f"other users may read {directory}, with the secrets that change what is stored there ({why}); "
        f"run 'chmod go= {directory}', or move it where that works",
    )
