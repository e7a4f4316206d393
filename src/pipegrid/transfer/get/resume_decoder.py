"""Resume an interrupted get: find the segments that its part file contains, and fetch the missing ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.core.decoder import Decoder
from pipegrid.core.encoding_parameters import Geometry
from pipegrid.core.hash_tree import GROUP_LEAVES
from pipegrid.core.hashes import CRYPTTEXT_SEGMENT, Buffer
from pipegrid.core.layout import ShareLayout
from pipegrid.core.received_file import ReadPlan, block_range
from pipegrid.core.segment_decoding import SegmentJob
from pipegrid.core.spans import Spans
from pipegrid.core.stream_cipher import StreamCipher
from pipegrid.transfer.get.sink import PresentBytes

ReadHere = Callable[[int, int], bytes]
"""A function of offset and length: returns bytes of the part file, fewer at its end. Called in any thread."""

CHECK_AHEAD_BYTES = 256 << 20
"""
Blocks are requested only when at most this many present bytes must be checked before the blocks are
delivered. Checking that many bytes takes about half a second, so round trips are used for checking, and no
server is paused for minutes.
"""

_CHUNK_BYTES = 1 << 18
_UNLIMITED = 1 << 62


class Rechecked(NamedTuple):
    """
    The result of checking a segment that may be in the part file.

    Attributes:
        probe: whether the segment was checked before its turn, to find out whether the part file belongs to
            the file of the cap.
    """

    segment: int
    good: bool
    probe: bool


class Recheck(NamedTuple):
    """
    The check of one segment that may be in the part file; it runs in any thread and holds one chunk in
    memory.

    Attributes:
        key: the key to encrypt the plaintext; None if the part file contains ciphertext.
        offset: where the segment begins in the range.
        length: size of the segment.
        crypttext_hash: the segment's proven hash.
    """

    segment: int
    probe: bool
    key: bytes | None
    first_byte: int
    offset: int
    length: int
    crypttext_hash: bytes
    read: ReadHere

    def __repr__(self) -> str:  # the key is secret
        return f"<Recheck of segment {self.segment}>"

    def run(self) -> Rechecked:
        """Check the segment; a segment that cannot be read counts as missing."""
        return Rechecked(self.segment, self._is_good(), self.probe)

    def _is_good(self) -> bool:
        hasher = CRYPTTEXT_SEGMENT.hasher()
        cipher = StreamCipher(self.key, self.first_byte) if self.key is not None else None
        buffer = bytearray(min(_CHUNK_BYTES, self.length))
        done = 0
        while done < self.length:
            wanted = min(_CHUNK_BYTES, self.length - done)
            try:
                data: Buffer = self.read(self.offset + done, wanted)
            except OSError:
                return False
            if not data:
                return False
            if cipher is not None:
                output = memoryview(buffer)[: len(data)]
                cipher.apply(data, output)
                data = output
            hasher.update(data)
            done += len(data)
        return hasher.digest() == self.crypttext_hash


class ResumingDecoder(Decoder):
    """
    A decoder that does not fetch segments that are present in a part file.

    Present bytes are encrypted again and compared with the ciphertext's segment hashes; the UEB proves these
    hashes, and the cap proves the UEB. Every share contains the hashes next to data that is read anyway: so
    the first requests ask for blocks that are certainly missing, and checking costs no round trip. A segment
    that proves to be bad is fetched like any missing segment. Nothing in the part file is trusted, and
    nothing unproven counts as delivered.

    ``PresentSegments`` records which segments are present.

    Args:
        found_bytes: number of bytes that may be present, from the start of the range.
        read: reads the present bytes.
        max_segment_bytes: a file with larger segments is not decoded.
    """

    def __init__(
        self,
        cap: ChkCap | ChkVerifierCap,
        start: int,
        length: int,
        found_bytes: int,
        read: ReadHere,
        max_segment_bytes: int,
    ) -> None:
        super().__init__(cap, start, length, max_segment_bytes=max_segment_bytes)
        self._found_bytes = found_bytes
        self._read = read
        self._here: PresentSegments | None = None  # None until the geometry is known
        self._probing: set[int] = set()
        self._guessed_here = self._segments_here(self.guessed_geometry)

    def _segments_here(self, geometry: Geometry) -> PresentSegments:
        return PresentSegments(geometry, self._start, self._end, self._found_bytes)

    def _here_in(self, geometry: Geometry) -> PresentSegments:
        if geometry is self.guessed_geometry and self.geometry is None:
            return self._guessed_here
        if geometry is not self.geometry:
            return self._segments_here(geometry)
        if self._here is None:
            self._here = self._segments_here(geometry)
        return self._here

    @property
    def here(self) -> PresentSegments | None:
        """The segments that may be present; None until the geometry is known."""
        return None if self.geometry is None else self._here_in(self.geometry)

    @property
    def is_checking(self) -> bool:
        """Whether the next segment to deliver may be in the part file."""
        here = self.here
        if here is None or self._queue is None:
            return bool(self._guessed_here)
        return not self.done and here.has(self._queue.next_delivery)

    # Which segments are missing, and which blocks to read.

    @property
    def segments_left(self) -> tuple[int, int]:
        """The range [first, end) that contains all segments to fetch."""
        first, end = super().segments_left
        missing = self._here_in(self.geometry or self.guessed_geometry).missing(first, end)
        return (missing[0][0] if missing else end), end

    def _needed_blocks(
        self, where: ShareLayout, geometry: Geometry, first: int, end: int
    ) -> list[tuple[int, int]]:
        missing = self._here_in(geometry).missing(first, end)
        return [block_range(where, geometry, a, b) for a, b in missing]

    def _block_runs(self, plan: ReadPlan, where: ShareLayout) -> list[tuple[int, int]]:
        geometry = plan.geometry
        here = self._here_in(geometry)
        if not here:
            return super()._block_runs(plan, where)
        first, end = plan.part or (plan.first, plan.end)
        segments = max(1, plan.ahead_bytes // geometry.block_bytes)
        most_bytes = _UNLIMITED if plan.most_bytes is None else plan.most_bytes
        runs: list[tuple[int, int]] = []
        for a, b in here.missing(max(first, plan.first), min(end, plan.end)):
            if not (segments and most_bytes):
                break
            if here.unchecked_bytes(plan.first, a) > CHECK_AHEAD_BYTES:
                break
            b = min(b, a + segments)
            start, stop = block_range(where, geometry, a, b)
            runs.append((start, min(stop, start + most_bytes)))
            segments -= b - a
            most_bytes -= runs[-1][1] - start
        return runs

    # Segments.

    def next_job(self) -> SegmentJob | None:
        """Return a job for a fetched segment that can be decoded; for present segments see ``next_check``."""
        self.raise_failure()
        here = self.here
        if here is None or self._queue is None or self.done:
            return None
        for segment in self._queue.candidates():
            if here.has(segment):
                continue
            job = self._job(segment, self._queue)
            if job is not None:
                self._queue.started(segment)
                return job
        return None

    def next_check(self) -> Recheck | None:
        """Return the check of a segment that may be present; None if no check can run now."""
        here, queue = self.here, self._queue
        if here is None or queue is None or self.done:
            return None
        for segment in queue.candidates():
            if not here.has(segment):
                continue
            for each in here.to_check(segment):
                if each == segment:
                    check = self._check(segment, False)
                    if check is not None:
                        queue.started(segment)
                    return check
                if each not in self._probing:
                    check = self._check(each, True)
                    if check is not None:
                        self._probing.add(each)
                    return check
        return None

    def _check(self, segment: int, probe: bool) -> Recheck | None:
        assert self.geometry is not None
        assert self._queue is not None
        crypttext_hash = self._crypttext_hash(segment, self._queue)
        if crypttext_hash is None:
            return None
        first_byte = segment * self.geometry.segment_bytes
        return Recheck(
            segment,
            probe,
            self._cap.key if isinstance(self._cap, ChkCap) else None,
            first_byte,
            first_byte - self._start,
            self.geometry.segment_length(segment),
            crypttext_hash,
            self._read,
        )

    def checked(self, result: Rechecked) -> tuple[list[Buffer], bool]:
        """
        Process the result of a check.

        Returns:
            The plaintext that can be delivered now, in order; and whether all present segments were just
                dropped because they belong to another file.
        """
        here, queue = self.here, self._queue
        assert here is not None
        assert queue is not None
        assert self.geometry is not None
        forgotten = here.checked(result.segment, result.good)
        if result.probe:
            self._probing.discard(result.segment)
            return [], forgotten
        if not result.good:
            queue.failed(result.segment)
            return [], forgotten
        piece = PresentBytes.of(self.geometry.segment_length(result.segment))
        leaving = queue.succeeded(result.segment, [piece])
        if leaving:
            for share in self._shares.values():
                self._release_delivered(share)
        return leaving, forgotten


# Which segments of a file may be present in a part file, and which must be fetched.
#
# The bytes in the part file of an interrupted get are not trusted: a segment counts as present until its hash
# proves otherwise; then the segment is fetched. Segments are checked in order, mostly while missing segments
# are fetched. If the first segment is bad, perhaps all are, because the part file belongs to another file. In
# this case probes are checked next: some segments spread over the part file. If no probe is good, all
# segments are fetched.
#
# A segment that lies only partly in the range cannot be checked, so it is always fetched: at most the first
# and the last of a range.
#
# Pure: the caller reports the results of checks, by segment number.

_PROBES = 8


class PresentSegments:
    """
    The segments of one range that may be present.

    Args:
        start, end: the range, in bytes of the file.
        found_bytes: number of bytes that may be present, from the start of the range.

    Attributes:
        good, bad: number of segments that were found good, or bad.
        good_bytes: number of bytes of the range in good segments.
    """

    def __init__(self, geometry: Geometry, start: int, end: int, found_bytes: int) -> None:
        self._geometry = geometry
        size = geometry.segment_bytes
        until = min(start + found_bytes, end)
        first = -(-start // size)
        # The last segment may be shorter than the others: it ends with the file.
        last = geometry.num_segments if until == geometry.size else until // size
        self._here = Spans([(first, last)] if first < last else [])
        self._unchecked = Spans(self._here)
        self._probes = self._spread(first, last) if first < last else []
        self.good = 0
        self.bad = 0
        self.good_bytes = 0

    def _spread(self, first: int, last: int) -> list[int]:
        # Probes lie within the segments whose hashes are read first, since of a huge file not all hashes are
        # read at first.
        count = min(last - first, GROUP_LEAVES)
        return sorted({first + count * i // _PROBES for i in range(_PROBES)} - {first})

    def __bool__(self) -> bool:
        """Return whether any segment may be present."""
        return len(self._here) > 0

    def has(self, segment: int) -> bool:
        """Return whether a segment may be present."""
        return self._here.contains(segment, segment + 1)

    def missing(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the runs, each [first, end), of segments that must be fetched."""
        return self._here.gaps(first, end)

    def to_check(self, segment: int) -> list[int]:
        """
        Return the segments to check now, when it is this segment's turn.

        If a segment was bad and none was good so far, return the probes; this segment waits for them.
        """
        if self.bad and not self.good and self._probes:
            return self._probes
        return [segment]

    def unchecked_bytes(self, first: int, end: int) -> int:
        """Return approximately how many bytes of the segments [first, end) must still be checked."""
        runs = self._unchecked.overlap(first, end)
        return sum(b - a for a, b in runs) * self._geometry.segment_bytes

    def checked(self, segment: int, good: bool) -> bool:
        """
        Record the result of checking a segment.

        Returns:
            Whether this result was the reason to drop all segments that were thought to be present.
        """
        was_unchecked = self._unchecked.contains(segment, segment + 1)
        self._unchecked.remove(segment, segment + 1)
        if segment in self._probes:
            self._probes.remove(segment)
        if good:
            if was_unchecked:
                self.good += 1
                self.good_bytes += self._geometry.segment_length(segment)
            return False
        self.bad += 1
        self._here.remove(segment, segment + 1)
        if self.good or self._probes:
            return False
        was_any = len(self._here) > 0
        self._here, self._unchecked = Spans(), Spans()
        return was_any
