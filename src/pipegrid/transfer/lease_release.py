"""
Release this client's leases on many objects at once, so that servers free the space before the leases end.

Servers of PipeGrid accept release requests (``wire.gbs_surveys_releases``); on other servers, leases end when
they expire.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import attrs
from twisted.internet.defer import Deferred

from pipegrid.errors import ServerError
from pipegrid.reactor.deferreds import few_at_a_time
from pipegrid.transfer.peers import Peer, TransferContext, lease_secrets
from pipegrid.transfer.time_limits import CallTimeout
from pipegrid.wire.storage_messages import (
    MAX_RELEASES,
    LeaseRelease,
    LeaseReleases,
    ReleaseAnswers,
    Released,
)

SERVERS_AT_ONCE = 32

BATCHES_AT_ONCE = 4
"""Maximum number of requests in flight, per server on average."""


@runtime_checkable
class ReleasesLeases(Protocol):
    """
    A server object that can send a request to release many leases; not every server supports the request.
    """

    def release_leases(self, request: LeaseReleases) -> Deferred[ReleaseAnswers | None]:
        """Release leases; fire with None if the server does not support releases and has done nothing."""


@attrs.frozen
class ReleaseOutcome:
    """
    What the servers that accept releases have done.

    Attributes:
        done: sum of what was released on all these servers.
        undone: storage indexes whose leases some server may still have.
        problems: the errors because of which leases remain.
    """

    done: Released
    undone: frozenset[bytes]
    problems: tuple[ServerError, ...] = ()


class LeaseReleaser:
    """
    Releases leases of one client.

    Args:
        silence_s: a server without activity for this many seconds counts as unreachable.

    Attributes:
        without: nicknames of the servers that do not accept releases.
    """

    def __init__(self, means: TransferContext, silence_s: float) -> None:
        self._means = means
        self._silence_s = silence_s
        self._since: dict[Peer, int] = {}
        self.without: list[str] = []

    @property
    def is_possible(self) -> bool:
        """Whether any server accepts releases."""
        return bool(self._since)

    async def begin(self) -> None:
        """
        Ask every server for its time; leases that any program renews after that time will not be released.

        Raises:
            ServerError: a server does not respond, so that the current state of the grid is unknown.
        """
        steps = [partial(self._begin_on, peer) for peer in self._means.peers]
        await few_at_a_time(SERVERS_AT_ONCE, steps)
        self.without.sort()

    async def _begin_on(self, peer: Peer) -> None:
        answers = await self._ask(peer, LeaseReleases(0, ()))
        if answers is not None:
            self._since[peer] = answers.now
            return
        self.without.append(peer.name)
        # This server does not accept releases, but it must be reachable, since other objects are read from
        # it.
        await self._timeout().answer(peer.server.version(), peer)

    async def release(self, storage_indexes: Sequence[bytes]) -> ReleaseOutcome:
        """
        Release this client's leases on all shares of these objects, on all servers that accept releases.

        Releasing a lease that does not exist, or twice, does no harm.
        """
        done = Released()
        undone: set[bytes] = set()
        problems: dict[str, ServerError] = {}

        async def on_peer(peer: Peer, batch: Sequence[bytes]) -> None:
            nonlocal done
            request = LeaseReleases(
                self._since[peer], tuple(self._release(each, peer) for each in batch)
            )
            try:
                answers = await self._ask(peer, request)
                if answers is None:
                    raise ServerError(
                        f"{peer.name} takes no releases of leases any more", peer.name
                    )
            except ServerError as error:
                undone.update(batch)
                problems.setdefault(str(error), error)
                return
            for index, result in zip(batch, answers.results, strict=True):
                if isinstance(result, Released):
                    done = done.plus(result)
                    if result.kept:
                        undone.add(index)
                else:
                    undone.add(index)
                    refusal = ServerError(
                        f"{peer.name} could not release a lease (status {result})", peer.name
                    )
                    problems.setdefault(str(refusal), refusal)

        starts = range(0, len(storage_indexes), MAX_RELEASES)
        batches = [storage_indexes[start : start + MAX_RELEASES] for start in starts]
        calls = [partial(on_peer, peer, batch) for batch in batches for peer in self._since]
        await few_at_a_time(BATCHES_AT_ONCE * max(1, len(self._since)), calls)
        return ReleaseOutcome(done, frozenset(undone), tuple(problems.values()))

    def _release(self, storage_index: bytes, peer: Peer) -> LeaseRelease:
        secrets = self._means.secrets.for_file(storage_index)
        return LeaseRelease(storage_index, lease_secrets(secrets, peer.identity).cancel)

    async def _ask(self, peer: Peer, request: LeaseReleases) -> ReleaseAnswers | None:
        if not isinstance(peer.server, ReleasesLeases):
            return None
        return await self._timeout().answer(peer.server.release_leases(request), peer)

    def _timeout(self) -> CallTimeout:
        return CallTimeout(self._means.clock, self._silence_s)
