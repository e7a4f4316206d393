"""
Notifies systemd that the server is ready, stopping, or alive; and ends the process when it runs out of
memory.

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
    Send a state to systemd if ``NOTIFY_SOCKET`` is set; returns whether it was sent.

    With ``Type=notify``, systemd counts the unit as started after ``READY=1``. With ``WatchdogSec=``, systemd
    restarts the unit if ``WATCHDOG=1`` does not arrive in time.

    Args:
        surroundings: environment variables; None for those of the process.
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
    """
    Return the interval for ``WATCHDOG=1`` in seconds, half of the time that systemd allows; None: never send.
    """
    given = os.environ if surroundings is None else surroundings
    if given.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    text = given.get("WATCHDOG_USEC", "")
    if not text.isdigit() or not int(text):
        return None
    return int(text) / 2e6


def stay_alive(clock: IReactorTime) -> LoopingCall | None:
    """
    If systemd wants it, send ``WATCHDOG=1`` while the reactor runs. Returns the loop, which the caller stops,
    or None.
    """
    interval_s = watchdog_s()
    if interval_s is None:
        return None
    timer = LoopingCall(notify, ALIVE)
    timer.clock = clock
    timer.start(interval_s)
    return timer


def end_without_memory(end: Callable[[int], object] = os._exit) -> Callable[[], None]:
    """
    Observe the log, and end the process when an error is logged whose cause is lack of memory; returns a
    function that removes the observer.

    Work that failed for lack of memory may be half done in memory; the disk is as after ``kill -9``, which
    loses no acknowledged data. So the process ends at once, with one sentence and status 1, and its
    supervisor restarts it. Call this only in a process that runs nothing else.
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
    """
    Return whether an error, or one of its causes, reports lack of memory or that no thread can be started.
    """
    seen: BaseException | None = error
    for _ in range(10):
        if seen is None:
            return False
        if isinstance(seen, MemoryError) or "can't start new thread" in str(seen)[:100]:
            return True
        seen = seen.__cause__ or seen.__context__
    return False
