"""Sets of integers as sorted half-open ranges, used for byte ranges that were requested or have arrived."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

Range = tuple[int, int]
"""A half-open range: the first integer, and the integer after the last one."""


class Span(NamedTuple):
    """
    ``length`` bytes of share data from ``offset`` on.

    Attributes:
        can_wait: the reader may delay this span as long as it likes. A span that cannot wait is short.
    """

    offset: int
    length: int
    can_wait: bool = False

    @property
    def end(self) -> int:
        """The offset after the last byte of the span."""
        return self.offset + self.length


class Spans:
    """
    A set of integers as disjoint ranges [start, end) that do not touch each other.

    An operation costs a binary search, a step for each range that it touches, and moving the ranges after
    these. A transfer in order keeps the set at a few ranges, and only changes the end of one.

    Attributes:
        total: the number of integers.
    """

    __slots__ = ("_ends", "_starts", "total")

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.total = 0
        self.update(ranges)

    @classmethod
    def up_to(cls, end: int) -> Spans:
        """Return the set [0, end). Faster than ``add``, for small shares that arrive as a whole."""
        made = cls.__new__(cls)
        made._starts, made._ends, made.total = ([0], [end], end) if end > 0 else ([], [], 0)
        return made

    def __iter__(self) -> Iterator[Range]:
        return iter(list(zip(self._starts, self._ends, strict=True)))

    def __len__(self) -> int:
        """Return the number of ranges."""
        return len(self._starts)

    def __repr__(self) -> str:
        return f"Spans({list(self)})"

    def update(self, ranges: Iterable[Range]) -> None:
        """Add half-open ranges, each as ``add`` does."""
        for start, end in ranges:
            self.add(start, end)

    def add(self, start: int, end: int) -> None:
        """Add [start, end) to the set."""
        if start >= end:
            return
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
            self.total -= sum(self._ends[first:last]) - sum(self._starts[first:last])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        self.total += end - start

    def remove(self, start: int, end: int) -> None:
        """Remove [start, end) from the set."""
        if start >= end:
            return
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        if first >= last:
            return
        starts, ends = [], []
        if self._starts[first] < start:
            starts.append(self._starts[first])
            ends.append(start)
        if self._ends[last - 1] > end:
            starts.append(end)
            ends.append(self._ends[last - 1])
        self.total -= sum(self._ends[first:last]) - sum(self._starts[first:last])
        self.total += sum(ends) - sum(starts)
        self._starts[first:last] = starts
        self._ends[first:last] = ends

    def contains(self, start: int, end: int) -> bool:
        """Return whether all of [start, end) is in the set; an empty range always is."""
        if start >= end:
            return True
        i = bisect_right(self._starts, start) - 1
        return i >= 0 and self._ends[i] >= end

    def overlap(self, start: int, end: int) -> list[Range]:
        """Return the parts of [start, end) that are in the set."""
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        return [(max(start, self._starts[i]), min(end, self._ends[i])) for i in range(first, last)]

    def gaps(self, start: int, end: int) -> list[Range]:
        """Return the parts of [start, end) that are not in the set."""
        if start >= end:
            return []
        # A download asks for the same range repeatedly, and usually all of the range has arrived or none of
        # it: these cases first.
        first = bisect_right(self._ends, start)
        if first == len(self._starts) or self._starts[first] >= end:
            return [(start, end)]
        if self._starts[first] <= start and self._ends[first] >= end:
            return []
        missing = []
        position = start
        for a, b in self.overlap(start, end):
            if position < a:
                missing.append((position, a))
            position = b
        if position < end:
            missing.append((position, end))
        return missing

    def merged(self, gap: int) -> list[Range]:
        """Return the ranges; ranges at most ``gap`` apart are joined."""
        joined: list[Range] = []
        for start, end in self:
            if joined and start - joined[-1][1] <= gap:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        return joined
