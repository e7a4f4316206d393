"""Keeping a connection: make it, use it, and make it again when it is lost, with growing patience."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 300.0
_GOOD_S = 60.0
"""A connection that held for so long was a good one: the next attempt comes soon."""


class Reconnecting:
    """
    Keeps one connection until it is stopped.

    Args:
        clock: for the pauses.
        use: connects, uses the connection, and fires or fails when it is lost, or could not be made.
        lost: told the reason, each time; None if ``use`` just ended.
        spread: gives a factor for each pause, so that many clients do not come back at once.
    """

    def __init__(
        self,
        clock: IReactorTime,
        use: Callable[[], Deferred[None]],
        lost: Callable[[Exception | None], None],
        spread: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self._clock = clock
        self._use = use
        self._lost = lost
        self._spread = spread
        self._running: Deferred[None] | None = None
        self._stopped = False

    def start(self) -> None:
        """Connect for the first time."""
        if self._running is None:
            self._running = Deferred.fromCoroutine(self._run())
            self._running.addErrback(lambda failure: failure.trap(CancelledError))

    def stop(self) -> None:
        """Let go of the connection, and make no other."""
        self._stopped = True
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            began = self._clock.seconds()
            reason: Exception | None = None
            try:
                await self._use()
            except CancelledError:
                raise
            except Exception as error:
                reason = error
            self._lost(reason)
            if self._stopped:  # by whom we just told
                return
            if self._clock.seconds() - began >= _GOOD_S:
                pause_s = FIRST_PAUSE_S
            await deferLater(self._clock, pause_s * self._spread(), _nothing)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)


def _nothing(*_: Any) -> None: ...
