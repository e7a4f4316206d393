"""The servers of a grid while it runs: they appear, move to other addresses, and are told apart by id."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

import attrs
from twisted.internet.defer import Deferred

from pipegrid.grid.servers import same_address
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.results import ServerStatus
from pipegrid.wire.announcements import KnownServer
from pipegrid.wire.furl import Furl
from pipegrid.wire.nurl import Nurl

MAX_WARNINGS = 100


class Warnings:
    """Sentences for the user; each once, and not without end."""

    def __init__(self, sentences: Iterable[str] = ()) -> None:
        self._sentences: dict[str, None] = {}
        for sentence in sentences:
            self.add(sentence)

    def add(self, sentence: str) -> None:
        """Say it, if it was not said before."""
        if len(self._sentences) < MAX_WARNINGS:
            self._sentences[sentence] = None

    def __call__(self) -> tuple[str, ...]:
        return tuple(self._sentences)


class Members:
    """
    The peers of a grid, and the servers that cannot be among them.

    Args:
        peers: the grid's list; it is changed in place, so that every new transfer sees the newest.
        open_server: makes a peer; a ``ValueError`` tells why it cannot.
        preferred: ids of servers that come first on every ring.
        warnings: gets a sentence for every server that cannot be used.
        certify: given a peer and its newest certificates, where nothing else has changed.
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
        Add a server of the user's own file: whatever is announced under its id or address, the file is right.

        The user may have called a server "alice" that is announced under its key. Of two announcements nobody
        knows which is right, and one must not be able to have the other's server skipped.
        """
        self.found(server)
        server_id = server.identity.server_id
        self._fixed.add(server_id)
        self._fixed_at.update(dict.fromkeys(server.addresses, server_id))

    def found(self, server: KnownServer) -> None:
        """Add a server, or let it have another address; what is under way there fails, and goes elsewhere."""
        server_id = server.identity.server_id
        before = self._known.get(server_id)
        if server_id in self._fixed or before == server:
            return
        self._known[server_id] = server
        if before == attrs.evolve(server, certificates=before.certificates if before else ()):
            for peer in self.peers:
                if peer.identity.server_id == server_id:
                    self._certify(peer, server)
                    return  # and its connections stay
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
            return  # it was usable before, and perhaps still is
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
        """What fires when the connections to former addresses are gone."""
        return list(self._leaving)
