"""The servermap (which server has which version), and the queries that update it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from pipegrid.core.mutable.mutable_share import MutableShare, VerifiedVersions
from pipegrid.core.mutable.versions import Choice, Holding, Version, choose
from pipegrid.core.placement import place_shares, servers_of_happiness
from pipegrid.errors import CorruptionError, ServerError
from pipegrid.reactor.deferreds import RequestSet
from pipegrid.transfer.mutable.slot_client import Slot
from pipegrid.transfer.peers import Peer

# Which server has which version of a mutable file. Pure: the caller passes servers' responses, and gets
# conclusions.
#
# A server's later response replaces its earlier response. A share whose version is not proven is ignored when
# a version is chosen. But such a share is recorded, since a writer must test for it, and overwrites it.
#
# Source: Tahoe-LAFS's ``mutable.rst``, and how 1.20 behaves; ``dirnodes.rst``.

HEAD_BYTES = 57
"""
Number of bytes that a writer tests: the length of the checkstring of SDMF. The checkstring of MDMF is
shorter, and the bytes after it never change within a version.
"""


class Copy(NamedTuple):
    """
    One share on one server.

    Attributes:
        head: the first 57 bytes of the share, or all of a shorter share.
        share: the parts received so far; None if the share is damaged or its version is not proven.
        version: the version, if its signature is proven; otherwise None.
    """

    peer: Peer
    number: int
    head: bytes
    share: MutableShare | None
    version: Version | None


Spoilt = Mapping[tuple[str, int, Version], CorruptionError]
"""
Shares whose content does not match the version that they claim. Maps the server's id, the share number and
the claimed version to the error that describes the damage.
"""


class ServerMap:
    """
    What servers have responded about one file.

    Args:
        spoilt: known damaged shares; a share counts as damaged while its server still has the same version of
            it.

    Attributes:
        book: the keys and versions that were proven.
        copies: the shares of each server that responded.
        failed: the servers that did not respond; maps each to its error.
        corrupt: errors that describe damaged shares; each error names its server.
        spoilt_versions: the versions that damaged shares claim.
    """

    def __init__(self, book: VerifiedVersions, spoilt: Spoilt | None = None) -> None:
        self.book = book
        self.spoilt_versions: set[Version] = set()
        self._spoilt = spoilt or {}
        self.copies: dict[Peer, dict[int, Copy]] = {}
        self.failed: dict[Peer, ServerError] = {}
        self.corrupt: list[CorruptionError] = []
        self._choice: Choice | None = None

    def heard(self, peer: Peer, found: Mapping[int, bytes], length: int) -> None:
        """Record a server's response: the first ``length`` bytes of each share, or all of a shorter one."""
        self.failed.pop(peer, None)
        self._choice = None
        self.copies[peer] = {
            number: self._copy(peer, number, data, length) for number, data in sorted(found.items())
        }

    def _copy(self, peer: Peer, number: int, data: bytes, length: int) -> Copy:
        head = bytes(data[:HEAD_BYTES])
        share = MutableShare(number)
        try:
            share.answered(0, length, data)
            version = self.book.check(share)
            if version is not None and number >= version.total_shares:
                version = None
            if version is not None:
                spoilt = self._spoilt.get((peer.identity.server_id, number, version))
                if spoilt is not None:
                    self.spoilt_versions.add(version)
                    raise spoilt
        except CorruptionError as error:
            error.server = peer.name
            self.corrupt.append(error)
            return Copy(peer, number, head, None, None)
        return Copy(peer, number, head, share if version is not None else None, version)

    def without(self, spoilt: Collection[Copy]) -> ServerMap:
        """Return a copy of this map in which the versions of the shares ``spoilt`` are unknown."""
        other = ServerMap(self.book)
        other.failed, other.corrupt = self.failed, self.corrupt
        other.copies = {
            peer: {
                number: Copy(peer, number, copy.head, None, None) if copy in spoilt else copy
                for number, copy in copies.items()
            }
            for peer, copies in self.copies.items()
        }
        return other

    @property
    def answered(self) -> int:
        """Number of servers that have responded, including servers without a share."""
        return len(self.copies)

    def holders(self, version: Version) -> dict[int, list[Copy]]:
        """
        Return the copies of a version's shares: a dict from share number to copies in the order of the
        responses.
        """
        found: dict[int, list[Copy]] = {}
        for copies in self.copies.values():
            for copy in copies.values():
                if copy.version == version:
                    found.setdefault(copy.number, []).append(copy)
        return dict(sorted(found.items()))

    def choice(self) -> Choice:
        """Return which versions can be read, and which is best."""
        if self._choice is None:
            self._choice = choose(
                Holding(peer, copy.number, copy.version)
                for peer, copies in self.copies.items()
                for copy in copies.values()
                if copy.version is not None
            )
        return self._choice

    def heads(self) -> dict[Peer, dict[int, bytes]]:
        """Return the first bytes of each share on each server."""
        return {
            peer: {number: copy.head for number, copy in copies.items()}
            for peer, copies in self.copies.items()
        }


