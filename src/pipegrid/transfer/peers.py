"""Server and pipeline as transfers see them; call timeouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from pipegrid.core.lease_secrets import ClientSecrets, FileSecrets
from pipegrid.core.placement import permuted
from pipegrid.errors import ServerTimeout
from pipegrid.flow.pipeline import Pipeline
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.failure_messages import Shortfall
from pipegrid.transport.interface import StorageServer
from pipegrid.wire.messages import LeaseSecrets, ServerIdentity, UploadSecrets

# Storage servers as transfers see them, each with the pipeline of writes towards it, and what else they need.
#
# One peer serves all transfers of a grid, so that the files that are put at the same time share
# one window per server, and servers never wait for each other.


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
    def last_activity(self) -> float:
        """
        When bytes last went to the server or came from it, for whatever transfer, by the clock.

        On a slow line what one transfer waits for is behind what others do, for longer than anybody may be
        silent. Who keeps no such book, as a server in this process, is asked for nothing that takes long.
        """
        last_s: float = getattr(self.server, "last_activity_s", -math.inf)
        return last_s


class TransferContext:
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


def server_ids(peers: Iterable[Peer]) -> list[str]:
    """Return the ids of servers, sorted."""
    return sorted(peer.identity.server_id for peer in peers)


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


# How long a server may be silent to one of those who wait for it, while it is busy with others.
#
# On a slow line what one transfer waits for is behind what others do, for longer than anybody may be silent:
# so what a server does for others is a sign of life to all. But one that answers everything except a single
# request must not keep whoever made that waiting for ever: its signs to others count for a while only.

MOST_TIMES = 10
"""So many times as long as a server may be silent altogether it may be silent to one that waits."""


def last_activity_s(own_s: float, server_s: float, silence_s: float) -> float:
    """
    Return when a server gave its last sign of life that counts for one who waits, in seconds of some clock.

    Args:
        own_s: when it gave one to those who wait, or when they began to.
        server_s: when it gave one to whomever.
        silence_s: how long it may give none.
    """
    return max(own_s, min(server_s, own_s + (MOST_TIMES - 1) * silence_s))


# Which of several streams bring next to nothing, while others get on.
#
# A server that sends a byte now and then is never silent. Who wants all of its stream waits for years:
# one such server among honest ones was enough to keep every verification, and every repair, from ending.
# So a stream has to be worth the waiting, too.
#
# A slow line is no server's fault, and all streams share it. So a stream is judged by what others bring:
# it is given up if it has had as long as silence may last, and brought on average less than 1000 bytes a
# second *and* less than a twentieth of what the fastest stream did at its best. Where there is nobody to
# compare it with, as where every server is such a one, it has ten times as long, and then 100 bytes a
# second are enough.
#
# Its time begins with its first byte, for before that it may wait behind others; and while we hold it
# back, it stands still.

SLOWEST_BYTES_PER_S = 1000
"""A server wants as much of those who send to it (``server.gbs.http_connection``)."""

SLOWER_TIMES = 20
SLOWEST_OF_ALL_BYTES_PER_S = 100

_LEAST_S = 10.0
"""What came all at once, came in so long: on a slow line what one stream brings at first says little."""


class StreamRates:
    """
    Those of one operation.

    Args:
        silence_s: how long a server may give no sign of life.

    Attributes:
        best_bytes_per_s: what the fastest has brought at its best.
    """

    def __init__(self, clock: IReactorTime, silence_s: float) -> None:
        self.clock = clock
        self.silence_s = silence_s
        self.best_bytes_per_s = 0.0

    def begin(self) -> SlowStreamDetector:
        """Return what judges one more of them."""
        return SlowStreamDetector(self)


class SlowStreamDetector:
    """
    Whether one stream is worth waiting for.

    Attributes:
        came_bytes: what it has brought.
    """

    def __init__(self, streams: StreamRates) -> None:
        self.came_bytes = 0
        self._streams = streams
        self._began_s: float | None = None
        self._held_since_s: float | None = None
        self._held_s = 0.0

    def came(self, size: int) -> None:
        """So many bytes more have come."""
        if self._began_s is None:
            self._began_s = self._streams.clock.seconds()
        self.came_bytes += size
        self._streams.best_bytes_per_s = max(self._streams.best_bytes_per_s, self._bytes_per_s())

    def hold(self) -> None:
        """Its time stands still: nothing more is taken for now."""
        self._held_since_s = self._streams.clock.seconds()

    def go_on(self) -> None:
        """Its time goes on: what comes is taken again."""
        if self._held_since_s is not None:
            self._held_s += self._streams.clock.seconds() - self._held_since_s
            self._held_since_s = None

    @property
    def took_s(self) -> float:
        """For how long it could have brought something, from its first byte on."""
        if self._began_s is None:
            return 0.0
        now_s = self._streams.clock.seconds() if self._held_since_s is None else self._held_since_s
        return now_s - self._began_s - self._held_s

    def is_fast_enough(self) -> bool:
        """Return whether it is still waited for, as far as this goes."""
        rate, silence_s = self._bytes_per_s(), self._streams.silence_s
        if self.took_s >= MOST_TIMES * silence_s and rate < SLOWEST_OF_ALL_BYTES_PER_S:
            return False
        slow = rate < min(SLOWEST_BYTES_PER_S, self._streams.best_bytes_per_s / SLOWER_TIMES)
        return self.took_s < silence_s or not slow

    def _bytes_per_s(self) -> float:
        return self.came_bytes / max(_LEAST_S, self.took_s)


# Giving up a server that has been silent for too long, where one call is all there is to wait for.

T = TypeVar("T")


class CallTimeout:
    """
    Watches one call.

    Args:
        silence_s: how long the server may give no sign of life, to this call or any other (``silence``).
        more_s: asked when that is over: how much longer, for the time that much data needs.
        worth: of a call that brings a stream: whether that is still worth waiting for.
    """

    def __init__(
        self,
        clock: IReactorTime,
        silence_s: float,
        more_s: Callable[[], float] = lambda: 0.0,
        worth: SlowStreamDetector | None = None,
    ) -> None:
        self._clock = clock
        self._silence_s = silence_s
        self._more_s = more_s
        self._worth = worth
        self._last_activity = clock.seconds()
        self._over = False
        self._call: Deferred[Any] | None = None
        self._peer: Peer | None = None
        self._timer: IDelayedCall | None = None

    def progress(self) -> None:
        """The server has given a sign of life: its silence begins anew."""
        self._last_activity = self._clock.seconds()

    async def answer(self, call: Deferred[T], peer: Peer) -> T:
        """
        Return what the call fires with.

        Args:
            peer: whose answer it is.

        Raises:
            ServerTimeout: nothing came for too long, or next to nothing; the call has been cancelled.
        """
        self._call, self._peer = call, peer
        self._look_in(self._silence_s)
        try:
            return await call
        except CancelledError:
            if not self._over:
                raise
            raise ServerTimeout(f"{peer.name} {self._what_it_did()}", peer.name, True) from None
        finally:
            if self._timer is not None and self._timer.active():
                self._timer.cancel()

    def _look_in(self, delay_s: float) -> None:
        self._timer = self._clock.callLater(delay_s, self._look)

    def _look(self) -> None:
        assert self._peer is not None
        sign_s = last_activity_s(self._last_activity, self._peer.last_activity, self._silence_s)
        end_s = sign_s + self._silence_s + self._more_s()
        left_s = end_s - self._clock.seconds()
        if left_s > 0 and (self._worth is None or self._worth.is_fast_enough()):
            self._look_in(left_s)
        elif self._call is not None:
            self._over = True
            self._call.cancel()

    def _what_it_did(self) -> str:
        worth = self._worth
        if worth is None or worth.is_fast_enough():
            return f"was silent for {self._silence_s:g} s"
        return f"sent no more than {worth.came_bytes} bytes in {worth.took_s:.0f} s"
