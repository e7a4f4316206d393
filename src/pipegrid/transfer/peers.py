"""
Servers with their pipelines, as transfers use them, and everything else that all transfers of a grid share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import attrs
from twisted.internet.interfaces import IReactorTime

from pipegrid.core.hashes import ClientSecrets, FileSecrets
from pipegrid.core.placement import permuted
from pipegrid.flow.pipeline import Pipeline
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.failure_messages import Shortfall
from pipegrid.transport.interface import StorageServer
from pipegrid.wire.storage_messages import LeaseSecrets, ServerIdentity

# Storage servers as transfers use them, each with the pipeline of writes to it; and other things that
# transfers share.
#
# All transfers of a grid share one peer per server. So files that are put at the same time share one window
# per server, and servers never wait for each other.


@attrs.define(eq=False, repr=False)
class Peer:
    """
    One server and its flow control.

    Attributes:
        server: sends requests to the server.
        pipeline: limits how many written bytes the server has not acknowledged.
        protocol, address: how the server is reached, for display.
        preferred: whether the server comes before the others on every file's ring.
        no_uploads: returns the reason why the server gets no new shares now; None: it may get shares.
        certified_by, certified_until: for display: the grid manager that has certified the server, and when
            the certificate expires or has expired; None: no certificate.
        connects_slowly: whether connecting may take tens of seconds, as through Tor.
    """

    server: StorageServer
    pipeline: Pipeline
    protocol: str = "memory"
    address: str = ""
    preferred: bool = False
    no_uploads: Callable[[], str | None] = lambda: None
    certified_by: str | None = None
    certified_until: str | None = None
    connects_slowly: bool = False

    @property
    def identity(self) -> ServerIdentity:
        """The server's identity; the same as ``server.identity``."""
        return self.server.identity

    @property
    def name(self) -> str:
        """The server's nickname, for messages."""
        return self.server.identity.nickname

    @property
    def takes_uploads(self) -> bool:
        """Whether the server may get new shares; its existing shares are read in any case."""
        return self.no_uploads() is None

    @property
    def last_activity(self) -> float:
        """
        When bytes last went to the server or came from it, for any transfer, by the clock.

        On a slow link a transfer's request may wait for the requests of other transfers longer than the time
        limit for silence. A server object without this record, such as one in this process, handles only
        quick requests; for such an object the value is minus infinity.
        """
        last_s: float = getattr(self.server, "last_activity_s", -math.inf)
        return last_s


class TransferContext:
    """
    What all transfers of one grid share.

    Attributes:
        clock: the clock of the reactor.
        workers: threads for work that takes long.
        peers: the servers that may be used, in any order; the list may change.
        secrets: the client's secrets, from which the secrets of files derive.
        shortfall: counts the writes that reached fewer servers than wanted.
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
        """The peers that may get new shares."""
        return [peer for peer in self.peers if peer.takes_uploads]


def server_ids(peers: Iterable[Peer]) -> list[str]:
    """Return the ids of servers, sorted."""
    return sorted(peer.identity.server_id for peer in peers)


def lease_secrets(secrets: FileSecrets, server: ServerIdentity) -> LeaseSecrets:
    """Return the secrets of a file's lease on a server."""
    derived = secrets.for_server(server.lease_seed)
    return LeaseSecrets(derived.renew, derived.cancel)


def ring(storage_index: bytes, peers: Iterable[Peer]) -> list[Peer]:
    """Return the peers in the order in which this file's shares are placed and searched."""
    seeds = {peer: peer.identity.permutation_seed for peer in peers}
    return permuted(storage_index, seeds, {peer for peer in seeds if peer.preferred})
