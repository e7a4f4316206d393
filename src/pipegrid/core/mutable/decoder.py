"""
From the shares of one version to its plaintext, a range of segments at a time.

The caller has mapped the file: it knows which servers have shares of this version, and
``VerifiedVersions`` has proven the version. Here each share proves its leaf of the share hash tree by its
chain, each block its place in the share's own tree. What is wrong is named and left out; the caller
offers another server's copy, or another share.

    reader = VersionReader(version, readkey)
    reader.add_share(share)                        # MutableShare, header here
    reader.missing(3, first, end)                  # ranges to ask of share 3 for these segments
    share.answered(...)                            # as they come
    job = reader.job(segment)                      # None: not k blocks yet
    pieces = reader.finish(job.run())              # None: some were wrong; ask for others

Segments are to be taken in ascending order.

Source: the format reference for mutable files, section 5, step 4.
"""

from __future__ import annotations

import attrs

from pipegrid.core import hash_tree
from pipegrid.core.hash_tree import VerifiedTree, group_end, nodes_to_read
from pipegrid.core.hashes import HASH_BYTES, Buffer
from pipegrid.core.mutable.encoder import MutableSegmentJob
from pipegrid.core.mutable.share import MutableShare, Part, damaged
from pipegrid.core.mutable.versions import Version
from pipegrid.core.segment_job import Block, SegmentResult
from pipegrid.core.share_parts import BadPart, ShareTree, prove_leaf
from pipegrid.core.spans import Range, Spans
from pipegrid.errors import CorruptionError

_SECTION = "block_hashes"  # as ShareTree calls it


@attrs.define(eq=False)
class _InUse:
    share: MutableShare
    tree: ShareTree | None = None


