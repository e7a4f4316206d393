"""
The bytes of one share that were asked for: what is under way, what has come.

Only bytes that were asked for are kept, each once, until they are released: so no server can
make a reader hold more than it chose to ask. Large pieces are kept by reference and never joined;
small ones are copied together, since a thousand tiny buffers cost far more than their bytes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from pipegrid.core.hashes import Buffer
from pipegrid.core.spans import Spans

_SMALL_BYTES = 4096
"""Below this, a piece is copied: a reference to it might pin a much larger buffer."""

_GATHERED_BYTES = 1 << 16
"""Small pieces are copied together up to this size."""


class ShareBytes:
    """
    Part of a share's data, addressed by offset.

    Attributes:
        end: no byte at or after this offset exists, as far as the server says; None if unknown.
        keeps: nothing is released; for whoever needs a part twice, and little of the share.
    """

    __slots__ = ("_asked", "_have", "_pieces", "_starts", "_under_way", "end", "keeps")

    def __init__(self) -> None:
        self.end: int | None = None
        self.keeps = False
        self._asked = Spans()
        self._under_way = Spans()
        self._have = Spans()
        # Sorted and disjoint; piece i begins at share offset _starts[i].
        self._starts: list[int] = []
        self._pieces: list[memoryview | bytearray] = []

    def ask(self, start: int, end: int) -> list[tuple[int, int]]:
        """Mark [start, end) as asked for; return the parts that were not before."""
        if self.end is not None:
            end = min(end, self.end)
        fresh = self._asked.gaps(start, end)
        for a, b in fresh:
            self._asked.add(a, b)
            self._under_way.add(a, b)
        return fresh

    def forget_asked(self) -> None:
        """What is under way will not come: it may be asked for again."""
        for a, b in self._under_way:
            self._asked.remove(a, b)
        self._under_way = Spans()

    def put(self, offset: int, data: Buffer) -> None:
        """
        Keep those bytes of data that were asked for and did not come before.

        The buffer is kept by reference and must not change any more.
        """
        view = memoryview(data).cast("B")
        if not len(view):
            return  # a piece without bytes would stand before the one that begins there
        for start, end in self._under_way.overlap(offset, offset + len(view)):
            self._under_way.remove(start, end)
            self._have.add(start, end)
            self._insert(start, view[start - offset : end - offset])

    def _insert(self, start: int, view: memoryview) -> None:
        i = bisect_left(self._starts, start)
        if len(view) >= _SMALL_BYTES:
            self._starts.insert(i, start)
            self._pieces.insert(i, view)
            return
        if i:
            before = self._pieces[i - 1]
            if (
                isinstance(before, bytearray)
                and self._starts[i - 1] + len(before) == start
                and len(before) < _GATHERED_BYTES
            ):
                try:
                    before.extend(view)
                except BufferError:
                    pass  # somebody reads it at this moment, so it cannot move
                else:
                    return
        self._starts.insert(i, start)
        self._pieces.insert(i, bytearray(view))

    def set_end(self, offset: int) -> None:
        """The share has no bytes at or after offset; do not wait for them."""
        self.end = offset if self.end is None else min(self.end, offset)
        for start, end in self._under_way:
            self._under_way.remove(max(start, self.end), end)

    @property
    def held_bytes(self) -> int:
        """How many bytes have come and were not released."""
        return self._have.total

    def has(self, start: int, end: int) -> bool:
        """Say whether all of [start, end) has come and was not released."""
        return self._have.contains(start, end)

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of [start, end) that have not come, or were released."""
        return self._have.gaps(start, end)

    def pieces(self, start: int, end: int) -> list[memoryview]:
        """Return [start, end), all of which must be here, as the pieces it came in."""
        views = []
        i = max(0, bisect_right(self._starts, start) - 1)
        while start < end:
            at = start - self._starts[i]
            view = memoryview(self._pieces[i])[at : at + end - start]
            assert len(view) > 0, "pieces() of bytes that are not here"
            views.append(view)
            start += len(view)
            i += 1
        return views

    def read(self, start: int, end: int) -> bytes:
        """Return [start, end), all of which must be here, as one copy: for small parts."""
        return b"".join(self.pieces(start, end))

    def release(self, start: int, end: int) -> None:
        """
        Whoever needed [start, end) is done with it: drop it, also what of it is still to come.

        Another part may claim the same bytes, if a header lies; it can ask for them again.
        """
        if self.keeps:
            return
        self._asked.remove(start, end)
        self._under_way.remove(start, end)
        for a, b in self._have.overlap(start, end):
            self._have.remove(a, b)
            self._cut_out(a, b)

    def _cut_out(self, start: int, end: int) -> None:
        first = max(0, bisect_right(self._starts, start) - 1)
        last = bisect_left(self._starts, end)
        starts: list[int] = []
        pieces: list[memoryview | bytearray] = []
        for i in range(first, last):
            piece_start, piece = self._starts[i], self._pieces[i]
            piece_end = piece_start + len(piece)
            for a, b in ((piece_start, min(piece_end, start)), (max(piece_start, end), piece_end)):
                if a < b:
                    starts.append(a)
                    pieces.append(memoryview(piece)[a - piece_start : b - piece_start])
        self._starts[first:last] = starts
        self._pieces[first:last] = pieces

    def clear(self) -> None:
        """Drop everything, and take nothing more."""
        self._under_way = Spans()
        self._have = Spans()
        self._starts = []
        self._pieces = []
