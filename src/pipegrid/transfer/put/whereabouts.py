"""
Where the shares of one upload are: what servers had, what was placed, and how many bytes of all are there.

Pure: told of answers and of ways that have ended; it tells the plan what is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from pipegrid.transfer.peers import Peer
from pipegrid.transfer.progress import Progress, ProgressReport
from pipegrid.transfer.put.plan import UploadPlan


class Underway(Protocol):
    """
    What is asked of the way of a share that has not ended.

    Attributes:
        acknowledged_bytes: what the server has confirmed, or said that it has from before.
        found_bytes: of these, what it had before.
    """

    share_number: int
    acknowledged_bytes: int
    found_bytes: int


class Whereabouts:
    """
    The shares of one upload.

    Args:
        plan: is told what is stored.
        share_bytes: of one share.
        progress: called with acknowledged and total bytes of shares.
        found: called with bytes of shares that servers had before, and with all that there are.

    Attributes:
        placed: which server has a share that was sent here.
        found: which servers had a share before.
    """

    def __init__(
        self,
        plan: UploadPlan[Peer],
        share_bytes: int,
        progress: Progress | None = None,
        found: Progress | None = None,
    ) -> None:
        self.placed: dict[int, Peer] = {}
        self.found: dict[int, set[Peer]] = {}
        self._plan = plan
        self._share_bytes = share_bytes
        self._found_parts: dict[int, int] = {}
        self._progress = ProgressReport(progress, plan.total_shares * share_bytes)
        self._found_before = ProgressReport(found, plan.total_shares * share_bytes)

    def found_at(
        self, peer: Peer, numbers: frozenset[int], sent_before: frozenset[int] = frozenset()
    ) -> set[int]:
        """
        Take in that a server has shares; returns those that can be.

        Args:
            sent_before: of these it is not known whether they were there before.
        """
        if not numbers:
            return set()
        there = {n for n in numbers if n < self._plan.total_shares}
        self._plan.found(peer, there)
        for number in there - sent_before:
            if self.placed.get(number) is not peer:
                self.found.setdefault(number, set()).add(peer)
        return there

    def stored(self, peer: Peer, number: int) -> None:
        """A share that was sent is complete there."""
        self._plan.found(peer, [number])
        if peer not in self.found.get(number, ()):
            self.placed[number] = peer

    def names_placed(self) -> dict[int, str]:
        """Return share numbers with the server that each was sent to."""
        return {number: peer.name for number, peer in sorted(self.placed.items())}

    def names_found(self) -> dict[int, list[str]]:
        """Return share numbers with the servers that had each before."""
        return {
            number: sorted(peer.name for peer in peers)
            for number, peers in sorted(self.found.items())
        }

    @property
    def is_followed(self) -> bool:
        """Whether somebody wants to know how much is stored, whenever it is more."""
        return self._progress.is_wanted

    def report(self, ways: Sequence[Underway]) -> None:
        """Tell who wants to know how much is there by now."""
        if self._found_before.is_wanted:
            self._found_before.report(self.found_bytes(ways))
        if self._progress.is_wanted:
            self._progress.report(self.acknowledged_bytes(ways))

    def finish(self) -> None:
        """Tell that all is stored that will be."""
        self._progress.finish()

    def found_bytes(self, ways: Iterable[Underway]) -> int:
        """Return how much of all shares was there before, of whole ones and of those that were cut off."""
        for way in ways:
            number = way.share_number
            self._found_parts[number] = max(self._found_parts.get(number, 0), way.found_bytes)
        whole: Mapping[int, int] = dict.fromkeys(self.found, self._share_bytes)
        return sum({**self._found_parts, **whole}.values())

    def acknowledged_bytes(self, ways: Iterable[Underway]) -> int:
        """Return how much of all shares is stored, or acknowledged and not lost since."""
        done = dict.fromkeys(self._plan.stored, self._share_bytes)
        for way in ways:  # two may have the same share, and one may have sent a part twice
            number = way.share_number
            done[number] = max(done.get(number, 0), min(way.acknowledged_bytes, self._share_bytes))
        return sum(done.values())
