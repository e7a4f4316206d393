"""
Which server is written first, alone, when others may be writing the same mutable file.

All writers agree on it: the first of the file's ring that has a share. Whoever is refused there has touched
nothing else.
"""

from __future__ import annotations

from pipegrid.core.mutable.versions import Version
from pipegrid.transfer.mutable.known import Known
from pipegrid.transfer.mutable.publishing import ExpectedHeads
from pipegrid.transfer.mutable.slot import Slot
from pipegrid.transfer.peers import Peer

CAUTIOUS_S = 60.0
"""So long after others were met, writes have a leader from the start."""


def leader(slot: Slot, known: Known, places: ExpectedHeads) -> Peer | None:
    """Return the server to be written first, if others were met of late."""
    met_s = known.contended_s
    if met_s is None or slot.clock.seconds() - met_s > CAUTIOUS_S:
        return None
    return _first_holder(slot, places)


def leader_of_range(
    slot: Slot, known: Known, places: ExpectedHeads, version: Version
) -> Peer | None:
    """
    Return the server to be written first with a range, whose writer does not have the rest of the content.

    Two such writers whose versions have half of the shares each have destroyed the file if half are too few
    to read it; and nobody could write one whole that is too long for that. So they have a leader at any time.
    """
    is_too_long = version.size > slot.settings.max_content_bytes
    if is_too_long or 2 * version.required_shares > version.total_shares:
        return _first_holder(slot, places)
    return leader(slot, known, places)


def _first_holder(slot: Slot, places: ExpectedHeads) -> Peer | None:
    holders = (
        peer
        for peer in slot.peers
        if any(head is not None for head in places.get(peer, {}).values())
    )
    return next(holders, None)
