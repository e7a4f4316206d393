"""What a Foolscap client is told of an error; paths and causes are in the log."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from twisted.internet.defer import Deferred, maybeDeferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from pipegrid.errors import (
    ConflictingWrite,
    NoSpace,
    NoSuchShare,
    PipegridError,
    ServerRefused,
    UsageError,
    WrongSecret,
)

P = ParamSpec("P")
T = TypeVar("T")

log = Logger()

_TELLABLE: dict[type[PipegridError], str] = {
    NoSuchShare: "there is no such share, or no such unfinished upload",
    ConflictingWrite: "other bytes were written there before",
    NoSpace: "there is no more room",
}


def answers(operation: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make what a method raises an error that is fit for a client."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @wraps(method)
        def carry_out(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return method(*args, **kwargs)
            except Exception as error:
                raise _fit_for_clients(operation, error) from None

        return carry_out

    return decorate


def answers_later(operation: str) -> Callable[[Callable[P, Any]], Callable[P, Deferred[Any]]]:
    """The same for one that may take its time."""

    def failed(failure: Failure) -> Failure:
        assert isinstance(failure.value, Exception)
        return Failure(_fit_for_clients(operation, failure.value))

    def decorate(method: Callable[P, Any]) -> Callable[P, Deferred[Any]]:
        @wraps(method)
        def carry_out(*args: P.args, **kwargs: P.kwargs) -> Deferred[Any]:
            return maybeDeferred(method, *args, **kwargs).addErrback(failed)

        return carry_out

    return decorate


def _fit_for_clients(operation: str, error: Exception) -> PipegridError:
    text = _TELLABLE.get(type(error)) if isinstance(error, PipegridError) else None
    if text is not None:
        if isinstance(error, NoSpace):
            log.warn("{operation}: {error}", operation=operation, error=str(error))
        kind: Any = type(error)
        told: PipegridError = kind(text)
        return told
    if isinstance(error, (UsageError, WrongSecret)):
        return error  # what they say is about the request
    if isinstance(error, PipegridError):
        log.error("{operation}: {error}", operation=operation, error=str(error))
    else:
        log.failure("{operation} failed", Failure(error), operation=operation)
    return ServerRefused(f"{operation} failed; the server's operator can see why")
