"""
Reader that restores one version of a mutable file from its shares, segment by segment, without I/O.

Source: Tahoe-LAFS's ``mutable.rst``, and how 1.20 behaves.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from pipegrid.core import hash_tree
from pipegrid.core.erasure import cut
from pipegrid.core.hash_tree import VerifiedTree, group_end, nodes_to_read
from pipegrid.core.hashes import HASH_BYTES, Buffer
from pipegrid.core.mutable.keys import data_key
from pipegrid.core.mutable.mutable_share import MutableShare, Part, damaged
from pipegrid.core.mutable.versions import MutableGeometry, Version
from pipegrid.core.received_share import BadPart, ShareTree, prove_leaf
from pipegrid.core.segment_decoding import Block, SegmentResult, decrypted, joined
from pipegrid.core.spans import Range, Spans
from pipegrid.core.stream_cipher import StreamCipher
from pipegrid.errors import CorruptionError

_SECTION = "block_hashes"  # ``ShareTree`` uses this name in errors


class _InUse:
    __slots__ = ("share", "tree")

    def __init__(self, share: MutableShare) -> None:
        self.share = share
        self.tree: ShareTree | None = None


class VersionReader:
    """
    The shares of one version, for a reader. Segments are restored in ascending order.

    The caller knows which servers have shares of this version, and has verified the version with
    ``VerifiedVersions``. The share hash chain proves the root of each share's block hash tree, and this tree
    proves each block. A share with a wrong part is listed in ``corrupt`` and not used any more; the caller
    then adds the same share from another server, or another share.

        reader = VersionReader(version, readkey)
        reader.add_share(share)                        # MutableShare with its header
        reader.missing(3, first, end)                  # ranges to read of share 3 for these segments
        share.answered(...)                            # as responses arrive
        job = reader.job(segment)                      # None: fewer than k blocks so far
        pieces = reader.finish(job.run())              # None: some blocks were wrong; read other shares

    Attributes:
        version: the verified version.
        corrupt: the errors that were found so far; the shares that they name are not used any more.
    """

    def __init__(self, version: Version, readkey: bytes | None) -> None:
        """
        Start without any share.

        Args:
            readkey: 16 bytes, or None to restore the ciphertext.
        """
        self.version = version
        self.corrupt: list[CorruptionError] = []
        self._readkey = readkey
        self._shares: dict[int, _InUse] = {}

    @property
    def shares_in_use(self) -> list[int]:
        """The numbers of the shares that were added and have not proved bad."""
        return list(self._shares)

    @property
    def lacking(self) -> int:
        """How many more distinct shares are needed; 0 if there are enough."""
        return max(0, self.version.required_shares - len(self._shares))

    def add_share(self, share: MutableShare) -> None:
        """
        Add a share of this version; it replaces a share with the same number.

        The share's header must be known, and name this version.
        """
        assert share.header is not None, "what it is a share of is not known"
        assert share.header.version == self.version, "a share of another version"
        assert 0 <= share.number < self.version.total_shares, "no such share"
        self._shares[share.number] = _InUse(share)
        self._shares = dict(sorted(self._shares.items()))

    def drop_share(self, share_number: int) -> None:
        """Stop using a share, and drop the bytes of it that have arrived."""
        self._shares.pop(share_number, None)

    def missing(self, share_number: int, first: int, end: int) -> list[Range]:
        """
        Return the ranges of a share that are still needed to restore segments [first, end); an empty list if
        the share has proved bad.

        The ranges [start, end) of share data are ascending and disjoint; the caller may join near ranges. A
        range is returned by every call until its bytes arrive.
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
        Return one share's stored block, with the hash that it must have. None if the share is bad or the
        bytes have not arrived.
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
        Return the job that restores a segment, or None while fewer than k shares have its block and the
        block's hash.

        Args:
            start, end: which of the segment's bytes to return; by default all.
        """
        geometry = self.version.geometry
        k = geometry.required_shares
        found = (self.block(number, segment) for number in self.shares_in_use)
        blocks = tuple(islice(filter(None, found), k))
        if len(blocks) < k:
            return None
        length = geometry.segment_length(segment)
        end = length if end is None else min(end, length)
        salt = self.version.salt
        return MutableSegmentJob(segment, geometry, self._readkey, salt, blocks, start, end)

    def finish(self, result: SegmentResult) -> list[Buffer] | None:
        """
        Accept the result of a job, release the segment's blocks, and return its bytes in pieces.

        None if some blocks were wrong; their shares are then listed in ``corrupt`` and not used any more.

        Raises:
            CorruptionError: the author wrote an inconsistent file; the error names no share.
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
        """Record that a share's block was found to be wrong, and stop using the share."""
        used = self._shares.get(share_number)
        if used is not None:
            offset = self._stored(used.share, segment, segment + 1)[0]
            what = f"its block of segment {segment} has the wrong hash"
            self._condemn(share_number, damaged(share_number, what, offset))

    def release(self, segment: int) -> None:
        """Release the blocks of a segment, in all shares."""
        self._release(segment, segment + 1)

    def release_all(self) -> None:
        """
        Release the blocks of all segments, since the reader was interrupted.

        Objects of an interrupted reader may form a reference cycle, and so stay in memory for a long time.
        """
        self._release(0, self.version.geometry.num_segments)

    def _release(self, first: int, end: int) -> None:
        for used in self._shares.values():
            used.share.store.release(*self._stored(used.share, first, end))

    def whole(self) -> bytes | None:
        """
        Return the whole plaintext if enough bytes have arrived, else None. For small files.

        Shares that prove bad are not used any more, and listed in ``corrupt``.

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
        """
        Return whether the root of a share's block hash tree is verified. False while it has not arrived, or
        if the share is bad.
        """
        used = self._shares.get(share_number)
        if used is None:
            return False
        try:
            return not self._prove(used)
        except CorruptionError as error:
            self._condemn(share_number, error)
            return False

    def _prove(self, used: _InUse) -> list[Range]:
        """
        Verify the root of the share's block hash tree if possible; return the ranges that must arrive first.
        """
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
        name = Part.TREE_ROOT.value
        return [gap for wanted in ranges for gap in used.share.missing_range(wanted, name)]

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
    Return the root of a share's block hash tree, after verifying with the share hash chain that it belongs to
    the version.

    Chain and root must have arrived.

    Raises:
        CorruptionError: chain and root do not lead to the version's root hash.
    """
    root = share.read(Part.TREE_ROOT)
    leaf_node = hash_tree.leaf_node(version.total_shares, share.number)
    chain = share.read(Part.CHAIN) + leaf_node.to_bytes(2, "big") + root
    try:
        at = share.range_of(Part.CHAIN)[0]
        return prove_leaf(chain, share.number, version.total_shares, version.root_hash, at)
    except BadPart as bad:
        raise damaged(share.number, bad.what, bad.offset) from None


