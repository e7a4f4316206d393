"""Upload of one share to one server: its states and its acknowledged bytes."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

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
from pipegrid.transfer.results import Traffic
from pipegrid.wire.storage_messages import WriteAnswer

# What can happen to one share on one server.
#
#     state        event                                                      next state
#     open         the server has the whole share                             stored
#                  the server refused; has other bytes; is gone               refused; lost; failed
#                  the server knows no unfinished share                       uncertain
#                  all is sent and answered, but the server wants more        uncertain
#     uncertain    all is answered; the share was not granted                 refused
#                  the server lists the share; does not list it               stored; lost
#                  does not list it, but has reported a part before           open, to send that part
#     either       this client dropped the share; another stored it           dropped; found


class ShareState(str, Enum):
    """State of a share on one server; the table above gives the transitions."""

    OPEN = "open"
    UNCERTAIN = "uncertain"  # unknown whether the server has the share, or any part of it
    STORED = "stored"
    FOUND = "found"  # another client stored the share meanwhile
    REFUSED = "refused"
    LOST = "lost"  # the server dropped the share, or has other bytes
    FAILED = "failed"  # the server is gone
    DROPPED = "dropped"


def state_after(error: BaseException | None) -> ShareState:
    """Return the state of a share after one of its requests ended with this error."""
    if isinstance(error, CancelledError):
        return ShareState.DROPPED
    if isinstance(error, NoSuchShare):
        return ShareState.UNCERTAIN
    if isinstance(error, ConflictingWrite):
        return ShareState.LOST  # ``take_ended`` then aborts the share on the server
    return ShareState.REFUSED if isinstance(error, ServerRefused) else ShareState.FAILED


def is_unexplained(state: ShareState, error: BaseException | None) -> bool:
    """Return whether the server refused a share without giving a reason."""
    return state is ShareState.REFUSED and (error is None or isinstance(error, NoSuchShare))


# Sending one share to one server.
#
# ``ShareSender`` sends, and ``ResumeRanges`` records which bytes the server has. ``ShareUpload`` counts what
# the server acknowledged and derives the state. The upload of the file reads ``blocked`` and ``state``, and
# is notified whenever they may have changed.


class ShareUpload:
    """
    The upload of one share to one server.

    Args:
        target: the share and the server.
        changed: called after every event that may let the file's upload continue.
        stored: called in place of ``changed`` when the server has acknowledged the whole share.
        missed: number of segments that were sent to other shares before this upload was opened; these
            segments are encoded again and sent at the end.
        recodable, turn: see ``ShareSender``.

    Attributes:
        sender: takes the bytes.
        resume: which bytes the server has, and which are missing.
        state: see the table above.
        ended: whether the state is final.
        granted: False once the server has left the share out of its response to the allocation.
        acknowledged_bytes: number of bytes that the server has confirmed, or has reported as present from
            before.
        found_bytes: those of ``acknowledged_bytes`` that the server had before.
        stalled_s: how many seconds this share has delayed the others so far.
        last_activity: when the server last acknowledged anything of this share, or when the oldest unanswered
            request was sent.
        error: why the share was refused, lost or failed.
        bug: an exception that is no server error; the file's upload raises it again.
        traffic: gets each message that is acknowledged from now on; None: messages are not reported.
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
        self.traffic: Traffic | None = None
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
        self._pending: dict[Deferred[Any], float] = {}  # when each pending call was sent
        self._answers = 0
        self._answers_s = 0.0

    def __repr__(self) -> str:
        return f"<ShareUpload of share {self.share_number} to {self.peer.name}: {self.state.value}>"

    @property
    def is_open(self) -> bool:
        """Whether this upload takes data, or waits for responses to its writes."""
        return self.state is ShareState.OPEN

    @property
    def blocked(self) -> bool:
        """Whether the sender takes no more data; see ``ShareSender.blocked``."""
        return self.sender.blocked

    @property
    def has_space(self) -> bool:
        """Whether this upload is open and can take more data now."""
        return self.state is ShareState.OPEN and not self.sender.blocked

    @property
    def waiting(self) -> bool:
        """Whether a response is outstanding that matters for the state."""
        return bool(self._pending) and not self.ended

    @property
    def pace_s(self) -> float:
        """The average response time in seconds, or the age of the oldest pending call if that is longer."""
        average_s = self._answers_s / self._answers if self._answers else 0.0
        oldest = next(iter(self._pending.values()), None)
        return average_s if oldest is None else max(average_s, self._clock.seconds() - oldest)

    @property
    def peer_activity(self) -> float:
        """When bytes last went to the server or came from it, for any transfer."""
        return self.peer.last_activity

    @property
    def is_useless(self) -> bool:
        """
        Whether the partial share on the server should be aborted: it takes up the last space, or has wrong
        bytes that a repeated put would resume.
        """
        wrong = self.state is ShareState.LOST and self._incomplete
        return wrong or isinstance(self.error, (NoSpace, ConflictingWrite))

    @property
    def exceeds_window(self) -> bool:
        """
        Whether the share is larger than the window, so that the server must acknowledge some writes
        before the rest can be sent.
        """
        return self._answers > 0 or self.sender.exceeds_window

    def needs_segment(self, segment: int) -> bool:
        """
        Return whether this upload is open, and ``segment`` is the next segment to be encoded again for it.
        """
        return self.state is ShareState.OPEN and self.resume.needs_segment(segment)

    def finish(self, hold: bool = False) -> None:
        """
        Record that every byte has been given to the sender.

        Args:
            hold: withhold the last byte, if it is not sent yet, until ``release`` is called.
        """
        self.sender.finish(hold)
        self._check_complete()

    def release(self) -> None:
        """Send the withheld byte, which completes the share."""
        self.sender.release()
        self._check_complete()

    def attach_sent(self, write: Deferred[WriteAnswer], sent_s: float) -> None:
        """
        Adopt a write of the whole share that another object sent at ``sent_s``; ``write`` fires with the
        response.
        """
        self._await_write(write, self.sender.attach_sent(), sent_s)

    def _await_write(
        self, call: Deferred[WriteAnswer], batch: Batch, sent_s: float | None = None
    ) -> Deferred[object]:
        self._await(call, sent_s)
        if self.traffic is not None:
            began_s = self._clock.seconds() if sent_s is None else sent_s
            call.addCallback(self._report, self.traffic, began_s, batch.length)
        answer: Deferred[object] = call.addCallbacks(
            self._written, self._write_failed, callbackArgs=(batch,), errbackArgs=(batch,)
        )
        return answer

    def _report(
        self, answer: WriteAnswer, traffic: Traffic, began_s: float, size_bytes: int
    ) -> WriteAnswer:
        traffic(self.peer.identity, began_s, self._clock.seconds(), size_bytes)
        return answer

    def _await(self, call: Deferred[Any], sent_s: float | None = None) -> None:
        """Track the call until it ends. ``sent_s``: when the call was sent; None: now."""
        began_s = self._clock.seconds() if sent_s is None else sent_s
        if not self._pending:  # so far no response was outstanding
            self.last_activity = began_s
        self._pending[call] = began_s
        call.addBoth(self._answered, call)

    def _answered(self, result: object, call: Deferred[Any]) -> object:
        self._answers += 1
        self._answers_s += self._clock.seconds() - self._pending.pop(call)
        return result

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
        # Everything is sent or skipped, and answered, but the server still wants more: it has lost a part of
        # the share, or never had it.
        if self.state is ShareState.OPEN and self.sender.all_sent and not self._pending:
            self._incomplete = True
            self.close(ShareState.UNCERTAIN)

    def _write_failed(self, failure: Failure, batch: Batch) -> object:
        if self.state is ShareState.OPEN and failure.check(WriteLost):
            self.sender.lost(batch)
            self._changed()
        elif self.state is ShareState.UNCERTAIN and failure.check(WriteLost):
            self._changed()  # the share is uncertain already, so these bytes need no record
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
        Find out what happened to an uncertain share, once all its writes are answered.

        A share that was not granted counts as refused, unless the server accepted writes for it. For any
        other share the server is asked for its list of shares.
        """
        if self.state is not ShareState.UNCERTAIN or self._pending:
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
            # The server does not have the ranges that it reported as present.
            self.sender.unskip()
            self._incomplete = False
            self.state = ShareState.OPEN
        else:
            self.close(ShareState.LOST)
        self._changed()

    def close(self, state: ShareState) -> None:
        """Set this state and drop unsent bytes; writes that were sent remain pending."""
        if self.ended:
            return
        self.state = state
        self.ended = state is not ShareState.UNCERTAIN
        self.sender.stop()

    def cancel(self, state: ShareState) -> None:
        """End the upload, set this state and cancel all unanswered writes."""
        self.close(state)
        for call in list(self._pending):
            call.cancel()

    def detach(self) -> None:
        """Drop all callbacks; otherwise a reference cycle would keep the upload and its shares in memory."""
        self._changed = self._stored = lambda: None
        self.sender.detach()

    def abort(self) -> Deferred[None]:
        """Abort the unfinished share on the server; fire when the server has responded, and never fail."""
        target = self._target
        done = self.peer.server.abort(
            target.shares.storage_index, self.share_number, target.secrets.upload
        )
        return done.addErrback(lambda failure: failure.trap(ServerError, CancelledError) and None)
