"""The servermap (which server has which version) and the queries that update it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import attrs

from pipegrid.core.mutable.share import MutableShare, VerifiedVersions
from pipegrid.core.mutable.versions import Choice, Holding, Version, choose
from pipegrid.core.placement import place_shares, servers_of_happiness
from pipegrid.errors import CorruptionError, ServerError
from pipegrid.reactor.deferreds import RequestSet
from pipegrid.transfer.mutable.slot import Slot
from pipegrid.transfer.peers import Peer

# Who has which version of a mutable file: pure, from what servers answered to what follows from it.
#
# A server's answer takes the place of what it said before. A share whose version is not proven counts for
# nothing when a version is chosen, but it is there: whoever writes has to test for it, and puts it right.
#
# Source: the format reference for mutable files, sections 5 and 6; that of trees, 7.1.

HEAD_BYTES = 57
"""What a writer tests: the checkstring of SDMF; that of MDMF is shorter, and what follows it is as fixed."""


@attrs.frozen(eq=False)
class Copy:
    """
    One share on one server.

    Attributes:
        head: its first bytes, 57 if it has as many.
        share: what has come of it; None if it is not one that is known here.
        version: as proven by its signature, or None.
    """

    peer: Peer
    number: int
    head: bytes = attrs.field(repr=False)
    share: MutableShare | None = attrs.field(repr=False)
    version: Version | None


Spoilt = Mapping[tuple[str, int, Version], CorruptionError]
"""
Shares that are not what they begin as, and what is wrong: by their server's id, their number, and the version
that they claim.
"""


class ServerMap:
    """
    What servers said of one file.

    Args:
        spoilt: shares that count for nothing, as long as servers have them.

    Attributes:
        book: the keys and versions that were proven.
        copies: of each server that answered, its shares.
        failed: servers that did not answer, and why.
        corrupt: what is wrong with shares, each with its server.
        spoilt_versions: those that spoilt shares claim to be of.
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
        """
        A server has answered: with the first ``length`` bytes of each share, or all of a shorter one.
        """
        self.failed.pop(peer, None)
        self._choice = None
        self.copies[peer] = {
            number: self._copy(peer, number, data, length) for number, data in sorted(found.items())
        }

    def failed_to_answer(self, peer: Peer, error: ServerError) -> None:
        """A server has not answered."""
        self.failed[peer] = error

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
        """Return the same, where these copies count for nothing."""
        other = ServerMap(self.book)
        other.failed, other.corrupt = self.failed, self.corrupt
        other.copies = {
            peer: {
                number: attrs.evolve(copy, share=None, version=None) if copy in spoilt else copy
                for number, copy in copies.items()
            }
            for peer, copies in self.copies.items()
        }
        return other

    @property
    def answered(self) -> int:
        """How many servers have answered, those without a share, too."""
        return len(self.copies)

    def holders(self, version: Version) -> dict[int, list[Copy]]:
        """Return the copies of a version's shares, by share number, in the order of the answers."""
        found: dict[int, list[Copy]] = {}
        for copies in self.copies.values():
            for copy in copies.values():
                if copy.version == version:
                    found.setdefault(copy.number, []).append(copy)
        return dict(sorted(found.items()))

    def choice(self) -> Choice:
        """Return what the versions amount to."""
        if self._choice is None:
            self._choice = choose(
                Holding(peer, copy.number, copy.version)
                for peer, copies in self.copies.items()
                for copy in copies.values()
                if copy.version is not None
            )
        return self._choice

    def heads(self) -> dict[Peer, dict[int, bytes]]:
        """Return how each share on each server begins."""
        return {
            peer: {number: copy.head for number, copy in copies.items()}
            for peer, copies in self.copies.items()
        }


def is_settled(found: ServerMap, wanted_answers: int, least: tuple[int, bytes]) -> bool:
    """
    Return whether a reader may take the best version without asking anybody else.

    Args:
        wanted_answers: so many servers must have answered, lest an old version on the fastest is taken.
        least: sequence number and root hash of the newest version seen before.
    """
    best = found.choice().best
    if best is None or found.answered < wanted_answers:
        return False
    if found.choice().newer_unrecoverable or found.choice().rivals:
        return False
    return (best.sequence_number, best.root_hash) >= least


