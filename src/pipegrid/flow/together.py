"""Waiting for several things at once, leaving none behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from twisted.internet.defer import Deferred, FirstError, gatherResults

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
