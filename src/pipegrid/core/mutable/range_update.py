"""
Update of a range of an MDMF file, without transferring the rest of the file.

Source: Tahoe-LAFS's ``mutable.rst``, and how 1.20 behaves.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from pipegrid.core import hash_tree
from pipegrid.core.encoder import Plaintext
from pipegrid.core.erasure import cut
from pipegrid.core.hash_tree import BadNode, VerifiedTree, is_small
from pipegrid.core.hashes import HASH_BYTES, MERKLE_NODE, Buffer
from pipegrid.core.mutable.decoder import MutableSegmentJob, VersionReader, share_leaf
from pipegrid.core.mutable.encoder import (
    EncodedVersion,
    code_segment,
    joined_writes,
    sign_version,
)
from pipegrid.core.mutable.keys import SigningKey
from pipegrid.core.mutable.mutable_share import Header, MutableShare, Part, Sections, damaged
from pipegrid.core.mutable.versions import Format, Version
from pipegrid.core.segment_decoding import SegmentResult
from pipegrid.core.spans import Range, Spans
from pipegrid.errors import CorruptionError, UsageError

MAX_GROWING_SEGMENTS = 1 << 20
"""Maximum number of segments to which a file can grow: all leaves of each block hash tree have to be read."""


class RangeUpdate:
    """
    One change of a range of one version.

    Only the segments that the range touches are coded again, with new salts. The first and the last segment
    keep their bytes outside the range, which are read first. Each share's block hash tree gets new leaves. If
    the tree keeps its place and shape, only the nodes on the paths from these leaves to the root are read and
    written; if the file grows, all leaves are read and the whole tree is written. Signature, chains, header
    and the roots of the trees are always written.

    The new version depends on the root of every share, so all n shares must be available. If some are lost,
    or the file shrinks, write the whole file (``encoder.encode``).

        update = RangeUpdate(version, offset, len(data), readkey)
        update.add_share(share)                       # for all n; update.lacking_shares has the rest
        update.missing(number)                        # what to read of a share; old blocks of k shares only
        job = update.next_job()                       # for each of segments_to_read
        update.finish(job.run())
        encoded = update.encode(data, sequence_number, key, salts)

    Attributes:
        version: the version to change.
        geometry: the sizes of the new version.
        touched: the segments that are coded again; ``encode`` takes one new salt for each.
        segments_to_read: the touched segments that keep some old bytes: at most two, ascending.
        moves_tree: whether the trees get another place or shape, and are written as a whole.
        corrupt: the errors that were found; the shares that they name are in ``lacking_shares`` again.

    Raises:
        UsageError: the file is not MDMF, the range is empty or begins after the file's end, or the file gets
            too long.
    """

    def __init__(self, version: Version, offset: int, length: int, readkey: bytes) -> None:
        old = version.geometry
        if version.format is not Format.MDMF:
            raise UsageError("only files in MDMF can be changed in part; write this one whole")
        if length < 1 or not 0 <= offset <= old.size:
            raise UsageError(
                f"cannot write {length} bytes at byte {offset} of a file of {old.size} bytes: write at "
                "least one byte, and begin at its end at the latest"
            )
        self.version = version
        self.geometry = attrs.evolve(old, size=max(old.size, offset + length))
        segment = old.segment_bytes
        self.touched = range(offset // segment, -(-(offset + length) // segment))
        self.moves_tree = self.geometry.data_bytes != old.data_bytes
        if self.moves_tree and self.geometry.num_segments > MAX_GROWING_SEGMENTS:
            raise UsageError(
                f"this file would have {self.geometry.num_segments} segments, and at most "
                f"{MAX_GROWING_SEGMENTS} are allowed where one grows; store the addition as another file"
            )
        self._offset, self._end = offset, offset + length
        self.segments_to_read = tuple(
            index
            for index in self.touched
            if index < old.num_segments
            and (
                offset > index * segment or self._end < index * segment + old.segment_length(index)
            )
        )
        self._reader = VersionReader(version, readkey)
        self._shares: dict[int, _Share] = {}
        self._old: dict[int, bytes] = {}

    @property
    def lacking_shares(self) -> set[int]:
        """The numbers of the shares that must still be added to make the new version."""
        return set(range(self.version.total_shares)) - self._shares.keys()

    @property
    def corrupt(self) -> list[CorruptionError]:
        return self._reader.corrupt

    def add_share(self, share: MutableShare) -> None:
        """
        Add a share of the version; the share's header must be known.

        The share keeps all its bytes as long as the update exists.
        """
        share.store.keeps = True
        self._reader.add_share(share)
        self._shares[share.number] = _Share(share, self.version)

    def missing(self, share_number: int, with_blocks: bool = True) -> list[Range]:
        """
        Return the ranges [start, end) to read of a share, ascending. The list is empty if all have arrived or
        the share is bad.

        Args:
            with_blocks: include the old blocks in ``segments_to_read``; they are needed from k good shares
                only.
        """
        wanted = Spans()
        if share_number not in self._shares:
            return []
        try:
            wanted.update(self._shares[share_number].missing(self._leaves_needed()))
        except CorruptionError as error:
            self._condemn(share_number, error)
            return []
        if with_blocks:
            for index in self.segments_to_read:
                if index not in self._old:
                    wanted.update(self._reader.missing(share_number, index, index + 1))
        self._drop_bad()
        return list(wanted) if share_number in self._shares else []

    def next_job(self) -> MutableSegmentJob | None:
        """
        Return the job that restores the next of ``segments_to_read``. None if all are restored, or the next
        is not ready.
        """
        for index in self.segments_to_read:
            if index not in self._old:
                job = self._reader.job(index)
                self._drop_bad()
                return job
        return None

    def finish(self, result: SegmentResult) -> bool:
        """
        Accept the result of a job. Return False if some of the blocks were wrong; their shares are then in
        ``lacking_shares`` again.

        Raises:
            CorruptionError: the file itself is inconsistent.
        """
        pieces = self._reader.finish(result)
        self._drop_bad()
        if pieces is None:
            return False
        self._old[result.segment] = b"".join(pieces)
        return True

    @property
    def is_ready(self) -> bool:
        """
        Whether ``encode`` can be called: no share is lacking, and everything that must be read has arrived.
        """
        if self.lacking_shares or set(self.segments_to_read) - self._old.keys():
            return False
        waits = any(self.missing(number, with_blocks=False) for number in list(self._shares))
        return not waits and not self.lacking_shares

    def prove(self) -> None:
        """
        Verify the trees whose nodes have all arrived. Bad shares are then listed in ``corrupt``, and are in
        ``lacking_shares`` again.

        ``encode`` calls this too, and requires all shares to be good.
        """
        for number, share in list(self._shares.items()):
            self._prove(number, share)

    def _prove(self, number: int, share: _Share) -> None:
        try:
            share.prove(self._leaves_needed())
        except CorruptionError as error:
            self._condemn(number, error)

    def encode(
        self, data: Plaintext, sequence_number: int, key: SigningKey, salts: Sequence[bytes]
    ) -> EncodedVersion:
        """
        Return the new version, whose writes contain only the changes of each share. ``is_ready`` must be
        true.

        Args:
            data: the new bytes of the range, whole or in pieces.
            sequence_number: above the highest sequence number that was seen.
            salts: for each of ``touched`` 16 new random bytes.

        Raises:
            CorruptionError: a share's tree is wrong; the share is now listed in ``corrupt``, and must be
                added again from another server.
        """
        self.prove()
        if self.lacking_shares:
            raise self.corrupt[-1] if self.corrupt else AssertionError("shares are lacking")
        assert len(salts) == len(self.touched), "a salt too many or too few"
        pieces = [data] if isinstance(data, (bytes, bytearray, memoryview)) else list(data)
        assert sum(map(len, pieces)) == self._end - self._offset, "data of another length"
        coded = [
            code_segment(self.geometry, index, self._plaintext(index, pieces), salt, key.readkey)
            for index, salt in zip(self.touched, salts, strict=True)
        ]
        trees = {
            number: self._new_nodes(share, [segment.block_hashes[number] for segment in coded])
            for number, share in sorted(self._shares.items())
        }
        roots = [trees[number][-1][1][:HASH_BYTES] for number in range(len(trees))]
        version, signature, chains = sign_version(roots, self.geometry, sequence_number, key, b"")
        writes = {}
        share_bytes = 0
        for number, share in self._shares.items():
            sections = self._new_sections(share.sections)
            share_bytes = max(share_bytes, sections.end)
            first_byte = self.geometry.stored_range(self.touched.start, self.touched.stop)[0]
            parts: list[tuple[int, Sequence[Buffer]]] = [
                (0, [Header(version, sections).pack()]),
                (sections.chain[0], [chains[number]]),
                (sections.signature[0], [signature]),
                (
                    sections.data[0] + first_byte,
                    [piece for segment in coded for piece in segment.blocks[number]],
                ),
            ]
            parts += [
                (sections.tree[0] + node * HASH_BYTES, [nodes]) for node, nodes in trees[number]
            ]
            writes[number] = joined_writes(number, parts)
        return EncodedVersion(version, writes, share_bytes)

    def _plaintext(self, index: int, data: list[Buffer]) -> list[Buffer]:
        """
        Return the new plaintext of a segment: old bytes before the range, new bytes, old bytes after the
        range.
        """
        start = index * self.geometry.segment_bytes
        end = start + self.geometry.segment_length(index)
        first, last = max(start, self._offset), min(end, self._end)
        new = cut(data, first - self._offset, last - self._offset)
        old: list[Buffer] = [self._old.get(index, b"")]
        return [*cut(old, 0, first - start), *new, *cut(old, last - start, end - start)]

    def _leaves_needed(self) -> tuple[int, ...] | None:
        """Return the leaves whose paths must be read; None for all leaves."""
        if self.moves_tree:
            return None
        return self.touched.start, self.touched.stop - 1

    def _new_nodes(self, share: _Share, leaves: list[bytes]) -> list[tuple[int, bytes]]:
        """
        Return runs of new tree nodes, each with the number of its first node. The last run begins with the
        root.
        """
        if self.moves_tree:
            all_leaves = share.leaves[: self.touched.start] + leaves
            all_leaves += share.leaves[self.touched.stop :]
            return [(0, hash_tree.build(all_leaves))]
        return updated_nodes(self.geometry.num_segments, self.touched.start, leaves, share.tree)

    def _new_sections(self, old: Sections) -> Sections:
        start = old.data[0]
        tree = start + self.geometry.data_bytes
        end = tree + self.geometry.tree_bytes
        return old._replace(tree=(tree, end), data=(start, tree), end=end)

    def _condemn(self, share_number: int, error: CorruptionError) -> None:
        self._reader.corrupt.append(error)
        self._reader.drop_share(share_number)
        self._shares.pop(share_number, None)

    def _drop_bad(self) -> None:
        """Drop the shares that ``VersionReader`` has found to be bad."""
        for number in self._shares.keys() - set(self._reader.shares_in_use):
            del self._shares[number]


class _Share:
    """The parts of one share's block hash tree that an update needs."""

    def __init__(self, share: MutableShare, version: Version) -> None:
        assert share.header is not None
        self.sections = share.header.sections
        self.leaves: list[bytes] = []
        self._share = share
        self._version = version
        self._num_segments = version.geometry.num_segments
        self.tree: VerifiedTree | None = None

    def missing(self, border_leaves: tuple[int, ...] | None) -> list[Range]:
        """
        Return the ranges of chain and tree that have not arrived. Raises CorruptionError if the share ends
        before one of them.
        """
        gaps = self._share.missing(Part.CHAIN, Part.TREE_ROOT)
        for first, end in self._nodes(border_leaves):
            gaps += self._share.missing_range(self._at(first, end), Part.TREE_ROOT.value)
        return gaps

    def prove(self, border_leaves: tuple[int, ...] | None) -> None:
        """Verify the tree once all needed parts have arrived. Raises CorruptionError if a part is wrong."""
        if self.tree is not None or self.missing(border_leaves):
            return
        store = self._share.store
        root = share_leaf(self._share, self._version)
        tree = VerifiedTree(max(1, self._num_segments), root)
        for first, end in self._nodes(border_leaves):
            tree.offer(first, store.read(*self._at(first, end)))
        at = self.sections.tree[0]
        wanted = range(self._num_segments) if border_leaves is None else border_leaves
        try:
            leaves = [tree.leaf(leaf) for leaf in wanted]
        except BadNode as bad:
            what = "its tree of block hashes contradicts its root"
            raise damaged(self._share.number, what, at + bad.node * HASH_BYTES) from None
        self.leaves = [leaf for leaf in leaves if leaf is not None]
        assert len(self.leaves) == len(leaves), "nodes are missing"
        self.tree = tree

    def _at(self, first: int, end: int) -> Range:
        at = self.sections.tree[0]
        return at + first * HASH_BYTES, at + end * HASH_BYTES

    def _nodes(self, border_leaves: tuple[int, ...] | None) -> list[Range]:
        """Return the ranges [first, end) of tree nodes to read; the root is not among them."""
        total = hash_tree.num_nodes(self._num_segments)
        if total == 1:
            return []
        if border_leaves is None or is_small(self._num_segments):
            return [(1, total)]
        wanted = Spans()
        for leaf in border_leaves:
            for sibling in hash_tree.sibling_path(self._num_segments, leaf):
                left = sibling - 1 + (sibling & 1)
                wanted.add(left, left + 2)
        return list(wanted)


def updated_nodes(
    num_leaves: int, first_leaf: int, leaves: Sequence[bytes], old: VerifiedTree | None
) -> list[tuple[int, bytes]]:
    """
    Return the changed nodes of a tree after a run of leaves changed: for each level, the number of the first
    changed node, and the nodes.

    Args:
        leaves: the new hashes of the leaves from ``first_leaf`` on, at least one.
        old: the tree before the change, with verified siblings on the paths of the first and the last leaf.
    """
    number = hash_tree.leaf_node(num_leaves, first_leaf)
    level = list(leaves)
    changed = [(number, b"".join(level))]
    while number:
        assert old is not None
        last = number + len(level) - 1
        if not number & 1:  # a right child; its left sibling did not change
            level.insert(0, _proven(old, number - 1))
            number -= 1
        if last & 1:
            level.append(_proven(old, last + 1))
        level = [MERKLE_NODE.hash_pair(level[i], level[i + 1]) for i in range(0, len(level), 2)]
        number = (number - 1) // 2
        changed.append((number, b"".join(level)))
    return changed


def _proven(tree: VerifiedTree, number: int) -> bytes:
    value = tree.proven(number)
    assert value is not None, "a sibling that was not proven"
    return value