def is_settled(found: ServerMap, wanted_responses: int, least: tuple[int, bytes]) -> bool:
    """
    Return whether a reader may use the best version without asking further servers.

    Args:
        wanted_responses: number of servers that must have responded, so that a few fast servers cannot make
            the reader use an old version.
        least: sequence number and root hash of the newest version seen before.
    """
    best = found.choice().best
    if best is None or found.answered < wanted_responses:
        return False
    if found.choice().newer_unrecoverable or found.choice().rivals:
        return False
    return (best.sequence_number, best.root_hash) >= least


def is_whole(found: ServerMap, servers: int) -> bool:
    """
    Return whether there is only one version, all its shares are known, and they are on as many different
    servers as possible: all servers of the grid, or one for each share.

    Args:
        servers: number of servers of the grid.
    """
    choice = found.choice()
    if choice.best is None or not choice.healthy():
        return False
    holders = {number: set(peers) for number, peers in choice.shares[choice.best].items()}
    return servers_of_happiness(holders) >= min(servers, choice.best.total_shares)


def place(
    total_shares: int,
    heads: Mapping[Peer, Mapping[int, bytes]],
    order: Sequence[Peer],
    unusable: set[Peer],
    *,
    widely: bool = False,
) -> dict[Peer, dict[int, bytes | None]]:
    """
    Decide which servers get the shares of a new version.

    Every existing share is overwritten where it is, whatever its version. Missing shares go to the servers
    with the fewest shares, in the order of the ring.

    Args:
        heads: first bytes of the existing shares, for all servers that responded.
        order: all servers, in the order of the file's ring.
        unusable: servers that get no shares, since they failed or refuse this client's writes.
        widely: whether to put copies of existing shares on further servers, if that raises happiness.

    Returns:
        Maps a server and a share number to the first bytes that the share has now; None: the share does not
            exist there.
    """
    places: dict[Peer, dict[int, bytes | None]] = {}
    placed: set[int] = set()
    for peer, shares in heads.items():
        if peer in unusable:
            continue
        for number, head in shares.items():
            if number < total_shares and not is_from_the_future(head):
                places.setdefault(peer, {})[number] = head
                placed.add(number)
    for number in range(total_shares):
        if number not in placed:
            home = server_for_share(number, places, heads, order, unusable)
            if home is not None:
                places.setdefault(home, {})[number] = None
    if widely:
        able = [p for p in order if p in heads and p not in unusable and p.takes_uploads]
        others = [peer for peer in places if peer not in able]
        for number, peer in place_shares(able, others, places, total_shares).items():
            if number not in places.get(peer, ()) and number not in heads.get(peer, ()):
                places.setdefault(peer, {})[number] = None
    return places


def server_for_share(
    number: int,
    places: Mapping[Peer, Mapping[int, bytes | None]],
    heads: Mapping[Peer, Mapping[int, bytes]],
    order: Sequence[Peer],
    unusable: set[Peer],
) -> Peer | None:
    """
    Return the server that should get one more share: the first in the ring of those with the fewest shares.
    """
    able = [
        peer
        for peer in order
        if peer not in unusable
        and peer.takes_uploads
        and number not in places.get(peer, {})
        and number not in heads.get(peer, {})
    ]
    return min(able, key=lambda peer: len(places.get(peer, {})), default=None)


def is_from_the_future(head: bytes) -> bool:
    """Return whether a share has an unknown format, and so must not be overwritten."""
    return len(head) > 0 and head[0] > 1


# Queries to servers about a mutable file: which servers are asked, how many, and when to stop.
#
# The first servers of the ring, where writers put shares, are asked at the same time: as many as the file has
# shares, and k more for a writer. If needed, further servers are asked in batches that double. When
# everything else is settled, the query waits for servers that lag only until the grace is over. The query
# ends when a reader may use the result (``is_settled``), or when all queried servers have responded.

Hints = dict[Peer, tuple[int, ...]]
"""Maps a server to the share numbers that it had when it was last asked."""


