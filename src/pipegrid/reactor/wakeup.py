"""
One thing to wait for: "something changed, look again".

Engines here are loops that look at their whole state, act, and then wait. Whatever may change the state
calls ``fire``; no event is lost between looking and waiting, and there is never more than one
waiter and one timer.

The waiter never runs inside ``fire``, but from the reactor right after: whoever fires may be in the middle
of something that the waiter wants to end. A burst of events wakes it once.
"""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime


class Wakeup:
    """
    A waiting place for one coroutine.

    Args:
        clock: wakes the waiter, at once or when its time is over.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._pending = False
        self._waiter: Deferred[None] | None = None
        self._timer: IDelayedCall | None = None

    def fire(self, _result: object = None) -> None:
        """Wake the waiter soon, or let the next ``wait`` return at once. Fit to be a callback."""
        if not self._pending:
            self._pending = True
            if self._waiter is not None:
                self._set_timer(0)

    def wait(self, timeout_s: float | None = None) -> Deferred[None]:
        """Return a Deferred that fires after the next ``fire`` since the last wait, or in time."""
        assert self._waiter is None, "only one coroutine may wait here"
        waiter: Deferred[None] = Deferred(self._cancelled)
        if self._pending:
            self._pending = False
            waiter.callback(None)
            return waiter
        self._waiter = waiter
        if timeout_s is not None:
            self._set_timer(max(0.0, timeout_s))
        return waiter

    def _wake(self) -> None:
        self._timer = None
        self._pending = False
        waiter, self._waiter = self._waiter, None
        assert waiter is not None
        waiter.callback(None)

    def _cancelled(self, _waiter: Deferred[None]) -> None:
        self._waiter = None
        self._stop_timer()

    def _set_timer(self, delay_s: float) -> None:
        self._stop_timer()
        self._timer = self._clock.callLater(delay_s, self._wake)

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None and timer.active():
            timer.cancel()
