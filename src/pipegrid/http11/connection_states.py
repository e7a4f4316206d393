"""Connection and reader states, read pause, timeouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import attrs
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from pipegrid.http11.connection_loss import Loss
from pipegrid.http11.exchange import Exchange
from pipegrid.http11.limits import Limits
from pipegrid.http11.request_queue import RequestQueue
from pipegrid.state_table import Named, Table

# What a connection can be, what can happen to it, and what it is then.
#
# **Its life.** ``PipelinedConnection._move`` is the only one that changes it; None is what cannot happen.
#
# * It takes requests while it is CONNECTING or READY, and writes them when it is READY.
# * CLOSING, it takes no more, and ends when what it owes is answered.
# * BROKEN is the same, and the body of the last request written will never be complete: it ends when that
#   request's turn to be answered has come.
# * LAST_WORDS: the transport is gone, and what it had brought is handed out.
# * LEAVING: every request was given back, and the transport was told to go. GONE: it has.
#
# What becomes of requests when something ends early:
#
# ====================================  ====================================================================
# a request is taken back               unsent: it is gone. Sent: its answer is read and dropped, up to
#                                       ``discard_limit_bytes``; beyond, the connection ends. Its body half
#                                       sent: nothing more is written, and the connection ends as soon as
#                                       the answers before it are in.
# a reader pauses                       the transport is paused; what one read had already brought
#                                       (256 KiB) is all that is ever held. Does it go on pausing, the
#                                       owner asks elsewhere what is new, and after long what stands
#                                       behind it as well; that at once, if nobody has claimed the answer
# an answer before the whole body       it counts, nothing more is written, and the connection ends
# the last answer (Connection: close)   all that stood behind it is as if never sent
# loss, garbage, silence                every unanswered request is handed back to the owner with
#                                       the error that is true of it
# ====================================  ====================================================================
#
# **Its reader**, of the answer that is being received (``ReadPause._move``):
#
# * PAUSED, the transport is paused with it.
# * SLOW, it was for so long that new requests had better go elsewhere: the owner is told.
# * OVERTAKEN, so do those that were written behind it; the owner is told. It comes to that at once if nobody
#   has claimed the answer.


class Phase(Named):
    """Where a connection is in its life; the module says what each phase means."""

    CONNECTING = "is connecting"
    READY = "is ready"
    CLOSING = "is closing"
    BROKEN = "has interrupted a body"
    LAST_WORDS = "reads until close"
    LEAVING = "is leaving"
    GONE = "is gone"


class LifeEvent(Named):
    """What moves a connection from one phase of its life to another."""

    USABLE = "it is usable"
    REFUSES = "it takes no more"
    BREAKS_OFF = "it interrupts a body"
    LOST = "its transport is lost"
    ENDS = "it ends"


class ReaderState(Named):
    """Of the answer that is being received."""

    READS = "reads"
    PAUSED = "pauses"
    SLOW = "is slow"
    OVERTAKEN = "is overtaken"


class Reading(Named):
    """What the reader does, or does not."""

    PAUSES = "it pauses"
    GOES_ON = "it continues"
    TAKES_LONG = "it takes long"
    NOBODY_CAME = "no reader took the answer"


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
"""In which requests are accepted."""
TAKES_NO_MORE = frozenset({Phase.CLOSING, Phase.BROKEN})
"""In which only what is owed is waited for."""
HELD_UP = frozenset({ReaderState.SLOW, ReaderState.OVERTAKEN})
"""In which requests had better go elsewhere."""


# Reading from the transport, unless the reader of the answer that is being received has had enough.
#
# What its reader is, and what it becomes, is the second table of ``states``; ``_move`` looks it up.


class ReadPause:
    """
    Of one connection.

    Attributes:
        reader: what the reader is.
        held_up: it has paused for so long that requests had better go elsewhere.
    """

    __slots__ = ("_transport", "held_up", "reader")

    def __init__(self) -> None:
        self._transport: Any = None
        self.reader = ReaderState.READS
        self.held_up = False

    def attach(self, transport: Any) -> None:
        """Keep the transport, to pause it and let it go on; called when the connection is made."""
        self._transport = transport

    def _move(self, reading: Reading) -> None:
        self.reader = READER.after(self.reader, reading)
        self.held_up = self.reader in HELD_UP

    def update(self, written: Sequence[Exchange]) -> None:
        """What is first among those that are to be answered, or what its reader wants, may have changed."""
        if self.is_right(written):
            return
        if self.reader is ReaderState.READS:
            self._move(Reading.PAUSES)
            self._transport.pauseProducing()
        else:
            self.open()

    def open(self) -> None:
        """Read on, whatever the reader wants."""
        if self.reader is not ReaderState.READS:
            self._move(Reading.GOES_ON)
            self._transport.resumeProducing()

    def takes_long(self, written: Sequence[Exchange]) -> None:
        """The first one's reader has paused for as long as it may in the state that it is in."""
        self.update(written)
        self._move(Reading.TAKES_LONG if written[0].claimed else Reading.NOBODY_CAME)

    def is_right(self, written: Sequence[Exchange]) -> bool:
        """Whether it is open, or shut, as the reader wants it."""
        reads = not written or not written[0].paused or written[0].abandoned
        return reads == (self.reader is ReaderState.READS)

    def _check_invariants(self, written: Sequence[Exchange]) -> None:
        """For tests, when all that has happened was worked off."""
        assert self.held_up == (self.reader in HELD_UP), self.reader
        assert self.is_right(written) or written[0].response is None, "it reads for a reader"


