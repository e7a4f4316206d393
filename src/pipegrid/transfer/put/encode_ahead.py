"""Segments are encoded in advance, and encoded again for shares that were opened late."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from twisted.internet.defer import CancelledError, Deferred

from pipegrid.core.caps import ChkCap
from pipegrid.core.encoder import CodedSegment, Encoder, ShareWrite
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.peers import TransferContext
from pipegrid.transfer.put.file_key import KeyedFile
from pipegrid.transfer.put.share_tracker import ActiveShares
from pipegrid.transfer.put.share_upload import ShareUpload
from pipegrid.transfer.put.source import Source

# Encoding segments in advance, on all worker threads at the same time.
#
# Segments are encrypted strictly in order, since cipher and flat hash continue through the whole file.
# Reading, erasure coding and hashing, which are five sixths of the work, run in parallel for several
# segments. One job does all steps for one segment: jobs start in order, and each job waits in its thread
# until the previous job has finished encrypting. (If encryption were a separate job, the reactor would have
# to pass each segment on. While the reactor is busy with the traffic of ten servers, a core would be idle: a
# put of 100 MB to servers on the same machine took a sixth longer.) The sender takes finished segments in
# order. At most ``depth`` segments exist between reader and sender.

_CODING_WEIGHT = 8
"""Encoding a segment processes about eight times its bytes."""

DEPTH = 3
"""Maximum number of segments between reader and sender: two being encoded, one that is finished or next."""


class EncodeAhead:
    """
    Encodes the segments of one source in advance, and returns them in order.

    Args:
        depth: maximum number of segments that were read but not taken yet; at least 1.
    """

    def __init__(
        self, encoder: Encoder, source: Source, workers: CpuWorkers, *, depth: int = DEPTH
    ) -> None:
        self._encoder = encoder
        self._source = source
        self._workers = workers
        self._depth = depth
        self._started = 0
        self._turns = _Turns()
        self._coded: deque[Deferred[CodedSegment]] = deque()
        # All jobs have the weight of a full segment: the last segment may be tiny, but must not be encoded on
        # the reactor while earlier segments are encoded in threads.
        self._weight_bytes = _CODING_WEIGHT * encoder.geometry.segment_length(0)

    async def take(self) -> CodedSegment:
        """Return the next segment; call this ``num_segments`` times, one call at a time."""
        self._advance()
        coded = await self._coded[0]
        self._coded.popleft()
        self._advance()
        return coded

    def close(self) -> None:
        """Drop everything; running jobs end by themselves, and their results are ignored."""
        self._turns.close()
        jobs, self._coded = self._coded, deque()
        for job in jobs:
            job.addErrback(lambda _failure: None)
            job.cancel()

    def _advance(self) -> None:
        """Start as many jobs as ``depth`` allows."""
        while (
            len(self._coded) < self._depth
            and self._started < self._encoder.geometry.num_segments
            and not self._turns.is_closed_to(self._started)
        ):
            index = self._started
            self._started += 1
            self._coded.append(self._workers.run_if_large(self._weight_bytes, self._code, index))

    def _code(self, index: int) -> CodedSegment:
        """Read, encrypt and encode a segment; runs in a thread, or on the reactor if segments are small."""
        geometry = self._encoder.geometry
        offset = index * geometry.segment_bytes
        try:
            plaintext = self._source.read_at(offset, geometry.segment_length(index))
            with self._turns.turn(index):
                segment = self._encoder.encrypt(plaintext)
        except BaseException:
            self._turns.close(index)  # later segments would be encrypted at the wrong position
            raise
        del plaintext
        return self._encoder.code(segment)


class _Turns:
    """Lets threads proceed one at a time, in the order of their numbers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = 0
        self._end: float = float("inf")

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """
        Wait until all lower numbers have had their turns, then enter the turn of this number.

        Raises:
            CancelledError: this number will have no turn.
        """
        with self._changed:
            while self._next != number and number < self._end:
                self._changed.wait()
            if number >= self._end:
                raise CancelledError
        yield
        with self._changed:
            self._next += 1
            self._changed.notify_all()

    def is_closed_to(self, number: int) -> bool:
        """Return whether this number will have no turn."""
        return number >= self._end

    def close(self, number: int = 0) -> None:
        """Give no turn to this number and all higher ones."""
        with self._changed:
            self._end = min(self._end, number)
            self._changed.notify_all()


