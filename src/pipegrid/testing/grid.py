"""A whole grid in virtual time, with real servers and clients, for tests of programs that use a ``Grid``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from twisted.internet.defer import Deferred, execute, succeed
from twisted.internet.interfaces import IProtocolFactory

from pipegrid.core.encoding_parameters import Params
from pipegrid.core.hashes import tagged_hash
from pipegrid.core.placement import permutation_seed
from pipegrid.disk.durability import Disk, Policy
from pipegrid.disk.group_commit import GroupCommit
from pipegrid.errors import UsageError
from pipegrid.grid.client_config import GridConfig
from pipegrid.grid.server_opening import Windows
from pipegrid.reactor.workers import BlockingCall
from pipegrid.server.gbs.http_connection import GbsSite
from pipegrid.server.gbs.storage_operations import GbsService
from pipegrid.storage.share_reader import open_reader
from pipegrid.storage.share_store import ShareStore
from pipegrid.testing.clock import HeapClock
from pipegrid.testing.fault_plan import FaultPlan
from pipegrid.testing.network import SimulatedNetwork, leaks, run
from pipegrid.transfer.peers import Peer
from pipegrid.transport.gbs.client import GbsServer
from pipegrid.tree.tree_grid import Grid
from pipegrid.wire.server_address import Nurl
from pipegrid.wire.storage_messages import ServerIdentity

P = ParamSpec("P")
T = TypeVar("T")

EPOCH_S = 1_700_000_000
"""The date at which virtual time begins; leases and directory entries contain dates."""

PORT = 443
SWISSNUM = "yergyyx6ik6krfzxcgaic6oyibvvo6t2"
_SETTLE_S = 700.0
"""The time after which every timeout of a server or a client has ended."""


class InlineWorkers:
    """``reactor.workers.CpuWorkers`` without threads: each function is called at once, in no virtual time."""

    parallel = 2

    def __init__(self) -> None:
        self._stopped = False

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """
        Call the function; the returned Deferred has already fired.

        Raises:
            UsageError: the workers have been stopped.
        """
        if self._stopped:
            raise UsageError("these workers have been stopped; make new ones")
        return execute(function, *args, **kwargs)

    def run_if_large(
        self, size_bytes: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Deferred[T]:
        """Call the function, whatever the number of bytes."""
        return self.run(function, *args, **kwargs)

    def run_blocking(
        self,
        function: Callable[Concatenate[BlockingCall, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Deferred[T]:
        """Call the function; if it waits for another program, the test waits too."""
        call = BlockingCall()
        try:
            return execute(function, call, *args, **kwargs)
        finally:
            call.ended()

    def stop(self) -> Deferred[None]:
        """Accept no more jobs; the returned Deferred has already fired, since no job is running."""
        self._stopped = True
        return succeed(None)


class _NoSync(Disk):
    """A disk that is never synced, since virtual time has no power cuts."""

    def sync_data(self, shares: Any) -> None:
        pass

    def sync_names(self, directories: Any) -> None:
        pass


class SimulatedServer:
    """
    A storage server on a host of a simulated network.

    A crash of the host ends the server's process as ``kill -9`` does: files are closed, and nothing else is
    written. A restart makes a new process that serves the same directory.

    Attributes:
        name: the name of its host.
        host: the host; ``host.crash(down_s)`` and ``host.refuse(for_s)`` cause faults.
        root: the storage directory.
        store: the share store of the running process.
    """

    def __init__(
        self, network: SimulatedNetwork, name: str, root: Path, durability: Policy = "none"
    ) -> None:
        self.host = network.host(name)
        self.name = name
        self.root = root
        self._durability = durability
        self.start()
        self.host.on_crash.append(self.kill)
        self.host.on_restart.append(self.start)

    def start(self) -> None:
        """Start a process that serves the directory."""
        clock: Any = self.host.clock
        self.store = self.make_store()
        commit = GroupCommit(InlineWorkers(), clock, self._durability, self.make_disk())
        self.site = GbsSite(GbsService(self.store, commit, SWISSNUM), clock)
        self.host.listen(PORT, self.make_front())

    def make_store(self) -> ShareStore:
        """Open the storage directory as a share store whose disk seems to have 1 TiB free."""
        return ShareStore(
            self.root,
            clock=lambda: EPOCH_S + self.host.clock.seconds(),
            free_bytes=lambda path: 1 << 40,
            boot_id=lambda: b"b" * 16,
        )

    def make_disk(self) -> Disk:
        """Return the disk, which never syncs, since virtual time has no power cuts."""
        return _NoSync()

    def make_front(self) -> IProtocolFactory:
        """Return the factory that listens on the port: the HTTP site itself, without TLS."""
        return self.site

    def kill(self) -> None:
        """Close all files of the process, as the kernel does when a process is killed."""
        abandon_store(self.store)
        abandon_site(self.site)

    def shares(self, storage_index: bytes) -> dict[int, bytes]:
        """Return the complete immutable shares on the disk, by share number."""
        found = {}
        for number in ShareStore.list_shares(self.store, storage_index):
            reader = open_reader(self.store._paths.final(storage_index, number))
            assert reader is not None
            with reader:
                found[number] = reader.read(0, reader.share_bytes)
        return found


def abandon_store(store: ShareStore) -> None:
    """Close the files of a share store without writing, as the kernel does when a process is killed."""
    for upload in store._unfinished._uploads.values():
        if upload._fd is not None:
            os.close(upload._fd)
            upload._fd = None
        upload.gone = True
    store._unfinished._uploads.clear()
    store._unfinished._open.clear()


def abandon_site(site: GbsSite) -> None:
    """Close the shares that a killed server was sending."""
    for connection in site.connections:
        for place in connection._order.unanswered:
            if place.stream is not None:
                place.stream.close()


class SimulatedGrid:
    """
    Storage servers ``s0``, ``s1``… and clients, on a simulated network in virtual time.

    Only the network and the clock are simulated. Servers keep shares in real directories; TLS is left out.

        with SimulatedGrid(self.mktemp(), servers=10) as simulated:
            grid = simulated.client()
            result = simulated.run(grid.put(b"data"))
            simulated.apply(FaultPlan.random(seed, ["client"], simulated.names, duration_s=10))
            data = simulated.run(grid.read(result.cap))

    Args:
        directory: where the servers' directories are made; it must not exist, or be empty.
        servers: how many servers.
        latency_s: one way; half a round trip.
        bytes_per_s: of each direction between a client and a server; None for unlimited.
        seed: of the network's random events.

    Attributes:
        clock: the virtual time of all hosts; ``clock.advance(s)`` lets time pass.
        network: the network, with its log of everything that was sent.
        servers: the servers, in order.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        servers: int = 10,
        *,
        latency_s: float = 0.05,
        bytes_per_s: int | None = None,
        seed: int = 1,
    ) -> None:
        self.clock = HeapClock()
        self.network = SimulatedNetwork(self.clock, seed, latency_s, bytes_per_s)
        self._root = Path(directory)
        self._root.mkdir(parents=True, exist_ok=True)
        if any(self._root.iterdir()):
            raise FileExistsError(f"{self._root} is not empty; give a new directory")
        self.servers = [
            SimulatedServer(self.network, f"s{n}", self._root / f"s{n}") for n in range(servers)
        ]
        self._grids: list[Grid] = []

    @property
    def names(self) -> list[str]:
        """The names of the servers' hosts, for ``FaultPlan.random``."""
        return [server.name for server in self.servers]

    def client(
        self, name: str = "client", *, needed: int = 3, total: int = 10, happy: int = 7
    ) -> Grid:
        """
        Return a ``Grid`` that knows all servers, on the host with this name.

        Args:
            name: of the host. Each host is a different user, with its own lease secret.
            needed: how many shares restore a file (k).
            total: how many shares a file has (n).
            happy: on how many distinct servers a put must place shares.
        """
        clock: Any = self.network.host(name).clock
        windows = Windows.shared_by(max(1, min(total, len(self.servers))))
        peers = []
        for server in self.servers:
            connected = self._connect(name, server)
            seen = partial(getattr, connected, "round_trip_s", None)
            peers.append(Peer(connected, windows.pipeline(clock, seen), "https"))
        secret = tagged_hash(b"simulated client", name.encode())[:32]
        config = GridConfig(self._root, Params(needed, total), happy, b"simulated", secret, None)
        workers: Any = InlineWorkers()
        grid = Grid(clock, config, peers, workers)
        self._grids.append(grid)
        return grid

    def _connect(self, client: str, server: SimulatedServer) -> GbsServer:
        lease_seed = tagged_hash(b"simulated server", server.name.encode())[:20]
        identity = ServerIdentity(
            server.name, server.name, permutation_seed(server.name), lease_seed
        )
        nurl = Nurl(b"\0" * 32, server.name, PORT, SWISSNUM)
        clock = self.network.host(client).clock
        endpoint = partial(self.network.endpoint, client, server.name, PORT)
        return GbsServer(identity, nurl, endpoint, clock)

    def run(self, waiting: Deferred[T], limit_s: float = 3600.0) -> T:
        """
        Let virtual time pass until a Deferred fires; return its result or raise its failure.

        Raises:
            Hung: the Deferred did not fire within ``limit_s``; the message lists what is pending.
        """
        return run(self.clock, waiting, limit_s, self.network)

    def round_trips(self, start: Callable[[], Deferred[T]]) -> tuple[T, float]:
        """Run an operation; return its result, and its duration in round trips to the first server."""
        began_s = self.clock.seconds()
        result = self.run(start())
        took_s = self.clock.seconds() - began_s
        return result, self.network.round_trips(took_s, "client", self.servers[0].name)

    def apply(self, plan: FaultPlan) -> None:
        """Apply the faults of a plan; their times count from now."""
        plan.apply(self.network)

    def leaks(self) -> list[str]:
        """Close all clients, wait for every timeout, and return the connections and timers that are left."""
        for grid in self._grids:
            self.run(grid.close())
        self._grids.clear()
        self.clock.advance(_SETTLE_S)
        return leaks(self.clock, self.network)

    def close(self) -> None:
        """Stop the servers and remove their directories."""
        for server in self.servers:
            server.kill()
        shutil.rmtree(self._root, ignore_errors=True)

    def __enter__(self) -> SimulatedGrid:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
