"""
From shares to plaintext: says what to read of each share, checks what comes, restores segments.

The decoder knows no server and reads nothing itself. Its caller asks ``wanted`` what to read of a
share, hands the bytes to ``received`` in any order and pieces, runs the jobs that ``next_job``
gives wherever it likes, and passes what they found to ``finish``, which returns plaintext in
order.

Trust runs from the cap to the UEB (by its hash), from there to the share's chain and its tree of
block hashes, and to the tree of segment hashes. k, n and the size are the cap's. No block is
decoded, and no plaintext leaves, before it is proven.

Everything that is read is placed by a guess of the segment size until a share's header and the
UEB are here; a right guess costs one round trip. A header is not authenticated: it may only
suggest where to look, and how much is read on its word is bounded.

What one share has told is kept by ``shareparts``, where its parts are is worked out by ``readplan``,
the order of segments is ``segmentqueue``'s, and the work on a segment ``segmentjob``'s.

Source: the format reference, section 7.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from pipegrid.core import layout, ueb
from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.core.hashes import Buffer
from pipegrid.core.layout import ShareLayout
from pipegrid.core.params import DEFAULT_SEGMENT_BYTES, Geometry, Params
from pipegrid.core.readplan import ReadPlan, block_range
from pipegrid.core.segmentjob import Block, SegmentJob, SegmentResult
from pipegrid.core.segmentqueue import SegmentQueue
from pipegrid.core.shareparts import BadPart, ShareParts, ShareTree, blamed_offset
from pipegrid.core.spans import Span, Spans
from pipegrid.core.ueb import Ueb
from pipegrid.core.verifiedtree import VerifiedTree, is_small
from pipegrid.errors import CorruptionError

MERGE_GAP_BYTES = 8192
"""Reading this much that nobody needs is cheaper than another request."""

_APART_BYTES = 1 << 18
"""
More blocks than this, if they are several, are not asked in one span with metadata behind them: whoever
reads them may hold them back, and then the metadata would never come.
"""

_CRYPTTEXT_SOURCES = 2
"""A large tree of segment hashes is read from so many shares; a slow one then stops nobody."""


class Decoder:
    """
    Restores one range of one file.

    Attributes:
        guessed_geometry: what the file is taken for until its UEB is known.
        guessed_layout: where its sections are, then.
        guessed_share_bytes: the length of a share, then: what to read to have all of it.
        geometry: the real one, once a good UEB has come.
        corrupt: what was found to be wrong so far, with share number and offset.
    """

    def __init__(
        self,
        cap: ChkCap | ChkVerifierCap,
        start: int = 0,
        length: int | None = None,
        *,
        guess_segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        merge_gap_bytes: int = MERGE_GAP_BYTES,
    ) -> None:
        """
        Prepare to restore plaintext [start, start + length), clipped to the file.

        With a verifier cap it is ciphertext, for there is no key; all the rest is the same.

        Args:
            length: None for all the rest.
            guess_segment_bytes: the maximum segment size that the writer is thought to have used.
            merge_gap_bytes: spans at most this far apart become one.
        """
        self._cap = cap
        self._merge_gap_bytes = merge_gap_bytes
        self._start = min(max(start, 0), cap.size)
        self._end = cap.size if length is None else min(self._start + max(length, 0), cap.size)
        params = Params(cap.required_shares, cap.total_shares, guess_segment_bytes)
        self.guessed_geometry = params.geometry(cap.size)
        self.guessed_layout = layout.for_geometry(self.guessed_geometry)
        self.guessed_share_bytes = layout.share_length(self.guessed_geometry, self.guessed_layout)
        self.geometry: Geometry | None = None
        self.corrupt: list[CorruptionError] = []
        self._ueb: Ueb | None = None
        self._shares: dict[int, ShareParts] = {}
        self._failure: CorruptionError | None = None
        self._queue: SegmentQueue | None = None  # once the geometry is known
        self._uses_damaged_shares = False
        self._running: dict[int, dict[int, ShareParts]] = {}

    # What is there, and what is missing.

    @property
    def done(self) -> bool:
        """Whether all plaintext of the range has been returned by ``finish``."""
        if self._start == self._end:
            return True
        return self._queue is not None and self._queue.done

    @property
    def segments_left(self) -> tuple[int, int]:
        """The segments [first, end) whose plaintext has not left; a guess until the UEB is known."""
        if self._queue is None:
            return self._segment_range(self.guessed_geometry)
        return self._queue.next_delivery, self._queue.end

    @property
    def shares_in_use(self) -> list[int]:
        """The shares that can be asked and have not proven bad."""
        return [n for n, share in self._shares.items() if share.available and not share.bad]

    @property
    def bad_shares(self) -> list[int]:
        """The shares whose blocks are not used any more because something in them was wrong."""
        return [number for number, share in self._shares.items() if share.bad]

    @property
    def held_bytes(self) -> int:
        """Share bytes that have come and wait for their turn; proven tree nodes are apart."""
        return sum(share.store.held_bytes for share in self._shares.values())

    def held_of(self, share_number: int) -> int:
        """How much of one share waits for its turn; whoever streams it pauses by this."""
        share = self._shares.get(share_number)
        return 0 if share is None else share.store.held_bytes

    def awaits(self, share_number: int, start: int, end: int) -> bool:
        """
        Whether the next segment to leave waits for any of the bytes [start, end) of a share.

        Whoever holds these back holds up everything, however much of the share has come already.
        """
        share = self._shares.get(share_number)
        if share is None or share.bad or not share.available or self.done:
            return False
        where = share.layout or self.guessed_layout
        plan = self._plan(share, 0, None)
        for a, b in (plan.blocks(where), *self._metadata_wanted(share, where, plan)):
            if max(a, start) < min(b, end) and not share.store.has(max(a, start), min(b, end)):
                return True
        return False

    @property
    def metadata_bytes(self) -> int:
        """How much of a share is not blocks: that may be held whatever is held of blocks."""
        geometry = self.geometry or self.guessed_geometry
        whole = layout.share_length(geometry, layout.for_geometry(geometry))
        return whole - geometry.share_data_bytes

    @property
    def lacking(self) -> int:
        """How many more good shares are needed before all can be restored; 0 if none."""
        if self.done:
            return 0
        useful = [s for s in self._shares.values() if not s.bad and self._is_useful(s)]
        usable = min(
            (
                sum(segment not in share.bad_segments for share in useful)
                for segment in (self._queue.failing if self._queue else ())
            ),
            default=len(useful),
        )
        missing = self._cap.required_shares - usable
        if missing > 0:
            return missing
        has_ueb = self._ueb is not None or any(not share.bad_ueb for share in useful)
        has_tree = any(
            not share.bad_crypttext_tree
            and (share.available or self._is_whole(self._crypttext_tree(share)))
            for share in self._shares.values()
            if not share.bad
        )
        return 0 if has_ueb and has_tree else 1

    def _is_useful(self, share: ShareParts) -> bool:
        if share.available:
            return True
        # Its server is gone, but perhaps all that is needed of it has come.
        if self.geometry is None or self._queue is None or share.layout is None:
            return False
        first, end = self._queue.next_delivery, self._queue.end
        blocks = block_range(share.layout, self.geometry, first, end)
        return share.store.has(*blocks) and self._is_whole(share.block_tree)

    def _is_whole(self, tree: ShareTree | None) -> bool:
        """Say whether all that is still needed of a tree has come; for those that get no more."""
        if tree is None or self._queue is None:
            return False
        tree.need(self._queue.next_delivery, self._queue.end, self._queue.end)
        return not tree.awaited()

    # What the caller tells.

    def add_share(self, share_number: int) -> None:
        """
        A share can be asked.

        One that was dropped, or is bad, begins anew: do that only if another server has it.
        """
        known = self._shares.get(share_number)
        if known is not None and known.available and not known.bad:
            return
        assert 0 <= share_number < self._cap.total_shares, "no such share"
        self._shares[share_number] = ShareParts(share_number, self.guessed_geometry)
        self._shares = dict(sorted(self._shares.items()))

    def use_damaged_shares(self) -> list[int]:
        """
        The last resort, when good shares are lacking and no more can be found.

        From now on a share with bad blocks is used for its other segments: each block is proven by
        itself, so nothing wrong can come of it. Returns the bad shares that are in use again.
        """
        self._uses_damaged_shares = True
        revived = [s for s in self._shares.values() if s.bad and s.bad_segments]
        for share in revived:
            share.bad = False
        return [share.number for share in revived]

    def drop_share(self, share_number: int) -> None:
        """A share can be asked no more; what has come of it remains in use."""
        share = self._shares.get(share_number)
        if share is not None:
            share.available = False
            share.store.forget_asked()

    def unasked(self, share_number: int) -> None:
        """What was asked of a share and has not come will not come: ask for it again."""
        share = self._shares.get(share_number)
        if share is not None:
            share.store.forget_asked()

    def received(self, share_number: int, offset: int, data: Buffer) -> None:
        """
        Bytes of a share have come, in any split and order; what was not asked is ignored.

        Args:
            data: kept by reference; it must not change any more.
        """
        share = self._shares.get(share_number)
        if share is not None and not share.bad:
            share.store.put(offset, data)
            self._read_parts(share)

    def ended(self, share_number: int, offset: int) -> None:
        """A share has no bytes at or after offset; if some were needed, it is bad."""
        share = self._shares.get(share_number)
        if share is not None and not share.bad:
            share.store.set_end(offset)
            self._read_parts(share)

    # What to read.

    def wanted(
        self,
        share_number: int,
        ahead_bytes: int,
        most_bytes: int | None = None,
        part: tuple[int, int] | None = None,
    ) -> list[Span]:
        """
        Return what to read of a share that was not asked before; it counts as asked from now on.

        Metadata comes first, or together with the first blocks. Empty: wait, or there is no more.

        Args:
            ahead_bytes: how many bytes of blocks may be asked beyond those whose plaintext has
                been returned; at least one block is.
            most_bytes: not more of blocks than this all the same, be it a part of one.
            part: blocks of these segments [first, end) only.
        """
        share = self._shares.get(share_number)
        if share is None or share.bad or not share.available or self.done:
            return []
        where = share.layout or self.guessed_layout
        plan = attrs.evolve(self._plan(share, ahead_bytes, most_bytes), part=part)
        blocks = plan.blocks(where)
        metadata, data = Spans(), Spans()
        apart = blocks[1] - blocks[0] > max(_APART_BYTES, plan.geometry.block_bytes)
        for start, end in self._metadata_wanted(share, where, plan):
            for a, b in share.store.ask(start, end):
                metadata.add(a, b)
        for a, b in share.store.ask(*blocks):
            (data if apart else metadata).add(a, b)
        # No block is of use before the metadata is here.
        spans = [Span(a, b - a) for a, b in metadata.merged(self._merge_gap_bytes)]
        spans.sort(key=lambda span: (span.end > blocks[0] and span.offset < blocks[1], span.offset))
        return spans + [Span(a, b - a, True) for a, b in data.merged(self._merge_gap_bytes)]

    def _plan(self, share: ShareParts, ahead_bytes: int, most_bytes: int | None) -> ReadPlan:
        if self.geometry is not None and self._queue is not None:
            first, end = self._queue.next_delivery, self._queue.end
            return ReadPlan(self.geometry, first, end, ahead_bytes, most_bytes)
        # A guess, or a header's word: that must not make us read more than a block of ours.
        trusted_bytes = max(ahead_bytes, self.guessed_geometry.block_bytes)
        most_bytes = trusted_bytes if most_bytes is None else min(trusted_bytes, most_bytes)
        first, end = self._segment_range(share.hint)
        return ReadPlan(share.hint, first, end, ahead_bytes, most_bytes)

    def _segment_range(self, geometry: Geometry) -> tuple[int, int]:
        return self._start // geometry.segment_bytes, -(-self._end // geometry.segment_bytes)

    def _metadata_wanted(
        self, share: ShareParts, where: ShareLayout, plan: ReadPlan
    ) -> Iterator[tuple[int, int]]:
        yield from plan.header(share)
        yield from plan.chain(share, where)
        yield from plan.tree(share.block_tree, where.block_hashes)
        if self._ueb is None and not share.bad_ueb:
            yield plan.ueb(share, where)
        crypttext_tree = self._crypttext_tree(share)
        if self._ueb is None or crypttext_tree is not None:
            yield from plan.tree(crypttext_tree, where.crypttext_hash_tree)

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
            self._report(share, bad)
            return
        if packed is None:
            return
        k, n, size = self._cap.required_shares, self._cap.total_shares, self._cap.size
        try:
            parsed = ueb.parse(packed)
            if not parsed.segment_bytes or parsed.segment_bytes % k:
                raise ValueError(f"a segment size of {parsed.segment_bytes} for {k} shares")
        except ValueError as error:
            self._fail(f"its UEB is the one that the cap names, but useless: {error}")
            return
        self._ueb = parsed
        self.geometry = Geometry(size, k, n, parsed.segment_bytes)
        self._queue = SegmentQueue(*self._segment_range(self.geometry))
        for other in self._shares.values():
            self._release_delivered(other)
            if other is not share and not other.bad:
                self._read_parts(other)

    def _crypttext_tree(self, share: ShareParts) -> ShareTree | None:
        """Return the share's tree of segment hashes, if it is known or worth reading."""
        if self._ueb is None or self.geometry is None or share.layout is None:
            return None
        if share.crypttext_tree is None and not share.bad_crypttext_tree:
            others = [s for s in self._shares.values() if s.crypttext_tree and not s.bad]
            sources = sum(other.available for other in others)
            if sources < _CRYPTTEXT_SOURCES or is_small(self.geometry.num_segments):
                share.crypttext_tree = ShareTree(
                    share.store,
                    "crypttext_hash_tree",
                    share.layout.crypttext_hash_tree,
                    VerifiedTree(self.geometry.num_segments, self._ueb.crypttext_root_hash),
                )
        return share.crypttext_tree

    def _check_end(self, share: ShareParts) -> None:
        """Raise ``BadPart`` if a part that is needed lies past the end of the share."""
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

    # Segments.

    def next_job(self) -> SegmentJob | None:
        """
        Return work that is ready, or None. Several jobs may be under way at a time.

        Raises:
            CorruptionError: the file itself is inconsistent; no share can help.
        """
        if self._failure is not None:
            raise self._failure
        if self._queue is None or self.done:
            return None
        for segment in self._queue.candidates():
            job = self._job(segment, self._queue)
            if job is not None:
                self._queue.started(segment)
                return job
        return None

    def _job(self, segment: int, queue: SegmentQueue) -> SegmentJob | None:
        assert self.geometry is not None
        geometry = self.geometry
        blocks: list[Block] = []
        for share in list(self._shares.values()):
            block = self._block(share, segment, geometry, queue)
            if block is not None:
                blocks.append(block)
                if len(blocks) == geometry.required_shares:
                    break
        else:
            return None
        crypttext_hash = self._crypttext_hash(segment, queue)
        if crypttext_hash is None:
            return None
        self._running[segment] = {b.share_number: self._shares[b.share_number] for b in blocks}
        first_byte = segment * geometry.segment_bytes
        return SegmentJob(
            segment,
            geometry,
            self._cap.key if isinstance(self._cap, ChkCap) else None,
            tuple(blocks),
            crypttext_hash,
            max(self._start - first_byte, 0),
            min(self._end - first_byte, geometry.segment_length(segment)),
        )

    def _block(
        self, share: ShareParts, segment: int, geometry: Geometry, queue: SegmentQueue
    ) -> Block | None:
        if share.bad or segment in share.bad_segments:
            return None
        if share.layout is None or share.block_tree is None:
            return None
        start, end = block_range(share.layout, geometry, segment, segment + 1)
        if not share.store.has(start, end):
            return None
        share.block_tree.need(queue.next_delivery, segment + 1, queue.end)
        try:
            expected_hash = share.block_tree.leaf(segment)
        except BadPart as bad:
            self._condemn(share, bad)
            return None
        if expected_hash is None:
            self._read_parts(share)  # perhaps it has ended, and the hash will never come
            return None
        if not share.store.has(start, end):
            return None  # a lying header put the tree within the block; the block is read again
        return Block(share.number, share.store.pieces(start, end), expected_hash)

    def _crypttext_hash(self, segment: int, queue: SegmentQueue) -> bytes | None:
        for share in self._shares.values():
            tree = None if share.bad else self._crypttext_tree(share)
            if tree is None or share.bad_crypttext_tree:
                continue
            tree.need(queue.next_delivery, segment + 1, queue.end)
            try:
                found = tree.leaf(segment)
            except BadPart as bad:
                self._distrust_tree(share, bad)
                continue
            if found is not None:
                return found
            self._read_parts(share)  # as above: it may have ended before this tree was thought of
        return None

    def finish(self, result: SegmentResult) -> list[Buffer]:
        """
        Take what a job found; return the plaintext that can leave now, in order.

        Raises:
            CorruptionError: the file itself is inconsistent; no share can help.
        """
        assert self.geometry is not None
        assert self._queue is not None
        used = self._running.pop(result.segment)
        for number in result.bad_shares:
            share = used[number]
            self._bad_block(share, result.segment, self.geometry)
        if result.bad_shares:
            self._queue.failed(result.segment)
            return []
        if not result.consistent:
            self._fail(f"good blocks of segment {result.segment} do not make the segment")
        if self._failure is not None:
            raise self._failure
        leaving = self._queue.succeeded(result.segment, result.plaintext)
        if leaving:
            for share in self._shares.values():
                self._release_delivered(share)
        return leaving

    def _release_delivered(self, share: ShareParts) -> None:
        """Drop the blocks whose plaintext has left."""
        if share.layout is not None and self.geometry is not None and self._queue is not None:
            # From the first block on: a wrong guess may have asked for some before the range.
            until = self._queue.next_delivery
            share.store.release(*block_range(share.layout, self.geometry, 0, until))

    # Blame.

    def _condemn(self, share: ShareParts, bad: BadPart) -> None:
        """The share is not to be used any more, not even as a last resort."""
        if not share.bad:
            share.bad = True
            share.bad_segments.clear()
            self._report(share, bad)
            share.store.clear()

    def _bad_block(self, share: ShareParts, segment: int, geometry: Geometry) -> None:
        """The share is not to be used any more, unless nothing better can be had."""
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
