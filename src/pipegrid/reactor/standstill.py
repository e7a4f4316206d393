"""
Time in which the process stood still does not count.

Who stopped a command (Ctrl-Z, ``kill -STOP``) and had it go on two minutes later found that all servers had
been silent for longer than anybody is waited for, though nobody had listened. So the reactor's clock stands
still as long as the process does: it goes on from where it was read last before. While a reactor waits it is
not read, so some of that waiting may not count either, which does no harm: patience lasts a little longer.

Servers count on. What they have closed meanwhile is a lost connection as any other.
"""

from __future__ import annotations

import signal
import time

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    from typing import Any


class StandingClock:
    """
    The monotonic clock, less the time in which the process was stopped.

    Args:
        now: tells the time.
    """

    def __init__(self, now: Any = time.monotonic) -> None:
        self._now = now
        self._stood_s = 0.0
        self._last_s = now()

    def seconds(self) -> float:
        """Return seconds since some moment, but for those in which the process stood still."""
        last_s: float = self._now() - self._stood_s
        self._last_s = last_s
        return last_s

    def went_on(self, *_: object) -> None:
        """The process was stopped, and goes on: so does the time, from where it was seen last."""
        self._stood_s = self._now() - self._last_s


CLOCK = StandingClock()
"""The process's; as long as no reactor counts with it, it is the monotonic clock."""


def arranged(reactor: Any) -> list[Any]:
    """
    Return the calls that a reactor has been asked for and not made, cancelled ones too.

    None where Twisted has other names for them, which matters only to calls that were arranged this early.
    """
    waiting = getattr(reactor, "_pendingTimedCalls", ()), getattr(reactor, "_newTimedCalls", ())
    return [call for calls in waiting for call in calls]


def is_standing(reactor: Any) -> bool:
    """Return whether a reactor's time stands still while the process does."""
    return bool(reactor.seconds == CLOCK.seconds)


def pass_over_stops(reactor: Any) -> None:
    """
    Have a reactor's time stand still while the process does. The main thread only, before the reactor runs.

    Args:
        reactor: one that counts with the monotonic clock; see ``monotonic``.
    """
    CLOCK.seconds()  # what was before has passed
    for call in arranged(reactor):
        call.seconds = CLOCK.seconds
    reactor.seconds = CLOCK.seconds
    signal.signal(signal.SIGCONT, CLOCK.went_on)
