"""The embedded grid: storage directories served in process, one server each."""

from __future__ import annotations

import time

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorFromThreads, IReactorTime

from pipegrid.core.hashes import tagged_hash
from pipegrid.core.ring import permutation_seed
from pipegrid.disk.durability import Durability
from pipegrid.flow.pipeline import Pipeline
from pipegrid.grid.config import LocalGrid
from pipegrid.reactor.workers import Workers
from pipegrid.storage.store import KEEP_UNFINISHED_S, ShareStore
from pipegrid.transfer.peers import Peer
from pipegrid.transport.local import LocalServer
from pipegrid.wire.messages import ServerIdentity

_WINDOW_BYTES = 1 << 20
"""A disk has no round trip to fill: one batch in flight while the next is made."""

_DISK_THREADS = 4

_WAITING_JOBS = 1 << 18
"""
Reads and writes that may wait for a thread, as requests to servers wait on their connections. Whoever begins
them has bounds: of 1024 objects that are looked after at once, every one of 256 shares may be read.
"""


@attrs.frozen
class OpenLocalGrid:
    """The servers of an embedded grid, their stores, and the threads that do their disk work."""

    peers: list[Peer]
    stores: list[ShareStore]
    disk_workers: Workers

    def close(self) -> Deferred[None]:
        """Stop the threads, let go of all files, and clear away uploads that nobody went on with."""
        return self.disk_workers.stop().addCallback(lambda _: self._let_go())

    def _let_go(self) -> None:
        for store in self.stores:
            store.expire_uploads()  # no server runs all the time and could do it
            store.close()


def local_identity(number: int) -> ServerIdentity:
    """Return who the server of the embedded grid's directory ``number`` is."""
    server_id = f"local-{number:02d}"
    lease_seed = tagged_hash(b"pipegrid_local_lease_seed_v1", server_id.encode("ascii"))[:20]
    return ServerIdentity(server_id, server_id, permutation_seed(server_id), lease_seed)


def open_local(reactor: IReactorFromThreads, grid: LocalGrid) -> OpenLocalGrid:
    """Return servers for every storage directory; nothing on disk is touched yet."""
    workers = Workers(reactor, threads=_DISK_THREADS, waiting_limit=_WAITING_JOBS)
    # One for all, since the shares of a file are complete at the same time: one sync makes the
    # group durable on every directory of the disk.
    durability = Durability(workers, IReactorTime(reactor), grid.durability)
    peers, stores = [], []
    for number in range(grid.servers):
        directory = grid.directory / f"{number:02d}"
        store = ShareStore(
            directory,
            clock=time.time,
            keep_unfinished_s=grid.keep_unfinished_s or KEEP_UNFINISHED_S,
        )
        stores.append(store)
        server = LocalServer(store, local_identity(number), workers, durability)
        peers.append(Peer(server, Pipeline(_WINDOW_BYTES), "local", str(directory)))
    return OpenLocalGrid(peers, stores, workers)
