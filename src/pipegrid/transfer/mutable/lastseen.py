"""
What servers showed when they were written to, for those that do not answer in time when they are asked: pure.

Writes and questions go on connections of their own, and an answer to a question is the longer one. So a
server may be silent in every look, and refuse every write for the share that nobody expects there: a writer
that is alone would try until its patience ends. What it showed when it refused is expected of it next time.

Only what was older than the version that the refused write was made from is expected so, or part of it or of
a version of one's own. Anything else may be what somebody was told to be stored: it has to be seen in a look,
on whatever server, which decides what to build on; what was built on then is harmless. In any case the server
tests what is expected of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipegrid.core.mutable.versions import Version, checkstring_order
from pipegrid.transfer.mutable.mapping import HEAD_BYTES, ShareMap
from pipegrid.transfer.mutable.publishing import Outcome
from pipegrid.transfer.peers import Peer


class LastSeen:
    """What servers were last seen to have, as far as it can be expected of them."""

    def __init__(self) -> None:
        self._left: dict[Peer, dict[int, bytes]] = {}
        self._doubtful: set[Peer] = set()
        self._harmless: set[bytes] = set()

    def written(
        self, outcome: Outcome, tried: Version, base: Version, own: Iterable[Version]
    ) -> None:
        """
        A write has met somebody or something.

        Args:
            tried: what was written.
            base: what it was made from.
            own: what was tried before.
        """
        harmless = self._harmless
        harmless.update(each.signed_prefix[:HEAD_BYTES] for each in (base, tried, *own))
        for peer, seen in outcome.seen.items():
            left = {number: data[:HEAD_BYTES] for number, data in seen.items()}
            for number, peers in outcome.placed.items():
                if peer in peers:
                    left[number] = tried.signed_prefix[:HEAD_BYTES]
            self._left[peer] = left
            if all(head in harmless for head in left.values()):
                self._doubtful.discard(peer)
            elif not all(head in harmless or _is_older(head, base) for head in left.values()):
                self._doubtful.add(peer)

    def fill_in(self, found: ShareMap) -> dict[Peer, dict[int, bytes]]:
        """Return how each share begins on each server that was heard now, or else when it was written to."""
        self._left = {p: left for p, left in self._left.items() if p not in found.copies}
        self._doubtful -= found.copies.keys()
        expected = {p: left for p, left in self._left.items() if p not in self._doubtful}
        return found.heads() | expected


def _is_older(head: bytes, version: Version) -> bool:
    """Return whether a share is of an older version, or of none at all."""
    order = checkstring_order(head)
    return order is None or order[0] < version.sequence_number
