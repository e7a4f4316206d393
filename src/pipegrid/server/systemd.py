"""
What a server's process and its supervisor tell each other: ready, stopping, alive; and an end when nothing
helps.

**systemd** names a socket in ``NOTIFY_SOCKET``; a unit of ``Type=notify`` is started when ``READY=1`` comes
there, and with ``WatchdogSec=`` it is killed and started again when ``WATCHDOG=1`` has not come for so
long. Without that variable nothing is sent.

**Out of memory.** Whatever was being done when there was none left was not done, and may have left anything
half done; what is on the disk is as after ``kill -9``, which loses nothing that was acknowledged. So the
process ends at once, with one sentence and status 1, and its supervisor starts a new one.

Source: sd_notify(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import LoopingCall
from twisted.logger import ILogObserver, globalLogPublisher
from zope.interface import provider

READY = "READY=1"
STOPPING = "STOPPING=1"
ALIVE = "WATCHDOG=1"
STATUS = 1
_NO_MEMORY = (
    b"pipegrid: there was no memory left, or no room for a thread; the process ends, so that its supervisor "
    b"starts it again: give it more, or let in fewer clients (--max-connections)\n"
)


def notify(state: str, surroundings: Mapping[str, str] | None = None) -> bool:
    """
    Tell systemd, if it wants to know; returns whether it was told.

    Args:
        surroundings: of the process; None for the real ones.
    """
    name = (os.environ if surroundings is None else surroundings).get("NOTIFY_SOCKET", "")
    if not name.startswith(("/", "@")):
        return False
    address = "\0" + name[1:] if name.startswith("@") else name
    with (
        suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as told,
    ):
        told.setblocking(False)
        told.connect(address)
        told.send(state.encode("utf-8"))
        return True
    return False


def watchdog_s(surroundings: Mapping[str, str] | None = None) -> float | None:
    """Return how often systemd wants to hear that we are alive, twice as often as it must; None: never."""
    given = os.environ if surroundings is None else surroundings
    if given.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    text = given.get("WATCHDOG_USEC", "")
    if not text.isdigit() or not int(text):
        return None
    return int(text) / 2e6


def stay_alive(clock: IReactorTime) -> LoopingCall | None:
    """Begin to tell that the reactor turns, if that is wanted; returns what to stop."""
    interval_s = watchdog_s()
    if interval_s is None:
        return None
    timer = LoopingCall(notify, ALIVE)
    timer.clock = clock
    timer.start(interval_s)
    return timer


def end_without_memory(end: Callable[[int], object] = os._exit) -> Callable[[], None]:
    """
    Have the process end when anything logs that there was no memory; returns what to call to have it not.

    For whoever the process belongs to.
    """

    @provider(ILogObserver)
    def observe(event: Any) -> None:
        failure = event.get("log_failure")
        if failure is not None and is_out_of_memory(failure.value):
            with suppress(OSError):
                os.write(2, _NO_MEMORY)
            end(STATUS)

    globalLogPublisher.addObserver(observe)
    return lambda: globalLogPublisher.removeObserver(observe)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one that led to it, says that there is no memory, for threads either."""
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            return False
        if isinstance(seen, MemoryError) or "can't start new thread" in str(seen)[:100]:
            return True
        seen = seen.__cause__ or seen.__context__
    return False
