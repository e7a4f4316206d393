"""
Which segments are to be tried, which are being tried, and in what order their plaintext leaves.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipegrid.core.hashes import Buffer


class SegmentQueue:
    """
    Segments [first, end): each starts in order, may fail and be tried again, and leaves in order.

    Attributes:
        next_delivery: the first segment whose plaintext has not left.
        end: the end of the range.
    """

    def __init__(self, first: int, end: int) -> None:
        self.next_delivery = first
        self.end = end
        self._next_start = first
        self._retry: set[int] = set()
        self._results: dict[int, list[Buffer]] = {}

    @property
    def done(self) -> bool:
        """Whether all plaintext has left."""
        return self.next_delivery >= self.end

    @property
    def failing(self) -> list[int]:
        """The segments that failed and were not started again."""
        return sorted(self._retry)

    def candidates(self) -> Iterator[int]:
        """Yield the segments that may be started now, best first."""
        yield from self.failing
        if self._next_start < self.end:
            yield self._next_start

    def started(self, segment: int) -> None:
        """One of the candidates is being tried."""
        self._retry.discard(segment)
        if segment == self._next_start:
            self._next_start += 1

    def failed(self, segment: int) -> None:
        """It must be tried again."""
        self._retry.add(segment)

    def succeeded(self, segment: int, plaintext: list[Buffer]) -> list[Buffer]:
        """Hold a segment's plaintext until it is its turn; return all whose turn it is."""
        self._results[segment] = plaintext
        leaving: list[Buffer] = []
        while self.next_delivery in self._results:
            leaving += self._results.pop(self.next_delivery)
            self.next_delivery += 1
        return leaving
