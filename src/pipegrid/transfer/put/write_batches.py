"""Batches of writes; ranges to skip."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from pipegrid.core.encoder import ShareWrite
from pipegrid.core.hashes import Buffer
from pipegrid.core.spans import Spans

# What a server has of one share already, so that it need not be sent once more.
#
# Whoever puts a file again that was cut off sends as if nothing were there: to ask first would cost
# everybody a round trip. The answer to the first write tells which bytes the server still needs, and with
# them which it got before. From then on what lies wholly within those is passed over. So a rerun sends
# what is missing, and beside it at most what left before that first answer came: a window.
#
# Pure: answers come in, and out goes whether to send. The rules:
#
# * **The last answer counts**, whole. It was made when its write was processed, so what has been sent
# since is
#   not in it yet; that is sent already, and nobody asks whether to send it. It may also be smaller than one
#   before, if the server has lost something; then what was passed over is sent after all, at the end.
# * **An answer is a stranger's word.** It decides what is sent, never what is stored: that a share is
# stored is
#   for the write that completes it to say. If all has been sent or passed over and no write has
#   said so, the server was wrong about something: ``unskip`` gives what was passed over, and from
#   then on nothing is.
# * **It is bounded.** Whoever writes in order, as all of ours do, leaves a gap for each interruption and each
#   lost connection. An answer with more than ``MAX_GAPS`` of them is taken as one that says nothing:
#   that costs bytes, and neither memory nor time.
#
# Not every server tells: over Foolscap a write has no such answer, and an unfinished share goes with its
# connection. There nothing is passed over that was not sent by this very process.

MAX_GAPS = 256
"""What a share that was cut off, and its reruns after it, could have: a few."""

_NO_SEGMENTS = range(0)


class ResumeRanges:
    """
    One share at one server.

    Attributes:
        upto: no byte from here on is there, as far as is known; 0 if nothing is known. (Most writes are
            behind it, which is quickly seen.)
        total_bytes: how much is there, as the last answer has it.
        segments: from the first to the last whose blocks were passed over, those between them included.
        trailer: whether what stands behind the blocks was passed over.
    """

    __slots__ = ("_believed", "_spans", "segments", "total_bytes", "trailer", "upto")

    def __init__(self) -> None:
        self.upto = 0
        self.total_bytes = 0
        self.segments = _NO_SEGMENTS
        self.trailer = False
        self._spans: Spans | None = None
        self._believed = True

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
        if not self._believed or not 0 < len(required) <= MAX_GAPS:
            return
        needed = Spans((begin, min(end, share_bytes)) for begin, end in required if begin >= 0)
        if not len(needed):
            return
        gaps = needed.gaps(0, share_bytes)
        self._spans = Spans(gaps)
        self.total_bytes = share_bytes - needed.total
        self.upto = gaps[-1][1] if gaps else 0

    def covers(self, begin: int, end: int) -> bool:
        """Return whether all of these bytes are there, so that they need not be sent."""
        return (
            begin < self.upto
            and self._believed
            and self._spans is not None
            and self._spans.contains(begin, end)
        )

    def mark_skipped(self, segments: range, trailer: bool) -> None:
        """Note that these were not sent."""
        self.segments = joined(self.segments, segments)
        self.trailer = self.trailer or trailer

    def unskip(self) -> tuple[range, bool]:
        """Return what was passed over, segments and trailer, to be sent after all; believe no further."""
        told = self.segments, self.trailer
        self.segments, self.trailer = _NO_SEGMENTS, False
        self._believed = False
        self._spans = None
        self.upto = self.total_bytes = 0
        return told


def joined(one: range, other: range) -> range:
    """Return all from the first of both to the last; what lies between them as well."""
    if not one or not other:
        return one or other
    return range(min(one.start, other.start), max(one.stop, other.stop))


# The messages that a share goes in, and how large they are.
#
# Pure. The encoder gives small writes; they are gathered into batches, each of which is one request. How
# large it may get is decided here, from what the pipeline's window likes (``flow``: a part of what may be
# in flight).

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

NO_SEGMENTS = range(0)


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
