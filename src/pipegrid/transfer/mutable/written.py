"""
What came of writing a mutable file.
"""

from __future__ import annotations

import attrs

from pipegrid.core.caps import MutableCap
from pipegrid.core.mutable.versions import Version
from pipegrid.core.placement import possible_happiness, servers_of_happiness
from pipegrid.transfer.mutable.publishing import Outcome
from pipegrid.transfer.mutable.slot import Slot


@attrs.frozen
class WriteResult:
    """
    A version that was written, and is the one that is there.

    Attributes:
        version: it.
        placed: share number to the nicknames of its servers.
        attempts: how often it was tried.
        reasons: what kept servers from taking shares, if anything did, by nickname.
        written: False if the content was as wanted already.
        happiness: servers of happiness that its shares have reached; 0 if it was not written.
        possible_happiness: the same, had they been spread over all servers that did not fail.
    """

    version: Version
    placed: dict[int, list[str]]
    attempts: int
    reasons: dict[str, str] = attrs.field(factory=dict)
    written: bool = True
    happiness: int = 0
    possible_happiness: int = 0


def write_result(slot: Slot, version: Version, outcome: Outcome, attempts: int) -> WriteResult:
    """Return what to tell of a version that was written, and count it if it reached too few servers."""
    placed = {
        number: sorted(peer.name for peer in peers)
        for number, peers in sorted(outcome.placed.items())
    }
    reasons = {peer.name: str(error) for peer, error in outcome.failed.items()}
    homes = {number: set(peers) for number, peers in outcome.placed.items()}
    takers = [peer for peer in slot.peers if peer.takes_uploads]
    able = [peer for peer in takers if peer not in outcome.failed]
    n = version.total_shares
    reached = servers_of_happiness(homes)
    if slot.shortfall is not None:
        slot.shortfall.note(reached, min(n, len(takers)), reasons)
    possible = possible_happiness(homes, able, n)
    return WriteResult(
        version, placed, attempts, reasons, happiness=reached, possible_happiness=possible
    )


@attrs.frozen
class CreateResult:
    """A new mutable file: its write cap, and how it was written."""

    cap: MutableCap
    written: WriteResult