# Sending encoded segments to the share uploads that are open, and encoding again the segments that a share
# upload has missed.
#
# Every segment is sent once, in order. A share upload that was opened late, or lost a connection, gets the
# segments that it missed after the last segment. These segments are encoded again from the source; no segment
# is kept for this purpose.

WaitForSpace = Callable[[], Coroutine[Any, Any, None]]


class Segments:
    """
    The segments of one upload.

    Attributes:
        gone_by: number of segments that were sent already, each to the share uploads that were open then.
    """

    def __init__(self, file: KeyedFile, means: TransferContext, uploads: ActiveShares) -> None:
        self.gone_by = 0
        self._file = file
        self._workers = means.workers
        self._uploads = uploads
        self._encoder = Encoder(file.geometry, file.key)
        self._line = EncodeAhead(self._encoder, file.source, means.workers)

    @property
    def cap(self) -> ChkCap:
        """The file's capability; available after the trailers are sent."""
        return self._encoder.cap

    def close(self) -> None:
        """Encode no more segments in advance; jobs in threads end by themselves."""
        self._line.close()

    async def send_blocks(self, wait_for_space: WaitForSpace) -> None:
        """
        Send the blocks of each segment to the share uploads that are open when it is sent.

        Args:
            wait_for_space: awaited before each segment; may raise to end the upload.
        """
        for index in range(self._file.geometry.num_segments):
            await wait_for_space()
            writes = self._encoder.add(await self._line.take())
            _send(writes, index, self._uploads.open)
            self.gone_by = index + 1

    async def send_trailers(self) -> None:
        """Send the trailers: the hashes that follow the blocks. The trailers determine the file's cap."""
        trees = 32 * self._file.geometry.num_segments * self._file.geometry.total_shares
        writes = await self._workers.run_if_large(16 * trees, self._encoder.finish)
        _send(writes, None, self._uploads.open)

    async def send_missed(self, late: Sequence[ShareUpload], wait_for_space: WaitForSpace) -> None:
        """
        Encode again, and send, the segments that late share uploads have missed or lost; then send the
        trailers.
        """
        geometry = self._file.geometry
        assert self.gone_by == geometry.num_segments
        missed = [upload.resume.missed for upload in late if upload.resume.missed]
        first = min((each.start for each in missed), default=0)
        for index in range(first, max((each.stop for each in missed), default=0)):
            await wait_for_space()
            # If a share upload needs an earlier segment now, it has only just lost that segment; the next
            # call sends it.
            joining = [upload for upload in late if upload.needs_segment(index)]
            if joining:
                shares = {upload.share_number for upload in joining}
                size = 8 * geometry.segment_length(index)
                writes = await self._workers.run_if_large(size, self._recode, index, shares)
                # While the segment was encoded, a share upload may have lost more.
                _send(writes, index, [upload for upload in joining if upload.needs_segment(index)])
        for upload in late:
            if upload.resume.missed or not upload.is_open:
                continue
            if not upload.resume.has_trailer:
                upload.sender.send(self._encoder.trailer(upload.share_number))
            upload.finish()

    def _recode(self, index: int, shares: set[int]) -> list[ShareWrite]:
        geometry = self._file.geometry
        plaintext = self._file.source.read_at(
            index * geometry.segment_bytes, geometry.segment_length(index)
        )
        return self._encoder.recode(index, plaintext, shares)


def _send(
    writes: Iterable[ShareWrite], segment: int | None, uploads: Iterable[ShareUpload]
) -> None:
    by_share: dict[int, list[ShareUpload]] = {}
    for upload in uploads:
        by_share.setdefault(upload.share_number, []).append(upload)
    for write in writes:
        for upload in by_share.get(write.share_number, ()):
            upload.sender.send(write, segment)
