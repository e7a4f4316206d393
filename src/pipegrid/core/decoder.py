"""
Decoder that restores a range of an immutable file from its shares. It does no I/O: the caller reads the
ranges that it asks for.

Source: Tahoe-LAFS's ``file-encoding.rst``, and how 1.20 behaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from pipegrid.core import layout
from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.core.encoding_parameters import DEFAULT_SEGMENT_BYTES, MAX_SEGMENT_BYTES, Geometry
from pipegrid.core.hashes import Buffer
from pipegrid.core.layout import ShareLayout
from pipegrid.core.received_file import FileShares, ReadPlan, SegmentQueue, block_range
from pipegrid.core.received_share import BadPart, ShareParts, ShareTree
from pipegrid.core.segment_decoding import Block, SegmentJob, SegmentResult
from pipegrid.core.spans import Range, Span, Spans

MERGE_GAP_BYTES = 8192
"""Reading up to this many unneeded bytes is cheaper than another request."""

_APART_BYTES = 1 << 18
"""
A run of blocks longer than this is not requested in one span with metadata.

A reader may pause the span of a long run, and then the metadata would never arrive.
"""


class Decoder(FileShares):
    """
    Restores one range of one file from its shares. ``FileShares`` documents the attributes.

    For each share, the caller asks ``wanted`` for the ranges to read, and passes the bytes to ``received`` in
    any order and in pieces of any size. It runs the jobs of ``next_job`` in any thread, and passes their
    results to ``finish``, which returns plaintext in order. Blocks are verified before they are decoded, and
    plaintext before it is returned.

    Until a share's header and the UEB are known, offsets are computed from a guessed segment size; a correct
    guess saves one round trip. A header is not authenticated: it only suggests where to read, and a wrong one
    can cause only a limited number of bytes to be read.
    """

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

        With a verify cap, which has no key, the decoder restores ciphertext.

        Args:
            length: None for the rest of the file.
            guess_segment_bytes: the maximum segment size that the writer probably used.
            merge_gap_bytes: spans at most this far apart are merged.
            max_segment_bytes: a file with larger segments is not restored.
        """
        super().__init__(cap, start, length, guess_segment_bytes, max_segment_bytes)
        self._merge_gap_bytes = merge_gap_bytes
        self._running: dict[int, dict[int, ShareParts]] = {}

    # Which segments, bytes and good shares are still lacking.

    @property
    def segments_left(self) -> tuple[int, int]:
        """
        The segments [first, end) whose plaintext has not been returned yet; an estimate until the UEB is
        known.
        """
        if self._queue is None:
            return self._segment_range(self.guessed_geometry)
        return self._queue.next_delivery, self._queue.end

    @property
    def delivered_bytes(self) -> int:
        """How many bytes of the file's range ``finish`` has returned."""
        if self._queue is None or self.geometry is None:
            return 0
        until = min(self._queue.next_delivery * self.geometry.segment_bytes, self._end)
        return max(0, until - self._start)

    @property
    def metadata_bytes(self) -> int:
        """
        The length of a share without its blocks. These bytes may be in memory in addition to the limit for
        blocks.
        """
        geometry = self.geometry or self.guessed_geometry
        return layout.share_bytes(geometry) - geometry.share_data_bytes

    @property
    def lacking(self) -> int:
        """How many more good shares are needed to restore the rest of the range; 0 if there are enough."""
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
        # The share's server is gone, but all bytes of the share that are still needed may have arrived.
        if self.geometry is None or self._queue is None or share.layout is None:
            return False
        first, end = self._queue.next_delivery, self._queue.end
        blocks = self._needed_blocks(share.layout, self.geometry, first, end)
        return all(share.store.has(*run) for run in blocks) and self._is_whole(share.block_tree)

    def _needed_blocks(
        self, where: ShareLayout, geometry: Geometry, first: int, end: int
    ) -> list[Range]:
        """Return the ranges of the blocks of segments [first, end) that have to be read."""
        return [block_range(where, geometry, first, end)]

    def _is_whole(self, tree: ShareTree | None) -> bool:
        """
        Return whether all nodes of a tree that are still needed have arrived. Used for shares whose server is
        gone.
        """
        if tree is None or self._queue is None:
            return False
        tree.need(self._queue.next_delivery, self._queue.end, self._queue.end)
        return not tree.awaited()

    # The ranges to read next from each share.

    def wanted(
        self,
        share_number: int,
        ahead_bytes: int,
        most_bytes: int | None = None,
        part: Range | None = None,
    ) -> list[Span]:
        """
        Return the spans to read next from a share; later calls do not return them again.

        Metadata comes first, or together with the first blocks. An empty list means that everything is
        requested, or that the caller must wait for other bytes.

        Args:
            ahead_bytes: how many bytes of blocks may be requested beyond those whose plaintext has been
                returned; at least one block is requested.
            most_bytes: the maximum number of bytes of blocks, even if that is only a part of one block; None
                for no limit.
            part: only blocks of these segments [first, end); None for all segments.
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
        if not around and not within:  # the usual case: callers ask after each event
            return []
        blocks = (runs[0][0], runs[-1][1]) if runs else (0, 0)
        apart = blocks[1] - blocks[0] > max(_APART_BYTES, plan.geometry.block_bytes)
        metadata, data = (
            Spans(around if apart else (*around, *within)),
            Spans(within if apart else ()),
        )
        # Metadata comes first: no block can be used before it is known.
        spans = [Span(a, b - a) for a, b in metadata.merged(self._merge_gap_bytes)]
        spans.sort(key=lambda span: (span.end > blocks[0] and span.offset < blocks[1], span.offset))
        return spans + [Span(a, b - a, True) for a, b in data.merged(self._merge_gap_bytes)]

    def awaits(self, share_number: int, start: int, end: int) -> bool:
        """
        Return whether the next segment to return needs any of the bytes [start, end) of a share.

        Pausing such bytes delays the whole download, even if most of the share has arrived.
        """
        share = self._shares.get(share_number)
        if share is None or share.bad or not share.available or self.done:
            return False
        where = share.layout or self.guessed_layout
        plan = self._plan(share, 0, None)
        needed = (*self._block_runs(plan, where), *self._metadata_wanted(share, where, plan))
        return any(not share.store.has(max(a, start), min(b, end)) for a, b in needed)

    def _block_runs(self, plan: ReadPlan, where: ShareLayout) -> list[Range]:
        """Return the ranges of blocks that a plan allows to be read now, in ascending order."""
        return [plan.blocks(where)]

    def _plan(
        self, share: ShareParts, ahead_bytes: int, most_bytes: int | None, part: Range | None = None
    ) -> ReadPlan:
        if self.geometry is not None and self._queue is not None:
            first, end = self._queue.next_delivery, self._queue.end
            return ReadPlan(self.geometry, first, end, ahead_bytes, most_bytes, part)
        # The geometry is a guess, or from an unverified header. It must not cause more than one block of a
        # file with the default segment size to be read.
        trusted_bytes = max(ahead_bytes, self.guessed_geometry.block_bytes)
        most_bytes = trusted_bytes if most_bytes is None else min(trusted_bytes, most_bytes)
        first, end = self._segment_range(share.hint)
        return ReadPlan(share.hint, first, end, ahead_bytes, most_bytes, part)

    def _metadata_wanted(
        self, share: ShareParts, where: ShareLayout, plan: ReadPlan
    ) -> Iterator[Range]:
        if share.layout is None:
            yield 0, share.header_bytes()
        if share.leaf is None:
            yield where.share_hashes, where.uri_extension
        yield from plan.tree(share.block_tree, where.block_hashes)
        if self._ueb is None and not share.bad_ueb:
            yield plan.ueb(share, where)
        crypttext_tree = self._crypttext_tree(share)
        if self._ueb is None or crypttext_tree is not None:
            yield from plan.tree(crypttext_tree, where.crypttext_hash_tree)

    # Segments.

    def next_job(self) -> SegmentJob | None:
        """
        Return a job that is ready, or None. Several jobs may run at the same time.

        Raises:
            CorruptionError: the file itself is inconsistent; no other share can help.
            CapMismatch: the cap's numbers differ from those in the UEB that the cap names.
            SegmentTooLarge: a segment needs more memory than is allowed.
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
        shares = list(self._shares.values())
        found = (self._block(share, segment, geometry, queue) for share in shares)
        blocks = tuple(islice(filter(None, found), geometry.required_shares))
        if len(blocks) < geometry.required_shares:
            return None
        crypttext_hash = self._crypttext_hash(segment, queue)
        if crypttext_hash is None:
            return None
        self._running[segment] = {b.share_number: self._shares[b.share_number] for b in blocks}
        first_byte = segment * geometry.segment_bytes
        start = max(self._start - first_byte, 0)
        end = min(self._end - first_byte, geometry.segment_length(segment))
        key = self._cap.key if isinstance(self._cap, ChkCap) else None
        return SegmentJob(segment, geometry, key, blocks, crypttext_hash, start, end)

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
            self._read_parts(share)  # if the share has ended, the hash will never arrive
            return None
        if not share.store.has(start, end):
            return None  # a wrong header: loading the tree dropped bytes of the block
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
            self._read_parts(share)  # the share may have ended before the caller needed this tree
        return None

    def finish(self, result: SegmentResult) -> list[Buffer]:
        """
        Accept the result of a job; return the plaintext that is next in order.

        Raises:
            CorruptionError: the file itself is inconsistent; no other share can help.
        """
        assert self.geometry is not None
        assert self._queue is not None
        used = self._running.pop(result.segment)
        for number in result.bad_shares:
            self._bad_block(used[number], result.segment, self.geometry)
        if result.bad_shares:
            self._queue.failed(result.segment)
            return []
        if not result.consistent:
            self._fail(f"good blocks of segment {result.segment} do not restore the segment")
        self.raise_failure()
        leaving = self._queue.succeeded(result.segment, result.plaintext)
        if leaving:
            for share in self._shares.values():
                self._release_delivered(share)
        return leaving

    def release(self) -> None:
        """
        Drop all bytes, and accept no more, because the reader has ended, with or without success.

        Objects of an interrupted reader may form a reference cycle, and so stay in memory for a long time.
        """
        for share in self._shares.values():
            share.store.clear()
        self._running.clear()
        if self._queue is not None:
            self._queue.release()
