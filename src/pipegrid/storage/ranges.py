"""Which bytes of something are there: a set of half-open ranges of whole numbers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Range = tuple[int, int]


class Ranges:
    """
    A set of whole numbers, kept as sorted, disjoint, non-adjacent ranges ``(begin, end)``.

    Adding costs a search, and a shift of what lies behind; in order it only moves one end.
    """

    __slots__ = ("_begins", "_ends", "total")

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        self.total = 0
        for begin, end in ranges:
            self.add(begin, end)

    def __iter__(self) -> Iterator[Range]:
        return zip(self._begins, self._ends, strict=True)

    def __len__(self) -> int:
        """Return the number of separate ranges."""
        return len(self._begins)

    def __repr__(self) -> str:
        return f"Ranges({list(self)!r})"

    def add(self, begin: int, end: int) -> None:
        """Add ``[begin, end)``."""
        if begin >= end:
            return
        first = bisect_left(self._ends, begin)
        last = bisect_right(self._begins, end)
        if first < last:
            begin = min(begin, self._begins[first])
            end = max(end, self._ends[last - 1])
            self.total -= sum(self._ends[first:last]) - sum(self._begins[first:last])
        self._begins[first:last] = [begin]
        self._ends[first:last] = [end]
        self.total += end - begin

    def within(self, begin: int, end: int) -> Iterator[Range]:
        """Yield the parts of ``[begin, end)`` that are in the set, ascending."""
        if begin >= end:
            return
        index = bisect_right(self._ends, begin)
        while index < len(self._begins) and self._begins[index] < end:
            yield max(begin, self._begins[index]), min(end, self._ends[index])
            index += 1

    def missing(self, begin: int, end: int) -> Iterator[Range]:
        """Yield the parts of ``[begin, end)`` that are not in the set, ascending."""
        at = begin
        for there_begin, there_end in self.within(begin, end):
            if at < there_begin:
                yield at, there_begin
            at = there_end
        if at < end:
            yield at, end
