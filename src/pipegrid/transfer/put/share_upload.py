"""Upload of one share: states, acknowledged bytes."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.errors import (
    ConflictingWrite,
    NoSpace,
    NoSuchShare,
    ServerError,
    ServerRefused,
    WriteLost,
)
from pipegrid.flow.pipeline import UNDELIVERED
from pipegrid.transfer.put.file_key import ShareTarget
from pipegrid.transfer.put.write_batches import Batch, ResumeRanges, ShareSender
from pipegrid.wire.messages import WriteAnswer

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


# The outstanding answers for one share, and how long they take.

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
        """How long an answer takes: on average, or the oldest outstanding one if that is longer."""
        average_s = self._answers_s / self.answers if self.answers else 0.0
        oldest = next(iter(self._calls.values()), None)
        return average_s if oldest is None else max(average_s, self._clock.seconds() - oldest)

    def asked(self, call: Deferred[T], sent_s: float | None = None) -> None:
        """Know a call, which was sent at that time, or now, until it ends."""
        self._calls[call] = self._clock.seconds() if sent_s is None else sent_s
        call.addBoth(self._answered, call)

    def cancel(self) -> None:
        """Give up all that are outstanding."""
        for call in list(self._calls):
            call.cancel()

    def _answered(self, result: T, call: Deferred[T]) -> T:
        self.answers += 1
        self._answers_s += self._clock.seconds() - self._calls.pop(call)
        return result


# One share that is sent to one server.
#
# ``ShareSender`` sends, ``ResumeRanges`` knows what the server has; here is what the server acknowledged, and
# the state that follows from it. The upload looks at ``blocked`` and ``state``, and is woken whenever they
# may have changed.


class ShareUpload:
    """
    The upload of one share to one server.

    Args:
        target: which share, and where to.
        changed: called after every event that may let the upload continue.
        stored: called instead when the server has acknowledged all of the share.
        missed: so many segments were sent to other shares before this one was opened; they are encoded again
            and sent at the end.
        recodable, turn: as of ``ShareSender``.

    Attributes:
        sender: takes the bytes.
        resume: what the server has, and what it still has to be sent.
        state: see the table.
        ended: whether the state is final.
        granted: False once the server has left the share out of its answer to the allocation.
        acknowledged_bytes: what the server has confirmed, or said that it has from before.
        found_bytes: of these, what it had before.
        stalled_s: how long this share has kept others waiting, so far.
        last_activity: when the server last acknowledged anything of this share.
        error: why it was refused, lost or failed.
        bug: what was raised that no server may raise; the upload passes it on.
    """

    def __init__(
        self,
        target: ShareTarget,
        changed: Callable[[], None],
        stored: Callable[[], None],
        clock: IReactorTime,
        missed: int = 0,
        recodable: bool = False,
        turn: float = 1.0,
    ) -> None:
        self.peer = target.peer
        self.share_number = target.share_number
        self.state = ShareState.OPEN
        self.ended = False
        self.granted = True
        self.error: ServerError | None = None
        self.bug: Failure | None = None
        self.acknowledged_bytes = 0
        self.found_bytes = 0
        self.stalled_s = 0.0
        self.last_activity = clock.seconds()
        self.resume = ResumeRanges(range(missed))
        self.sender = ShareSender(
            target, self.resume, self._await_write, changed, recodable=recodable, turn=turn
        )
        self._target = target
        self._confirmed_bytes = 0
        self._incomplete = False
        self._recodable = recodable
        self._changed = changed
        self._stored = stored
        self._clock = clock
        self._pending = PendingWrites(clock)

    def __repr__(self) -> str:
        return f"<ShareUpload of share {self.share_number} to {self.peer.name}: {self.state.value}>"

    @property
    def is_open(self) -> bool:
        """Whether it takes, or awaits, what there is to be sent."""
        return self.state is ShareState.OPEN

    @property
    def blocked(self) -> bool:
        """Whether it takes no more; see ``ShareSender.blocked``."""
        return self.sender.blocked

    @property
    def has_room(self) -> bool:
        """Whether it is open, and would take more now."""
        return self.state is ShareState.OPEN and not self.sender.blocked

    @property
    def waiting(self) -> bool:
        """Whether an answer of the server that matters is outstanding."""
        return bool(self._pending) and not self.ended

    @property
    def pace_s(self) -> float:
        """How long an answer takes: on average, or the oldest outstanding one if that is longer."""
        return self._pending.pace_s

    @property
    def peer_activity(self) -> float:
        """When bytes last went to its server or came from it, for any transfer."""
        return self.peer.last_activity

    @property
    def is_useless(self) -> bool:
        """Whether what the server has of it takes the last space, or is wrong and would be resumed."""
        wrong = self.state is ShareState.LOST and self._incomplete
        return wrong or isinstance(self.error, (NoSpace, ConflictingWrite))

    @property
    def exceeds_window(self) -> bool:
        """Whether the server must have answered some writes, or has to, before the rest can be sent."""
        return self._pending.answers > 0 or self.sender.exceeds_window

    def needs_segment(self, segment: int) -> bool:
        """Whether it is open, and this is the next segment to be encoded again for it."""
        return self.state is ShareState.OPEN and self.resume.needs_segment(segment)

    def finish(self, hold: bool = False) -> None:
        """
        Every byte has been given.

        Args:
            hold: the last one, if it is not sent yet, waits until ``release``.
        """
        self.sender.finish(hold)
        self._check_complete()

    def release(self) -> None:
        """Send what was held back: all of the share is sent with it."""
        self.sender.release()
        self._check_complete()

    def attach_sent(self, write: Deferred[WriteAnswer], sent_s: float) -> None:
        """All of the share was sent by another object, at that time; ``write`` fires with the answer."""
        self._await_write(write, self.sender.attach_sent(), sent_s)

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
        if not self._pending:  # before, no answer was outstanding
            self.last_activity = self._clock.seconds() if sent_s is None else sent_s
        self._pending.asked(call, sent_s)

    def _written(self, result: WriteAnswer, batch: Batch) -> None:
        if not self.ended:
            share_bytes = self._target.shares.share_bytes
            self.last_activity = self._clock.seconds()
            self._confirmed_bytes += batch.length
            if result.complete:
                self.acknowledged_bytes = share_bytes
                self.close(ShareState.STORED)
                self._stored()
                return
            self.resume.answered(result.required, share_bytes)
            self.acknowledged_bytes = max(self._confirmed_bytes, self.resume.total_bytes)
            before = self.acknowledged_bytes - self._confirmed_bytes
            self.found_bytes = max(self.found_bytes, before)
            self._check_complete()
        self._changed()

    def _check_complete(self) -> None:
        # All is sent or skipped, and answered, and still the server wants more: it has lost something, or
        # never had it.
        if self.state is ShareState.OPEN and self.sender.all_sent and not self._pending:
            self._incomplete = True
            self.close(ShareState.DOUBTFUL)

    def _write_failed(self, failure: Failure, batch: Batch) -> object:
        if self.state is ShareState.OPEN and failure.check(WriteLost):
            self.sender.lost(batch)
            self._changed()
        elif self.state is ShareState.DOUBTFUL and failure.check(WriteLost):
            self._changed()  # all of it is uncertain anyhow
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
        Find out what happened to an uncertain share, once all that was sent is answered.

        One that was not granted is refused, unless its writes were taken; of any other the server is asked.
        """
        if self.state is not ShareState.DOUBTFUL or self._pending:
            return
        if not self.granted and not self._incomplete:
            self.close(ShareState.REFUSED)
            return
        question = self.peer.server.list_shares(self._target.shares.storage_index)
        self._await(question)
        question.addCallbacks(self._listed, self._call_failed)

    def _listed(self, share_numbers: frozenset[int]) -> None:
        if self.share_number in share_numbers:
            self.close(ShareState.STORED)
        elif self._incomplete and self._recodable and self.resume.has_skipped and not self.ended:
            # The server does not have what it said.
            self.sender.unskip()
            self._incomplete = False
            self.state = ShareState.OPEN
        else:
            self.close(ShareState.LOST)
        self._changed()

    def close(self, state: ShareState) -> None:
        """Enter this state, and drop the bytes; what is on the wire stays there."""
        if self.ended:
            return
        self.state = state
        self.ended = state is not ShareState.DOUBTFUL
        self.sender.stop()

    def cancel(self, state: ShareState) -> None:
        """End the upload in this state and give up all unanswered writes."""
        self.close(state)
        self._pending.cancel()

    def detach(self) -> None:
        """Call nothing any more; else an upload and its shares would keep each other after their end."""
        self._changed = self._stored = lambda: None
        self.sender.detach()

    def abort(self) -> Deferred[None]:
        """Make the server forget the unfinished share; fires when it has answered, never fails."""
        target = self._target
        done = self.peer.server.abort(
            target.shares.storage_index, self.share_number, target.secrets.upload
        )
        return done.addErrback(lambda failure: failure.trap(ServerError, CancelledError) and None)
