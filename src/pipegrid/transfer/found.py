"""
What is known of a file's shares, and what follows from it.

Pure: facts are written down by whoever asked (``check``, ``upkeep``).
"""

from __future__ import annotations

import attrs

from pipegrid.core import layout, ueb
from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.core.params import Params
from pipegrid.core.placement import possible_happiness, servers_of_happiness
from pipegrid.errors import CorruptionError
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.results import CheckResult


@attrs.define
class FoundShares:
    """
    What the servers said.

    Attributes:
        holders: share number to the servers with a copy that is not known to be bad.
        answered: the servers that gave a list of shares, and none of them failed later.
        bad: copies that are damaged, each as share number and server.
        unreachable: nicknames of servers that could not be asked.
        corrupt: what is wrong with the bad copies.
        packed_ueb: of a good share; b"" if none was verified.
        reasons: why servers could not be asked, by their nicknames.
        full: those that answered and take no more shares, as they say.
    """

    holders: dict[int, list[Peer]] = attrs.field(factory=dict)
    answered: list[Peer] = attrs.field(factory=list)
    bad: set[tuple[int, Peer]] = attrs.field(factory=set)
    unreachable: list[str] = attrs.field(factory=list)
    corrupt: list[CorruptionError] = attrs.field(factory=list)
    packed_ueb: bytes = b""
    reasons: dict[str, str] = attrs.field(factory=dict)
    full: set[Peer] = attrs.field(factory=set)

    def sharemap(self) -> dict[int, set[Peer]]:
        """Return share number to the servers that hold a good copy, without shares that none holds."""
        return {number: set(peers) for number, peers in self.holders.items() if peers}

    def possible_happiness(self, total_shares: int) -> int:
        """Return the happiness that a repair can reach with the servers that answered."""
        takers = [peer for peer in self.answered if peer not in self.full and peer.takes_uploads]
        return possible_happiness(self.sharemap(), takers, total_shares, self.bad)

    def could_spread(self, total_shares: int) -> bool:
        """
        Whether nothing is missing, and more servers could have a share, if no more are full than are known
        to be.
        """
        shares = self.sharemap()
        if len(shares) < total_shares:
            return False
        return servers_of_happiness(shares) < self.possible_happiness(total_shares)


def judge(cap: ChkCap | ChkVerifierCap, found: FoundShares) -> CheckResult:
    """Return what follows from what was found."""
    good = {number: peers for number, peers in found.holders.items() if peers}
    reached = servers_of_happiness(found.sharemap())
    possible = found.possible_happiness(cap.total_shares)
    return CheckResult(
        cap=cap,
        healthy=len(good) == cap.total_shares and reached >= possible,
        recoverable=len(good) >= cap.required_shares,
        good_shares={n: sorted([peer.name for peer in good[n]]) for n in sorted(good)},
        corrupt=found.corrupt,
        happiness=reached,
        required_shares=cap.required_shares,
        total_shares=cap.total_shares,
        unreachable=sorted(set(found.unreachable)),
        reasons=dict(sorted(found.reasons.items())),
        possible_happiness=possible,
        servers=len(found.answered) + len(set(found.unreachable)),
    )


@attrs.frozen
class UebPlace:
    """
    Where a share has its UEB, if it was written as most are.

    Attributes:
        offset, length: of the record with its length in front.
        length_bytes: of that length.
    """

    offset: int
    length: int
    length_bytes: int


def ueb_place(cap: ChkCap | ChkVerifierCap) -> UebPlace:
    """Return where the UEB should be."""
    geometry = Params(cap.required_shares, cap.total_shares).geometry(cap.size)
    where = layout.for_geometry(geometry)
    length = where.ueb_length_bytes + ueb.packed_length(geometry)
    return UebPlace(where.uri_extension, length, where.ueb_length_bytes)


def ueb_in(data: bytes, length_bytes: int) -> bytes:
    """Return the record behind its length, if all of it is there."""
    length = int.from_bytes(data[:length_bytes], "big")
    packed = data[length_bytes : length_bytes + length]
    return packed if len(packed) == length <= ueb.MAX_UEB_BYTES else b""


def longest_share(size: int, required_shares: int) -> int:
    """Return what no honest share exceeds: each block may bring three hashes of 32 bytes, doubled."""
    return 200 * (size // required_shares + 1) + (1 << 20)