class VersionReader:
    """
    The shares of one version, for whoever reads it.

    Attributes:
        version: proven.
        corrupt: what was found to be wrong so far; a share in it is not used any more.
    """

    def __init__(self, version: Version, readkey: bytes | None) -> None:
        """
        Know the version only.

        Args:
            readkey: 16 bytes, or None for the ciphertext.
        """
        self.version = version
        self.corrupt: list[CorruptionError] = []
        self._readkey = readkey
        self._shares: dict[int, _InUse] = {}

    @property
    def shares_in_use(self) -> list[int]:
        """The share numbers that can be asked and have not proven bad."""
        return list(self._shares)

    @property
    def lacking(self) -> int:
        """How many more distinct shares are needed; 0 if there are enough."""
        return max(0, self.version.required_shares - len(self._shares))

    def add_share(self, share: MutableShare) -> None:
        """
        A share of this version is there to be asked; it takes the place of one with its number.

        Its header must be here, and name this version.
        """
        assert share.header is not None, "what it is a share of is not known"
        assert share.header.version == self.version, "a share of another version"
        assert 0 <= share.number < self.version.total_shares, "no such share"
        self._shares[share.number] = _InUse(share)
        self._shares = dict(sorted(self._shares.items()))

    def drop_share(self, share_number: int) -> None:
        """A share can be asked no more, and what has come of it is not used."""
        self._shares.pop(share_number, None)

    def missing(self, share_number: int, first: int, end: int) -> list[Range]:
        """
        Return what is lacking of a share to take segments [first, end); none if it has proven bad.

        Ranges [start, end) of share data in ascending order, disjoint; whoever asks may join what is near.
        The same is returned until it has come.
        """
        used = self._shares.get(share_number)
        if used is None:
            return []
        wanted = Spans()
        try:
            wanted.update(self._prove(used))
            wanted.update(self._tree_gaps(used, first, end))
            if first < end:
                stored = self._stored(used.share, first, end)
                wanted.update(used.share.missing_range(stored, "blocks"))
        except CorruptionError as error:
            self._condemn(share_number, error)
            return []
        return list(wanted)

    def block(self, share_number: int, segment: int) -> Block | None:
        """
        Return one share's stored block with the hash that it must have; None if it is bad, or not here yet.
        """
        used = self._shares.get(share_number)
        if used is None:
            return None
        try:
            if self._prove(used) or used.tree is None:
                return None
            used.tree.need(segment, segment + 1, self.version.geometry.num_segments)
            expected = used.tree.leaf(segment)
        except BadPart as bad:
            self._condemn(share_number, damaged(share_number, bad.what, bad.offset))
            return None
        except CorruptionError as error:
            self._condemn(share_number, error)
            return None
        where = self._stored(used.share, segment, segment + 1)
        if expected is None or not used.share.store.has(*where):
            return None
        return Block(share_number, used.share.store.pieces(*where), expected)

    def job(self, segment: int, start: int = 0, end: int | None = None) -> MutableSegmentJob | None:
        """
        Return the work that makes a segment, or None while fewer than k blocks are here and proven.

        Args:
            start, end: which of the segment's bytes are wanted; by default all.
        """
        geometry = self.version.geometry
        k = geometry.required_shares
        blocks: list[Block] = []
        for number in self.shares_in_use:
            block = self.block(number, segment)
            if block is not None:
                blocks.append(block)
                if len(blocks) == k:
                    break
        if len(blocks) < k:
            return None
        length = geometry.segment_length(segment)
        end = length if end is None else min(end, length)
        salt = self.version.salt
        return MutableSegmentJob(segment, geometry, self._readkey, salt, tuple(blocks), start, end)

    def finish(self, result: SegmentResult) -> list[Buffer] | None:
        """
        Take what a job made: return its bytes in pieces, and let go of the segment's blocks.

        None if some of its blocks were wrong; their shares are in ``corrupt`` and out of use.

        Raises:
            CorruptionError: the file itself is inconsistent, by its author's doing; no share number.
        """
        segment = result.segment
        for number in result.bad_shares:
            self.condemn_block(number, segment)
        if result.bad_shares:
            return None
        if not result.consistent:
            raise CorruptionError(
                f"version {self.version.name} of this file is inconsistent: the shares of segment {segment} "
                "have different salts; its author wrote it that way, so ask for another version"
            )
        self.release(segment)
        return result.plaintext

    def condemn_block(self, share_number: int, segment: int) -> None:
        """A block was found to be wrong: say so, and use its share no more."""
        used = self._shares.get(share_number)
        if used is not None:
            offset = self._stored(used.share, segment, segment + 1)[0]
            what = f"its block of segment {segment} has the wrong hash"
            self._condemn(share_number, damaged(share_number, what, offset))

    def release(self, segment: int) -> None:
        """Let go of the blocks of a segment, in all shares."""
        for used in self._shares.values():
            used.share.store.release(*self._stored(used.share, segment, segment + 1))

    def whole(self) -> bytes | None:
        """
        Return all the plaintext at once, for small files of which everything is here; else None.

        Shares that prove bad are left out; see ``corrupt``.

        Raises:
            CorruptionError: as ``finish``.
        """
        made: list[Buffer] = []
        for segment in range(self.version.geometry.num_segments):
            pieces = None
            while pieces is None:
                job = self.job(segment)
                if job is None:
                    return None
                pieces = self.finish(job.run())
            made += pieces
        return b"".join(made)

    def prove_share(self, share_number: int) -> bool:
        """Say whether a share's root is proven; False while it is not, or if it is bad."""
        used = self._shares.get(share_number)
        if used is None:
            return False
        try:
            return not self._prove(used)
        except CorruptionError as error:
            self._condemn(share_number, error)
            return False

    def _prove(self, used: _InUse) -> list[Range]:
        """Prove the share's leaf if it can be; return what is lacking for that."""
        if used.tree is not None:
            return []
        share = used.share
        gaps = share.missing(Part.CHAIN, Part.TREE_ROOT)
        if gaps:
            return gaps
        leaf = share_leaf(share, self.version)
        leaves = max(1, self.version.geometry.num_segments)
        at = share.range_of(Part.TREE_ROOT)[0]
        used.tree = ShareTree(share.store, _SECTION, at, VerifiedTree(leaves, leaf))
        return []

    def _tree_gaps(self, used: _InUse, first: int, end: int) -> list[Range]:
        if first >= end:
            return []
        segments = self.version.geometry.num_segments
        at = used.share.range_of(Part.TREE_ROOT)[0]
        if used.tree is not None:
            used.tree.need(first, end, segments)
            ranges = used.tree.awaited()
        else:
            ranges = [
                (at + a * HASH_BYTES, at + b * HASH_BYTES)
                for a, b in nodes_to_read(segments, first, max(end, group_end(segments, first)))
            ]
        gaps = []
        for wanted in ranges:
            gaps += used.share.missing_range(wanted, Part.TREE_ROOT.value)
        return gaps

    def _stored(self, share: MutableShare, first: int, end: int) -> Range:
        assert share.header is not None
        a, b = self.version.geometry.stored_range(first, end)
        at = share.header.sections.data[0]
        return at + a, at + b

    def _condemn(self, share_number: int, error: CorruptionError) -> None:
        self._shares.pop(share_number, None)
        self.corrupt.append(error)


def share_leaf(share: MutableShare, version: Version) -> bytes:
    """
    Return the root of a share's block hash tree, proven by its chain to belong to the version.

    Chain and root must be here.

    Raises:
        CorruptionError: they do not lead to the version's root hash.
    """
    root = share.read(Part.TREE_ROOT)
    leaf_node = hash_tree.leaf_node(version.total_shares, share.number)
    chain = share.read(Part.CHAIN) + leaf_node.to_bytes(2, "big") + root
    try:
        at = share.range_of(Part.CHAIN)[0]
        return prove_leaf(chain, share.number, version.total_shares, version.root_hash, at)
    except BadPart as bad:
        raise damaged(share.number, bad.what, bad.offset) from None
