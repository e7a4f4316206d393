"""Sending one share in batches of writes; skipping what the server has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
from twisted.internet.defer import Deferred

from pipegrid.core.encoder import ShareWrite
from pipegrid.core.hashes import Buffer
from pipegrid.core.spans import Spans
from pipegrid.transfer.put.file_key import ShareTarget
from pipegrid.wire.messages import WriteAnswer

# What must still be sent of one share, and what need not be.
#
# A put that resumes an interrupted one sends as if the server had nothing: asking first would cost every put
# a round trip. The answer to the first write names the bytes that the server still needs, and so those that
# it has. From then on writes that lie wholly within those are skipped. A rerun sends what is missing, and at
# most what left before that first answer came: a window.
#
# Pure: answers come in, and out goes whether to send. The rules:
#
# * **The last answer counts**, whole. It was made when its write was processed, so what has been sent since
#   is not in it yet; that is not asked about again. It may also be smaller than one before, if the server has
#   lost something; then what was skipped is sent after all, at the end.
# * **An answer is untrusted input.** It decides what is sent, never what is stored: only the write that
#   completes the share says that. If all has been sent or skipped and no write has said so, the server was
#   wrong: ``unskip`` makes what was skipped missing, and from then on nothing is skipped.
# * **It is bounded.** A client that writes in order, as all of ours do, leaves a gap for each interruption
#   and each lost connection. An answer with more than ``MAX_GAPS`` of them is ignored: that costs bytes, and
#   neither memory nor time.
#
# Not every server says what it has: over Foolscap a write has no such answer, and an unfinished share goes
# with its connection. There nothing is skipped that was not sent by this very process.

MAX_GAPS = 256
"""An interrupted share and its reruns leave a few."""

NO_SEGMENTS = range(0)


class ResumeRanges:
    """
    What one server has, and what it still has to be sent, of one share.

    Args:
        missed: segments that were sent to the other shares before this one was opened.

    Attributes:
        missed: segments that have to be encoded again and sent, in this order.
        has_trailer: whether the hashes after the blocks were sent or skipped, and not lost.
        upto: no byte from here on is present, as far as is known; 0 if nothing is known. (Most writes are
            after it, which is quickly seen.)
        total_bytes: how much is present, by the last answer.
        segments: from the first to the last whose blocks were skipped, those between them included.
        trailer: whether what follows the blocks was skipped.
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
        """Whether anything was not sent because the server said that it has it."""
        return bool(self.segments) or self.trailer

    def answered(self, required: Sequence[tuple[int, int]], share_bytes: int) -> None:
        """
        The server has said what it still needs of the share, which is not complete.

        Args:
            required: half-open ranges, as they came: in any order, overlapping, anywhere. None at all, or
                none within the share, say nothing, since a share that needs nothing would be complete.
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
        return (
            begin < self.upto
            and self._trusted
            and self._spans is not None
            and self._spans.contains(begin, end)
        )

    def needs_segment(self, segment: int) -> bool:
        """Return whether this is the next segment to be encoded again."""
        return bool(self.missed) and segment == self.missed.start

    def gave(self, segment: int | None) -> None:
        """A segment's block, or with None what follows the blocks, was given to be sent."""
        if segment is None:
            self.has_trailer = True
        elif self.needs_segment(segment):
            self.missed = self.missed[1:]

    def mark_skipped(self, segments: range, trailer: bool) -> None:
        """Note that these were not sent."""
        self.segments = joined(self.segments, segments)
        self.trailer = self.trailer or trailer

    def lost(self, segments: range, trailer: bool) -> None:
        """These were sent in vain: they have to be encoded again."""
        self.missed = joined(self.missed, segments)
        self.has_trailer = self.has_trailer and not trailer

    def unskip(self) -> None:
        """Send what was skipped after all: the server does not have it; trust no further answer."""
        self.lost(self.segments, self.trailer)
        self.segments, self.trailer = NO_SEGMENTS, False
        self._trusted = False
        self._spans = None
        self.upto = self.total_bytes = 0


def joined(one: range, other: range) -> range:
    """Return all from the first of both to the last; what lies between them as well."""
    if not one or not other:
        return one or other
    return range(min(one.start, other.start), max(one.stop, other.stop))


# The messages that a share is sent in, and how large they are.
#
# Pure. The encoder gives small writes; they are gathered into batches, each of which is one request. Its
# size follows from what the pipeline's window allows a message (``flow``: a part of what may be in flight).

