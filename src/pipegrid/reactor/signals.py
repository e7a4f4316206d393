"""
Signals that a reactor does not sleep through, where its own handlers are not wanted.

Python notes a signal when it comes, and runs the handler when the main thread executes its next instruction.
If the signal comes just before the reactor waits for the network, or to another thread, that is not until
something else happens: a server that was told to end in the moment when it began to listen never did.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from twisted.internet.interfaces import IReadDescriptor
from twisted.python.failure import Failure
from zope.interface import implementer

_AT_ONCE = 4096


def wake_for_signals(reactor: Any) -> None:
    """Have every signal that is handled wake the reactor, so that the handler runs. The main thread only."""
    told, tell = os.pipe()
    for fd in (told, tell):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    reactor.addReader(_Told(told))


@implementer(IReadDescriptor)
class _Told:
    """The end of a pipe into which the system's side of Python writes the number of each signal."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def logPrefix(self) -> str:
        return "signals"

    def doRead(self) -> None:
        # The handlers run because the reactor does: what was told does not matter.
        os.read(self._fd, _AT_ONCE)

    def connectionLost(self, reason: Failure) -> None:
        """Do nothing: the reactor has ended, and the pipe is not its to close."""
