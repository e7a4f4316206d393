"""
Which segments of a file are there already, as far as is known, and which have to be fetched.

What an interrupted get has left is not believed: each segment counts as there only until its hash says
otherwise, and is fetched then. They are checked in order, mostly while the others are fetched. If the first
one is bad, perhaps all are, since the part is of another file: then some others are tried first, spread
over the part, and if none is good all of it is forgotten, so that it is not fetched piece by piece.

A segment of which only a part is wanted cannot be checked, and so it is always fetched: at most the first and
the last of a range.

Pure: told of bytes and of what was found, in segment numbers.
"""

from __future__ import annotations

from pipegrid.core.params import Geometry
from pipegrid.core.spans import Spans
from pipegrid.core.verifiedtree import GROUP_LEAVES

_PROBES = 8


class InPlace(bytes):
    """
    An empty piece of plaintext, which stands for bytes that are in their place already.

    Attributes:
        length: how many.
    """

    length: int

    @classmethod
    def of(cls, length: int) -> InPlace:
        """Return one for so many bytes."""
        piece = cls()
        piece.length = length
        return piece


class SegmentsHere:
    """
    The segments of one range that may be there.

    Args:
        start, end: of the range, in bytes of the file.
        found_bytes: how many bytes of it are there, from its start on.

    Attributes:
        good, bad: how many were found to be so.
        good_bytes: of the range, in those that were found to be good.
    """

    def __init__(self, geometry: Geometry, start: int, end: int, found_bytes: int) -> None:
        self._geometry = geometry
        size = geometry.segment_bytes
        until = min(start + found_bytes, end)
        first = -(-start // size)
        # The last segment of the file is whole where the file ends.
        last = geometry.num_segments if until == geometry.size else until // size
        self._here = Spans([(first, last)] if first < last else [])
        self._unchecked = Spans(self._here)
        self._probes = self._spread(first, last) if first < last else []
        self.good = 0
        self.bad = 0
        self.good_bytes = 0

    def _spread(self, first: int, last: int) -> list[int]:
        # Within those whose hashes are read at first: of a huge file not all are.
        count = min(last - first, GROUP_LEAVES)
        return sorted({first + count * i // _PROBES for i in range(_PROBES)} - {first})

    def __bool__(self) -> bool:
        """Whether any may be there."""
        return len(self._here) > 0

    def has(self, segment: int) -> bool:
        """Whether it may be there, or is."""
        return self._here.contains(segment, segment + 1)

    def missing(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the runs [first, end) of segments that have to be fetched."""
        return self._here.gaps(first, end)

    def to_check(self, segment: int) -> list[int]:
        """
        Return what to check now, when it is this segment's turn.

        While all that is known is that the first was bad, it is the probes; the segment waits.
        """
        if self.bad and not self.good and self._probes:
            return self._probes
        return [segment]

    def unchecked_bytes(self, first: int, end: int) -> int:
        """Return about how many bytes of segments [first, end) have to be checked yet."""
        runs = self._unchecked.overlap(first, end)
        return sum(b - a for a, b in runs) * self._geometry.segment_bytes

    def is_unchecked(self, segment: int) -> bool:
        """Whether nothing is known of it but that it may be there."""
        return self._unchecked.contains(segment, segment + 1)

    def checked(self, segment: int, good: bool) -> bool:
        """
        A segment was looked at.

        Returns:
            whether all that was thought to be there has just been forgotten.
        """
        was_unchecked = self.is_unchecked(segment)
        self._unchecked.remove(segment, segment + 1)
        if segment in self._probes:
            self._probes.remove(segment)
        if good:
            if was_unchecked:
                self.good += 1
                self.good_bytes += self._geometry.segment_length(segment)
            return False
        self.bad += 1
        self._here.remove(segment, segment + 1)
        if self.good or self._probes:
            return False
        was_any = len(self._here) > 0
        self._here, self._unchecked = Spans(), Spans()
        return was_any
