"""
The state of one immutable file's shares during a download: their verified metadata, which metadata is
missing, which ranges to read for a range of segments, and which segments wait for blocks.

Source: Tahoe-LAFS's ``file-encoding.rst``, and how 1.20 behaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pipegrid.core import layout, ueb
from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.core.encoding_parameters import Geometry, Params, check_segment_bytes
from pipegrid.core.hash_tree import GROUP_LEAVES, VerifiedTree, group_end, is_small, nodes_to_read
from pipegrid.core.hashes import HASH_BYTES, Buffer
from pipegrid.core.layout import ShareLayout
from pipegrid.core.received_share import BadPart, ForeignUeb, ShareParts, ShareTree, blamed_offset
from pipegrid.core.ueb import Ueb, contradiction
from pipegrid.errors import CorruptionError, PipegridError, SegmentTooLarge


class ReadPlan(NamedTuple):
    """
    Which segments to read, and in which ranges of a share their parts are.

    Attributes:
        geometry: the file's sizes, known or guessed.
        first: the first segment whose plaintext has not been returned.
        end: the end of the range of segments that the reader wants.
        ahead_bytes: how many bytes of blocks to read from ``first`` on; at least one block is read.
        most_bytes: the maximum number of bytes of blocks, even if it is less than one block; None for no
            limit.
        part: read only blocks of these segments [first, end); None for all.
    """

    geometry: Geometry
    first: int
    end: int
    ahead_bytes: int
    most_bytes: int | None
    part: tuple[int, int] | None = None

    @property
    def until(self) -> int:
        """The first segment after those to read now."""
        return min(self.end, self.first + max(1, self.ahead_bytes // self.geometry.block_bytes))

    def blocks(self, where: ShareLayout) -> tuple[int, int]:
        """Return the range [start, end) in a share of the blocks to read now."""
        first, until = self.first, self.until
        if self.part is not None:
            first = max(first, self.part[0])
            until = max(first, min(until, self.part[1]))
        start, end = block_range(where, self.geometry, first, until)
        return start, end if self.most_bytes is None else min(end, start + self.most_bytes)

    def ueb(self, share: ShareParts, where: ShareLayout) -> tuple[int, int]:
        """Return the range of the UEB in a share; its end is an estimate until the UEB's length is known."""
        return where.uri_extension, share.ueb_end(ueb.packed_length(self.geometry), where)

    def tree(self, tree: ShareTree | None, offset: int) -> Iterator[tuple[int, int]]:
        """
        Yield the ranges of the tree nodes that the next segments need. The stored tree begins at ``offset``.
        """
        if tree is not None:
            # Only one group of leaves: with tiny blocks, the trees would otherwise be a large part of what is
            # read in advance.
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
    The order of segments [first, end). They are started in order, may fail and be retried, and are returned
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
        """Whether the plaintext of all segments has been returned."""
        return self.next_delivery >= self.end

    @property
    def failing(self) -> list[int]:
        """The segments that failed and whose retry has not started."""
        return sorted(self._retry)

    def candidates(self) -> Iterator[int]:
        """Yield the segments that may be started now: those to retry, then the next one."""
        yield from self.failing
        if self._next_start < self.end:
            yield self._next_start

    def started(self, segment: int) -> None:
        """Record that a segment from ``candidates`` is being decoded."""
        self._retry.discard(segment)
        if segment == self._next_start:
            self._next_start += 1

    def failed(self, segment: int) -> None:
        """Record that a segment must be retried."""
        self._retry.add(segment)

    def succeeded(self, segment: int, plaintext: list[Buffer]) -> list[Buffer]:
        """Store a segment's plaintext; return all stored plaintext that is next in order."""
        self._results[segment] = plaintext
        leaving: list[Buffer] = []
        while self.next_delivery in self._results:
            leaving += self._results.pop(self.next_delivery)
            self.next_delivery += 1
        return leaving

    def release(self) -> None:
        """Drop the plaintext that waits for the plaintext of an earlier segment. Nothing more is returned."""
        self._results.clear()


_CRYPTTEXT_SOURCES = 2
"""Number of shares that a large tree of segment hashes is read from at once, in case one share is slow."""