# One timer for a whole connection: it bounds how long nothing may go on.
#
# It is left alone while all goes well, fires early rather than late, and then looks how much time
# is really left. A timer for each request instead cost 7 % of all requests a second.

FOREVER = float("inf")


class ProgressTimer:
    """
    Args:
        how_long_s: asked whenever it matters: how long nothing may happen, from the last progress on.
        is_up: called with that when nothing has happened for so long.

    Attributes:
        since_s: when something went on last.
    """

    def __init__(
        self, clock: IReactorTime, how_long_s: Callable[[], float], is_up: Callable[[float], None]
    ) -> None:
        self._clock = clock
        self._how_long_s = how_long_s
        self._is_up = is_up
        self._stopped = False
        self.since_s = clock.seconds()
        self._call: IDelayedCall | None = None
        self._due = FOREVER  # when the call will come

    def progress(self) -> None:
        """Something went on: patience starts anew."""
        self.since_s = self._clock.seconds()
        self.adjust()

    def adjust(self) -> None:
        """What was to be waited for may have changed."""
        due = self.since_s + self._how_long_s()
        if due < self._due and not self._stopped:
            if self._call is not None:
                self._call.cancel()
            self._due = due
            self._call = self._clock.callLater(max(0.0, due - self._clock.seconds()), self._fire)

    def stop(self) -> None:
        """It will not be up any more."""
        self._stopped = True
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def _fire(self) -> None:
        self._call, self._due = None, FOREVER
        how_long_s = self._how_long_s()
        if self._clock.seconds() < self.since_s + how_long_s:
            self.adjust()
        else:
            self._is_up(how_long_s)


# What a connection waits for, how long that may take, and what is said when it took longer.
#
# Decisions without I/O, and ``WaitTimer``, which has them made with each read and when its one timer rings.


class Wait(Enum):
    """What a connection may be waiting for; what is in ``VERDICTS`` ends it when it takes too long."""

    USABLE = "the connection to be usable"
    UNWANTED = "an unwanted answer"
    ANSWER = "an answer"
    READER = "the reader of an answer, which is usually quick"
    SLOW_READER = "a reader that has been slow"
    OVERTAKEN_READER = "a reader that delays no other any more"
    START = "the first request to be written"
    USE = "a use for it"


_SILENT = Loss(reason="it was silent for {:g} s", timed_out=True)

VERDICTS = {
    Wait.USABLE: Loss(reason="it was not usable after {:g} s", timed_out=True),
    Wait.UNWANTED: Loss(reason="an unwanted answer did not come for {:g} s", announced=True),
    Wait.ANSWER: _SILENT,
    Wait.START: _SILENT,
    Wait.OVERTAKEN_READER: Loss(reason="the answer was not read for {:g} s", announced=True),
    Wait.USE: Loss(reason="it was not used for {:g} s", announced=True),
}
"""
How the connection ends, with the seconds to be put into the reason. Of readers that pause, those behind them
are told first (see ``states``).
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
    Return how long nothing may happen.

    Args:
        scheduled: what is to be written will be at the end of this turn of the reactor.
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
        return limits.held_up_after_s
    if wait is Wait.SLOW_READER:
        return limits.slow_reader_after_s
    return FOREVER if lane.written[0].claimed else limits.unclaimed_timeout_s


class WaitTimer:
    """
    The same with a timer, for one connection.

    Args:
        is_scheduled: asked whether what is to be written will be at the end of this turn.
        end: called with how the connection ends when a wait was too long.
        reader_takes_long: called when it was for a reader, who holds up others.

    Attributes:
        usable: whether the connection is.
        patience: knows when something went on last.
    """

    def __init__(
        self,
        clock: IReactorTime,
        limits: Limits,
        lane: RequestQueue,
        valve: ReadPause,
        is_scheduled: Callable[[], bool],
        end: Callable[[Loss], None],
        reader_takes_long: Callable[[], None],
    ) -> None:
        self.usable = False
        self._limits = limits
        self._lane = lane
        self._valve = valve
        self._is_scheduled = is_scheduled
        self._end = end
        self._reader_takes_long = reader_takes_long
        patience = self.patience = ProgressTimer(clock, self._how_long_s, self._time_is_up)
        self.progress = patience.progress
        self.adjust = patience.adjust
        self.stop = patience.stop

    def _how_long_s(self) -> float:
        wait = what_for(self.usable, self._lane, self._valve.reader)
        return how_long_s(wait, self._lane, self._limits, self._is_scheduled())

    def _time_is_up(self, waited_s: float) -> None:
        verdict = VERDICTS.get(what_for(self.usable, self._lane, self._valve.reader))
        if verdict is None:
            self._valve.takes_long(self._lane.written)
            self.adjust()
            self._reader_takes_long()
        else:
            self._end(attrs.evolve(verdict, reason=verdict.reason.format(waited_s)))
