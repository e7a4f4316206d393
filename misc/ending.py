"""
How the tools here end when they are told to: with all that they have started, in a bounded time.

A program that waits itself says ``end_on_sigterm``; one that needs a reactor has ``run`` run its coroutine.
Twisted's ``react`` will not do: its handlers take the place of ours, stop the reactor and forget the
coroutine, whose servers nobody ends then. And the interpreter waits for the threads of a pool that nobody
has stopped, which wait for work: for ever.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

T = TypeVar("T")

WITHIN_S = 60
PATIENCE_S = 2.0
"""How long a reactor may not come round, once told, before whatever it waits for is interrupted."""
_NAG_S = 0.1


def end_on_sigterm(within_s: int = WITHIN_S) -> None:
    """
    Have SIGTERM unwind the stack, as Ctrl-C does, so that what was started is stopped.

    Whatever runs may swallow that, and wait for ever for what was lost with it. So after ``within_s`` seconds
    the process ends anyhow; what it started ends with its standard input.

    The main thread only. In a reactor, use ``run``.
    """
    _Ending(within_s).install(signal.SIGTERM)


def run(work: Callable[[Any], Coroutine[Any, Any, T]], within_s: int = WITHIN_S) -> T:
    """
    Run a coroutine in the reactor, which has not run yet; returns what it returns.

    SIGTERM and Ctrl-C cancel it, so that its contexts are left and end what they have started. Where it does
    not wait for a Deferred, but blocks, that is interrupted by SystemExit. After ``within_s`` seconds the
    process ends anyhow, as in ``end_on_sigterm``.

    Args:
        work: called with the reactor, when that runs.

    Raises:
        SystemExit: it was told to end; or raised by the coroutine, as is anything else.
    """
    from twisted.internet import reactor as installed_reactor

    reactor: Any = installed_reactor
    ending = _Ending(within_s)
    outcomes: list[T | Failure] = []

    def begin() -> None:
        running = Deferred.fromCoroutine(work(reactor))
        ending.cancel = running.cancel
        running.addBoth(outcomes.append).addBoth(lambda _: reactor.stop())

    ending.call_soon = reactor.callFromThread
    ending.install(signal.SIGTERM, signal.SIGINT)
    reactor.callWhenRunning(begin)
    reactor.run(installSignalHandlers=False)
    ending.call_soon = None
    if ending.told:
        raise SystemExit(128 + ending.told)
    outcome = outcomes[0]
    if isinstance(outcome, Failure):
        outcome.raiseException()
    return outcome


class _Ending:
    """
    What happens when the process is told to end.

    Python runs a signal's handler between two of its own instructions. A signal that comes in a long call of
    the system, or just before one that then waits, is not handled for as long as that takes. So the time
    is counted by a thread, which the system tells of the signal at once, and which interrupts what waits.

    Attributes:
        call_soon: has the reactor call something when it comes round; None where none runs.
        cancel: what it is to call.
        told: the number of the signal, once there was one.
    """

    def __init__(self, within_s: int) -> None:
        self._within_s = within_s
        self._handled = threading.Event()
        self.call_soon: Callable[[Callable[[], None]], object] | None = None
        self.cancel: Callable[[], object] | None = None
        self.told = 0

    def install(self, *numbers: signal.Signals) -> None:
        """Handle these signals from now on."""
        told, tell = os.pipe()
        os.set_blocking(tell, False)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for number in numbers:
            signal.signal(number, self._told)
        signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
        thread = (told, threading.get_ident(), numbers)
        threading.Thread(target=self._watch, args=thread, daemon=True).start()

    def _told(self, number: int, _frame: FrameType | None) -> None:
        if self._handled.is_set():
            return  # it was sent again only to wake us
        signal.alarm(self._within_s)
        first, self.told = not self.told, number
        if first and self.call_soon is not None:
            self.call_soon(self._cancel)
            return
        self._handled.set()
        raise SystemExit(128 + number)

    def _cancel(self) -> None:
        if not self._handled.is_set():
            self._handled.set()
            if self.cancel is not None:
                self.cancel()

    def _watch(self, told: int, main_thread: int, numbers: tuple[signal.Signals, ...]) -> None:
        while not (number := next((each for each in os.read(told, 1) if each in numbers), 0)):
            pass
        signal.alarm(self._within_s)
        if self.call_soon is not None:
            self._handled.wait(PATIENCE_S)
        while not self._handled.wait(_NAG_S):
            signal.pthread_kill(main_thread, number)
