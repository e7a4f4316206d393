"""
Servers that refuse what they have just said that they expect: from looks and refusals to whom to leave out.

Whoever is refused by an honest server finds there, when it looks again, what somebody else has written
meanwhile: a version that is signed, new there, and has no lower number than that which the refused write was
made from. A server that refuses again and again, and each time shows nothing of the kind, but perhaps one
more of the old versions that it has kept, would keep a writer busy until its patience ends, alone against
all the others. It is left out of this change, as if it could not be reached: what is acknowledged without it
still needs as many servers as ever.

Who did not answer the look is not judged: it may have what must not be written over (``told``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from pipegrid.core.mutable.versions import Version
from pipegrid.errors import ServerError
from pipegrid.transfer.mutable.mapping import ShareMap
from pipegrid.transfer.mutable.publishing import Outcome
from pipegrid.transfer.peers import Peer

REFUSALS = 3
"""So many in a row, without a sign of anybody else, are enough."""


class Contrary:
    """
    What servers have said in the course of one change.

    Attributes:
        left_out: servers that are not to be written, and why.
    """

    def __init__(self) -> None:
        self.left_out: dict[Peer, ServerError] = {}
        self._shown: dict[Peer, set[Version]] = {}
        self._heard: set[Peer] = set()
        self._refusals: Counter[Peer] = Counter()
        self._least = 0

    def heard(self, found: ShareMap, own: Collection[Version]) -> None:
        """Servers have been looked at; ``own``: versions that say nothing of somebody else."""
        self._heard = set(found.copies)
        for peer, copies in found.copies.items():
            versions = {copy.version for copy in copies.values() if copy.version is not None}
            shown = self._shown.setdefault(peer, set())
            if any(v.sequence_number >= self._least for v in versions - shown - set(own)):
                self._refusals[peer] = 0
            shown |= versions

    def refused(self, outcome: Outcome, base: Version) -> None:
        """A write that was made from this version, found in that look, has met something."""
        self._least = base.sequence_number
        for peer in {*outcome.refused, *outcome.surprises} & self._heard:
            self._refusals[peer] += 1
            if self._refusals[peer] >= REFUSALS:
                self.left_out[peer] = ServerError(
                    f"{peer.name} has refused {REFUSALS} writes in a row of what it showed before "
                    f"each, and no other client has written there; it was left out",
                    peer.name,
                )
