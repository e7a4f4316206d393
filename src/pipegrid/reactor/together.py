"""Waiting for several things at once, leaving none behind."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from twisted.internet.defer import (
    Deferred,
    DeferredList,
    DeferredSemaphore,
    FirstError,
    gatherResults,
)

T = TypeVar("T")


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
