"""The registry of an open grid's servers, including those that cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from twisted.internet.defer import Deferred

from pipegrid.grid.servers_and_introducers_yaml import same_address
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.results import ServerStatus
from pipegrid.wire.announcements import KnownServer
from pipegrid.wire.server_address import Furl, Nurl

# The servers of a running grid appear and change their addresses; their ids identify them.

MAX_WARNINGS = 100
IDS_OF_ADDRESSES = ("spki-", "tub-")
"""Prefixes of server ids that were made from a server's address."""


class Warnings:
    """Sentences for the user; each is kept once, up to a maximum number."""

    def __init__(self, sentences: Iterable[str] = ()) -> None:
        self._sentences: dict[str, None] = {}
        for sentence in sentences:
            self.add(sentence)

    def add(self, sentence: str) -> None:
        """Add a sentence, unless it was added before or the maximum number is reached."""
        if len(self._sentences) < MAX_WARNINGS:
            self._sentences[sentence] = None

    def __call__(self) -> tuple[str, ...]:
        return tuple(self._sentences)


class ServerRegistry:
    """
    The peers of a grid, and the servers that cannot be used.

    Args:
        peers: the grid's list, which is changed in place, so that every new transfer uses the current
            servers.
        open_server: makes a peer, or raises ``ValueError`` with the reason why the server cannot be used.
        preferred: ids of servers that come first in the permuted order of every file.
        warnings: receives a sentence for every server that cannot be used.
        certify: called with a peer and its newest announcement, if only the certificates have changed.
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
        self.leaving: set[Deferred[None]] = set()
        """Each fires when the connections to a server's previous address are closed."""

    def add_static(self, server: KnownServer) -> None:
        """
        Add a server from the user's file, which takes precedence over announcements with the same id or
        address.

        Addresses are compared since the user may have given the id "alice" to a server that is announced
        under its key. The addresses of two announcements are not compared: either may be false, and a false
        announcement must not cause the true one to be skipped.
        """
        self.found(server)
        server_id = server.identity.server_id
        self._fixed.add(server_id)
        self._fixed_at.update(dict.fromkeys(server.addresses, server_id))

    def found(self, server: KnownServer) -> None:
        """
        Add a server or change its address, unless the user's file has a server with its id or address.
        Requests that are running at the previous address fail and are sent to other servers.
        """
        server_id = server.identity.server_id
        before = self._known.get(server_id)
        if server_id in self._fixed or before == server:
            return
        self._known[server_id] = server
        if before == server._replace(certificates=before.certificates if before else ()):
            for peer in self.peers:
                if peer.identity.server_id == server_id:
                    self._certify(peer, server)
                    return  # keep the peer's connections
        for address in server.addresses:
            if address in self._fixed_at:
                if self._fixed_at[address].startswith(IDS_OF_ADDRESSES):
                    return  # the user's file lists this server, without its announced id
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
        self.leaving.add(leaving)
        leaving.addBoth(lambda _: self.leaving.discard(leaving))
