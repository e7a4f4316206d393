"""Timeouts of a connection: of progress, and of each thing that it waits for."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import attrs
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from pipegrid.http11.connection_limits import Limits
from pipegrid.http11.connection_loss import Loss
from pipegrid.http11.connection_states import ReaderState, ReadPause
from pipegrid.http11.request_queue import RequestQueue

FOREVER = float("inf")


# One timer for a whole connection: it bounds the time without progress.
#
# Progress does not reset the timer. It fires early instead, computes the time that is left, and waits
# again. A timer for each request cost 7 % of the requests per second.


class ProgressTimer:
    """
    A timer that progress restarts.

    Args:
        how_long_s: returns the time limit; called whenever it is needed.
        is_up: called with the time waited, after ``how_long_s`` seconds without progress.

    Attributes:
        since_s: the time of the last progress.
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
        how_long_s = self._how_long_s()
        if self._clock.seconds() < self.since_s + how_long_s:
            self.adjust()
        else:
            self._is_up(how_long_s)


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
    Ends one connection when a wait takes too long.

    Args:
        is_scheduled: returns whether the queued requests will be written at the end of this turn.
        end: called with the loss when a wait has taken too long.
        reader_takes_long: called when a reader that delays other responses has taken too long.

    Attributes:
        usable: whether the connection is.
        timer: it records the time of the last progress.
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
        self._limits = limits
        self._lane = lane
        self._read_pause = read_pause
        self._is_scheduled = is_scheduled
        self._end = end
        self._reader_takes_long = reader_takes_long
        timer = self.timer = ProgressTimer(clock, self._how_long_s, self._time_is_up)
        self.progress = timer.progress
        self.adjust = timer.adjust
        self.stop = timer.stop

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