class MutableSegmentJob(NamedTuple):
    """
    The input to turn k stored blocks into plaintext.

    Attributes:
        readkey: None to return the ciphertext.
        salt: for SDMF the version's salt; b"" for MDMF, where each stored block begins with its salt.
        blocks: exactly k stored blocks of different shares, each with its verified hash.
        start, end: which plaintext bytes of the segment to return.
    """

    segment: int
    geometry: MutableGeometry
    readkey: bytes | None
    salt: bytes
    blocks: tuple[Block, ...]
    start: int
    end: int

    def __repr__(self) -> str:
        """Return a short form without the key, since logs may contain it."""
        return f"MutableSegmentJob({self.segment}, ...)"

    def run(self) -> SegmentResult:
        """Run the job, in any thread; the same job may run more than once."""
        bad = tuple(block.share_number for block in self.blocks if not block.is_good())
        if bad:
            return SegmentResult(self.segment, [], bad_shares=bad)
        skip = self.geometry.salt_bytes
        salts = {self.salt}
        if skip:
            salts = {b"".join(cut(block.pieces, 0, skip)) for block in self.blocks}
        if len(salts) > 1:
            return SegmentResult(self.segment, [], consistent=False)
        ciphertext = cut(self._decode(skip), self.start, self.end)
        if self.readkey is None:
            return SegmentResult(self.segment, ciphertext)
        cipher = StreamCipher(data_key(salts.pop(), self.readkey), self.start)
        return SegmentResult(self.segment, decrypted(ciphertext, cipher))

    def _decode(self, skip: int) -> list[Buffer]:
        geometry = self.geometry
        k, length = geometry.required_shares, geometry.segment_length(self.segment)
        stored_bytes = skip + geometry.block_length(self.segment)
        pieces = {
            block.share_number: cut(block.pieces, skip, stored_bytes) for block in self.blocks
        }
        return joined(pieces, k, geometry.total_shares, length)
