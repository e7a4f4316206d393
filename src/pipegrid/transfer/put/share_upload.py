"""Upload of one share: states, acknowledged bytes."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.core.encoder import ShareWrite
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
from pipegrid.transfer.put.file_key import ShareSet
from pipegrid.transfer.put.write_batches import NO_SEGMENTS, Batch, ResumeRanges, joined
from pipegrid.wire.messages import UploadSecrets, WriteAnswer

# What becomes of one share at one server.
#
#     state        what happens                                              and then
#     open         the server has all of it                                  stored
#                  it refuses; has other bytes; is gone                      refused; lost; failed
#                  it knows no unfinished share                              doubtful
#                  all is sent and answered, and it wants more               doubtful
#     doubtful     all is answered; it did not grant the share               refused
#                  it lists the share; it does not                           stored; lost
#                  it does not, and said before that it had a part           open, to send that part after all
#     any of both  taken back; somebody else stored it                       dropped; found


class ShareState(str, Enum):
    """What becomes of the share at this server; the table above says how."""

    OPEN = "open"
    DOUBTFUL = "doubtful"  # whether the server has it, or any of it
    STORED = "stored"
    FOUND = "found"  # somebody else stored it meanwhile
    REFUSED = "refused"
    LOST = "lost"  # the server forgot it, or has other bytes
    FAILED = "failed"  # the server is gone
    DROPPED = "dropped"


def state_after(error: BaseException | None) -> ShareState:
    """Return what state a failed call puts a share in."""
    if isinstance(error, CancelledError):
        return ShareState.DROPPED
    if isinstance(error, NoSuchShare):
        return ShareState.DOUBTFUL
    if isinstance(error, ConflictingWrite):
        return ShareState.LOST  # whoever looks at it has the server forget what it has
    return ShareState.REFUSED if isinstance(error, ServerRefused) else ShareState.FAILED


def is_unexplained(state: ShareState, error: BaseException | None) -> bool:
    """Return whether the server refused a share, and did not say why."""
    return state is ShareState.REFUSED and (error is None or isinstance(error, NoSuchShare))


# The answers that a server owes for one share, and how long they take.

T = TypeVar("T")


class PendingWrites:
    """
    The calls of one share that have not ended.

    Attributes:
        answers: how many have ended.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._calls: dict[Deferred[Any], float] = {}  # with the time of each, the oldest first
        self._answers_s = 0.0
        self.answers = 0

    def __bool__(self) -> bool:
        return bool(self._calls)

    @property
    def pace_s(self) -> float:
        """How long an answer takes: on average, or the oldest that is owed if that is longer."""
        average_s = self._answers_s / self.answers if self.answers else 0.0
        oldest = next(iter(self._calls.values()), None)
        return average_s if oldest is None else max(average_s, self._clock.seconds() - oldest)

    def asked(self, call: Deferred[T], sent_s: float | None = None) -> None:
        """Know a call, which was sent at that time, or now, until it ends."""
        self._calls[call] = self._clock.seconds() if sent_s is None else sent_s
        call.addBoth(self._answered, call)

    def cancel(self) -> None:
        """Give up all that are owed."""
        for call in list(self._calls):
            call.cancel()

    def _answered(self, result: T, call: Deferred[T]) -> T:
        self.answers += 1
        self._answers_s += self._clock.seconds() - self._calls.pop(call)
        return result


# One share on its way to one server.
#
# A way gathers the encoder's small writes into batches (``batch``), hands them to its peer's pipeline, and
# knows what was acknowledged. It never waits itself: the upload looks at ``blocked`` and ``state``, and is
# woken whenever they may have changed.
#
# What its states are, and what leads from one to the next: ``sharestate``.
#
# A large batch need not be kept until it is acknowledged, if the transfer can code segments again. What
# is lost with a connection then is ``missed``, as are the segments that went by before the way was
# opened.
#
# What the server has already, of an upload that was cut off, is not sent again (``already``).