class ServermapUpdate:
    """
    One query for the versions of a file.

    Args:
        read_bytes: number of bytes to read from the beginning of each share.
        hints: servers that are asked first, together with the first servers of the ring.
        usual: k and n of a file whose version is not known yet.
        opens_key: whether to decrypt the signing key, which takes milliseconds, as soon as a share that
            contains it has arrived, while other responses are outstanding.
        spoilt: damaged shares that earlier queries have found.
    """

    def __init__(
        self,
        slot: Slot,
        book: VerifiedVersions,
        read_bytes: int,
        hints: Hints,
        usual: tuple[int, int],
        *,
        opens_key: bool = False,
        spoilt: Spoilt | None = None,
    ) -> None:
        self._slot = slot
        self._read_bytes = read_bytes
        self._hints = hints
        self._usual = usual
        self._opens_key = opens_key
        self._requests: RequestSet[Peer] = RequestSet(slot.clock)
        self._left = [*hints, *(peer for peer in slot.peers if peer not in hints)]
        self.found = ServerMap(book, spoilt)

    async def for_reader(self, least: tuple[int, bytes]) -> ServerMap:
        """
        Ask servers until there is a version to read, or no server is left to ask.

        Args:
            least: sequence number and root hash of the newest version seen before.
        """
        k, n = self._usual
        # If ``happy`` of the n servers have acknowledged a version, any ``wanted`` of the n servers include
        # at least k that have a share of it.
        wanted = min(max(2 * k, n - min(self._slot.settings.happy, n) + k), n)
        return await self._ask(n, least, lambda: is_settled(self.found, wanted, least))

    async def for_writer(self, least: tuple[int, bytes], quorum: int) -> ServerMap:
        """
        Ask servers that may have shares, until all shares are known or all servers have responded.

        If the known shares are on fewer servers than possible, other servers may have copies, too. A writer
        that does not know of these copies would leave the old version in them.

        Args:
            quorum: number of servers to wait for, no matter how slow they are.
        """
        k, n = self._usual
        return await self._ask(
            n + k,
            least,
            lambda: (
                is_whole(self.found, len(self._slot.peers))
                and is_settled(self.found, quorum, least)
            ),
            quorum,
        )

    async def everyone(self, quorum: int = 0) -> ServerMap:
        """Ask all servers, and wait for all except stragglers. ``quorum``: see ``for_writer``."""
        return await self._ask(len(self._left), (0, b""), lambda: False, quorum)

    async def _ask(
        self,
        first: int,
        least: tuple[int, bytes],
        is_enough: Callable[[], bool],
        quorum: int = 0,
    ) -> ServerMap:
        clock, settings = self._slot.clock, self._slot.settings
        began_s = clock.seconds()
        grace_ends_s: float | None = None
        batch = max(first, len(self._hints))
        try:
            while True:
                if is_enough():
                    return self.found
                if (
                    not self._requests.running
                    or (grace_ends_s or clock.seconds() + 1) <= clock.seconds()
                ):
                    if is_settled(self.found, quorum, least) or not self._left:
                        return self.found
                    self._start(batch)
                    batch *= 2
                    grace_ends_s = None
                elif (
                    grace_ends_s is None
                    and len(self._requests.running) <= max(1, self.found.answered)
                    and is_settled(self.found, quorum, least)
                ):
                    grace_ends_s = clock.seconds() + settings.grace(clock.seconds() - began_s)
                timeout_s = None if grace_ends_s is None else grace_ends_s - clock.seconds()
                await self._requests.wait(timeout_s)
        finally:
            self._requests.cancel()

    def _start(self, count: int) -> None:
        peers, self._left = self._left[:count], self._left[count:]
        for peer in peers:
            self._requests.start(self._look(peer), peer)
        self._requests.changed.fire()

    async def _look(self, peer: Peer) -> None:
        try:
            data = await self._slot.look(peer, self._read_bytes, self._expected(peer))
        except ServerError as error:
            self.found.failed[peer] = error
        else:
            self.found.heard(peer, data, self._read_bytes)
            if self._opens_key and self.found.book.signing_key is None:
                self._open_key(peer)

    def _open_key(self, peer: Peer) -> None:
        for copy in self.found.copies[peer].values():
            if copy.share is not None:
                # a caller that needs the key decrypts it again, and raises the error
                with suppress(CorruptionError):
                    self.found.book.open_signing_key(copy.share)

    def _expected(self, peer: Peer) -> frozenset[int]:
        """
        Return the numbers of the shares that a server probably has: those it had last, or else those of the
        usual placement.
        """
        if peer in self._hints:
            return frozenset(self._hints[peer])
        place = self._slot.peers.index(peer)
        return frozenset(range(place, self._usual[1], len(self._slot.peers)))