class FileShares:
    """
    The shares of one file as far as they have arrived, for a reader of one range of the file.

    Bytes arrive in any order and in pieces of any size, and are kept until they are not needed any more. The
    parts before and after the blocks are verified as soon as they are complete: the cap proves the UEB by its
    hash, and the UEB proves the share's chain, its tree of block hashes, and the tree of segment hashes. k, n
    and the size are taken from the cap. A share with a wrong part is listed in ``corrupt``; after that it is
    not used at all, or only its other parts are.

    Attributes:
        guessed_geometry: the assumed sizes of the file until its UEB is known.
        guessed_layout: the offsets that follow from the assumed sizes.
        geometry: the real sizes, once a good UEB has arrived.
        corrupt: the errors that were found so far, with share number and offset.
        foreign_uebs: by share number, UEBs that are not the one that the cap names.
    """

    # This is a base class of ``Decoder`` rather than an attribute, because every piece that arrives goes
    # through ``received``, and delegating would cost one more call for each. The class does not use anything
    # of ``Decoder``.

    def __init__(
        self,
        cap: ChkCap | ChkVerifierCap,
        start: int,
        length: int | None,
        guess_segment_bytes: int,
        max_segment_bytes: int,
    ) -> None:
        """
        Start without any share.

        Args:
            start, length: the range of plaintext to read, clipped to the file; a length of None means the
                rest of the file.
            guess_segment_bytes: the maximum segment size that the writer probably used.
            max_segment_bytes: a file with larger segments is not restored.
        """
        self._cap = cap
        self._max_segment_bytes = max_segment_bytes
        self._start = min(max(start, 0), cap.size)
        self._end = cap.size if length is None else min(self._start + max(length, 0), cap.size)
        params = Params(cap.required_shares, cap.total_shares, guess_segment_bytes)
        self.guessed_geometry = params.geometry(cap.size)
        self.guessed_layout = layout.for_geometry(self.guessed_geometry)
        self.geometry: Geometry | None = None
        self.corrupt: list[CorruptionError] = []
        self._ueb: Ueb | None = None
        self._shares: dict[int, ShareParts] = {}
        self.foreign_uebs: dict[int, bytes] = {}
        self._failure: PipegridError | None = None
        self._queue: SegmentQueue | None = None  # None until the geometry is known
        self._uses_damaged_shares = False

    # Known shares.

    @property
    def shares_in_use(self) -> list[int]:
        """The numbers of the shares that a server can be asked for and that have not proved bad."""
        return [n for n, share in self._shares.items() if share.available and not share.bad]

    @property
    def bad_shares(self) -> list[int]:
        """
        The numbers of the shares whose blocks are not used any more because some part of the share was wrong.
        """
        return [number for number, share in self._shares.items() if share.bad]

    @property
    def has_received_ueb(self) -> bool:
        """Whether the UEB of some share has arrived, right or wrong."""
        return self._ueb is not None or any(share.bad_ueb for share in self._shares.values())

    @property
    def held_bytes(self) -> int:
        """How many bytes of shares have arrived and are still needed; verified tree nodes are not counted."""
        return sum(share.store.held_bytes for share in self._shares.values())

    def held_of(self, share_number: int) -> int:
        """
        Return how many bytes of one share are held. A reader that streams the share pauses if there are too
        many.
        """
        share = self._shares.get(share_number)
        return 0 if share is None else share.store.held_bytes

    # The methods that the reader calls.

    def add_share(self, share_number: int) -> None:
        """
        Add a share that a server can be asked for.

        A share that was dropped or is bad starts from scratch; add it again only if another server has it.
        """
        known = self._shares.get(share_number)
        if known is not None and known.available and not known.bad:
            return
        assert 0 <= share_number < self._cap.total_shares, "no such share"
        self._shares[share_number] = ShareParts(share_number, self.guessed_geometry)
        self._shares = dict(sorted(self._shares.items()))

    def use_damaged_shares(self) -> list[int]:
        """
        Use bad shares again, as a last resort when there are too few good shares and no more can be found.

        From now on a share with bad blocks is used for its other segments. Each block is verified by itself,
        so the result is always right. Returns the numbers of the bad shares that are used again.
        """
        self._uses_damaged_shares = True
        revived = [s for s in self._shares.values() if s.bad and s.bad_segments]
        for share in revived:
            share.bad = False
        return [share.number for share in revived]

    def drop_share(self, share_number: int) -> None:
        """Stop requesting a share, since its server is gone; bytes of it that have arrived remain in use."""
        share = self._shares.get(share_number)
        if share is not None:
            share.available = False
            share.store.forget_asked()

    def received(self, share_number: int, offset: int, data: Buffer) -> None:
        """
        Store bytes of a share, which may arrive in any order and in pieces of any size. Bytes that were not
        requested are ignored.

        Args:
            data: kept by reference; it must not change any more.
        """
        share = self._shares.get(share_number)
        if share is not None and not share.bad:
            share.store.put(offset, data)
            self._read_parts(share)

    def ended(self, share_number: int, offset: int) -> None:
        """
        Record that a share has no bytes at or after offset. If some of these bytes are needed, the share is
        bad.
        """
        share = self._shares.get(share_number)
        if share is not None and not share.bad:
            share.store.set_end(offset)
            self._read_parts(share)

    def raise_failure(self) -> None:
        """Raise the error that makes all shares useless, if there is one; see ``next_job``."""
        if self._failure is not None:
            raise self._failure

    # Which plaintext has been returned, and which blocks are not needed any more.

    @property
    def done(self) -> bool:
        """Whether all plaintext of the range has been returned by ``finish``."""
        if self._start == self._end:
            return True
        return self._queue is not None and self._queue.done

    def _segment_range(self, geometry: Geometry) -> tuple[int, int]:
        return self._start // geometry.segment_bytes, -(-self._end // geometry.segment_bytes)

    def _release_delivered(self, share: ShareParts) -> None:
        """Drop the blocks whose plaintext has been returned."""
        if share.layout is not None and self.geometry is not None and self._queue is not None:
            # Release from block 0, not from the start of the range: if the segment size was guessed wrongly,
            # earlier blocks may have been requested.
            until = self._queue.next_delivery
            share.store.release(*block_range(share.layout, self.geometry, 0, until))

    # Metadata.

    def _read_parts(self, share: ShareParts) -> None:
        try:
            was_known = share.layout is not None
            share.read_header()
            if share.layout is None:
                self._check_end(share)
                return
            if not was_known and self.geometry is not None:
                self._release_delivered(share)
            if self._ueb is None and not share.bad_ueb:
                self._read_ueb(share)
            if self._ueb is not None and self.geometry is not None:
                share.read_leaf(self._ueb.share_root_hash, self.geometry)
            self._check_end(share)
        except BadPart as bad:
            self._condemn(share, bad)

    def _read_ueb(self, share: ShareParts) -> None:
        try:
            packed = share.read_ueb(self._cap.ueb_hash)
        except BadPart as bad:
            share.bad_ueb = True
            if isinstance(bad, ForeignUeb):
                self.foreign_uebs[share.number] = bad.packed
            self._report(share, bad)
            return
        if packed is None:
            return
        k, n, size = self._cap.required_shares, self._cap.total_shares, self._cap.size
        try:
            parsed = ueb.parse(packed)
            self._failure = contradiction(self._cap, parsed)
            if self._failure is not None:
                share.bad_ueb = True  # so that the UEB is not read again
                return
            if not parsed.segment_bytes or parsed.segment_bytes % k:
                raise ValueError(f"a segment size of {parsed.segment_bytes} for {k} shares")
        except ValueError as error:
            self._fail(f"its UEB is the one that the cap names, but invalid: {error}")
            return
        try:
            check_segment_bytes(parsed.segment_bytes, size, self._max_segment_bytes)
        except SegmentTooLarge as error:
            self._failure = error
            share.bad_ueb = True  # so that the UEB is not read again
            return
        self._ueb = parsed
        self.geometry = Geometry(size, k, n, parsed.segment_bytes)
        self._queue = SegmentQueue(*self._segment_range(self.geometry))
        for other in self._shares.values():
            self._release_delivered(other)
            if other is not share and not other.bad:
                self._read_parts(other)

    def _crypttext_tree(self, share: ShareParts) -> ShareTree | None:
        """Return the share's tree of segment hashes, or None if this share's tree is not read."""
        if self._ueb is None or self.geometry is None or share.layout is None:
            return None
        if share.crypttext_tree is None and not share.bad_crypttext_tree:
            others = [s for s in self._shares.values() if s.crypttext_tree and not s.bad]
            sources = sum(other.available for other in others)
            if sources < _CRYPTTEXT_SOURCES or is_small(self.geometry.num_segments):
                at = share.layout.crypttext_hash_tree
                tree = VerifiedTree(self.geometry.num_segments, self._ueb.crypttext_root_hash)
                share.crypttext_tree = ShareTree(share.store, "crypttext_hash_tree", at, tree)
        return share.crypttext_tree

    def _check_end(self, share: ShareParts) -> None:
        """Raise ``BadPart`` if a needed part lies beyond the end of the share."""
        end = share.store.end
        if end is None:
            return
        if share.layout is None:
            if end < share.header_bytes():
                raise BadPart("header", 0, f"it ends at byte {end}, within its header")
            return
        where = share.layout
        if share.leaf is None and end < where.uri_extension:
            raise _ends(end, "share_hashes", where.share_hashes)
        if self.geometry is None or self._queue is None:
            needed = where.uri_extension + where.ueb_length_bytes
            if not share.bad_ueb and (end < needed or end < share.ueb_end(0, where)):
                share.bad_ueb = True
                self._report(share, _ends(end, "uri_extension", where.uri_extension))
            return
        for start, stop in share.block_tree.awaited() if share.block_tree else ():
            if stop > end:
                raise _ends(end, "block_hashes", start)
        for start, stop in share.crypttext_tree.awaited() if share.crypttext_tree else ():
            if stop > end:
                self._distrust_tree(share, _ends(end, "crypttext_hash_tree", start))
                break
        first, last = self._queue.next_delivery, self._queue.end
        start, stop = block_range(where, self.geometry, first, last)
        if stop > end and not self.done:
            within = max(0, end - start) // self.geometry.block_bytes
            raise _ends(end, "data", start + within * self.geometry.block_bytes)

    # Bad shares.

    def _condemn(self, share: ShareParts, bad: BadPart) -> None:
        """Stop using a share; ``use_damaged_shares`` will not use it again either."""
        if not share.bad:
            share.bad = True
            share.bad_segments.clear()
            self._report(share, bad)
            share.store.clear()

    def _bad_block(self, share: ShareParts, segment: int, geometry: Geometry) -> None:
        """Record a bad block, and stop using its share unless ``use_damaged_shares`` was called."""
        share.bad_segments.add(segment)
        if share.bad:
            return
        where = share.layout or self.guessed_layout
        what = f"its block of segment {segment} does not match its hash"
        self._report(share, BadPart("data", where.data + segment * geometry.block_bytes, what))
        if not self._uses_damaged_shares:
            share.bad = True
            share.store.forget_asked()

    def _distrust_tree(self, share: ShareParts, bad: BadPart) -> None:
        if not share.bad_crypttext_tree:
            share.bad_crypttext_tree = True
            share.crypttext_tree = None
            self._report(share, bad)

    def _report(self, share: ShareParts, bad: BadPart) -> None:
        geometries = [self.geometry] if self.geometry else [share.hint, self.guessed_geometry]
        offset = blamed_offset(bad, share.layout, geometries)
        where = f"at byte {offset}" if offset == bad.offset else f"at byte {bad.offset}, or header"
        text = f"share {share.number} is damaged {where}: {bad.what}; repair the file to replace it"
        self.corrupt.append(CorruptionError(text, share.number, offset))

    def _fail(self, what: str) -> None:
        self._failure = CorruptionError(
            f"this file was stored damaged, by a faulty or malicious writer: {what}; "
            "store it again from the original"
        )


def _ends(end: int, section: str, offset: int) -> BadPart:
    return BadPart(section, offset, f"it ends at byte {end}, within what is needed of it")