def is_whole(found: ServerMap, servers: int) -> bool:
    """
    Return whether there is one version, and all of its shares are known, on as many servers as can have them.

    Args:
        servers: how many there are.
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
    Decide where the shares of a new version go.

    Every share that is there is written where it is, whatever version it has. Others go to the servers that
    hold the fewest, in the order of the ring.

    Args:
        heads: how the shares begin that are there, of all servers that answered.
        order: all servers, in the order of the file's ring.
        unusable: those that failed.
        widely: shares that are there go to other servers as well, if more servers count then.

    Returns:
        of each server, what must be there of each share: its first bytes, or None: nothing.
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
            peer_or_none = spare(number, places, heads, order, unusable)
            if peer_or_none is not None:
                places.setdefault(peer_or_none, {})[number] = None
    if widely:
        able = [p for p in order if p in heads and p not in unusable and p.takes_uploads]
        others = [peer for peer in places if peer not in able]
        for number, peer in place_shares(able, others, places, total_shares).items():
            if number not in places.get(peer, ()) and number not in heads.get(peer, ()):
                places.setdefault(peer, {})[number] = None
    return places


def spare(
    number: int,
    places: Mapping[Peer, Mapping[int, bytes | None]],
    heads: Mapping[Peer, Mapping[int, bytes]],
    order: Sequence[Peer],
    unusable: set[Peer],
) -> Peer | None:
    """Return the server that should take one more share: one that holds the fewest, the first of these."""
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
    """Return whether a share is of a format that is not known here, and so is not written over."""
    return len(head) > 0 and head[0] > 1


# Asking servers about a mutable file: whom, how many, and when it is enough.
#
# The first servers of the ring are asked at once, where writers put shares: as many as the file has
# shares, for writers k more; then everybody, in waves that double. Servers that lag behind when all else
# is clear are given their grace, and no more. Waiting ends when a reader may take what it has
# (``mapping.is_settled``), or when all who were asked have answered.

Hints = dict[Peer, frozenset[int]]
"""Which shares servers had when they were last asked."""


class ServermapUpdate:
    """
    One look at a file.

    Args:
        read_bytes: of the beginning of each share.
        hints: these servers are asked first, too.
        usual: how many shares, k and n, a file has whose version is not known yet.
        opens_key: take the signing key from the first share that has it, while others are waited for: that
            takes milliseconds.
        spoilt: shares that earlier looks were misled by.
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
        Ask until there is a version to read, or nobody is left.

        Args:
            least: sequence number and root hash of the newest version seen before.
        """
        k, n = self._usual
        # What was acknowledged by happy servers of n is on k, at least, of so many.
        wanted = min(max(2 * k, n - min(self._slot.settings.happy, n) + k), n)
        return await self._ask(n, least, lambda: is_settled(self.found, wanted, least))

    async def for_writer(self, least: tuple[int, bytes], quorum: int) -> ServerMap:
        """
        Ask those who may have shares, until all shares are known, or all have answered.

        Shares that are known on fewer servers than they could be on may have copies on others, too: a writer
        that does not know of these would leave them behind.

        Args:
            quorum: so many servers are waited for, however slow they are.
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
        """Ask all servers, and wait for all but those that lag far behind; see ``for_writer``."""
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
        wave = max(first, len(self._hints))
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
                    self._start(wave)
                    wave *= 2
                    grace_ends_s = None
                elif (
                    grace_ends_s is None
                    and self._left_few()
                    and is_settled(self.found, quorum, least)
                ):
                    grace_ends_s = clock.seconds() + settings.grace(clock.seconds() - began_s)
                timeout_s = None if grace_ends_s is None else grace_ends_s - clock.seconds()
                await self._requests.wait(timeout_s)
        finally:
            self._requests.cancel()

    def _left_few(self) -> bool:
        return len(self._requests.running) <= max(1, self.found.answered)

    def _start(self, count: int) -> None:
        peers, self._left = self._left[:count], self._left[count:]
        for peer in peers:
            self._requests.start(self._look(peer), peer)
        self._requests.changed.fire()

    async def _look(self, peer: Peer) -> None:
        try:
            data = await self._slot.look(peer, self._read_bytes, self._expected(peer))
        except ServerError as error:
            self.found.failed_to_answer(peer, error)
        else:
            self.found.heard(peer, data, self._read_bytes)
            if self._opens_key and self.found.book.signing_key is None:
                self._open_key(peer)

    def _open_key(self, peer: Peer) -> None:
        for copy in self.found.copies[peer].values():
            if copy.share is not None:
                try:
                    self.found.book.open_signing_key(copy.share)
                except CorruptionError:  # whoever needs the key asks for it, and says so then
                    continue

    def _expected(self, peer: Peer) -> frozenset[int]:
        """Return which shares a server has if writers have put them where they always do."""
        if peer in self._hints:
            return self._hints[peer]
        _, n = self._usual
        place = self._slot.peers.index(peer)
        return frozenset(range(place, n, len(self._slot.peers)))
