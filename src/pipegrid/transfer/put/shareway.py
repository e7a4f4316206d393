"""
One share on its way to one server.

A lane gathers the encoder's small writes into batches of up to 4 MiB (what a server takes fastest),
hands them to its peer's pipeline, and knows what was acknowledged. It never waits itself: the
upload looks at ``blocked`` and ``state``, and is woken whenever they may have changed.

A large batch need not be kept until it is acknowledged, if the transfer can code segments again: on a long
path several times as much as memory should hold may be on its way. What is lost with a connection then is
``missed``, as are the segments that went by before the lane was opened.

What the server has already, of an upload that was cut off, is not sent again (``already``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.core.encoder import ShareWrite
from pipegrid.core.hashes import Buffer
from pipegrid.errors import (
    ConflictingWrite,
    NoSpace,
    NoSuchShare,
    ServerError,
    ServerRefused,
    WriteLost,
)
from pipegrid.flow.pipeline import UNDELIVERED
from pipegrid.transfer.peers import Peer
from pipegrid.transfer.put.already import AlreadyThere, joined
from pipegrid.wire.messages import UploadSecrets, WriteResult

T = TypeVar("T")

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


_NO_SEGMENTS = range(0)

LET_GO_BYTES = 256 << 10
"""Batches from this size on are let go of; what is smaller is sent again from memory, without coding."""


@attrs.define(eq=False)
class _Batch:
    """
    Writes that go in one message.

    Attributes:
        segments: whose blocks are in it; between the first and the last of them none is missing.
        has_trailer: whether the hashes behind the blocks are in it.
    """

    offset: int
    pieces: list[Buffer] = attrs.Factory(list)
    length: int = 0
    segments: range = _NO_SEGMENTS
    has_trailer: bool = False

    def cut_last(self) -> _Batch:
        """Take its last byte off; returns that."""
        last = memoryview(self.pieces.pop()).cast("B")
        if len(last) > 1:
            self.pieces.append(last[:-1])
        self.length -= 1
        return _Batch(self.offset + self.length, [last[-1:]], 1, has_trailer=True)


class Lane:
    """
    The way of one share to one server.

    Args:
        share_bytes: of the whole share.
        missed: so many segments went by before this lane was opened; they are coded again and sent at
            the end.
        changed: called after every event that may let the upload go on.
        stored: called instead when the server has acknowledged all of the share.
        lets_go: segments can be coded again, so that bytes which the network has need not be kept.
        turn: what part of a full message the second one is, more than 0 and at most 1. Lanes whose messages
            filled up together would send them together, hold all of them in memory at the same moment, and
            leave the servers idle while the next are coded.

    Attributes:
        state: ``open``, perhaps ``doubtful`` (the server knows no unfinished share: it may have
            forgotten it, or completed it with an answer that got lost; or all was sent or passed over, and
            it wants more), and in the end ``stored``, ``refused`` (the server will not), ``lost`` (it did
            forget, or has other bytes), ``failed`` (the server is gone) or ``dropped`` (taken back).
        ended: whether the state is final.
        granted: False once the server has left the share out of its answer to the allocation.
        missed: segments that the transfer has to code again and send, in this order.
        acknowledged_bytes: what the server has confirmed, or said that it has from before.
        found_bytes: of these, what it had before.
        stalled_s: how long this lane has kept others waiting, so far.
        last_sign: when the server last acknowledged anything of this lane.
        has_trailer: whether the hashes behind the blocks have gone by, and were not lost.
        all_sent: whether every byte of the share has been handed to the pipeline.
        error: why it was refused, lost or failed.
        bug: what was raised that no server may raise; the upload passes it on.
    """

    def __init__(
        self,
        peer: Peer,
        share_number: int,
        storage_index: bytes,
        secrets: UploadSecrets,
        share_bytes: int,
        missed: int,
        changed: Callable[[], None],
        stored: Callable[[], None],
        clock: IReactorTime,
        lets_go: bool = False,
        turn: float = 1.0,
    ) -> None:
        self.peer = peer
        self.share_number = share_number
        self.state = "open"
        self.ended = False
        self.granted = True
        self.error: ServerError | None = None
        self.bug: Failure | None = None
        self.missed = range(missed)
        self.acknowledged_bytes = 0
        self.found_bytes = 0
        self.stalled_s = 0.0
        self.last_sign = clock.seconds()
        self.has_trailer = False
        self.all_sent = False
        self._storage_index = storage_index
        self._secrets = secrets
        self._share_bytes = share_bytes
        self._already = AlreadyThere()
        self._confirmed_bytes = 0
        self._incomplete = False
        self._changed = changed
        self._stored = stored
        self._clock = clock
        self._lets_go = lets_go
        self._turn = turn
        self._flushed = 0
        self._batch: _Batch | None = None
        self._last: _Batch | None = None
        self._lost_writes = False
        self._room: Deferred[None] | None = None
        self._calls: dict[Deferred[Any], float] = {}  # with the time of each, the oldest first
        self._answers = 0
        self._answers_s = 0.0

    def __repr__(self) -> str:
        return f"<Lane share {self.share_number} to {self.peer.name}: {self.state}>"

    @property
    def blocked(self) -> bool:
        """Whether the server's window has no room for more of this share now."""
        return self.state == "open" and self._room is not None

    @property
    def unexplained(self) -> bool:
        """Whether the server refused the share, and did not say why."""
        return self.state == "refused" and (
            self.error is None or isinstance(self.error, NoSuchShare)
        )

    @property
    def waiting(self) -> bool:
        """Whether the server owes an answer that matters."""
        return bool(self._calls) and not self.ended

    @property
    def pace_s(self) -> float:
        """How long an answer takes: on average, or the oldest that is owed if that is longer."""
        average_s = self._answers_s / self._answers if self._answers else 0.0
        oldest = next(iter(self._calls.values()), None)
        return average_s if oldest is None else max(average_s, self._clock.seconds() - oldest)

    @property
    def is_useless(self) -> bool:
        """
        Whether what the server has of a share that has ended is of no use to anybody.

        It takes some of the last room; or it is not what was sent, and a rerun would go on with it.
        """
        wrong = self.state == "lost" and self._incomplete
        return wrong or isinstance(self.error, (NoSpace, ConflictingWrite))

    def misses_next(self, segment: int) -> bool:
        """Whether this is the next segment to be coded again for this lane."""
        return self.state == "open" and bool(self.missed) and segment == self.missed.start

    @property
    def is_held(self) -> bool:
        """Whether all of the share but its last byte was sent, and not lost since."""
        return self._last is not None and self.has_trailer and not self.missed

    @property
    def exceeds_window(self) -> bool:
        """Whether the server must have answered some writes, or has to, before the rest can be sent."""
        gathered = 0 if self._batch is None else self._batch.length
        return self._answers > 0 or self._room is not None or gathered > self.peer.pipeline.room

    def finish(self, hold: bool = False) -> None:
        """
        Every byte has been given.

        Args:
            hold: the last one, if it is not sent yet, waits until ``release``.
        """
        if hold and self._last is None and self._batch is not None and self._batch.has_trailer:
            self._last = self._batch.cut_last()
        self.all_sent = self._last is None
        self.flush()
        self._check_complete()

    def release(self) -> None:
        """Send what was held back: all of the share is sent with it."""
        self.flush()
        if self.state == "open":
            self._batch = self._last
        self._last = None
        self.finish()

    def adopt(self, write: Deferred[WriteResult], sent_s: float) -> None:
        """All of the share was sent by somebody else, at that time, and here is what comes of it."""
        self.has_trailer = self.all_sent = True
        self.missed = _NO_SEGMENTS
        batch = _Batch(0, length=self._share_bytes, has_trailer=True)
        self._await(write, sent_s)
        write.addCallbacks(
            self._written, self._write_failed, callbackArgs=(batch,), errbackArgs=(batch,)
        )

    def send(self, write: ShareWrite, segment: int | None = None) -> None:
        """
        Send the bytes, now or with the next batch. They must not change until acknowledged.

        Args:
            segment: whose block it is; None: what stands behind all blocks.
        """
        if self.state != "open" or self.all_sent:
            return
        if write.offset < self._already.upto and self._pass_over(write, segment):
            return
        batch = self._batch
        if batch is not None and write.offset != batch.offset + batch.length:
            self.flush()
            batch = None
        if batch is None:
            batch = self._batch = _Batch(write.offset)
        batch.pieces.extend(write.pieces)
        batch.length += write.length
        if segment is None:
            self.has_trailer = batch.has_trailer = True
        else:
            batch.segments = joined(batch.segments, range(segment, segment + 1))
            if self.misses_next(segment):
                self.missed = self.missed[1:]
        if segment is None and self._lets_go:
            return  # an upload's trailer, which ``finish`` sends
        if batch.length < min(BATCH_BYTES, MIN_BATCH_BYTES):
            return  # as a small file's are: asking the window takes longer than all of this
        message_bytes = min(BATCH_BYTES, self.peer.pipeline.message_bytes)
        if self._flushed == 1:
            message_bytes = int(message_bytes * self._turn)
        if batch.length >= min(BATCH_BYTES, max(MIN_BATCH_BYTES, message_bytes)):
            self.flush()

    def _pass_over(self, write: ShareWrite, segment: int | None) -> bool:
        """Do not send what the server has; returns whether that is so."""
        if not self._already.covers(write.offset, write.offset + write.length):
            return False
        self.flush()  # what comes next does not follow what was gathered
        if segment is None:
            self.has_trailer = True
            self._already.pass_over(_NO_SEGMENTS, True)
        else:
            self._already.pass_over(range(segment, segment + 1), False)
            if self.misses_next(segment):
                self.missed = self.missed[1:]
        return True

    def flush(self) -> None:
        """Send what has been gathered, unless the server turned out to have it meanwhile."""
        batch = self._batch
        if batch is None or self.state != "open":
            return
        self._batch = None
        if self._already.covers(batch.offset, batch.offset + batch.length):
            self._already.pass_over(batch.segments, batch.has_trailer)
            return
        self._flushed += 1
        pipeline = self.peer.pipeline
        if self._lets_go and batch.length >= LET_GO_BYTES:
            room = pipeline.add_letting_go(batch.length, self._write, batch)
        else:
            room = pipeline.add(batch.length, self._write, None, batch)
        if not room.called:
            self._room = room
            room.addBoth(self._has_room, room)

    def _has_room(self, _result: object, room: Deferred[None]) -> None:
        if self._room is room:
            self._room = None
            self._changed()

    def _write(self, let_go: Callable[[], None] | None, batch: _Batch) -> Deferred[object]:
        """Return a Deferred that never fails: a pipeline is shared, a failure is this lane's own."""
        pieces, batch.pieces = batch.pieces, []  # the transport's now, and nobody else's
        call = self.peer.server.write(
            self._storage_index,
            self.share_number,
            batch.offset,
            pieces,
            self._secrets.upload,
            let_go=let_go,
            again=self._lost_writes,
        )
        self._await(call)
        answer: Deferred[object] = call.addCallbacks(
            self._written, self._write_failed, callbackArgs=(batch,), errbackArgs=(batch,)
        )
        return answer

    def _await(self, call: Deferred[T], sent_s: float | None = None) -> None:
        """Know the call until it ends, and wake the upload then."""
        if sent_s is None:
            sent_s = self._clock.seconds()
        if not self._calls:
            self.last_sign = sent_s  # before, the server owed nothing
        self._calls[call] = sent_s
        call.addBoth(self._answered, call)

    def _answered(self, result: T, call: Deferred[T]) -> T:
        self._answers += 1
        self._answers_s += self._clock.seconds() - self._calls.pop(call)
        return result

    def _written(self, result: WriteResult, batch: _Batch) -> None:
        if not self.ended:
            self.last_sign = self._clock.seconds()
            self._confirmed_bytes += batch.length
            if result.complete:
                self.acknowledged_bytes = self._share_bytes
                self.close("stored")
                self._stored()
                return
            self._already.answered(result.required, self._share_bytes)
            self.acknowledged_bytes = max(self._confirmed_bytes, self._already.total_bytes)
            before = self.acknowledged_bytes - self._confirmed_bytes
            self.found_bytes = max(self.found_bytes, before)
            self._check_complete()
        self._changed()

    def _check_complete(self) -> None:
        # All is sent or passed over, and answered, and still the server wants more: it has lost something, or
        # never had it.
        if self.state == "open" and self.all_sent and not self._calls:
            self._incomplete = True
            self.close("doubtful")

    def _write_failed(self, failure: Failure, batch: _Batch) -> object:
        if self.state == "open" and failure.check(WriteLost):
            self.missed = joined(self.missed, batch.segments)
            self.has_trailer = self.has_trailer and not batch.has_trailer
            self.all_sent = False
            if not self.has_trailer:
                self._last = None  # it comes again with the rest of the trailer
            self._lost_writes = True
            self._changed()
        elif self.state == "doubtful" and failure.check(WriteLost):
            self._changed()  # the doubt is about all of it
        else:
            self._call_failed(failure)
        return UNDELIVERED

    def _call_failed(self, failure: Failure) -> None:
        error = failure.value
        if not failure.check(ServerError, CancelledError):
            self.bug = failure
            self.close("failed")
        elif self.state == "open" or not isinstance(error, NoSuchShare):
            if isinstance(error, ServerError) and not self.ended:
                self.error = error
            self.close(_state_after(error))
        self._changed()

    def resolve_doubt(self) -> None:
        """
        Find out what became of a doubtful share, once all that was sent is answered.

        One that was not granted is refused, unless its writes were taken; of any other the server is asked.
        """
        if self.state != "doubtful" or self._calls:
            return
        if not self.granted and not self._incomplete:
            self.close("refused")
            return
        question = self.peer.server.list_shares(self._storage_index)
        self._await(question)
        question.addCallbacks(self._listed, self._call_failed)

    def _listed(self, share_numbers: frozenset[int]) -> None:
        if self.share_number in share_numbers:
            self.close("stored")
        elif self._incomplete and self._lets_go and self._already.passed_over and not self.ended:
            self._send_after_all()
        else:
            self.close("lost")
        self._changed()

    def _send_after_all(self) -> None:
        """The server does not have what it said: it gets all that was passed over, coded again."""
        segments, trailer = self._already.take_back()
        self.missed = joined(self.missed, segments)
        self.has_trailer = self.has_trailer and not trailer
        self.all_sent = self._incomplete = False
        self.state = "open"

    def close(self, state: str) -> None:
        """Enter this state, and let go of the bytes; what is on the wire stays there."""
        if self.ended:
            return
        self.state = state
        self.ended = state != "doubtful"
        self._batch = self._last = None
        room, self._room = self._room, None
        if room is not None:
            room.cancel()

    def cancel(self, state: str) -> None:
        """End the lane in this state and give up all unanswered writes."""
        self.close(state)
        for call in list(self._calls):
            call.cancel()

    def detach(self) -> None:
        """Tell nobody any more; else a transfer and its lanes would keep each other after their end."""
        self._changed = self._stored = _tell_nobody

    def abort(self) -> Deferred[None]:
        """Tell the server to forget the unfinished share; fires when told, never fails."""
        done = self.peer.server.abort(self._storage_index, self.share_number, self._secrets.upload)
        return done.addErrback(lambda failure: failure.trap(ServerError, CancelledError) and None)


def _tell_nobody() -> None:
    """The transfer is over."""


def _state_after(error: BaseException | None) -> str:
    """Return what state a failed call puts a lane in."""
    if isinstance(error, CancelledError):
        return "dropped"
    if isinstance(error, NoSuchShare):
        return "doubtful"
    if isinstance(error, ConflictingWrite):
        return "lost"  # whoever looks at it has the server forget what it has
    return "refused" if isinstance(error, ServerRefused) else "failed"