class ShareUpload:
    """
    The way of one share to one server.

    Args:
        shares: those of the file.
        secrets: of the file on this server.
        missed: so many segments went by before this way was opened; they are coded again and sent at
            the end.
        changed: called after every event that may let the upload go on.
        stored: called instead when the server has acknowledged all of the share.
        lets_go: segments can be coded again, so that bytes which the network has need not be kept.
        turn: what part of a full message the second one is, more than 0 and at most 1. Ways whose messages
            filled up together would send them together, and leave the servers idle while the next are coded.

    Attributes:
        state: see the table.
        ended: whether the state is final.
        granted: False once the server has left the share out of its answer to the allocation.
        missed: segments that the transfer has to code again and send, in this order.
        acknowledged_bytes: what the server has confirmed, or said that it has from before.
        found_bytes: of these, what it had before.
        stalled_s: how long this way has kept others waiting, so far.
        last_activity: when the server last acknowledged anything of this way.
        has_trailer: whether the hashes behind the blocks have gone by, and were not lost.
        all_sent: whether every byte of the share has been handed to the pipeline.
        error: why it was refused, lost or failed.
        bug: what was raised that no server may raise; the upload passes it on.
    """

    def __init__(
        self,
        peer: Peer,
        share_number: int,
        shares: ShareSet,
        secrets: UploadSecrets,
        missed: int,
        changed: Callable[[], None],
        stored: Callable[[], None],
        clock: IReactorTime,
        lets_go: bool = False,
        turn: float = 1.0,
    ) -> None:
        self.peer = peer
        self.share_number = share_number
        self.state = ShareState.OPEN
        self.ended = False
        self.granted = True
        self.error: ServerError | None = None
        self.bug: Failure | None = None
        self.missed = range(missed)
        self.acknowledged_bytes = 0
        self.found_bytes = 0
        self.stalled_s = 0.0
        self.last_activity = clock.seconds()
        self.has_trailer = False
        self.all_sent = False
        self._storage_index = shares.storage_index
        self._share_bytes = shares.share_bytes
        self._secrets = secrets
        self._already = ResumeRanges()
        self._confirmed_bytes = 0
        self._incomplete = False
        self._changed = changed
        self._stored = stored
        self._clock = clock
        self._lets_go = lets_go
        self._turn = turn
        self._flushed = 0
        self._batch: Batch | None = None
        self._last: Batch | None = None
        self._lost_writes = False
        self._room: Deferred[None] | None = None
        self._owed = PendingWrites(clock)

    def __repr__(self) -> str:
        return f"<ShareUpload of share {self.share_number} to {self.peer.name}: {self.state.value}>"

    @property
    def is_open(self) -> bool:
        """Whether it takes, or awaits, what there is to be sent."""
        return self.state is ShareState.OPEN

    @property
    def blocked(self) -> bool:
        """Whether it takes no more: the window is full, and so is the message behind it, if there is one."""
        full = self._room is not None and self.state is ShareState.OPEN
        return full and (self._is_ready or not self.peer.pipeline.gathers)

    @property
    def has_room(self) -> bool:
        """Whether it is open, and would take more now."""
        return self.state is ShareState.OPEN and not self.blocked

    @property
    def _is_ready(self) -> bool:
        """Whether a whole message is there, by what is in flight and held just now."""
        batch = self._batch
        if batch is None or batch.is_small or (batch.has_trailer and self._lets_go):
            return False  # an upload's trailer is sent by ``finish``
        return batch.is_full(self.peer.pipeline.message_bytes, self._flushed, self._turn)

    @property
    def waiting(self) -> bool:
        """Whether the server owes an answer that matters."""
        return bool(self._owed) and not self.ended

    @property
    def pace_s(self) -> float:
        """How long an answer takes: on average, or the oldest that is owed if that is longer."""
        return self._owed.pace_s

    @property
    def is_useless(self) -> bool:
        """Whether what the server has of it takes the last room, or is wrong and would be gone on with."""
        wrong = self.state is ShareState.LOST and self._incomplete
        return wrong or isinstance(self.error, (NoSpace, ConflictingWrite))

    def needs_segment(self, segment: int) -> bool:
        """Whether this is the next segment to be coded again for this way."""
        return self.state is ShareState.OPEN and bool(self.missed) and segment == self.missed.start

    @property
    def is_held(self) -> bool:
        """Whether all of the share but its last byte was sent, and not lost since."""
        return self._last is not None and self.has_trailer and not self.missed

    @property
    def exceeds_window(self) -> bool:
        """Whether the server must have answered some writes, or has to, before the rest can be sent."""
        gathered = 0 if self._batch is None else self._batch.length
        return (
            self._owed.answers > 0 or self._room is not None or gathered > self.peer.pipeline.room
        )

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
        self._batch, self._last = self._last if self.state is ShareState.OPEN else None, None
        self.finish()

    def attach_sent(self, write: Deferred[WriteAnswer], sent_s: float) -> None:
        """All of the share was sent by somebody else, at that time, and here is what comes of it."""
        self.has_trailer = self.all_sent = True
        self.missed = NO_SEGMENTS
        batch = Batch(0, length=self._share_bytes, has_trailer=True)
        self._await_write(write, batch, sent_s)

    def send(self, write: ShareWrite, segment: int | None = None) -> None:
        """
        Send the bytes, now or with the next batch. They must not change until acknowledged.

        Args:
            segment: whose block it is; None: what stands behind all blocks.
        """
        if self.state is not ShareState.OPEN or self.all_sent:
            return
        if write.offset < self._already.upto and self._pass_over(write, segment):
            return
        batch = self._batch
        if batch is not None and write.offset != batch.offset + batch.length:
            self.flush()
        batch = self._batch = self._batch or Batch(write.offset)
        batch.add(write, segment)
        self._went_by(segment)
        if self._room is None and self._is_ready:
            self.flush()

    def _pass_over(self, write: ShareWrite, segment: int | None) -> bool:
        """Do not send what the server has; returns whether that is so."""
        if not self._already.covers(write.offset, write.offset + write.length):
            return False
        self.flush()  # what comes next does not follow what was gathered
        segments = NO_SEGMENTS if segment is None else range(segment, segment + 1)
        self._already.mark_skipped(segments, segment is None)
        self._went_by(segment)
        return True

    def _went_by(self, segment: int | None) -> None:
        if segment is None:
            self.has_trailer = True
        elif self.needs_segment(segment):
            self.missed = self.missed[1:]

    def flush(self) -> None:
        """Send what has been gathered, unless the server turned out to have it meanwhile."""
        batch = self._batch
        if batch is None or self.state is not ShareState.OPEN:
            return
        self._batch = None
        if self._already.covers(batch.offset, batch.offset + batch.length):
            self._already.mark_skipped(batch.segments, batch.has_trailer)
            return
        self._flushed += 1
        pipeline = self.peer.pipeline
        if self._lets_go and batch.may_be_let_go:
            room = pipeline.add_letting_go(batch.length, self._write, batch)
        else:
            room = pipeline.add(batch.length, self._write, None, batch)
        if not room.called:
            self._room = room
            room.addBoth(self._has_room, room)

    def _has_room(self, _result: object, room: Deferred[None]) -> None:
        if self._room is room:
            self._room = None
            if self._is_ready:  # else it grows: what the window leaves for a message has grown
                self.flush()
            self._changed()

    def _now_gone(self, let_go: Callable[[], None]) -> None:
        let_go()
        if self._room is not None:
            self._changed()  # there is memory for more of the next message

    def _write(self, let_go: Callable[[], None] | None, batch: Batch) -> Deferred[object]:
        """Return a Deferred that never fails: a pipeline is shared, a failure is this way's own."""
        pieces, batch.pieces = batch.pieces, []  # the transport's now, and nobody else's
        call = self.peer.server.write(
            self._storage_index,
            self.share_number,
            batch.offset,
            pieces,
            self._secrets.upload,
            let_go=let_go and partial(self._now_gone, let_go),
            again=self._lost_writes,
        )
        return self._await_write(call, batch)

    def _await_write(
        self, call: Deferred[WriteAnswer], batch: Batch, sent_s: float | None = None
    ) -> Deferred[object]:
        self._await(call, sent_s)
        answer: Deferred[object] = call.addCallbacks(
            self._written, self._write_failed, callbackArgs=(batch,), errbackArgs=(batch,)
        )
        return answer

    def _await(self, call: Deferred[Any], sent_s: float | None = None) -> None:
        """Know the call until it ends, and wake the upload then."""
        if not self._owed:  # before, the server owed nothing
            self.last_activity = self._clock.seconds() if sent_s is None else sent_s
        self._owed.asked(call, sent_s)

    def _written(self, result: WriteAnswer, batch: Batch) -> None:
        if not self.ended:
            self.last_activity = self._clock.seconds()
            self._confirmed_bytes += batch.length
            if result.complete:
                self.acknowledged_bytes = self._share_bytes
                self.close(ShareState.STORED)
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
        if self.state is ShareState.OPEN and self.all_sent and not self._owed:
            self._incomplete = True
            self.close(ShareState.DOUBTFUL)

    def _write_failed(self, failure: Failure, batch: Batch) -> object:
        if self.state is ShareState.OPEN and failure.check(WriteLost):
            self.missed = joined(self.missed, batch.segments)
            self.has_trailer = self.has_trailer and not batch.has_trailer
            self.all_sent = False
            if not self.has_trailer:
                self._last = None  # it comes again with the rest of the trailer
            self._lost_writes = True
            self._changed()
        elif self.state is ShareState.DOUBTFUL and failure.check(WriteLost):
            self._changed()  # the doubt is about all of it
        else:
            self._call_failed(failure)
        return UNDELIVERED

    def _call_failed(self, failure: Failure) -> None:
        error = failure.value
        if not failure.check(ServerError, CancelledError):
            self.bug = failure
            self.close(ShareState.FAILED)
        elif self.state is ShareState.OPEN or not isinstance(error, NoSuchShare):
            if isinstance(error, ServerError) and not self.ended:
                self.error = error
            self.close(state_after(error))
        self._changed()

    def resolve_uncertain(self) -> None:
        """
        Find out what became of a doubtful share, once all that was sent is answered.

        One that was not granted is refused, unless its writes were taken; of any other the server is asked.
        """
        if self.state is not ShareState.DOUBTFUL or self._owed:
            return
        if not self.granted and not self._incomplete:
            self.close(ShareState.REFUSED)
            return
        question = self.peer.server.list_shares(self._storage_index)
        self._await(question)
        question.addCallbacks(self._listed, self._call_failed)

    def _listed(self, share_numbers: frozenset[int]) -> None:
        if self.share_number in share_numbers:
            self.close(ShareState.STORED)
        elif self._incomplete and self._lets_go and self._already.has_skipped and not self.ended:
            self._send_after_all()
        else:
            self.close(ShareState.LOST)
        self._changed()

    def _send_after_all(self) -> None:
        """The server does not have what it said: it gets all that was passed over, coded again."""
        segments, trailer = self._already.unskip()
        self.missed = joined(self.missed, segments)
        self.has_trailer = self.has_trailer and not trailer
        self.all_sent = self._incomplete = False
        self.state = ShareState.OPEN

    def close(self, state: ShareState) -> None:
        """Enter this state, and let go of the bytes; what is on the wire stays there."""
        if self.ended:
            return
        self.state = state
        self.ended = state is not ShareState.DOUBTFUL
        self._batch = self._last = None
        room, self._room = self._room, None
        if room is not None:
            room.cancel()

    def cancel(self, state: ShareState) -> None:
        """End the way in this state and give up all unanswered writes."""
        self.close(state)
        self._owed.cancel()

    def detach(self) -> None:
        """Tell nobody any more; else a transfer and its ways would keep each other after their end."""
        self._changed = self._stored = lambda: None

    def abort(self) -> Deferred[None]:
        """Tell the server to forget the unfinished share; fires when told, never fails."""
        done = self.peer.server.abort(self._storage_index, self.share_number, self._secrets.upload)
        return done.addErrback(lambda failure: failure.trap(ServerError, CancelledError) and None)
