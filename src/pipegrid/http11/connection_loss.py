"""
What becomes of the requests of a connection that ended, and who decides.

The question for each is whether the server may have acted on it. Nothing of an unsent request was seen.
What stood behind an answer with ``Connection: close`` was seen but must not be acted on
(RFC 9112, section 9.6). About everything else that was sent nobody can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import attrs

from pipegrid.errors import PipegridError
from pipegrid.http11.exchange import (
    Exchange,
    RequestMaybeProcessed,
    RequestNotSent,
    RequestTimedOut,
    ResponseError,
)

C_contra = TypeVar("C_contra", contravariant=True)
"""The connection: whoever owns connections knows of which kind they are."""


@attrs.frozen
class Unanswered:
    """A request that a connection gives back, and the error that is true of it."""

    exchange: Exchange
    error: PipegridError


@attrs.frozen(kw_only=True)
class Loss:
    """
    How a connection ended.

    Attributes:
        reason: a clause for people.
        error: what the transport or its TLS said, if that is an error with a sentence of its own.
        cut: the other side ended it, or something on the way; not TLS, for a reason that stays.
        announced: it was closed by us, or after an answer that was to be the last.
        said_close: the server said so with its last answer.
        answered: how many requests it had answered.
        in_flight: how many were written and not answered.
        garbage: the server sent what is not an answer.
        timed_out: the server was silent.
    """

    reason: str
    error: PipegridError | None = None
    cut: bool = False
    announced: bool = False
    said_close: bool = False
    answered: int = 0
    in_flight: int = 0
    garbage: bool = False
    timed_out: bool = False


def closed(reason: str) -> Loss:
    """Return what is told of a connection that was closed by us, or after an answer that was the last."""
    return Loss(reason=reason, announced=True)


class Owner(Protocol[C_contra]):
    """Who is told what becomes of a connection and its requests."""

    def has_room(self, connection: C_contra) -> None:
        """Something was answered, or the connection became ready: more may be submitted."""

    def answered(self, connection: C_contra, exchange: Exchange) -> None:
        """One answer is complete; ``exchange.response`` and ``.received_bytes`` describe it."""

    def held_up(self, connection: C_contra) -> None:
        """The reader of an answer holds up those behind it; ``move_followers`` would free them."""

    def gave_back(self, unsent: list[Unanswered]) -> None:
        """A connection that is being closed will not send these: repeat or fail them, in order."""

    def lost(self, connection: C_contra, loss: Loss, unanswered: list[Unanswered]) -> None:
        """The connection is of no more use; repeat its requests elsewhere, or fail them, in order."""


class NoOwner:
    """The owner of a connection that is used directly: the caller decides what to repeat."""

    def has_room(self, connection: Any) -> None:
        """The lane's own queue is all there is."""

    def answered(self, connection: Any, exchange: Exchange) -> None:
        """Learn nothing from it: there is no host of whom to keep a record."""

    def held_up(self, connection: Any) -> None:
        """The order is the caller's, so they wait."""

    def gave_back(self, unsent: list[Unanswered]) -> None:
        """What cannot be done, fails."""
        for each in unsent:
            each.exchange.failed(each.error)

    def lost(self, connection: Any, loss: Loss, unanswered: list[Unanswered]) -> None:
        """The same; see also ``PipelinedConnection.when_lost``."""
        self.gave_back(unanswered)


def given_back(
    written: Sequence[Exchange], queued: Sequence[Exchange], loss: Loss, server: str
) -> list[Unanswered]:
    """Take requests from a connection that cannot answer them; return them, and what is true of each."""
    for each in (*written, *queued):
        each.connection = None
    unanswered = [
        Unanswered(
            each, not_answered(each, server, loss, was_due=not place, said_close=loss.said_close)
        )
        for place, each in enumerate(written)
        if not each.abandoned
    ]
    unsent = [Unanswered(e, loss.error or not_sent(e, server, loss.reason)) for e in queued]
    return unanswered + unsent


def not_sent(exchange: Exchange, server: str, reason: str) -> RequestNotSent:
    """Nothing of the request was written."""
    return RequestNotSent(f"The {_method(exchange)} was not sent to {server} ({reason}).", server)


def not_answered(
    exchange: Exchange, server: str, loss: Loss, *, was_due: bool, said_close: bool
) -> PipegridError:
    """
    The request was written, at least in part.

    Args:
        was_due: its answer was the next one.
        said_close: the last answer ruled out that anything behind it is processed.
    """
    method, reason = _method(exchange), loss.reason
    if exchange.response is not None:
        return ResponseError(
            f"The answer of {server} to a {method} was interrupted after"
            f" {exchange.received_bytes} bytes ({reason}); ask again.",
            server,
        )
    if said_close:
        return RequestNotSent(f"The {method} was not processed by {server} ({reason}).", server)
    if loss.timed_out and was_due:
        return RequestTimedOut(
            f"{server} did not answer a {method} ({reason}); it may have processed it.", server
        )
    if loss.garbage and was_due:
        return ResponseError(
            f"{server} did not answer a {method} properly ({reason}); it may have processed it.",
            server,
        )
    return RequestMaybeProcessed(
        f"The connection to {server} was lost before it answered a {method} ({reason});"
        " it may have processed it.",
        server,
    )


def _method(exchange: Exchange) -> str:
    return exchange.method.decode("latin-1")
