"""Send one share in batches of writes, without the bytes that the server already has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from twisted.internet.defer import Deferred

from pipegrid.core.encoder import ShareWrite
from pipegrid.core.hashes import Buffer
from pipegrid.core.spans import Spans
from pipegrid.transfer.put.file_key import ShareTarget
from pipegrid.wire.storage_messages import WriteAnswer

# Which bytes of one share must still be sent.
#
# A put that resumes an interrupted put starts as if the server had nothing: asking first would cost every put
# a round trip. The response to the first write lists the bytes that the server still needs, and so the bytes
# that it has. From then on, writes that lie wholly within present bytes are skipped. So a repeated put sends
# the missing bytes and at most one window more, which is sent before the first response arrives.
#
# Pure: the caller reports responses and gets decisions. The rules:
#
# * **The last response counts**, and replaces the earlier ones. It still lists the bytes of writes that were
#   sent after its request as missing; these are not sent again for that reason. It may report fewer present
#   bytes than an earlier response, if the server has lost some; then the skipped bytes are sent at the end.
# * **A response is untrusted input.** It decides which bytes are sent, never that the share is stored: only
#   the response to the completing write proves that. If everything was sent or skipped and no such response
#   came, the server was wrong: ``unskip`` marks the skipped bytes as missing, and from then on nothing is
#   skipped.
# * **A response is bounded.** A client that writes in order, as PipeGrid does, leaves one gap for each
#   interruption and each lost connection. A response with more than ``MAX_GAPS`` gaps is ignored, which costs
#   bytes but neither memory nor time.
#
# Over Foolscap the response to a write does not list bytes, and an unfinished share is lost with its
# connection. So over Foolscap only bytes that this process sent are skipped.

MAX_GAPS = 256
"""Maximum gaps in a response that is used; interrupted shares have few, even after several resumed puts."""

NO_SEGMENTS = range(0)


class ResumeRanges:
    """
    Which bytes of one share a server has, and which must still be sent.

    Args:
        missed: segments that were sent to the other shares before this share was opened.

    Attributes:
        missed: segments that must be encoded again and sent, in this order.
        has_trailer: whether the hashes after the blocks were sent or skipped, and not lost.
        upto: offset after the last byte known to be present; 0 if no byte is. Most writes start at or after
            this offset, which is quick to check.
        total_bytes: number of present bytes, by the last response.
        segments: range from the first to the last segment whose block was skipped.
        trailer: whether the hashes after the blocks were skipped.
    """

    __slots__ = (
        "_spans",
        "_trusted",
        "has_trailer",
        "missed",
        "segments",
        "total_bytes",
        "trailer",
        "upto",
    )

    def __init__(self, missed: range = NO_SEGMENTS) -> None:
        self.missed = missed
        self.has_trailer = False
        self.upto = 0
        self.total_bytes = 0
        self.segments = NO_SEGMENTS
        self.trailer = False
        self._spans: Spans | None = None
        self._trusted = True

    def __repr__(self) -> str:
        return f"<ResumeRanges {self.total_bytes} bytes up to {self.upto}>"

    @property
    def has_skipped(self) -> bool:
        """Whether any write was skipped because the server reported its bytes as present."""
        return bool(self.segments) or self.trailer

    def answered(self, required: Sequence[tuple[int, int]], share_bytes: int) -> None:
        """
        Process the server's list of bytes that it still needs, from a response that does not complete the
        share.

        Args:
            required: half-open ranges as received: in any order, overlapping, anywhere. If no range lies
                within the share, the list is ignored, since a share that needs nothing would be complete.
        """
        if not self._trusted or not 0 < len(required) <= MAX_GAPS:
            return
        needed = Spans((begin, min(end, share_bytes)) for begin, end in required if begin >= 0)
        if not len(needed):
            return
        gaps = needed.gaps(0, share_bytes)
        self._spans = Spans(gaps)
        self.total_bytes = share_bytes - needed.total
        self.upto = gaps[-1][1] if gaps else 0

    def covers(self, begin: int, end: int) -> bool:
        """Return whether the server has all of these bytes, so that they need not be sent."""
        return begin < self.upto and self._spans is not None and self._spans.contains(begin, end)

    def needs_segment(self, segment: int) -> bool:
        """Return whether this is the next segment to be encoded again."""
        return bool(self.missed) and segment == self.missed.start

    def gave(self, segment: int | None) -> None:
        """
        Record that the block of a segment was given to the sender; None: the hashes after the blocks were.
        """
        if segment is None:
            self.has_trailer = True
        elif self.needs_segment(segment):
            self.missed = self.missed[1:]

    def mark_skipped(self, segments: range, trailer: bool) -> None:
        """Record that these segments, or the trailer, were skipped."""
        self.segments = joined(self.segments, segments)
        self.trailer = self.trailer or trailer

    def lost(self, segments: range, trailer: bool) -> None:
        """Record that the sent blocks of these segments, or the trailer, were lost: encode them again."""
        self.missed = joined(self.missed, segments)
        self.has_trailer = self.has_trailer and not trailer

    def unskip(self) -> None:
        """
        Mark the skipped bytes as missing, since the server does not have them, and ignore later
        responses.
        """
        self.lost(self.segments, self.trailer)
        self.segments, self.trailer = NO_SEGMENTS, False
        self._trusted = False
        self._spans = None
        self.upto = self.total_bytes = 0


def joined(one: range, other: range) -> range:
    """Return the smallest range that contains both ranges, including any segments between them."""
    if not one or not other:
        return one or other
    return range(min(one.start, other.start), max(one.stop, other.stop))


# The messages of one share, and their sizes.
#
# Pure. The encoder yields small writes; these are gathered into batches, and each batch is one request. The
# pipeline's window limits the size of a batch to a part of the bytes that may be in flight.

BATCH_BYTES = 4 << 20
"""
Maximum size of a batch, if the window permits it. Measured: a server takes 75 MB/s in pieces of 32 KiB, 173
MB/s in pieces of 128 KiB and 357 MB/s in pieces of 1 MiB. 100 MB cost ten Tahoe-LAFS servers 1.6 s of
processor time in messages of 1 MiB, 1.4 s in 2 MiB and 1.25 s in 4 MiB.
"""

MIN_BATCH_BYTES = 64 << 10
"""
Smallest size at which a batch may count as full. Between this size and ``BATCH_BYTES`` the window decides: if
one message filled the window, the next message could be sent only a round trip later. With a first window of
1 MiB and ten servers that would cost every large file a round trip.
"""

UNKEPT_BATCH_BYTES = 256 << 10
"""
Batches of at least this size need not stay in memory once sent; smaller batches are kept, and sent again from
memory if their connection is lost.
"""


class Batch:
    """
    Writes that are sent in one message.

    Attributes:
        segments: the contiguous segments whose blocks are in the batch.
        has_trailer: whether the batch contains the hashes after the blocks.
    """

    __slots__ = ("has_trailer", "length", "offset", "pieces", "segments")

    def __init__(
        self,
        offset: int,
        pieces: list[Buffer] | None = None,
        length: int = 0,
        segments: range = NO_SEGMENTS,
        has_trailer: bool = False,
    ) -> None:
        self.offset = offset
        self.pieces = [] if pieces is None else pieces
        self.length = length
        self.segments = segments
        self.has_trailer = has_trailer

    def add(self, write: ShareWrite, segment: int | None) -> None:
        """
        Add a write that begins where the batch ends. ``segment``: the segment of a block; None for hashes.
        """
        self.pieces.extend(write.pieces)
        self.length += write.length
        if segment is None:
            self.has_trailer = True
        else:
            self.segments = joined(self.segments, range(segment, segment + 1))

    def cut_last(self) -> Batch:
        """Remove the last byte and return it as a batch."""
        last = memoryview(self.pieces.pop()).cast("B")
        if len(last) > 1:
            self.pieces.append(last[:-1])
        self.length -= 1
        return Batch(self.offset + self.length, [last[-1:]], 1, has_trailer=True)

    @property
    def is_small(self) -> bool:
        """
        Whether the batch can grow without a check of the window; such a check would take longer than
        everything else that is done for a small file.
        """
        return self.length < min(BATCH_BYTES, MIN_BATCH_BYTES)

    @property
    def may_be_released(self) -> bool:
        """Whether the batch is too large to be kept in memory; if it is lost, its bytes are encoded again."""
        return self.length >= UNKEPT_BATCH_BYTES

    def is_full(self, liked_bytes: int, sent_before: int, turn: float) -> bool:
        """
        Return whether the batch should be sent now.

        Args:
            liked_bytes: the message size that the window prefers.
            sent_before: number of messages of this share that were already sent.
            turn: size of the second message, as a fraction of a full message.
        """
        message_bytes = min(BATCH_BYTES, liked_bytes)
        if sent_before == 1:
            message_bytes = int(message_bytes * turn)
        return self.length >= min(BATCH_BYTES, max(MIN_BATCH_BYTES, message_bytes))


# Sending: writes are gathered into batches, and either skipped or passed to the server's pipeline.
#
# If segments can be encoded again, a large batch need not be kept until it is acknowledged. Segments that are
# lost with a connection then count as missed, like segments that were sent before the share was opened.

BatchSent = Callable[[Deferred[WriteAnswer], Batch], Deferred[object]]


class ShareSender:
    """
    Sends one share to one server; its methods never wait.

    Args:
        target: the share and the server.
        resume: which bytes need not be sent, and which segments were missed.
        sent: gets the call of each batch that is sent; returns a Deferred that never fails, since shares that
            use the same pipeline must not see this share's failures.
        changed: called when the sender can take more.
        recodable: whether segments can be encoded again, so that bytes that were passed to the network need
            not be kept.
        turn: size of the second message, as a fraction of a full message: more than 0, at most 1. It differs
            between shares: if the messages of all shares were full at the same time, they would be sent
            together, and servers would be idle until the next messages are encoded.

    Attributes:
        resume: see the argument.
        stopped: whether the sender sends nothing more.
        all_sent: whether every byte of the share was passed to the pipeline.
    """

    def __init__(
        self,
        target: ShareTarget,
        resume: ResumeRanges,
        sent: BatchSent,
        changed: Callable[[], None],
        *,
        recodable: bool,
        turn: float,
    ) -> None:
        self.resume = resume
        self.stopped = False
        self.all_sent = False
        self._target = target
        self._pipeline = target.peer.pipeline
        self._sent = sent
        self._changed = changed
        self._recodable = recodable
        self._turn = turn
        self._flushed = 0
        self._batch: Batch | None = None
        self._last: Batch | None = None
        self._window_space: Deferred[None] | None = None
        self._lost_writes = False

    @property
    def blocked(self) -> bool:
        """
        Whether the sender takes no more data: the window is full, and the next message is full, too, if the
        pipeline gathers one.
        """
        full = self._window_space is not None and not self.stopped
        return full and (self._is_ready or not self._pipeline.gathers)

    @property
    def _is_ready(self) -> bool:
        """Whether the gathered bytes fill a message of the size that the pipeline prefers now."""
        batch = self._batch
        if batch is None or batch.is_small or (batch.has_trailer and self._recodable):
            return False  # ``finish`` sends the last batch, which has the trailer
        return batch.is_full(self._pipeline.message_bytes, self._flushed, self._turn)

    @property
    def is_held(self) -> bool:
        """Whether the whole share except its last byte was sent, and not lost since."""
        return self._last is not None and self.resume.has_trailer and not self.resume.missed

    @property
    def exceeds_window(self) -> bool:
        """Whether the gathered bytes exceed what may be sent now."""
        gathered = 0 if self._batch is None else self._batch.length
        return self._window_space is not None or gathered > self._pipeline.space

    def send(self, write: ShareWrite, segment: int | None = None) -> None:
        """
        Send these bytes, now or with the next batch. The buffers must not change until they are acknowledged.

        Args:
            segment: the segment of a block; None: the hashes after all blocks.
        """
        if self.stopped or self.all_sent:
            return
        if write.offset < self.resume.upto and self._skip(write, segment):
            return
        batch = self._batch
        if batch is not None and write.offset != batch.offset + batch.length:
            self.flush()
        batch = self._batch = self._batch or Batch(write.offset)
        batch.add(write, segment)
        self.resume.gave(segment)
        if self._window_space is None and self._is_ready:
            self.flush()

    def _skip(self, write: ShareWrite, segment: int | None) -> bool:
        """Skip a write whose bytes the server has; return whether it was skipped."""
        if not self.resume.covers(write.offset, write.offset + write.length):
            return False
        self.flush()  # the next write does not follow the gathered bytes
        segments = NO_SEGMENTS if segment is None else range(segment, segment + 1)
        self.resume.mark_skipped(segments, segment is None)
        self.resume.gave(segment)
        return True

    def flush(self) -> None:
        """Send the gathered bytes, unless the server has reported in the meantime that it has them."""
        batch = self._batch
        if batch is None or self.stopped:
            return
        self._batch = None
        if self.resume.covers(batch.offset, batch.offset + batch.length):
            self.resume.mark_skipped(batch.segments, batch.has_trailer)
            return
        self._flushed += 1
        if self._recodable and batch.may_be_released:
            room = self._pipeline.add_letting_go(batch.length, self._write, batch)
        else:
            room = self._pipeline.add(batch.length, self._write, None, batch)
        if not room.called:
            self._window_space = room
            room.addBoth(self._has_space, room)

    def finish(self, hold: bool) -> None:
        """Send the rest, since every byte was given; with ``hold`` withhold the last byte."""
        if hold and self._last is None and self._batch is not None and self._batch.has_trailer:
            self._last = self._batch.cut_last()
        self.all_sent = self._last is None
        self.flush()

    def release(self) -> None:
        """Send the byte that ``finish`` withheld."""
        self.flush()
        self._batch, self._last = None if self.stopped else self._last, None
        self.finish(False)

    def attach_sent(self) -> Batch:
        """Record that another object has sent the whole share; return the share as a batch."""
        self.resume.missed, self.resume.has_trailer = NO_SEGMENTS, True
        self.all_sent = True
        return Batch(0, length=self._target.shares.share_bytes, has_trailer=True)

    def lost(self, batch: Batch) -> None:
        """Record that a batch was lost with its connection, after its bytes were released from memory."""
        self.resume.lost(batch.segments, batch.has_trailer)
        self.all_sent = False
        if not self.resume.has_trailer:
            self._last = None  # the last byte is sent again with the rest of the trailer
        self._lost_writes = True

    def unskip(self) -> None:
        """Mark the skipped bytes as missing, so that they are encoded again and sent after all."""
        self.resume.unskip()
        self.stopped = self.all_sent = False

    def stop(self) -> None:
        """Send nothing more and drop unsent bytes; writes that were sent remain pending."""
        self.stopped = True
        self._batch = self._last = None
        room, self._window_space = self._window_space, None
        if room is not None:
            room.cancel()

    def detach(self) -> None:
        """Drop all callbacks and all references to objects that refer to this object."""
        self._changed = lambda: None
        self._sent = _never_sent

    def _has_space(self, _result: object, room: Deferred[None]) -> None:
        if self._window_space is room:
            self._window_space = None
            if self._is_ready:  # otherwise the batch grows, since the preferred size has grown
                self.flush()
            self._changed()

    def _dropped(self, release: Callable[[], None]) -> None:
        release()
        if self._window_space is not None:
            self._changed()  # memory for the next message is free

    def _write(self, release: Callable[[], None] | None, batch: Batch) -> Deferred[object]:
        pieces, batch.pieces = batch.pieces, []  # now only the transport refers to the bytes
        target = self._target
        call = target.peer.server.write(
            target.shares.storage_index,
            target.share_number,
            batch.offset,
            pieces,
            target.secrets.upload,
            release=release and partial(self._dropped, release),
            again=self._lost_writes,
        )
        return self._sent(call, batch)


def _never_sent(call: Deferred[WriteAnswer], batch: Batch) -> Deferred[object]:
    raise AssertionError(f"{batch} was sent for an upload that has ended: {call}")
