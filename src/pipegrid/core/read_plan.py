"""
Which ranges of a share to read for a range of segments, and which segments wait for blocks.

Source: the format reference, sections 6 and 7.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pipegrid.core import ueb
from pipegrid.core.encoding_parameters import Geometry
from pipegrid.core.hash_tree import GROUP_LEAVES, group_end, nodes_to_read
from pipegrid.core.hashes import HASH_BYTES, Buffer
from pipegrid.core.layout import ShareLayout
from pipegrid.core.received_share import ShareParts, ShareTree


class ReadPlan(NamedTuple):
    """
    Which segments to read, and the ranges in a share where their parts are.

    Attributes:
        geometry: of the file, known or guessed.
        first: the first segment whose plaintext has not been returned.
        end: the end of the range of segments that the reader wants.
        ahead_bytes: how many bytes of blocks to read from ``first`` on; at least one block is read.
        most_bytes: the limit for blocks, even if it is shorter than one; None for no limit.
        part: only blocks of these segments [first, end); None for all.
    """

    geometry: Geometry
    first: int
    end: int
    ahead_bytes: int
    most_bytes: int | None
    part: tuple[int, int] | None = None

    @property
    def until(self) -> int:
        """The end of the segments to read now."""
        return min(self.end, self.first + max(1, self.ahead_bytes // self.geometry.block_bytes))

    def blocks(self, where: ShareLayout) -> tuple[int, int]:
        """Return the range [start, end) of the blocks to read."""
        first, until = self.first, self.until
        if self.part is not None:
            first = max(first, self.part[0])
            until = max(first, min(until, self.part[1]))
        start, end = block_range(where, self.geometry, first, until)
        return start, end if self.most_bytes is None else min(end, start + self.most_bytes)

    def header(self, share: ShareParts) -> Iterator[tuple[int, int]]:
        """Yield the range of the header, if it is not known."""
        if share.layout is None:
            yield 0, share.header_bytes()

    def chain(self, share: ShareParts, where: ShareLayout) -> Iterator[tuple[int, int]]:
        """Yield the range of the share hash chain, if it is not known."""
        if share.leaf is None:
            yield where.share_hashes, where.uri_extension

    def ueb(self, share: ShareParts, where: ShareLayout) -> tuple[int, int]:
        """Return the range of the UEB; its end is an estimate until its length is known."""
        return where.uri_extension, share.ueb_end(ueb.packed_length(self.geometry), where)

    def tree(self, tree: ShareTree | None, offset: int) -> Iterator[tuple[int, int]]:
        """
        Yield the ranges of the nodes for the next segments, in a stored tree that begins at ``offset``.
        """
        if tree is not None:
            # With tiny blocks, the trees must not become a large part of what is read in advance.
            tree.need(self.first, min(self.until, self.first + GROUP_LEAVES), self.end)
            yield from tree.awaited()
            return
        leaves = self.geometry.num_segments
        for a, b in nodes_to_read(leaves, self.first, min(group_end(leaves, self.first), self.end)):
            yield offset + a * HASH_BYTES, offset + b * HASH_BYTES


def block_range(where: ShareLayout, geometry: Geometry, first: int, end: int) -> tuple[int, int]:
    """Return the range in a share of the blocks of segments [first, end)."""
    stop = end * geometry.block_bytes
    if end == geometry.num_segments:
        stop = geometry.share_data_bytes
    return where.data + first * geometry.block_bytes, where.data + stop


class SegmentQueue:
    """
    The order of segments [first, end): each starts in order, may fail and be tried again, and is returned
    in order.

    Attributes:
        next_delivery: the first segment whose plaintext has not been returned.
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
        """Whether all plaintext has been returned."""
        return self.next_delivery >= self.end

    @property
    def failing(self) -> list[int]:
        """The segments that failed and have not been started again."""
        return sorted(self._retry)

    def candidates(self) -> Iterator[int]:
        """Yield the segments that may be started now, best first."""
        yield from self.failing
        if self._next_start < self.end:
            yield self._next_start

    def started(self, segment: int) -> None:
        """Record that one of the candidates is being decoded."""
        self._retry.discard(segment)
        if segment == self._next_start:
            self._next_start += 1

    def failed(self, segment: int) -> None:
        """Record that a segment must be tried again."""
        self._retry.add(segment)

    def succeeded(self, segment: int, plaintext: list[Buffer]) -> list[Buffer]:
        """Store a segment's plaintext; return all plaintext that is next in order."""
        self._results[segment] = plaintext
        leaving: list[Buffer] = []
        while self.next_delivery in self._results:
            leaving += self._results.pop(self.next_delivery)
            self.next_delivery += 1
        return leaving
