"""
What came of writing a mutable file.
"""

from __future__ import annotations

import attrs

from pipegrid.core.caps import MutableCap
from pipegrid.core.mutable.versions import Version
from pipegrid.transfer.mutable.publishing import Outcome


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
    """

    version: Version
    placed: dict[int, list[str]]
    attempts: int
    reasons: dict[str, str] = attrs.field(factory=dict)
    written: bool = True


def write_result(version: Version, outcome: Outcome, attempts: int) -> WriteResult:
    """Return what to tell of a version that was written."""
    placed = {
        number: sorted(peer.name for peer in peers)
        for number, peers in sorted(outcome.placed.items())
    }
    reasons = {peer.name: str(error) for peer, error in outcome.failed.items()}
    return WriteResult(version, placed, attempts, reasons)


@attrs.frozen
class CreateResult:
    """A new mutable file: its write cap, and how it was written."""

    cap: MutableCap
    written: WriteResult
