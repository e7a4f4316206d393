"""
What one server was asked and has not answered, as far as disconnecting has to cancel each by itself.

Those are questions. Changes stand with the connection that carries them, or with what they wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred, fail
from twisted.python.failure import Failure

from pipegrid.errors import ServerUnreachable
from pipegrid.http11.errors import ResponseError
from pipegrid.http11.raw import RawResponse
from pipegrid.transport.interface import disconnected

T = TypeVar("T")
R = TypeVar("R")

CUT_OFF_ATTEMPTS = 3
"""A short answer that was cut off (or is nonsense, who knows) is asked for so many times."""


class OpenQuestions:
    """
    Of one server.

    Attributes:
        disconnected: nothing is asked any more.
    """

    def __init__(self, server: str) -> None:
        self.disconnected = False
        self._server = server
        self._leaving = False
        self._waiting: set[Deferred[Any]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def track(self, start: Callable[[], Deferred[T]]) -> Deferred[T]:
        """Ask, and know of it until it has fired, been cancelled or failed; not when it is disconnected."""
        if self.disconnected:
            return fail(self.gone())
        waiting = start()
        self._waiting.add(waiting)
        return waiting.addBoth(self._answered, waiting)

    def give_up(self) -> None:
        """Cancel everything; who waits for it hears why."""
        self.disconnected = self._leaving = True
        for waiting in list(self._waiting):
            waiting.cancel()
        self._leaving = False

    def gone(self) -> ServerUnreachable:
        """Return what everybody is told."""
        return disconnected(self._server)

    def _answered(self, result: R, waiting: Deferred[Any]) -> R | Failure:
        self._waiting.discard(waiting)
        if self._leaving and isinstance(result, Failure) and result.check(CancelledError):
            return Failure(self.gone())
        return result


def until_whole(
    ask: Callable[[], Deferred[RawResponse]], attempts: int = CUT_OFF_ATTEMPTS
) -> Deferred[RawResponse]:
    """Ask, and again if the answer was cut off."""

    def again(failure: Failure) -> Any:
        # Not ``trap``, which raises: each get cancels a question, and frames would keep all of it.
        return until_whole(ask, attempts - 1) if failure.check(ResponseError) else failure

    answer: Deferred[Any] = ask()
    return answer.addErrback(again) if attempts > 1 else answer
