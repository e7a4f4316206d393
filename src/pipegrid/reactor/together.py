"""Beginning things that take time, and waiting for several at once, leaving none behind."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from types import CoroutineType
from typing import Any, Generic, ParamSpec, TypeVar, cast

from twisted.internet.defer import (
    CancelledError,
    Deferred,
    DeferredList,
    DeferredSemaphore,
    FirstError,
    gatherResults,
)
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

P = ParamSpec("P")
T = TypeVar("T")


def tell_deferred(function: Callable[..., Any]) -> None:
    """Have ``help`` say of a coroutine function that a Deferred comes of it, as callers will see it."""
    result = function.__annotations__["return"]
    function.__annotations__["return"] = f"Deferred[{result}]"


def as_deferred(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Deferred[T]]:
    """Have a coroutine begin when it is called: what is returned is a Deferred, which can be cancelled."""
    tell_deferred(function)

    @wraps(function)
    def begin(*arguments: P.args, **options: P.kwargs) -> Deferred[T]:
        return Deferred.fromCoroutine(function(*arguments, **options))

    return begin


def begun(work: Coroutine[Any, Any, T], clock: IReactorTime) -> Deferred[T]:
    """
    Begin a coroutine, and return a Deferred that can be cancelled by what the coroutine itself calls, too.

    A coroutine that runs at this moment waits for nothing that could be cancelled, so that Twisted's Deferred
    would drop it without a word: a progress callback could not give up. It is done right after; if the
    coroutine has nothing left to wait for, and ends before that, it counts as cancelled all the same.
    """
    running = Deferred.fromCoroutine(work)
    cancel = running.cancel
    soon: list[IDelayedCall] = []

    def cancel_now_or_soon() -> None:
        if not cast("CoroutineType[Any, Any, T]", work).cr_running:
            cancel()
        elif not soon:
            soon.append(clock.callLater(0, cancel))

    def ended(result: Any) -> Any:
        del running.__dict__["cancel"]  # which holds it: nothing is left to the collector
        if not soon or not soon[0].active():
            return result
        soon[0].cancel()
        return result if isinstance(result, Failure) else Failure(CancelledError())

    running.cancel = cancel_now_or_soon  # type: ignore[method-assign]
    running.addBoth(ended)
    return running


async def together(running: Sequence[Deferred[T]]) -> list[T]:
    """
    Return all results, in order.

    The first failure, or being cancelled, cancels all the others, which Twisted's ``gatherResults``
    leaves running, and comes out as it is, which there comes wrapped.
    """
    try:
        return list(await gatherResults(running, consumeErrors=True))
    except Exception as error:
        for other in running:
            other.addErrback(lambda _failure: None)
            other.cancel()
        if isinstance(error, FirstError):
            error.subFailure.raiseException()
        raise


async def all_ended(waiting: Sequence[Deferred[Any]]) -> list[Any]:
    """Wait for all, and raise the first failure when all have ended."""
    outcomes = await DeferredList(waiting, consumeErrors=True)
    for good, result in outcomes:
        if not good:
            result.raiseException()
    return [result for _, result in outcomes]


async def few_at_a_time(
    at_once: int, steps: Sequence[Callable[[], Coroutine[Any, Any, None]]]
) -> None:
    """Take all steps, so many of them at once; a failure or cancellation ends them all."""
    gate = DeferredSemaphore(at_once)

    def start(step: Callable[[], Coroutine[Any, Any, None]]) -> Deferred[None]:
        return Deferred.fromCoroutine(step())

    await together([gate.run(start, step) for step in steps])


class Waiters(Generic[T]):
    """All who wait for one event; who gives up waiting is forgotten."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[Deferred[T]] = []

    def wait(self) -> Deferred[T]:
        """Fire with the event that comes next."""
        waiting: Deferred[T] = Deferred(self._forget)
        self._waiting.append(waiting)
        return waiting

    def fire(self, result: T) -> None:
        """The event has come: all who wait now get ``result``, and are forgotten."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.called:  # who was told before may have had it give up
                each.callback(result)

    def fail(self, error: Exception) -> None:
        """The event will not come: all who wait now get ``error``, and are forgotten."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.called:
                each.errback(error)

    def _forget(self, waiting: Deferred[T]) -> None:
        if waiting in self._waiting:  # else it is about to be told
            self._waiting.remove(waiting)
