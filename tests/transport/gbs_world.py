"""Real storage servers and clients of them, joined by a simulated network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.protocol import Factory

from pipegrid.core.encoding_parameters import Params
from pipegrid.core.hashes import tagged_hash
from pipegrid.core.mutable import keys
from pipegrid.core.placement import permutation_seed
from pipegrid.disk.durability import Policy
from pipegrid.disk.group_commit import GroupCommit
from pipegrid.flow.pipeline import Pipeline
from pipegrid.flow.window import AutoWindow
from pipegrid.grid.client_config import GridConfig
from pipegrid.grid.file_grid import Grid
from pipegrid.server.gbs.http_connection import GbsSite
from pipegrid.server.gbs.storage_operations import GbsService
from pipegrid.storage.share_store import ShareStore
from pipegrid.testing.clock import HeapClock
from pipegrid.testing.grid import InlineWorkers, abandon_site
from pipegrid.testing.network import SimulatedNetwork, run
from pipegrid.transfer.peers import Peer
from pipegrid.transport.gbs.client import GbsServer
from pipegrid.transport.gbs.requests import GbsSettings
from pipegrid.wire.server_address import Nurl
from pipegrid.wire.storage_messages import ServerIdentity
from tests.storage.support import NOW
from tests.transfer.mutable_world import KeysAtOnce

P = ParamSpec("P")
T = TypeVar("T")

SWISSNUM = "yergyyx6ik6krfzxcgaic6oyibvvo6t2"
PORT = 443
CLIENT = "client"


class StorageHost:
    """
    A storage server on a host of the network; a restart makes a new one on the old directory.

    Args:
        make_factory: another kind of server, from the service.
    """

    def __init__(
        self,
        network: SimulatedNetwork,
        name: str,
        root: Path,
        policy: Policy = "none",
        make_factory: Callable[[GbsService, Any], Factory] | None = None,
    ) -> None:
        self.host = network.host(name)
        self.name = name
        self.root = root
        self.free_bytes = 1 << 40
        self._policy = policy
        self._make_factory = make_factory or GbsSite
        self._start()
        self.host.on_restart.append(self._start)

    def _start(self) -> None:
        self.store = ShareStore(
            self.root,
            clock=lambda: NOW + self.host.clock.seconds(),
            free_bytes=lambda path: self.free_bytes,
            boot_id=lambda: b"b" * 16,
        )
        self.host.on_crash[:] = [self.kill]
        clock = self.host.clock
        service = GbsService(
            self.store, GroupCommit(InlineWorkers(), clock, self._policy), SWISSNUM
        )
        self.factory: Any = self._make_factory(service, clock)
        self.host.listen(PORT, self.factory)

    def kill(self) -> None:
        """Do what the kernel does when the process has gone: close its files."""
        self.store.close()
        if isinstance(self.factory, GbsSite):
            abandon_site(self.factory)


class GbsWorld:
    """
    Servers ``s0``, ``s1``… with a client.

    Args:
        root: where their directories go.
    """

    def __init__(
        self,
        root: Path,
        servers: int = 1,
        *,
        latency_s: float = 0.05,
        bytes_per_s: int | None = None,
        policy: Policy = "none",
        settings: GbsSettings | None = None,
        make_factory: Callable[[GbsService, Any], Factory] | None = None,
    ) -> None:
        self.clock = HeapClock()
        self.network = SimulatedNetwork(
            self.clock, seed=1, latency_s=latency_s, bytes_per_s=bytes_per_s
        )
        self.client = self.network.host(CLIENT)
        self.settings = settings
        self.servers = [
            StorageHost(self.network, f"s{n}", root / f"s{n}", policy, make_factory)
            for n in range(servers)
        ]
        self.keys = KeysAtOnce()

    def connect(
        self,
        number: int = 0,
        endpoints: Callable[[], IStreamClientEndpoint] | None = None,
        seed: str = "",
    ) -> GbsServer:
        """Return a new client of a server."""
        name = f"s{number}"
        lease_seed = tagged_hash(b"test", name.encode())[:20]
        identity = ServerIdentity(name, name, permutation_seed(seed + name), lease_seed)
        return GbsServer(
            identity,
            Nurl(b"\0" * 32, name, PORT, SWISSNUM),
            endpoints or (lambda: self.network.endpoint(CLIENT, name, PORT)),
            self.client.clock,
            self.settings,
        )

    def run(self, waiting: Deferred[T], limit_s: float = 600.0) -> T:
        """Let time pass until it has fired."""
        return run(self.clock, waiting, limit_s, self.network)

    def round_trips(self, began_s: float) -> float:
        """Return how many round trips have passed since then."""
        return self.network.round_trips(self.clock.seconds() - began_s, CLIENT, "s0")

    def close(self) -> None:
        """Close the files of every server."""
        for server in self.servers:
            server.store.close()


class CpuWithKeys(InlineWorkers):
    """
    Has key pairs as well without a tenth of a second of real time for each.

    Args:
        made: gives them, each once in a world.
    """

    def __init__(self, made: KeysAtOnce) -> None:
        super().__init__()
        self._made = made

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """Call it, unless it makes a key."""
        if function is keys.generate:
            made: Any = self._made.take()
            return made  # type: ignore[no-any-return]
        return super().run(function, *args, **kwargs)


def make_grid(world: GbsWorld, seed: str = "", params: Params | None = None) -> Grid:
    """
    Return a grid of all servers of a world, with windows as real grids have them.

    Args:
        seed: another one places the servers elsewhere on every file's ring.
    """
    peers = []
    for number in range(len(world.servers)):
        server = world.connect(number, seed=seed)
        window = AutoWindow(maximum_bytes=6 << 20)
        peers.append(Peer(server, Pipeline(window, world.client.clock), "https"))
    config = GridConfig(Path("."), params or Params(), 7, b"c" * 32, b"l" * 32, None)
    workers: Any = CpuWithKeys(world.keys)
    return Grid(world.client.clock, config, peers, workers)