BATCH_BYTES = 4 << 20
"""
Writes are gathered up to this size, if the window likes it. A server was measured to take 75 MB/s in pieces
of 32 KiB, 173 in 128 KiB and 357 in 1 MiB; 100 MB cost ten servers of Tahoe-LAFS's 1.6 s of processor time
in messages of 1 MiB, 1.4 in 2 and 1.25 in 4.
"""

MIN_BATCH_BYTES = 64 << 10
"""
But only as large as the window likes them, if that is more than this: a window that one message fills is
empty for a round trip after it, and a first window of 1 MiB on a line of ten servers would cost every large
file one.
"""

LET_GO_BYTES = 256 << 10
"""Batches from this size on are let go of; what is smaller is sent again from memory, without coding."""


@attrs.define(eq=False)
class Batch:
    """
    Writes that go in one message.

    Attributes:
        segments: whose blocks are in it; between the first and the last of them none is missing.
        has_trailer: whether the hashes behind the blocks are in it.
    """

    offset: int
    pieces: list[Buffer] = attrs.Factory(list)
    length: int = 0
    segments: range = NO_SEGMENTS
    has_trailer: bool = False

    def add(self, write: ShareWrite, segment: int | None) -> None:
        """Take in a write that follows what is here; ``segment`` is whose block it is, or None."""
        self.pieces.extend(write.pieces)
        self.length += write.length
        if segment is None:
            self.has_trailer = True
        else:
            self.segments = joined(self.segments, range(segment, segment + 1))

    def cut_last(self) -> Batch:
        """Take its last byte off; returns that."""
        last = memoryview(self.pieces.pop()).cast("B")
        if len(last) > 1:
            self.pieces.append(last[:-1])
        self.length -= 1
        return Batch(self.offset + self.length, [last[-1:]], 1, has_trailer=True)

    @property
    def is_small(self) -> bool:
        """Whether it may grow in any case: to ask the window takes longer than all else of a small file."""
        return self.length < min(BATCH_BYTES, MIN_BATCH_BYTES)

    @property
    def may_be_let_go(self) -> bool:
        """Whether it is so large that its bytes are coded again rather than kept."""
        return self.length >= LET_GO_BYTES

    def is_full(self, liked_bytes: int, sent_before: int, turn: float) -> bool:
        """
        Return whether it should leave now.

        Args:
            liked_bytes: how large the window likes messages to be.
            sent_before: how many messages of its share have left.
            turn: what part of a full message the second one is.
        """
        message_bytes = min(BATCH_BYTES, liked_bytes)
        if sent_before == 1:
            message_bytes = int(message_bytes * turn)
        return self.length >= min(BATCH_BYTES, max(MIN_BATCH_BYTES, message_bytes))


# Sending: writes are gathered, skipped or handed to the server's pipeline.
#
# A large batch need not be kept until it is acknowledged if segments can be encoded again. What is lost with
# a connection then is missed, as are the segments that were sent before the share was opened.

BatchSent = Callable[[Deferred[WriteAnswer], Batch], Deferred[object]]


