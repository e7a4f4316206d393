"""
Where in a share the bytes are that its reader needs next.

Pure arithmetic over a geometry and an offset table, real or guessed. What was asked before, and
what has come, is ``sharebytes``' knowledge.

Source: the format reference, sections 6 and 7.2.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from pipegrid.core import ueb
from pipegrid.core.hashes import HASH_BYTES
from pipegrid.core.layout import ShareLayout
from pipegrid.core.params import Geometry
from pipegrid.core.shareparts import ShareParts, ShareTree
from pipegrid.core.verifiedtree import GROUP_LEAVES, group_end, nodes_to_read


@attrs.frozen
class ReadPlan:
    """
    The segments that are to be read.

    Attributes:
        geometry: real, or a guess.
        first: the first segment whose plaintext has not left.
        end: the end of the range of segments that is wanted at all.
        ahead_bytes: how much to read of the blocks from ``first`` on; at least one block.
        most_bytes: however long a block is, not more; None for whatever there is.
        part: of the blocks, only those of these segments [first, end); None for all.
    """

    geometry: Geometry
    first: int
    end: int
    ahead_bytes: int
    most_bytes: int | None
    part: tuple[int, int] | None = None

    @property
    def until(self) -> int:
        """The end of the segments that are to be read now."""
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
        """Yield where the header is, if it is not known."""
        if share.layout is None:
            yield 0, share.header_bytes()

    def chain(self, share: ShareParts, where: ShareLayout) -> Iterator[tuple[int, int]]:
        """Yield where the share hash chain is, if it is not known."""
        if share.leaf is None:
            yield where.share_hashes, where.uri_extension

    def ueb(self, share: ShareParts, where: ShareLayout) -> tuple[int, int]:
        """Return where the UEB is, as far as can be told."""
        return where.uri_extension, share.ueb_end(ueb.packed_length(self.geometry), where)

    def tree(self, tree: ShareTree | None, offset: int) -> Iterator[tuple[int, int]]:
        """Yield where the nodes for the next segments are, in a stored tree that begins there."""
        if tree is not None:
            # Tiny blocks must not make the trees' part of what is read ahead large.
            tree.need(self.first, min(self.until, self.first + GROUP_LEAVES), self.end)
            yield from tree.awaited()
            return
        leaves = self.geometry.num_segments
        for a, b in nodes_to_read(leaves, self.first, min(group_end(leaves, self.first), self.end)):
            yield offset + a * HASH_BYTES, offset + b * HASH_BYTES


def block_range(where: ShareLayout, geometry: Geometry, first: int, end: int) -> tuple[int, int]:
    """Return where in a share the blocks of segments [first, end) are."""
    stop = end * geometry.block_bytes
    if end == geometry.num_segments:
        stop = geometry.share_data_bytes
    return where.data + first * geometry.block_bytes, where.data + stop
