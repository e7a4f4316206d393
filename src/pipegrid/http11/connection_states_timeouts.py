"""
The states of a connection and of a response's reader, pauses of reading, and the timeouts of everything that
a connection waits for.
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

    ``PipelinedConnection._move`` changes the phase as the table ``LIFE`` says. In the table, None marks an
    impossible event.

    * CONNECTING and READY: the connection accepts requests. It writes them only when it is READY.
    * CLOSING: the connection accepts no requests, and ends when the outstanding responses have arrived.
    * BROKEN: like CLOSING, but the body of the last written request will never be complete. So the connection
      ends when all earlier responses have arrived.
    * LAST_WORDS: the transport is closed, and the bytes that it had received are processed.
    * LEAVING: all requests were returned to the owner, and the transport is closing.
    * GONE: the transport is closed.

    What happens to requests:

    * A request is withdrawn: if it is not sent yet, it is removed. If it was sent, its response is read and
      discarded, up to ``discard_limit_bytes``; if the response is longer, the connection ends. If its body
      was sent in part, nothing more is written, and the connection ends after the responses to earlier
      requests.
    * A reader pauses: the transport is paused, and at most the bytes of one read (256 KiB) are kept. After a
      while, the owner sends new requests on another connection, and later also the requests that wait for
      this reader. If the response has no reader yet, the owner does both at the same time.
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
    The state of the current response's reader, by the table ``READER``.

    * PAUSED: the transport is paused, too.
    * SLOW: the pause is so long that new requests should use another connection; the owner is notified.
    * OVERTAKEN: requests that were already written after the response should also use another connection; the
      owner is notified. A response without a reader becomes OVERTAKEN without being SLOW.
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
"""Phases in which a connection only waits for outstanding responses."""
BLOCKED = frozenset({ReaderState.SLOW, ReaderState.OVERTAKEN})
"""States of a reader in which new requests should use another connection."""


# Reading from the transport, with pauses while the reader of the current response is paused.


class ReadPause:
    """
    Pauses and resumes the reading of one connection.

    Attributes:
        transport: the transport to pause and resume; None until the connection is made.
        reader: the state of the current response's reader.
        blocked: whether the reader's pause is so long that new requests should use another connection.
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
        """Pause or resume the transport, after a change of the first unanswered request or its reader."""
        if self.is_right(written):
            return
        if self.reader is ReaderState.READS:
            self._move(Reading.PAUSES)
            self.transport.pauseProducing()
        else:
            self.open()

    def open(self) -> None:
        """Resume reading, even if the reader is paused."""
        if self.reader is not ReaderState.READS:
            self._move(Reading.GOES_ON)
            self.transport.resumeProducing()

    def takes_long(self, written: Sequence[Exchange]) -> None:
        """Change the reader's state, since it has paused for as long as its state allows."""
        self.update(written)
        self._move(Reading.TAKES_LONG if written[0].claimed else Reading.NOBODY_CAME)

    def is_right(self, written: Sequence[Exchange]) -> bool:
        """Return whether the transport is paused if the reader is paused, and only then."""
        reads = not written or not written[0].paused or written[0].abandoned
        return reads == (self.reader is ReaderState.READS)

    def _check_invariants(self, written: Sequence[Exchange]) -> None:
        """Check the invariants when all events are processed; called by tests."""
        assert self.blocked == (self.reader in BLOCKED), self.reader
        assert self.is_right(written) or written[0].response is None, "it reads for a reader"


FOREVER = float("inf")


# What a connection may wait for, the time limit of each wait, and how the connection ends after a wait that
# is too long.


class Wait(Enum):
    """What a connection may wait for. A wait in ``VERDICTS`` ends the connection if it takes too long."""

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
How a connection ends after each kind of wait; the reason contains the seconds. Before a paused reader ends
the connection, the owner is notified and can move the requests that wait for the reader (see
``ReaderState``).
"""


def what_for(ready: bool, lane: RequestQueue, reader: ReaderState) -> Wait:
    """Return what the connection waits for now."""
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
    Ends one connection when a wait takes too long. A single timer bounds the time without progress.

    Progress does not reset the timer. The timer fires early instead, computes the time that is left, and
    waits again. A timer for each request cost 7 % of the requests per second.

    Args:
        is_scheduled: returns whether the queued requests will be written at the end of this turn.
        end: called with the loss when a wait has taken too long.
        reader_takes_long: called when a reader that delays other responses has taken too long.

    Attributes:
        usable: whether the connection is usable.
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
        self._due = FOREVER  # the time when the timer fires

    def progress(self) -> None:
        self.since_s = self._clock.seconds()
        self.adjust()

    def adjust(self) -> None:
        """Set the timer to an earlier time if the wait has changed and ends earlier."""
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
