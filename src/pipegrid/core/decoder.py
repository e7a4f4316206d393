"""
From shares to plaintext: says what to read of each share, checks what comes, restores segments.

The decoder knows no server and reads nothing itself. Its caller asks ``wanted`` what to read of a
share, hands the bytes to ``received`` in any order and pieces, runs the jobs that ``next_job``
gives wherever it likes, and passes what they found to ``finish``, which returns plaintext in
order. No block is decoded, and no plaintext leaves, before it is proven.

Everything that is read is placed by a guess of the segment size until a share's header and the
UEB are here; a right guess costs one round trip. A header is not authenticated: it may only
suggest where to look, and how much is read on its word is bounded.

What the shares have told, and which of them are damaged, is ``fileshares``' knowledge. Where a share's
parts are is worked out by ``readplan``, the order of segments is ``segmentqueue``'s, and the work on a
segment ``segmentjob``'s.

Source: the format reference, section 7.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipegrid.core import layout
from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.core.file_shares import FileShares, ReadPlan, SegmentQueue, block_range
from pipegrid.core.hashes import Buffer
from pipegrid.core.layout import ShareLayout
from pipegrid.core.params import DEFAULT_SEGMENT_BYTES, MAX_SEGMENT_BYTES, Geometry
from pipegrid.core.segment_job import Block, SegmentJob, SegmentResult
from pipegrid.core.share_parts import BadPart, ShareParts, ShareTree
from pipegrid.core.spans import Range, Span, Spans

MERGE_GAP_BYTES = 8192
"""Reading this much that nobody needs is cheaper than another request."""

_APART_BYTES = 1 << 18
"""
More blocks than this, if they are several, are not asked in one span with metadata behind them: whoever
reads them may hold them back, and then the metadata would never come.
"""


class Decoder(FileShares):
    """Restores one range of one file from its shares; ``FileShares`` has the attributes."""

    def __init__(
        self,
        cap: ChkCap | ChkVerifierCap,
        start: int = 0,
        length: int | None = None,
        *,
        guess_segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        merge_gap_bytes: int = MERGE_GAP_BYTES,
        max_segment_bytes: int = MAX_SEGMENT_BYTES,
    ) -> None:
        """
        Prepare to restore plaintext [start, start + length), clipped to the file.

        With a verifier cap it is ciphertext, for there is no key; all the rest is the same.

        Args:
            length: None for all the rest.
            guess_segment_bytes: the maximum segment size that the writer is thought to have used.
            merge_gap_bytes: spans at most this far apart become one.
            max_segment_bytes: a file with larger segments is not restored.
        """
        super().__init__(cap, start, length, guess_segment_bytes, max_segment_bytes)
        self._merge_gap_bytes = merge_gap_bytes
        self._running: dict[int, dict[int, ShareParts]] = {}

    # What is missing.

    @property
    def segments_left(self) -> tuple[int, int]:
        """The segments [first, end) whose plaintext has not left; a guess until the UEB is known."""
        if self._queue is None:
            return self._segment_range(self.guessed_geometry)
        return self._queue.next_delivery, self._queue.end

    @property
    def delivered_bytes(self) -> int:
        """How much of the range has left."""
        if self._queue is None or self.geometry is None:
            return 0
        until = min(self._queue.next_delivery * self.geometry.segment_bytes, self._end)
        return max(0, until - self._start)

    @property
    def metadata_bytes(self) -> int:
        """How much of a share is not blocks: that may be held whatever is held of blocks."""
        geometry = self.geometry or self.guessed_geometry
        return layout.share_bytes(geometry) - geometry.share_data_bytes

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
        blocks = self._needed_blocks(share.layout, self.geometry, first, end)
        return all(share.store.has(*run) for run in blocks) and self._is_whole(share.block_tree)

    def _needed_blocks(
        self, where: ShareLayout, geometry: Geometry, first: int, end: int
    ) -> list[Range]:
        """Return where the blocks of segments [first, end) are that have to be read at all."""
        return [block_range(where, geometry, first, end)]

    def _is_whole(self, tree: ShareTree | None) -> bool:
        """Say whether all that is still needed of a tree has come; for those that get no more."""
        if tree is None or self._queue is None:
            return False
        tree.need(self._queue.next_delivery, self._queue.end, self._queue.end)
        return not tree.awaited()

    # What to read.

    def wanted(
        self,
        share_number: int,
        ahead_bytes: int,
        most_bytes: int | None = None,
        part: Range | None = None,
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
        plan = self._plan(share, ahead_bytes, most_bytes, part)
        runs = self._block_runs(plan, where)
        ask = share.store.ask
        around = [each for span in self._metadata_wanted(share, where, plan) for each in ask(*span)]
        within = [each for run in runs for each in ask(*run)]
        if not around and not within:  # mostly: whatever happens, all shares are looked at
            return []
        blocks = (runs[0][0], runs[-1][1]) if runs else (0, 0)
        apart = blocks[1] - blocks[0] > max(_APART_BYTES, plan.geometry.block_bytes)
        metadata, data = (
            Spans(around if apart else (*around, *within)),
            Spans(within if apart else ()),
        )
        # No block is of use before the metadata is here.
        spans = [Span(a, b - a) for a, b in metadata.merged(self._merge_gap_bytes)]
        spans.sort(key=lambda span: (span.end > blocks[0] and span.offset < blocks[1], span.offset))
        return spans + [Span(a, b - a, True) for a, b in data.merged(self._merge_gap_bytes)]

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
        runs = self._block_runs(plan, where)
        for a, b in (*runs, *self._metadata_wanted(share, where, plan)):
            if max(a, start) < min(b, end) and not share.store.has(max(a, start), min(b, end)):
                return True
        return False

    def _block_runs(self, plan: ReadPlan, where: ShareLayout) -> list[Range]:
        """Return the ranges of blocks that a plan is to read now, in order."""
        return [plan.blocks(where)]

    def _plan(
        self, share: ShareParts, ahead_bytes: int, most_bytes: int | None, part: Range | None = None
    ) -> ReadPlan:
        if self.geometry is not None and self._queue is not None:
            first, end = self._queue.next_delivery, self._queue.end
            return ReadPlan(self.geometry, first, end, ahead_bytes, most_bytes, part)
        # A guess, or a header's word: that must not make us read more than a block of ours.
        trusted_bytes = max(ahead_bytes, self.guessed_geometry.block_bytes)
        most_bytes = trusted_bytes if most_bytes is None else min(trusted_bytes, most_bytes)
        first, end = self._segment_range(share.hint)
        return ReadPlan(share.hint, first, end, ahead_bytes, most_bytes, part)

    def _metadata_wanted(
        self, share: ShareParts, where: ShareLayout, plan: ReadPlan
    ) -> Iterator[Range]:
        yield from plan.header(share)
        yield from plan.chain(share, where)
        yield from plan.tree(share.block_tree, where.block_hashes)
        if self._ueb is None and not share.bad_ueb:
            yield plan.ueb(share, where)
        crypttext_tree = self._crypttext_tree(share)
        if self._ueb is None or crypttext_tree is not None:
            yield from plan.tree(crypttext_tree, where.crypttext_hash_tree)

    # Segments.

    def next_job(self) -> SegmentJob | None:
        """
        Return work that is ready, or None. Several jobs may be under way at a time.

        Raises:
            CorruptionError: the file itself is inconsistent; no share can help.
            CapMismatch: the cap's numbers are not those of the UEB that it names.
            SegmentTooLarge: more would have to be held than is allowed.
        """
        self.raise_failure()
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
        start = max(self._start - first_byte, 0)
        end = min(self._end - first_byte, geometry.segment_length(segment))
        key = self._cap.key if isinstance(self._cap, ChkCap) else None
        return SegmentJob(segment, geometry, key, tuple(blocks), crypttext_hash, start, end)

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
            self._fail(f"good blocks of segment {result.segment} do not restore the segment")
        if self._failure is not None:
            raise self._failure
        leaving = self._queue.succeeded(result.segment, result.plaintext)
        if leaving:
            for share in self._shares.values():
                self._release_delivered(share)
        return leaving
