"""
Settings of the process: a clock that ignores suspended time, handling of signals, the garbage collector, and
returning memory.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from functools import lru_cache, partial

TYPE_CHECKING = False  # defined as in ``typing``, which is slow to import

if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import Thread
    from typing import Any


# When a command was suspended (Ctrl-Z, ``kill -STOP``) and resumed two minutes later, all servers seemed to
# have been silent for longer than the time limits. So the reactor's clock stops with the process: it
# continues from where it was last read. While a reactor waits it does not read the clock, so some of that
# time may be lost as well, which only makes time limits longer. Servers do not suspend: connections that
# they have closed meanwhile are lost as usual.


class StandingClock:
    """
    The monotonic clock without the time in which the process was suspended.

    Args:
        now: returns the time.
    """

    def __init__(self, now: Any = time.monotonic) -> None:
        self._now = now
        self._stood_s = 0.0
        self._last_s = now()

    def seconds(self) -> float:
        """Return seconds of a monotonic clock, without suspended time."""
        last_s: float = self._now() - self._stood_s
        self._last_s = last_s
        return last_s

    def went_on(self, *_: object) -> None:
        """Continue from the last reading, since the process was suspended until now."""
        self._stood_s = self._now() - self._last_s


def wall_time() -> float:
    """
    Return seconds since 1970, by the clock that people set.

    Use it instead of ``time.time`` as a default argument, which would keep the function of the time of
    import.
    """
    return time.time()


CLOCK = StandingClock()
"""The clock of the process; until a reactor uses it, it equals the monotonic clock."""


def arranged(reactor: Any) -> list[Any]:
    """
    Return the pending calls of a reactor, including cancelled ones.

    Returns an empty list if Twisted has renamed the attributes; then calls that were scheduled before this
    keep the old clock.
    """
    waiting = getattr(reactor, "_pendingTimedCalls", ()), getattr(reactor, "_newTimedCalls", ())
    return [call for calls in waiting for call in calls]


def is_standing(reactor: Any) -> bool:
    """Return whether a reactor uses ``CLOCK``."""
    return bool(reactor.seconds == CLOCK.seconds)


def ignore_suspended_time(reactor: Any) -> None:
    """
    Make a reactor's clock stop while the process is suspended. Only in the main thread, before the reactor
    runs.

    Args:
        reactor: one with a monotonic clock; see ``make_monotonic``.
    """
    CLOCK.seconds()  # count the time before this call
    for call in arranged(reactor):
        call.seconds = CLOCK.seconds
    reactor.seconds = CLOCK.seconds
    signal.signal(signal.SIGCONT, CLOCK.went_on)


# Twisted's reactors use ``time.time``. When that is set back by an hour (by hand, or by the first NTP
# answer), a call scheduled in five seconds happens in an hour and five seconds: no time limit fires, and a
# client waits for a dead server. When it is set forward, all time limits fire at once.
#
# So PipeGrid's processes first call ``make_monotonic``. The library does not, since the reactor belongs to
# the application, which may use ``reactor.seconds()`` as a date; the application may call it. Dates come
# from ``time.time``: leases, files' times, announcements.

# defined as in ``typing``, which is slow to import


def make_monotonic(reactor: Any) -> None:
    """
    Make a Twisted reactor use the monotonic clock from now on; a second call has no effect.

    Pending calls keep their delays. Only in the reactor's thread, or before it runs.

    Args:
        reactor: any that derives from ``ReactorBase``, as all of Twisted's do, asyncio's included.
    """
    if reactor.seconds is time.monotonic or is_standing(reactor):
        return
    shift_s = time.monotonic() - reactor.seconds()
    # Including cancelled ones, which are in the same heap.
    for call in arranged(reactor):
        call.time += shift_s
        call.seconds = time.monotonic
    reactor.seconds = time.monotonic


# Python runs a signal's handler when the main thread executes its next instruction. If the signal arrives
# just before the reactor waits for the network, or in another thread, that is only after the next event: a
# server that got SIGTERM just when it began to listen never stopped.

_SIGNALS_AT_ONCE = 4096


def wake_for_signals(reactor: Any) -> None:
    """Make every handled signal wake the reactor, so that its handler runs. Only in the main thread."""
    from twisted.internet.interfaces import IReadDescriptor
    from zope.interface import directlyProvides

    woken, wake = os.pipe()
    for fd in (woken, wake):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    reader = _SignalPipe(woken)
    directlyProvides(reader, IReadDescriptor)
    reactor.addReader(reader)


class _SignalPipe:
    """The end of a pipe into which Python writes the number of each signal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def logPrefix(self) -> str:
        return "signals"

    def doRead(self) -> None:
        # Reading wakes the reactor, and so runs the handlers; the numbers do not matter.
        os.read(self._fd, _SIGNALS_AT_ONCE)

    def connectionLost(self, reason: object) -> None:
        """Do nothing: the reactor has ended, and does not own the pipe."""


