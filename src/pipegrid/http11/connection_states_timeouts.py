"""
States of a connection and of the reader of its responses, pauses of reading, and the timeouts of progress and
of each thing that a connection waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import attrs
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from pipegrid.http11.connection_limits import Limits
from pipegrid.http11.connection_loss import Loss
from pipegrid.http11.exchange import Exchange
from pipegrid.http11.request_queue import RequestQueue
from pipegrid.state_table import Named, Table

# The states of a connection, the events that change them, and the resulting states.


class Phase(Named):
    """
    The phase of a connection.

    ``PipelinedConnection._move`` changes it by the table ``LIFE``, in which None marks an impossible event.

    * CONNECTING and READY: it accepts requests. It writes them when it is READY.
    * CLOSING: it accepts no requests, and ends when the outstanding responses have arrived.
    * BROKEN: like CLOSING; the body of the last written request will never be complete, so the connection
    ends when the response to that request is the next one.
    * LAST_WORDS: the transport is closed, and the bytes that it had received are processed.
    * LEAVING: all requests were returned to the owner, and the transport is closing. GONE: it is closed.

    What happens to requests:

    * A request is withdrawn: if it is not sent yet, it is removed. If it was sent, its response is read and
    discarded, up to ``discard_limit_bytes``; beyond that the connection ends. If half of its body was sent,
    nothing more is written, and the connection ends after the responses to earlier requests.
    * A reader pauses: the transport is paused, and at most the bytes of one read (256 KiB) are kept. If the
    pause goes on, the owner sends new requests on another connection, and later also those that wait for
    this reader. If the response has no reader yet, it does the second at once.
    * The response arrives before the whole body was sent: it is passed on, nothing more is written, and the
    connection ends.
    * A response has ``Connection: close``: later requests count as not sent.
    * Loss, garbage or silence: every unanswered request is returned to the owner with its error.
    """

    CONNECTING = "is connecting"
    READY = "is ready"
    CLOSING = "is closing"
    BROKEN = "has interrupted a body"
    LAST_WORDS = "reads until close"
    LEAVING = "is leaving"
    GONE = "is gone"


class LifeEvent(Named):
    """An event that may change the phase of a connection."""

    USABLE = "it is usable"
    REFUSES = "it accepts no more"
    BREAKS_OFF = "it interrupts a body"
    LOST = "its transport is lost"
    ENDS = "it ends"


class ReaderState(Named):
    """
    The state of the reader of the current response, by the table ``READER``.

    * PAUSED: the transport is paused too.
    * SLOW: its pause is so long that new requests should use another connection; the owner is
    notified.
    * OVERTAKEN: the requests written after it should do so too; the owner is notified. A response without a
    reader gets here at once.
    """

    READS = "reads"
    PAUSED = "pauses"
    SLOW = "is slow"
    OVERTAKEN = "is overtaken"


class Reading(Named):
    """An event that may change the state of a reader."""

    PAUSES = "it pauses"
    GOES_ON = "it continues"
    TAKES_LONG = "it takes long"
    NOBODY_CAME = "the response has no reader"


def _life() -> Table[Phase, LifeEvent]:
    (connecting, ready, closing, broken, last_words, leaving, gone) = Phase
    # fmt: off
    return Table("a connection", tuple(LifeEvent), {
        #             USABLE  REFUSES     BREAKS_OFF  LOST        ENDS
        connecting:  (ready,  closing,    None,       last_words, leaving),
        ready:       (None,   closing,    broken,     last_words, leaving),
        closing:     (None,   closing,    broken,     last_words, leaving),
        broken:      (None,   broken,     None,       last_words, leaving),
        last_words:  (None,   last_words, last_words, None,       gone),
        leaving:     (None,   None,       None,       gone,       None),
        gone:        (None,   None,       None,       None,       None),
    })
    # fmt: on


def _reader() -> Table[ReaderState, Reading]:
    (reads, paused, slow, overtaken) = ReaderState
    # fmt: off
    return Table("a reader", tuple(Reading), {
        #           PAUSES   GOES_ON  TAKES_LONG  NOBODY_CAME
        reads:     (paused,  None,    None,       None),
        paused:    (None,    reads,   slow,       overtaken),
        slow:      (None,    reads,   overtaken,  overtaken),
        overtaken: (None,    reads,   None,       None),
    })
    # fmt: on


LIFE = _life()
READER = _reader()

TAKES_REQUESTS = frozenset({Phase.CONNECTING, Phase.READY})
"""Phases in which requests are accepted."""
TAKES_NO_MORE = frozenset({Phase.CLOSING, Phase.BROKEN})
"""Phases in which only outstanding responses are waited for."""
BLOCKED = frozenset({ReaderState.SLOW, ReaderState.OVERTAKEN})
"""States in which requests should use another connection."""


# Reading from the transport, except while the reader of the current response is paused.


class ReadPause:
    """
    Pauses and resumes the reading of one connection.

    Attributes:
        transport: to pause and resume; None until the connection is made.
        reader: the state of the current response's reader.
        blocked: whether its pause is so long that requests should use another connection.
    """

    __slots__ = ("blocked", "reader", "transport")

    def __init__(self) -> None:
        self.transport: Any = None
        self.reader = ReaderState.READS
        self.blocked = False

    def _move(self, reading: Reading) -> None:
        self.reader = READER.after(self.reader, reading)
        self.blocked = self.reader in BLOCKED

    def update(self, written: Sequence[Exchange]) -> None:
        """Pause or resume the transport, after the first unanswered request or its reader has changed."""
        if self.is_right(written):
            return
        if self.reader is ReaderState.READS:
            self._move(Reading.PAUSES)
            self.transport.pauseProducing()
        else:
            self.open()

    def open(self) -> None:
        """Read on, even if the reader is paused."""
        if self.reader is not ReaderState.READS:
            self._move(Reading.GOES_ON)
            self.transport.resumeProducing()

    def takes_long(self, written: Sequence[Exchange]) -> None:
        """The reader of the first response has paused for as long as its state allows."""
        self.update(written)
        self._move(Reading.TAKES_LONG if written[0].claimed else Reading.NOBODY_CAME)

    def is_right(self, written: Sequence[Exchange]) -> bool:
        """Return whether the transport is paused exactly if the reader is."""
        reads = not written or not written[0].paused or written[0].abandoned
        return reads == (self.reader is ReaderState.READS)

    def _check_invariants(self, written: Sequence[Exchange]) -> None:
        """For tests, when all events were processed."""
        assert self.blocked == (self.reader in BLOCKED), self.reader
        assert self.is_right(written) or written[0].response is None, "it reads for a reader"


FOREVER = float("inf")


# What a connection waits for, how long it may take, and how the connection ends after that.


class Wait(Enum):
    """
    What a connection may be waiting for. A wait in ``VERDICTS`` ends the connection if it takes too long.
    """

    USABLE = "the connection to be usable"
    UNWANTED = "an unwanted response"
    ANSWER = "an answer"
    READER = "the reader of a response, which is usually quick"
    SLOW_READER = "a reader that has been slow"
    OVERTAKEN_READER = "a reader that delays no other requests any more"
    START = "the first request to be written"
    USE = "a request"


_SILENT = Loss(reason="it was silent for {:g} s", timed_out=True)


VERDICTS = {
    Wait.USABLE: Loss(reason="it was not usable after {:g} s", timed_out=True),
    Wait.UNWANTED: Loss(reason="an unwanted response did not come for {:g} s", announced=True),
    Wait.ANSWER: _SILENT,
    Wait.START: _SILENT,
    Wait.OVERTAKEN_READER: Loss(reason="the response was not read for {:g} s", announced=True),
    Wait.USE: Loss(reason="it was not used for {:g} s", announced=True),
}
"""
How the connection ends, with the seconds for the reason. Before a paused reader ends it, the owner is
notified and can move the requests that wait for it (see ``ReaderState``).
"""


def what_for(ready: bool, lane: RequestQueue, reader: ReaderState) -> Wait:
    """Return what is waited for now."""
    if not ready:
        return Wait.USABLE
    if lane.written:
        first = lane.written[0]
        if first.abandoned:
            return Wait.UNWANTED
        if not first.paused:
            return Wait.ANSWER
        if reader is ReaderState.OVERTAKEN:
            return Wait.OVERTAKEN_READER
        return Wait.SLOW_READER if reader is ReaderState.SLOW else Wait.READER
    return Wait.START if lane.queued else Wait.USE


def how_long_s(wait: Wait, lane: RequestQueue, limits: Limits, scheduled: bool) -> float:
    """
    Return the time limit of a wait.

    Args:
        scheduled: whether the queued requests will be written at the end of this turn of the reactor.
    """
    if wait is Wait.ANSWER:
        own_s = lane.written[0].timeout_s
        return limits.timeout_s if own_s is None else own_s
    if wait is Wait.USE:
        return limits.idle_timeout_s
    if wait is Wait.START:
        return FOREVER if scheduled else limits.timeout_s
    if wait is Wait.USABLE:
        return limits.connect_timeout_s
    if wait is Wait.UNWANTED:
        return limits.abandoned_timeout_s
    if wait is Wait.READER:
        return limits.blocked_after_s
    if wait is Wait.SLOW_READER:
        return limits.slow_reader_after_s
    return FOREVER if lane.written[0].claimed else limits.unclaimed_timeout_s


class WaitTimer:
    """
    Ends one connection when a wait takes too long: one timer, which bounds the time without progress.

    Progress does not reset the timer. It fires early instead, computes the time that is left, and waits
    again. A timer for each request cost 7 % of the requests per second.

    Args:
        is_scheduled: returns whether the queued requests will be written at the end of this turn.
        end: called with the loss when a wait has taken too long.
        reader_takes_long: called when a reader that delays other responses has taken too long.

    Attributes:
        usable: whether the connection is.
        since_s: the time of the last progress.
    """

    def __init__(
        self,
        clock: IReactorTime,
        limits: Limits,
        lane: RequestQueue,
        read_pause: ReadPause,
        is_scheduled: Callable[[], bool],
        end: Callable[[Loss], None],
        reader_takes_long: Callable[[], None],
    ) -> None:
        self.usable = False
        self.since_s = clock.seconds()
        self._clock = clock
        self._limits = limits
        self._lane = lane
        self._read_pause = read_pause
        self._is_scheduled = is_scheduled
        self._end = end
        self._reader_takes_long = reader_takes_long
        self._stopped = False
        self._call: IDelayedCall | None = None
        self._due = FOREVER  # when the timer fires

    def progress(self) -> None:
        self.since_s = self._clock.seconds()
        self.adjust()

    def adjust(self) -> None:
        """Compute the timer again after the wait may have changed."""
        due = self.since_s + self._how_long_s()
        if due < self._due and not self._stopped:
            if self._call is not None:
                self._call.cancel()
            self._due = due
            self._call = self._clock.callLater(max(0.0, due - self._clock.seconds()), self._fire)

    def stop(self) -> None:
        self._stopped = True
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def _fire(self) -> None:
        self._call, self._due = None, FOREVER
        waited_s = self._how_long_s()
        if self._clock.seconds() < self.since_s + waited_s:
            self.adjust()
        else:
            self._time_is_up(waited_s)

    def _how_long_s(self) -> float:
        wait = what_for(self.usable, self._lane, self._read_pause.reader)
        return how_long_s(wait, self._lane, self._limits, self._is_scheduled())

    def _time_is_up(self, waited_s: float) -> None:
        verdict = VERDICTS.get(what_for(self.usable, self._lane, self._read_pause.reader))
        if verdict is None:
            self._read_pause.takes_long(self._lane.written)
            self.adjust()
            self._reader_takes_long()
        else:
            self._end(attrs.evolve(verdict, reason=verdict.reason.format(waited_s)))
