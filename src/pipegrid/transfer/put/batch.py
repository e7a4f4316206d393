"""
The messages that a share goes in, and how large they are.

Pure. The encoder gives small writes; they are gathered into batches, each of which is one request. How large
it may get is decided here, from what the pipeline's window likes (``flow``: a part of what may be in flight).
"""

from __future__ import annotations

import attrs

from pipegrid.core.encoder import ShareWrite
from pipegrid.core.hashes import Buffer
from pipegrid.transfer.put.already import joined

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
