"""Requests that are under way for one loop, which is woken whenever one of them ends."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime

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
        self._bug: BaseException | None = None

    def start(self, request: Coroutine[Any, Any, None], about: W) -> None:
        """Begin a request; it deals with whatever can go wrong on its way."""
        running = Deferred.fromCoroutine(request)
        if not running.called:
            self.running[running] = about
        running.addBoth(self._ended, running)

    def _ended(self, result: object, running: Deferred[None]) -> None:
        self.running.pop(running, None)
        error = getattr(result, "value", None)
        if isinstance(error, BaseException) and not isinstance(error, CancelledError):
            self._bug = self._bug or error
        self.changed.fire()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait until something has changed; raises what no request should have raised."""
        await self.changed.wait(timeout_s)
        if self._bug is not None:
            raise self._bug

    def cancel(self) -> None:
        """Give up all that is under way."""
        for running in list(self.running):
            running.cancel()
