"""
What a connection waits for, how long that may take, and what is said when it took longer.

Decisions without I/O, and ``WaitTimer``, which has them made with each read and when its one timer rings.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import attrs
from twisted.internet.interfaces import IReactorTime

from pipegrid.http11.lane import Lane
from pipegrid.http11.limits import Limits
from pipegrid.http11.loss import Loss
from pipegrid.http11.patience import FOREVER, Patience
from pipegrid.http11.states import ReaderState
from pipegrid.http11.valve import Valve


class Wait(Enum):
    """What a connection may be waiting for; what is in ``VERDICTS`` ends it when it takes too long."""

    USABLE = "the connection to be usable"
    UNWANTED = "an answer that nobody wants"
    ANSWER = "an answer"
    READER = "the reader of an answer, who is quick as a rule"
    SLOW_READER = "a reader who has been slow"
    OVERTAKEN_READER = "a reader who holds up nobody else any more"
    START = "the first request to be written"
    USE = "somebody to have a use for it"


_SILENT = Loss(reason="it was silent for {:g} s", timed_out=True)

VERDICTS = {
    Wait.USABLE: Loss(reason="it was not usable after {:g} s", timed_out=True),
    Wait.UNWANTED: Loss(reason="an unwanted answer did not come for {:g} s", announced=True),
    Wait.ANSWER: _SILENT,
    Wait.START: _SILENT,
    Wait.OVERTAKEN_READER: Loss(reason="nobody read the answer for {:g} s", announced=True),
    Wait.USE: Loss(reason="it was not used for {:g} s", announced=True),
}
"""
How the connection ends, with the seconds to be put into the reason. Of readers that pause, those behind them
are told first (see ``states``).
"""


def what_for(ready: bool, lane: Lane, reader: ReaderState) -> Wait:
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


def how_long_s(wait: Wait, lane: Lane, limits: Limits, scheduled: bool) -> float:
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
        lane: Lane,
        valve: Valve,
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
        patience = self.patience = Patience(clock, self._how_long_s, self._time_is_up)
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
