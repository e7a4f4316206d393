"""Process-wide settings: clock, garbage collector, heap."""

from __future__ import annotations

import gc
import signal
import time
from functools import lru_cache

TYPE_CHECKING = False  # as in ``typing``, which is slow to import

if TYPE_CHECKING:
    from typing import Any


# Time in which the process stood still does not count.
#
# Who stopped a command (Ctrl-Z, ``kill -STOP``) and had it go on two minutes later found that all servers had
# been silent for longer than anybody is waited for, though nobody had listened. So the reactor's clock stands
# still as long as the process does: it goes on from where it was read last before. While a reactor waits
# it is not read, so some of that waiting may not count either, which does no harm: patience lasts a
# little longer.
#
# Servers count on. What they have closed meanwhile is a lost connection as any other.


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


def ignore_suspended_time(reactor: Any) -> None:
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


# Time limits that do not depend on what the clock on the wall shows.
#
# Twisted's reactors count with ``time.time``. When that is set back by an hour (by hand, or by a first answer
# from a time server), whatever was to happen in five seconds happens in an hour and five seconds: no limit
# fires, and a client that waits for a dead server waits on. When it is set forward, all limits fire at once.
#
# ``make_monotonic`` has a reactor count with ``time.monotonic``. Our processes call it first of all; a
# library must not, for the reactor is its application's, which may take ``reactor.seconds()`` for a date. An
# application that wants it calls it itself.
#
# What needs a date asks ``time.time``: leases and their end, files' times, announcements.

# as ``typing`` has it, which is not to be waited for


def make_monotonic(reactor: Any) -> None:
    """
    Have a reactor of Twisted's count with the monotonic clock from now on; again does nothing.

    Calls that were arranged before come when they would have come. The reactor's thread only, or before it
    runs.

    Args:
        reactor: any that derives from ``ReactorBase``, as all of Twisted's do, asyncio's included.
    """
    if reactor.seconds is time.monotonic or is_standing(reactor):
        return
    shift_s = time.monotonic() - reactor.seconds()
    # The cancelled ones, too: they stand in the same heap.
    for call in arranged(reactor):
        call.time += shift_s
        call.seconds = time.monotonic
    reactor.seconds = time.monotonic


# How often Python's collector of cycles looks, for processes that do the work of a command.


def tune_gc() -> None:
    """
    Have Python look for cycles of garbage less often, and not in what was there before the work began.

    Nearly everything here is freed by reference counts. With Python's defaults, looking for the rest among
    all modules took a third of the time of putting a hundred small files.
    """
    gc.enable()  # it may have been put off while modules were imported
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


# Giving memory back to the system.
#
# glibc keeps up to 64 MiB of what was freed at the end of its heap once a program has used large pieces, for
# the next time. A server that had one large request would be as large for good.


def trim_heap() -> None:
    """Return what was freed to the system, in about a millisecond; where that is not glibc's, do nothing."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@lru_cache(maxsize=1)
def _malloc_trim() -> Any:
    import ctypes  # costs a millisecond that most commands need not spend

    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
