"""What a Foolscap client is told of an error; paths and causes are in the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

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

T = TypeVar("T")

log = Logger()

_TELLABLE: dict[type[PipegridError], str] = {
    NoSuchShare: "there is no such share, or no such unfinished upload",
    ConflictingWrite: "other bytes were written there before",
    NoSpace: "there is no more room",
}


def answer(operation: str, call: Callable[[], T]) -> T:
    """Return what a call returns; what it raises becomes an error fit for a client."""
    try:
        return call()
    except Exception as error:
        raise _fit_for_clients(operation, error) from None


def answer_later(operation: str, call: Callable[[], Any]) -> Deferred[Any]:
    """The same for a call that may take its time."""

    def failed(failure: Failure) -> Failure:
        error = failure.value
        assert isinstance(error, Exception)
        return Failure(_fit_for_clients(operation, error))

    return maybeDeferred(call).addErrback(failed)


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
