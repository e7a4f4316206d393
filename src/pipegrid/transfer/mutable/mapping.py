"""
Who has which version of a mutable file: pure, from what servers answered to what follows from it.

A server's answer takes the place of what it said before. A share whose version is not proven counts for
nothing when a version is chosen, but it is there: whoever writes has to test for it, and puts it right.

Source: the format reference for mutable files, sections 5 and 6; that of trees, 7.1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs

from pipegrid.core.mutable.book import ShareBook
from pipegrid.core.mutable.share import MutableShare
from pipegrid.core.mutable.versions import Choice, Holding, Version, choose
from pipegrid.core.placement import place_shares, servers_of_happiness
from pipegrid.errors import CorruptionError, ServerError
from pipegrid.transfer.peers import Peer

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


class ShareMap:
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

    def __init__(self, book: ShareBook, spoilt: Spoilt | None = None) -> None:
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

    def without(self, spoilt: Collection[Copy]) -> ShareMap:
        """Return the same, where these copies count for nothing."""
        other = ShareMap(self.book)
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


def is_settled(found: ShareMap, wanted_answers: int, least: tuple[int, bytes]) -> bool:
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


def is_whole(found: ShareMap, servers: int) -> bool:
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