class ShareSender:
    """
    Sends one share to one server, and never waits itself.

    Args:
        target: which share, and where to.
        resume: what need not be sent, and what was missed.
        sent: is given the call of each batch that leaves; returns a Deferred that never fails, since a
            pipeline is shared and a failure is this share's own.
        changed: called when there is room again.
        recodable: segments can be encoded again, so that bytes which the network has need not be kept.
        turn: what part of a full message the second one is, more than 0 and at most 1. Shares whose messages
            filled up together would send them together, leaving the servers idle until the next are encoded.

    Attributes:
        resume: as above.
        stopped: nothing is sent any more.
        all_sent: whether every byte of the share has been handed to the pipeline.
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
        self._window_room: Deferred[None] | None = None
        self._lost_writes = False

    @property
    def blocked(self) -> bool:
        """Whether it takes no more: the window is full, and so is the message after it, if there is one."""
        full = self._window_room is not None and not self.stopped
        return full and (self._is_ready or not self._pipeline.gathers)

    @property
    def _is_ready(self) -> bool:
        """Whether a whole message is gathered, by what is in flight and held just now."""
        batch = self._batch
        if batch is None or batch.is_small or (batch.has_trailer and self._recodable):
            return False  # an upload's trailer is sent by ``finish``
        return batch.is_full(self._pipeline.message_bytes, self._flushed, self._turn)

    @property
    def is_held(self) -> bool:
        """Whether all of the share but its last byte was sent, and not lost since."""
        return self._last is not None and self.resume.has_trailer and not self.resume.missed

    @property
    def exceeds_window(self) -> bool:
        """Whether what was given does not fit in what may be sent now."""
        gathered = 0 if self._batch is None else self._batch.length
        return self._window_room is not None or gathered > self._pipeline.room

    def send(self, write: ShareWrite, segment: int | None = None) -> None:
        """
        Send the bytes, now or with the next batch. They must not change until acknowledged.

        Args:
            segment: whose block it is; None: what follows all blocks.
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
        if self._window_room is None and self._is_ready:
            self.flush()

    def _skip(self, write: ShareWrite, segment: int | None) -> bool:
        """Do not send what the server has; returns whether that is so."""
        if not self.resume.covers(write.offset, write.offset + write.length):
            return False
        self.flush()  # what comes next does not follow what was gathered
        segments = NO_SEGMENTS if segment is None else range(segment, segment + 1)
        self.resume.mark_skipped(segments, segment is None)
        self.resume.gave(segment)
        return True

    def flush(self) -> None:
        """Send what has been gathered, unless the server turned out to have it meanwhile."""
        batch = self._batch
        if batch is None or self.stopped:
            return
        self._batch = None
        if self.resume.covers(batch.offset, batch.offset + batch.length):
            self.resume.mark_skipped(batch.segments, batch.has_trailer)
            return
        self._flushed += 1
        if self._recodable and batch.may_be_let_go:
            room = self._pipeline.add_letting_go(batch.length, self._write, batch)
        else:
            room = self._pipeline.add(batch.length, self._write, None, batch)
        if not room.called:
            self._window_room = room
            room.addBoth(self._has_room, room)

    def finish(self, hold: bool) -> None:
        """Every byte was given: send the rest, but with ``hold`` not the last one."""
        if hold and self._last is None and self._batch is not None and self._batch.has_trailer:
            self._last = self._batch.cut_last()
        self.all_sent = self._last is None
        self.flush()

    def release(self) -> None:
        """Send what ``finish`` held back."""
        self.flush()
        self._batch, self._last = None if self.stopped else self._last, None
        self.finish(False)

    def attach_sent(self) -> Batch:
        """Another object sent all of the share; returns what that was."""
        self.resume.missed, self.resume.has_trailer = NO_SEGMENTS, True
        self.all_sent = True
        return Batch(0, length=self._target.shares.share_bytes, has_trailer=True)

    def lost(self, batch: Batch) -> None:
        """A batch was lost with its connection, and its bytes were dropped before."""
        self.resume.lost(batch.segments, batch.has_trailer)
        self.all_sent = False
        if not self.resume.has_trailer:
            self._last = None  # it comes again with the rest of the trailer
        self._lost_writes = True

    def unskip(self) -> None:
        """Send after all what was skipped: what is missing now is encoded again."""
        self.resume.unskip()
        self.stopped = self.all_sent = False

    def stop(self) -> None:
        """Send nothing more, and drop the bytes; what is on the wire stays there."""
        self.stopped = True
        self._batch = self._last = None
        room, self._window_room = self._window_room, None
        if room is not None:
            room.cancel()

    def detach(self) -> None:
        """Report nothing any more, and refer to no other object that refers to this one."""
        self._changed = lambda: None
        self._sent = _never_sent

    def _has_room(self, _result: object, room: Deferred[None]) -> None:
        if self._window_room is room:
            self._window_room = None
            if self._is_ready:  # else it grows: what the window leaves for a message has grown
                self.flush()
            self._changed()

    def _dropped(self, let_go: Callable[[], None]) -> None:
        let_go()
        if self._window_room is not None:
            self._changed()  # there is memory for more of the next message

    def _write(self, let_go: Callable[[], None] | None, batch: Batch) -> Deferred[object]:
        pieces, batch.pieces = batch.pieces, []  # from now on only the transport has them
        target = self._target
        call = target.peer.server.write(
            target.shares.storage_index,
            target.share_number,
            batch.offset,
            pieces,
            target.secrets.upload,
            let_go=let_go and partial(self._dropped, let_go),
            again=self._lost_writes,
        )
        return self._sent(call, batch)


def _never_sent(call: Deferred[WriteAnswer], batch: Batch) -> Deferred[object]:
    raise AssertionError(f"{batch} was sent for an upload that has ended: {call}")
