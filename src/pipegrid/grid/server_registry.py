"""The servers of an open grid, and when there are enough of them for an operation to start."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from pipegrid.errors import ServerError, UnhappyError
from pipegrid.grid.servers_yaml import same_address
from pipegrid.reactor.deferreds import timeout_or
from pipegrid.transfer.peers import CallTimeout, Peer
from pipegrid.transfer.results import ServerStatus
from pipegrid.wire.announcements import KnownServer
from pipegrid.wire.server_address import Furl, Nurl

if TYPE_CHECKING:
    from pipegrid.grid.introducer_discovery import Discovery


# The servers of a running grid: they appear and change their addresses; their ids identify them.

MAX_WARNINGS = 100


class Warnings:
    """Sentences for the user: each once, and a bounded number."""

    def __init__(self, sentences: Iterable[str] = ()) -> None:
        self._sentences: dict[str, None] = {}
        for sentence in sentences:
            self.add(sentence)

    def add(self, sentence: str) -> None:
        """Add a sentence, unless it was added before."""
        if len(self._sentences) < MAX_WARNINGS:
            self._sentences[sentence] = None

    def __call__(self) -> tuple[str, ...]:
        return tuple(self._sentences)


class ServerRegistry:
    """
    The peers of a grid, and the servers that cannot be used.

    Args:
        peers: the grid's list, which is changed in place, so that every new transfer sees the current one.
        open_server: makes a peer; its ``ValueError`` says why it cannot.
        preferred: ids of servers that come first in the permuted order of every file.
        warnings: receives a sentence for every server that cannot be used.
        certify: called with a peer and its newest certificates, if only these have changed.
    """

    def __init__(
        self,
        peers: list[Peer],
        open_server: Callable[[KnownServer], Peer],
        preferred: Container[str],
        warnings: Warnings,
        certify: Callable[[Peer, KnownServer], None] = lambda peer, server: None,
    ) -> None:
        self._certify = certify
        self.peers = peers
        self.unusable: dict[str, ServerStatus] = {}
        self._open_server = open_server
        self._preferred = preferred
        self._warnings = warnings
        self._known: dict[str, KnownServer] = {}
        self._fixed: set[str] = set()
        self._fixed_at: dict[Nurl | Furl, str] = {}
        self._leaving: set[Deferred[None]] = set()

    def add_static(self, server: KnownServer) -> None:
        """
        Add a server from the user's file, which takes precedence over announcements with its id or address.

        The user may have given the id "alice" to a server that is announced under its key, so addresses are
        compared as well. Between two announcements addresses are not compared: neither is known to be right,
        and a false one must not cause the other server to be skipped.
        """
        self.found(server)
        server_id = server.identity.server_id
        self._fixed.add(server_id)
        self._fixed_at.update(dict.fromkeys(server.addresses, server_id))

    def found(self, server: KnownServer) -> None:
        """Add a server or change its address; its running requests fail and are sent to other servers."""
        server_id = server.identity.server_id
        before = self._known.get(server_id)
        if server_id in self._fixed or before == server:
            return
        self._known[server_id] = server
        if before == attrs.evolve(server, certificates=before.certificates if before else ()):
            for peer in self.peers:
                if peer.identity.server_id == server_id:
                    self._certify(peer, server)
                    return  # keep its connections
        for address in server.addresses:
            if address in self._fixed_at:
                why = same_address(self._fixed_at[address])
                self._warnings.add(f"server {server.identity.nickname} is skipped: {why}")
                return
        try:
            peer = self._open_server(server)
        except ValueError as error:
            self._skip(server, str(error))
            return
        peer.preferred = server_id in self._preferred
        self.unusable.pop(server_id, None)
        for place, old in enumerate(self.peers):
            if old.identity.server_id == server_id:
                self.peers[place] = peer
                self._disconnect(old)
                return
        self.peers.append(peer)

    def _skip(self, server: KnownServer, reason: str) -> None:
        identity = server.identity
        self._warnings.add(f"server {identity.nickname} is skipped: {reason}")
        if any(peer.identity.server_id == identity.server_id for peer in self.peers):
            return  # keep the previous address, which may still work
        protocol = "https" if server.nurl is not None else "foolscap"
        address = "" if server.furl is None else server.furl.address
        self.unusable[identity.server_id] = ServerStatus(
            identity.nickname,
            identity.server_id,
            protocol,
            address,
            reachable=False,
            reason=reason,
            rtt_s=None,
            version=None,
            available_bytes=None,
        )

    def _disconnect(self, peer: Peer) -> None:
        leaving = peer.server.disconnect()
        self._leaving.add(leaving)

        def gone(_: object) -> None:
            self._leaving.discard(leaving)

        leaving.addBoth(gone)

    @property
    def leaving(self) -> list[Deferred[None]]:
        """Return Deferreds that fire when the connections to previous addresses are closed."""
        return list(self._leaving)


# An operation may start as soon as there are enough servers for it.
#
# By default all known servers count: a transfer finds out in its first round trip which of them respond. Only
# with ``--wait-for N`` it waits until servers have responded.

STATUS_SILENCE_S = 10.0
"""The time limit for a status request, since a person waits for it."""
WAIT_FOR_S = 60.0
"""The longest wait for the servers of ``wait_for``."""
_ASK_AGAIN_S = 1.0
_LOOK_AGAIN_S = 0.05


class Readiness:
    """
    Delays operations until there are enough servers.

    Args:
        peers: the grid's list of peers, which grows.
        discovery: adds servers to the list; None if there are no introducers.
        wait_for: the number of servers that must have responded before the first operation.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        discovery: Discovery | None,
        clock: IReactorTime,
        wait_for: int = 0,
    ) -> None:
        self._peers = peers
        self._discovery = discovery
        self._clock = clock
        self._wait_for = wait_for

    async def wait(self, needed: int, *, all_reported: bool = False, storing: bool = False) -> None:
        """
        Return when an operation that needs this number of servers may start.

        Args:
            all_reported: all servers are needed, so wait until all introducers have responded or failed.
            storing: count only servers that accept shares.

        Raises:
            UnhappyError: there are no servers, or too few responded.
        """
        await self._asked_for()
        if self._discovery is None:
            return
        if all_reported:
            await self._discovery.wait_settled()
        await self._discovery.wait(
            lambda: sum(peer.takes_uploads or not storing for peer in self._peers) >= needed
        )
        if not self._peers:
            statuses = self._discovery.statuses
            reasons = [f"introducer {each.name}: {each.reason}" for each in statuses if each.reason]
            because = f" ({'; '.join(reasons)})" if reasons else ""
            raise UnhappyError(
                f"no storage server is known{because}; see 'pipegrid status', and try again later",
                0,
                needed,
            )

    async def up_or_late(self) -> None:
        """Wait for the servers of ``wait_for``, within its time limit."""
        with contextlib.suppress(UnhappyError):  # the caller reports the status of each server
            await self._asked_for()

    async def more_servers(self) -> bool:
        """Wait for introducers that have not responded yet; returns whether there were any."""
        if self._discovery is None or self._discovery.settled:
            return False
        before = set(self._peers)
        await self._discovery.wait_settled()
        return not before >= set(self._peers)

    async def _asked_for(self) -> None:
        if self._wait_for > 0:
            await self._until_up(self._wait_for)
            self._wait_for = 0

    async def _until_up(self, wanted: int) -> None:
        """Ask all servers repeatedly until this number of them has responded once."""
        deadline = self._clock.seconds() + WAIT_FOR_S
        up: set[Peer] = set()
        asking: dict[Peer, Deferred[None]] = {}

        async def ask(peer: Peer) -> None:
            try:
                watch = CallTimeout(self._clock, STATUS_SILENCE_S)
                await watch.answer(peer.server.version(), peer)
            except ServerError:
                await deferLater(self._clock, _ASK_AGAIN_S, lambda: None)
            else:
                up.add(peer)
            finally:
                asking.pop(peer, None)

        try:
            while True:
                for peer in self._peers:
                    if peer not in up and peer not in asking:
                        asked = Deferred.fromCoroutine(ask(peer))
                        asked.addErrback(lambda failure: failure.trap(CancelledError))
                        if not asked.called:
                            asking[peer] = asked
                if len(up) >= wanted:
                    return
                left_s = deadline - self._clock.seconds()
                if left_s <= 0:
                    raise UnhappyError(
                        f"{len(up)} of the {wanted} servers to wait for answered within "
                        f"{WAIT_FOR_S:g} s; see 'pipegrid status', or wait for fewer",
                        len(up),
                        wanted,
                    )
                # The set changes while waiting: servers respond, and others are announced.
                await timeout_or(Deferred(), min(left_s, _LOOK_AGAIN_S), self._clock)
        finally:
            for asked in list(asking.values()):
                asked.cancel()
