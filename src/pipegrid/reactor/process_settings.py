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
# have been silent for longer than the time limits. So the reactor's clock stops while the process is
# suspended, and continues from its last reading. While a reactor waits it does not read the clock, so a part
# of the waiting time may be lost as well, which only makes time limits longer. Servers do not stop with the
# client: connections that they have closed meanwhile are lost as usual.


class StandingClock:
    """
    A monotonic clock that does not count the time in which the process was suspended.

    Args:
        now: returns the time of the underlying clock, in seconds.
    """

    def __init__(self, now: Any = time.monotonic) -> None:
        self._now = now
        self._stood_s = 0.0
        self._last_s = now()

    def seconds(self) -> float:
        """Return the seconds of a monotonic clock, without the time in which the process was suspended."""
        last_s: float = self._now() - self._stood_s
        self._last_s = last_s
        return last_s

    def went_on(self, *_: object) -> None:
        """Continue from the last reading; called when a suspended process continues."""
        self._stood_s = self._now() - self._last_s


def wall_time() -> float:
    """
    Return the seconds since 1970, by the system's adjustable clock.

    Use this function as a default argument instead of ``time.time``: the default would ignore a later
    replacement of ``time.time``, as in tests.
    """
    return time.time()


CLOCK = StandingClock()
"""The clock of the process; until a reactor uses it, it equals the monotonic clock."""


def arranged(reactor: Any) -> list[Any]:
    """
    Return the pending calls of a reactor, including cancelled ones.

    Returns an empty list if Twisted has renamed the attributes that hold them; then calls that are already
    scheduled keep their old clock.
    """
    waiting = getattr(reactor, "_pendingTimedCalls", ()), getattr(reactor, "_newTimedCalls", ())
    return [call for calls in waiting for call in calls]


def is_standing(reactor: Any) -> bool:
    """Return whether a reactor uses ``CLOCK``, which ignores suspended time."""
    return bool(reactor.seconds == CLOCK.seconds)


def ignore_suspended_time(reactor: Any) -> None:
    """
    Make a reactor's clock stop while the process is suspended. Call this in the main thread, before the
    reactor runs.

    Args:
        reactor: a reactor with a monotonic clock; see ``make_monotonic``.
    """
    CLOCK.seconds()  # otherwise SIGCONT could take the time before this call for suspended time
    for call in arranged(reactor):
        call.seconds = CLOCK.seconds
    reactor.seconds = CLOCK.seconds
    signal.signal(signal.SIGCONT, CLOCK.went_on)


# Twisted's reactors use ``time.time``. When that clock is set back by an hour (by hand, or by the first NTP
# answer), a call scheduled in five seconds happens in an hour and five seconds: no time limit fires, and a
# client waits for a dead server. When the clock is set forward, all time limits fire at once.
#
# So PipeGrid's processes first call ``make_monotonic``. The library does not call it, since the reactor
# belongs to the application, which may use ``reactor.seconds()`` as a date; an application may call it. Dates
# (of leases, files and announcements) come from ``time.time``.


def make_monotonic(reactor: Any) -> None:
    """
    Make a Twisted reactor use the monotonic clock from now on; a second call has no effect.

    Pending calls keep their delays. Call this in the reactor's thread, or before the reactor runs.

    Args:
        reactor: any reactor derived from ``ReactorBase``: all of Twisted's are, even the one for asyncio.
    """
    if reactor.seconds is time.monotonic or is_standing(reactor):
        return
    shift_s = time.monotonic() - reactor.seconds()
    # Cancelled calls are changed, too, since they are in the same heap.
    for call in arranged(reactor):
        call.time += shift_s
        call.seconds = time.monotonic
    reactor.seconds = time.monotonic


# Python runs a signal's handler when the main thread executes its next instruction. If the signal arrives
# just before the reactor waits for the network, or in another thread, the handler runs only after the next
# event: a server that got SIGTERM just when it began to listen never stopped.

_SIGNALS_AT_ONCE = 4096


def wake_for_signals(reactor: Any) -> None:
    """
    Make every signal that has a handler wake the reactor, so that the handler runs. Call this in the main
    thread only.
    """
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
    """The reading end of the pipe into which Python writes the number of each signal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def logPrefix(self) -> str:
        return "signals"

    def doRead(self) -> None:
        # Reading the pipe wakes the reactor, so Python runs the handlers; the signal numbers do not matter.
        os.read(self._fd, _SIGNALS_AT_ONCE)

    def connectionLost(self, reason: object) -> None:
        """Do nothing: the reactor has ended, and does not own the pipe."""


# How often Python's garbage collector runs in commands.


def tune_gc() -> None:
    """
    Make Python look for reference cycles less often, and only among objects created from now on.

    Reference counts free nearly all objects. With Python's defaults, garbage collection took a third of the
    time of putting a hundred small files.
    """
    gc.enable()  # the collector may have been disabled during imports
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


# A process may be unable to start threads: users (``ulimit -u``) and control groups have limits. Code that
# uses this module then works in the calling thread instead.

FEW_THREADS = (
    "the system gives no more threads (see 'ulimit -u'); work continues with fewer, and is slower"
)


class ThreadShortage:
    """
    Reports once that no more threads can be started.

    Attributes:
        tell: shows a sentence to the user of a command. The log gets the sentence even without this function.
    """

    def __init__(self) -> None:
        self.tell: Callable[[str], object] | None = None
        self._reported = False

    def report(self) -> None:
        """Report the shortage, unless it was reported before."""
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
    Shows how far the start of another program, which this program needs, has come.

    Attributes:
        tell: shows a sentence to the user of a command.
    """

    def __init__(self) -> None:
        self.tell: Callable[[str], object] | None = None


TOR_START = StartProgress()


def start_thread(thread: Thread) -> bool:
    """Start a thread; return False, and report the shortage, if the system has no more threads."""
    try:
        thread.start()
    except RuntimeError:
        SHORTAGE.report()
        return False
    return True


class ThreadlessResolver:
    """
    Looks up names in a reactor's thread pool, or in the reactor's thread if no thread can be started.

    Twisted's own resolver would then wait forever.
    """

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor
        self._resolver = reactor.nameResolver
        self._in_thread: Any = None

    def resolveHostName(self, *arguments: Any, **options: Any) -> Any:
        """Look up a name, as ``IHostnameResolver`` requires, and pass its addresses to the receiver."""
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
    """Make a reactor's name lookups work even if no thread can be started."""
    if hasattr(reactor, "installNameResolver"):  # some test reactors cannot look up names
        reactor.installNameResolver(ThreadlessResolver(reactor))


# glibc keeps up to 64 MiB of freed memory after a program has used large blocks. So a server would keep that
# memory after one large request.


def trim_heap() -> None:
    """Return freed memory to the system, which takes about a millisecond; do nothing without glibc."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@lru_cache(maxsize=1)
def _malloc_trim() -> Any:
    import ctypes  # importing it takes a millisecond, and most commands do not need it

    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
