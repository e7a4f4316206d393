"""
Storage servers as transfers see them, each with the pipeline of writes towards it, and what else they need.

One peer serves all transfers of a grid, so that the files that are put at the same time share
one window per server, and servers never wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import attrs
from twisted.internet.interfaces import IReactorTime

from pipegrid.core.leases import ClientSecrets, FileSecrets
from pipegrid.core.ring import permuted
from pipegrid.flow.pipeline import Pipeline
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.shortfall import Shortfall
from pipegrid.transport.interface import StorageServer
from pipegrid.wire.messages import LeaseSecrets, ServerIdentity, UploadSecrets


@attrs.define(eq=False)
class Peer:
    """
    One server and its flow control.

    Attributes:
        server: speaks to it.
        pipeline: bounds the bytes of writes that it has not acknowledged.
        protocol, address: how it is reached, for people.
        preferred: comes before the others on every file's ring.
        no_uploads: says why the server is given no new shares at this moment; None: it is.
    """

    server: StorageServer
    pipeline: Pipeline
    protocol: str = "memory"
    address: str = ""
    preferred: bool = False
    no_uploads: Callable[[], str | None] = lambda: None

    @property
    def identity(self) -> ServerIdentity:
        """Who the server is; the same as ``server.identity``."""
        return self.server.identity

    @property
    def name(self) -> str:
        """What a person calls it."""
        return self.server.identity.nickname

    @property
    def takes_uploads(self) -> bool:
        """Whether the server may be given new shares; what it has is read from it in any case."""
        return self.no_uploads() is None

    @property
    def last_sign(self) -> float:
        """
        When bytes last went to the server or came from it, for whatever transfer, by the clock.

        On a slow line what one transfer waits for is behind what others do, for longer than anybody may be
        silent. Who keeps no such book, as a server in this process, is asked for nothing that takes long.
        """
        last_s: float = getattr(self.server, "last_sign_s", -math.inf)
        return last_s


class Means:
    """
    What all transfers of one grid work with.

    Attributes:
        clock: the reactor's.
        workers: threads for what takes long.
        peers: servers that may be used, in any order; it may change.
        secrets: of the client, from which those of files derive.
        shortfall: the writes that reached fewer servers than wanted.
    """

    def __init__(
        self,
        clock: IReactorTime,
        workers: CpuWorkers,
        peers: Sequence[Peer],
        secrets: ClientSecrets,
    ) -> None:
        self.clock = clock
        self.workers = workers
        self.peers = peers
        self.secrets = secrets
        self.shortfall = Shortfall()

    @property
    def takers(self) -> list[Peer]:
        """Those of the peers that may be given new shares."""
        return [peer for peer in self.peers if peer.takes_uploads]


def lease_secrets(secrets: FileSecrets, server: ServerIdentity) -> LeaseSecrets:
    """Return the secrets of a file's lease on a server."""
    derived = secrets.for_server(server.lease_seed)
    return LeaseSecrets(derived.renew, derived.cancel)


def upload_secrets(secrets: FileSecrets, server: ServerIdentity) -> UploadSecrets:
    """Return the secrets of a file's upload to a server."""
    derived = secrets.for_server(server.lease_seed)
    return UploadSecrets(LeaseSecrets(derived.renew, derived.cancel), derived.upload)


def ring(storage_index: bytes, peers: Iterable[Peer]) -> list[Peer]:
    """Return the peers in the order in which this file's shares are placed and searched."""
    seeds = {peer: peer.identity.permutation_seed for peer in peers}
    return permuted(storage_index, seeds, {peer for peer in seeds if peer.preferred})
