"""
A whole grid in virtual time: real storage servers on real directories, real clients, and a network between.

Nothing is faked but the network, the clock and the moment when a disk fails. Servers run the GBS protocol on
a ``ShareStore``; clients are ``Grid``s over ``GbsServer``s over ``http11``. A host that crashes forgets
its process as ``kill -9`` does: files are closed, so locks are free, and nothing is written; its
restart makes a new server from the same directory. The CPU takes no time.

TLS is left out unless asked for: it costs real time, and all that it adds in virtual time is one
round trip for a new connection, which can be had without it, and a few bytes. Without it, a wrong swissnum
stands for a wrong key.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IProtocolFactory, IStreamClientEndpoint
from twisted.internet.task import deferLater
from zope.interface import implementer

from pipegrid.core.encoding_parameters import Params
from pipegrid.core.hashes import Buffer, tagged_hash
from pipegrid.core.placement import permutation_seed
from pipegrid.disk.durability import Committable, Disk, Policy
from pipegrid.errors import NoSpace
from pipegrid.flow.pipeline import Pipeline
from pipegrid.flow.window import Window
from pipegrid.grid.client_config import GridConfig
from pipegrid.grid.file_grid import Grid
from pipegrid.grid.server_opening import Windows
from pipegrid.http11.pinned_key import pin_endpoint
from pipegrid.server import identity as identities
from pipegrid.server.listener import PortListener
from pipegrid.storage.share_reader import ShareReader
from pipegrid.storage.share_store import ShareStore
from pipegrid.storage.uploads.incoming_share import IncomingShare
from pipegrid.testing.clock import HeapClock
from pipegrid.testing.grid import EPOCH_S, PORT, SWISSNUM, SimulatedServer
from pipegrid.testing.link_model import Bottleneck
from pipegrid.testing.network import SimulatedNetwork, leaks, run
from pipegrid.testing.simulated_tcp import TcpOptions
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.put.ask_first_policy import AskFirst
from pipegrid.transfer.settings import DownloadSettings, UploadSettings
from pipegrid.transport.gbs.client import GbsServer
from pipegrid.transport.gbs.requests import GbsSettings
from pipegrid.wire.server_address import Nurl
from pipegrid.wire.storage_messages import ServerIdentity
from tests.scratch import scratch_directory
from tests.transfer.mutable_world import KeysAtOnce
from tests.transport.gbs_world import CpuWithKeys

P = ParamSpec("P")
T = TypeVar("T")

WRONG_SWISSNUM = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
CLIENT = "client"
CONVERGENCE = b"world"
LEASE_SECRET = b"s" * 32

LIES = ("claims", "discards", "swaps", "garbles", "invents", "shortens", "overstates")
"""What a server may lie about; see ``LyingStore``."""


@lru_cache(maxsize=1)
def server_identity() -> identities.Identity:
    """The key that all servers share: making one takes longer than most tests."""
    return identities.from_pem(identities.make_pem(), SWISSNUM, "the simulation's key")


# Disks that fail, and servers that lie.


class FailingDisk(Disk):
    """Syncs nothing, since no machine loses its memory here, but fails to when it is to."""

    def __init__(self, host: StorageHost) -> None:
        self._host = host

    def sync_data(self, shares: Sequence[Committable]) -> None:
        """Fail if that is due."""
        self._host.sync()

    def sync_names(self, directories: Mapping[str, int]) -> None:
        """Fail if that is due."""
        self._host.sync()


class LyingStore(ShareStore):
    """
    A store on a disk that may be full, of a server that may lie.

    * ``claims``: it lists shares that it does not have.
    * ``discards``: it says "stored" and throws away.
    * ``swaps``: it gives another share's bytes.
    * ``garbles``: it gives wrong bytes.
    * ``invents``: it gives bytes of shares that it does not have.
    * ``shortens``: it gives less than there is.
    * ``overstates``: of an unfinished share it says that it needs its last byte, and nothing else.
    """

    def __init__(self, host: StorageHost) -> None:
        self._host = host
        super().__init__(
            host.root,
            clock=lambda: EPOCH_S + host.host.clock.seconds(),
            free_bytes=lambda path: host.free_bytes,
            boot_id=lambda: b"b" * 16,
        )
        unfinished = self._unfinished
        self._real_make_lease, self._real_adopt = unfinished._make_lease, unfinished._adopt
        unfinished._make_lease = self._make_lease  # type: ignore[method-assign, assignment]
        unfinished._adopt = self._adopt  # type: ignore[method-assign, assignment]

    def list_shares(self, storage_index: bytes) -> frozenset[int]:
        """List what is there, or more."""
        there = super().list_shares(storage_index)
        return there | self._host.claimed if "claims" in self._host.lies else there

    def open_share(self, storage_index: bytes, share_number: int) -> ShareReader:
        """Open what is there, or something else."""
        lies = self._host.lies
        others = super().list_shares(storage_index) - {share_number} if "swaps" in lies else ()
        if others:
            share_number = min(others)
        there = share_number in super().list_shares(storage_index)
        if not there and "invents" in lies:
            return _InventedReader(1000)
        reader = super().open_share(storage_index, share_number)
        if "shortens" in lies:
            reader.share_bytes //= 2
        if "garbles" in lies:
            read = reader.read
            reader.read = lambda offset, length: _garbled(  # type: ignore[method-assign]
                read(offset, length)
            )
        return reader

    def _make_lease(self, *args: Any) -> bytes:
        if self._host.space_bytes == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._real_make_lease(*args)

    def _adopt(self, *args: Any) -> IncomingShare:
        upload = self._real_adopt(*args)
        _limit(upload, self._host)
        if "overstates" in self._host.lies:
            upload.required = lambda: (  # type: ignore[method-assign]
                (upload.share_bytes - 1, upload.share_bytes),
            )
        if "discards" in self._host.lies:

            def publish() -> tuple[str, ...]:
                upload.discard()
                return ()

            upload.publish = publish  # type: ignore[method-assign]
        return upload


def _limit(upload: IncomingShare, host: StorageHost) -> None:
    """Let an upload meet the end of its disk."""
    fill, lay_out, checkpoint = upload._fill, upload._lay_out, upload.checkpoint

    def limited_fill(fd: int, begin: int, views: list[memoryview], wanted: Any) -> None:
        if host.space_bytes is None:
            fill(fd, begin, views, wanted)
            return
        fitting: list[memoryview] = []
        for view in views:
            fitting.append(view[: host.space_bytes])
            host.space_bytes -= len(fitting[-1])
        short = sum(map(len, fitting)) < sum(map(len, views))
        fill(fd, begin, [view for view in fitting if view], wanted)
        if short:
            raise NoSpace(f"the disk of {host.name} is full")

    def limited_lay_out(lease: bytes, data: Sequence[Buffer], *wanted: Any) -> None:
        if host.space_bytes is not None:
            length = sum(map(len, data))
            if length > host.space_bytes:
                raise NoSpace(f"the disk of {host.name} is full")
            host.space_bytes -= length
        lay_out(lease, data, *wanted)

    def limited_checkpoint() -> None:
        if host.space_bytes == 0:
            raise NoSpace(f"the disk of {host.name} is full")
        checkpoint()

    upload._fill = limited_fill  # type: ignore[method-assign]
    upload._lay_out = limited_lay_out  # type: ignore[method-assign, assignment]
    upload.checkpoint = limited_checkpoint  # type: ignore[method-assign]


def _garbled(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1]) if data else data


class _InventedReader(ShareReader):
    """A share that is not there."""

    def __init__(self, share_bytes: int) -> None:
        super().__init__(-1, share_bytes, "an invented share")

    def _read(self, at: int, length: int) -> bytes:
        return b"\0" * length

    def _close(self) -> None:
        pass


class StorageHost(SimulatedServer):
    """
    A storage server whose disk may fail, and which may lie.

    Attributes:
        free_bytes: what it believes its disk to have.
        space_bytes: what its disk really takes before it is full; None for no end.
        failing_syncs: how many of the next syncs fail.
        lies, claimed: what it lies about, and which shares it claims to have.
    """

    def __init__(
        self, network: SimulatedNetwork, name: str, root: Path, policy: Policy, tls: bool
    ) -> None:
        self.free_bytes = 1 << 40
        self.space_bytes: int | None = None
        self.failing_syncs = 0
        self.lies: frozenset[str] = frozenset()
        self.claimed: frozenset[int] = frozenset()
        self._tls = tls
        super().__init__(network, name, root, policy)

    def make_store(self) -> ShareStore:
        return LyingStore(self)

    def make_disk(self) -> Disk:
        return FailingDisk(self)

    def make_front(self) -> Any:
        if not self._tls:
            return self.site
        clock: Any = self.host.clock
        return PortListener(self.site, server_identity().contexts(), clock)

    def sync(self) -> None:
        """Fail if that is due."""
        if self.failing_syncs:
            self.failing_syncs -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def share_path(self, storage_index: bytes, number: int) -> str:
        """Return where a complete share lies."""
        return self.store._paths.final(storage_index, number)

    def unfinished(self) -> list[str]:
        """Return the names of what lies in ``incoming``."""
        incoming = self.root / "shares/incoming"
        return sorted(os.listdir(incoming)) if incoming.is_dir() else []


# The grid.


class Client:
    """
    One process that uses the grid.

    Attributes:
        name: of its host; ``grid`` and ``peers`` are what it has.
        alive: False when its host has crashed; a restart of the host does not bring it back.
    """

    def __init__(self, world: GridWorld, name: str, grid: Grid, peers: list[Peer]) -> None:
        self._world = world
        self.name = name
        self.host = world.network.host(name)
        self.grid = grid
        self.peers = peers
        self.alive = True
        self.host.on_crash.append(self._die)

    def _die(self) -> None:
        self.alive = False

    @property
    def in_flight_bytes(self) -> int:
        """What it has sent that is not acknowledged."""
        return sum(peer.pipeline.bytes_in_flight for peer in self.peers)

    @property
    def held_bytes(self) -> int:
        """What it holds of that, because the network has not taken it."""
        return sum(peer.pipeline.bytes_held for peer in self.peers)

    def close(self) -> None:
        """End it, if it has not crashed."""
        if self.alive:
            self._world.run(self.grid.close())


@implementer(IStreamClientEndpoint)
class LateEndpoint:
    """
    Connects, and takes so much longer for it.

    Args:
        late_s: before it begins: nobody is to know of a connection that was not shaken hands on.
    """

    def __init__(self, endpoint: IStreamClientEndpoint, clock: Any, late_s: float) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._late_s = late_s

    def connect(self, factory: IProtocolFactory) -> Deferred[Any]:
        """Connect after a while."""
        late: Deferred[Any] = deferLater(self._clock, self._late_s)
        return late.addCallback(lambda _: self._endpoint.connect(factory))


class GridWorld:
    """
    Servers ``s0``, ``s1``…, and clients.

    Args:
        servers: how many.
        latency_s: one way; half a round trip.
        handshake_s: what a new connection takes besides: that of TLS, without its computations.
        bytes_per_s: of each direction of the line to each server; None for infinite.
        shared_bytes_per_s: of the one line that a client has to all servers, instead.
        root: where disks go; by default somewhere fast, and ``close`` removes it.
    """

    def __init__(
        self,
        servers: int = 10,
        *,
        latency_s: float = 0.05,
        handshake_s: float = 0.0,
        bytes_per_s: int | None = None,
        shared_bytes_per_s: int | None = None,
        policy: Policy = "none",
        tls: bool = False,
        seed: int = 1,
        options: TcpOptions | None = None,
        root: Path | None = None,
    ) -> None:
        self.root = scratch_directory() if root is None else root
        self.clock = HeapClock()
        self.network = SimulatedNetwork(self.clock, seed, latency_s, bytes_per_s, options)
        self._latency_s = latency_s
        self._handshake_s = handshake_s
        self._shared_bytes_per_s = shared_bytes_per_s
        self._tls = tls
        self.servers = [
            StorageHost(self.network, f"s{n}", self.root / f"s{n}", policy, tls)
            for n in range(servers)
        ]
        self.clients: list[Client] = []
        self.keys = KeysAtOnce()

    def __getitem__(self, name: str) -> StorageHost:
        """The server of that name."""
        return self.servers[int(name[1:])]

    def client(
        self,
        name: str = CLIENT,
        *,
        params: Params | None = None,
        happy: int = 7,
        servers: Sequence[int] | None = None,
        window: Callable[[], int | Window] | None = None,
        gbs: GbsSettings | None = None,
        upload: UploadSettings | None = None,
        download: DownloadSettings | None = None,
        seed: str = "",
        mistrusted: Collection[str] = (),
        lease_secret: bytes = LEASE_SECRET,
        ask_first: AskFirst = "auto",
    ) -> Client:
        """
        Start a client on a host of its own, or another one on the same.

        Args:
            servers: those that it knows; all by default.
            window: makes the window towards each server; by default as real grids have it.
            seed: another one places the servers elsewhere on every file's ring.
            mistrusted: servers of which it has the wrong key (without TLS: the wrong secret).
            lease_secret: another one is another user.
            ask_first: whether puts ask where shares are before they send any.
        """
        known = range(len(self.servers)) if servers is None else servers
        self._join(name)
        clock: Any = self.network.host(name).clock
        windows = Windows.shared_by(min(10, len(self.servers)))
        peers = []
        for number in known:
            server = self.connect(name, number, gbs, seed, f"s{number}" in mistrusted)
            seen = partial(getattr, server, "round_trip_s", None)
            pipeline = (
                windows.pipeline(clock, seen) if window is None else Pipeline(window(), clock)
            )
            peers.append(Peer(server, pipeline, "https"))
        cpu: Any = CpuWithKeys(self.keys)
        config = GridConfig(
            Path("."),
            params or Params(),
            happy,
            CONVERGENCE,
            lease_secret,
            None,
            ask_first=ask_first,
        )
        grid = Grid(clock, config, peers, cpu, upload_settings=upload, download_settings=download)
        client = Client(self, name, grid, peers)
        self.clients.append(client)
        return client

    def _join(self, name: str) -> None:
        """Give a new client its own line, if there is one to be had."""
        if self._shared_bytes_per_s and name not in self.network.hosts:
            there, back = Bottleneck(self._shared_bytes_per_s), Bottleneck(self._shared_bytes_per_s)
            for server in self.servers:
                self.network.join(name, server.name, self._latency_s, there, back)

    def connect(
        self, client: str, number: int, gbs: GbsSettings | None, seed: str, mistrusted: bool
    ) -> GbsServer:
        """Return a client's view of one server."""
        name = f"s{number}"
        clock = self.network.host(client).clock
        lease_seed = tagged_hash(b"test", name.encode())[:20]
        identity = ServerIdentity(name, name, permutation_seed(seed + name), lease_seed)
        pin, swissnum = b"\0" * 32, SWISSNUM
        if self._tls:
            pin = b"\1" * 32 if mistrusted else server_identity().spki_hash
        elif mistrusted:
            swissnum = WRONG_SWISSNUM

        def endpoint() -> IStreamClientEndpoint:
            plain = self.network.endpoint(client, name, PORT)
            if self._handshake_s:
                return LateEndpoint(plain, clock, self._handshake_s)
            return pin_endpoint(plain, pin, name) if self._tls else plain

        return GbsServer(identity, Nurl(pin, name, PORT, swissnum), endpoint, clock, gbs)

    # Time.

    def run(self, waiting: Deferred[T], limit_s: float = 3600.0) -> T:
        """Let time pass until it has fired; return its result or raise its failure."""
        return run(self.clock, waiting, limit_s, self.network)

    def timed(self, start: Callable[[], Deferred[T]]) -> tuple[T, float]:
        """Return a result and the seconds that it took; then let a second pass."""
        began_s = self.clock.seconds()
        result = self.run(start())
        took_s = self.clock.seconds() - began_s
        self.clock.advance(1)
        return result, took_s

    # The end.

    def leaks(self) -> list[str]:
        """Close all clients, let everybody's patience end, and list what is left."""
        for client in self.clients:
            client.close()
        self.clock.advance(700)
        return leaks(self.clock, self.network)

    def close(self) -> None:
        """Forget the servers and their disks."""
        for server in self.servers:
            server.kill()
        shutil.rmtree(self.root, ignore_errors=True)
