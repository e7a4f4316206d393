"""
A storage server as transfers see it: the server, and the pipeline of writes towards it.

One peer serves all transfers of a grid, so that the files that are put at the same time share
one window per server, and servers never wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from pipegrid.core.ring import permuted
from pipegrid.flow.pipeline import Pipeline
from pipegrid.transport.interface import StorageServer
from pipegrid.wire.messages import ServerIdentity


@attrs.define(eq=False)
class Peer:
    """
    One server and its flow control.

    Attributes:
        server: speaks to it.
        pipeline: bounds the bytes of writes that it has not acknowledged.
        protocol, address: how it is reached, for people.
        preferred: comes before the others on every file's ring.
    """

    server: StorageServer
    pipeline: Pipeline
    protocol: str = "memory"
    address: str = ""
    preferred: bool = False

    @property
    def identity(self) -> ServerIdentity:
        """Who it is."""
        return self.server.identity

    @property
    def name(self) -> str:
        """What a person calls it."""
        return self.server.identity.nickname


def ring(storage_index: bytes, peers: Iterable[Peer]) -> list[Peer]:
    """Return the peers in the order in which this file's shares are placed and searched."""
    seeds = {peer: peer.identity.permutation_seed for peer in peers}
    return permuted(storage_index, seeds, {peer for peer in seeds if peer.preferred})
