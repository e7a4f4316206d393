"""Requests that are under way for one loop, which is woken whenever one of them ends."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.reactor.wakeup import Wakeup

W = TypeVar("W")


class RequestsUnderWay(Generic[W]):
    """
    What a loop has asked for, and waits for.

    Attributes:
        running: of each request that has not ended, what it is about.
        changed: wakes the loop; also to be fired by others.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self.running: dict[Deferred[None], W] = {}
        self.changed = Wakeup(clock)
        self._bug: Failure | None = None

    def start(self, request: Coroutine[Any, Any, None], about: W) -> None:
        """Begin a request; it deals with whatever can go wrong on its way."""
        running = Deferred.fromCoroutine(request)
        if not running.called:
            self.running[running] = about
        running.addBoth(self._ended, running)

    def _ended(self, result: Failure | None, running: Deferred[None]) -> None:
        self.running.pop(running, None)
        if isinstance(result, Failure) and not result.check(CancelledError):
            self._bug = self._bug or result
        self.changed.fire()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait until something has changed; raises what no request should have raised."""
        await self.changed.wait(timeout_s)
        if self._bug is not None:
            self._bug.raiseException()

    def cancel(self) -> None:
        """Give up all that is under way."""
        for running in list(self.running):
            running.cancel()