# How often Python's garbage collector runs, in commands.


def tune_gc() -> None:
    """
    Make Python look for reference cycles less often, and not among existing objects.

    Nearly everything is freed by reference counts. With Python's defaults, collecting took a third of the
    time of putting a hundred small files.
    """
    gc.enable()  # it may have been disabled while modules were imported
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


# A process may run out of threads: users (``ulimit -u``) and control groups have limits. Code that starts a
# thread here continues without it, in the calling thread.

FEW_THREADS = (
    "the system gives no more threads (see 'ulimit -u'); work continues with fewer, and is slower"
)


class ThreadShortage:
    """
    Reports once that threads have run out.

    Attributes:
        tell: shows a sentence to the user of a command; a program's log has it in any case.
    """

    def __init__(self) -> None:
        self.tell: Callable[[str], object] | None = None
        self._reported = False

    def report(self) -> None:
        """Report it, unless it was reported before."""
        if self._reported:
            return
        self._reported = True
        if self.tell is not None:
            self.tell(FEW_THREADS)
        if "twisted.logger" in sys.modules:
            sys.modules["twisted.logger"].Logger(__name__).warn("{sentence}", sentence=FEW_THREADS)


SHORTAGE = ThreadShortage()


class StartProgress:
    """
    Shows how far the start of a program that this one needs has come.

    Attributes:
        tell: shows a sentence to the user of a command.
    """

    def __init__(self) -> None:
        self.tell: Callable[[str], object] | None = None


TOR_START = StartProgress()


def start_thread(thread: Thread) -> bool:
    """Start a thread; False if the system has none, which has been reported."""
    try:
        thread.start()
    except RuntimeError:
        SHORTAGE.report()
        return False
    return True


class ThreadlessResolver:
    """
    Looks up names as a reactor does, in its pool of threads, or in the reactor's thread if there is none.

    Twisted's own resolver would wait forever.
    """

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor
        self._resolver = reactor.nameResolver
        self._in_thread: Any = None

    def resolveHostName(self, *arguments: Any, **options: Any) -> Any:
        """Look up a name, as in ``IHostnameResolver``, and give its addresses to the receiver."""
        if self._in_thread is None:
            pool = self._reactor.getThreadPool()
            self._in_thread = pool.callInThreadWithCallback
            pool.callInThreadWithCallback = self._call
        return self._resolver.resolveHostName(*arguments, **options)

    def _call(self, ended: Any, function: Any, *arguments: Any, **options: Any) -> None:
        try:
            self._in_thread(ended, function, *arguments, **options)
        except RuntimeError:
            SHORTAGE.report()
            self._call_here(ended, partial(function, *arguments, **options))

    def _call_here(self, ended: Any, call: Callable[[], Any]) -> None:
        from twisted.python.failure import Failure

        try:
            result, is_good = call(), True
        except Exception:
            result, is_good = Failure(), False
        if ended is not None:
            ended(is_good, result)


def need_no_threads(reactor: Any) -> None:
    """Make a reactor look up names even if no thread can be started."""
    if hasattr(reactor, "installNameResolver"):  # some test reactors cannot look up names
        reactor.installNameResolver(ThreadlessResolver(reactor))


# glibc keeps up to 64 MiB of freed memory after a program has used large blocks. A server would stay large
# after one large request.


def trim_heap() -> None:
    """Return freed memory to the system, in about a millisecond; without glibc, do nothing."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@lru_cache(maxsize=1)
def _malloc_trim() -> Any:
    import ctypes  # takes a millisecond, which most commands do not need

    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
