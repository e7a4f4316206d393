"""
The loss of a connection, the errors of the connection's unanswered requests, and the interface of its owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

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
"""The type of the connection; each owner is for one type."""


class Unanswered(NamedTuple):
    """A request that a connection returns unanswered, and the error of the request."""

    exchange: Exchange
    error: PipegridError


@attrs.frozen(kw_only=True)
class Loss:
    """
    How a connection ended.

    Attributes:
        reason: a clause for error messages.
        error: the error of the transport or of TLS, if its message is enough by itself.
        cut: whether the server or the network ended the connection; False for a TLS error that would occur
            again.
        announced: whether this side closed the connection, or the last response announced the close.
        announced_close: whether the last response had ``Connection: close``.
        answered: how many responses the connection had received.
        in_flight: how many requests were sent and not answered.
        garbage: whether the server sent bytes that are not a response.
        timed_out: whether the server was silent for too long.
    """

    reason: str
    error: PipegridError | None = None
    cut: bool = False
    announced: bool = False
    announced_close: bool = False
    answered: int = 0
    in_flight: int = 0
    garbage: bool = False
    timed_out: bool = False


def closed(reason: str) -> Loss:
    """Return the loss of a connection that this side closed, or whose last response announced the close."""
    return Loss(reason=reason, announced=True)


class Owner(Protocol[C_contra]):
    """The object that a connection notifies about its requests and its end."""

    def has_space(self, connection: C_contra) -> None:
        """More requests may be submitted, since a response is complete or the connection became ready."""

    def answered(self, connection: C_contra, exchange: Exchange) -> None:
        """A response is complete; ``exchange.response`` and ``exchange.received_bytes`` describe it."""

    def blocked(self, connection: C_contra) -> None:
        """
        The reader of a response delays the following responses; ``move_followers`` returns the requests that
        can be moved.
        """

    def gave_back(self, unsent: list[Unanswered]) -> None:
        """The connection is closing and will not send these requests: repeat or fail them, in order."""

    def lost(self, connection: C_contra, loss: Loss, unanswered: list[Unanswered]) -> None:
        """The connection is lost: repeat its requests on another connection, or fail them, in order."""


class NoOwner:
    """The owner of a connection that a program uses directly: the program decides what to repeat."""

    def has_space(self, connection: Any) -> None:
        """Do nothing: no requests wait outside of the connection."""

    def answered(self, connection: Any, exchange: Exchange) -> None:
        """Do nothing: no statistics are kept."""

    def blocked(self, connection: Any) -> None:
        """Do nothing: the program wants this order, so the requests wait."""

    def gave_back(self, unsent: list[Unanswered]) -> None:
        for each in unsent:
            each.exchange.failed(each.error)

    def lost(self, connection: Any, loss: Loss, unanswered: list[Unanswered]) -> None:
        """Fail the requests; see also ``PipelinedConnection.when_lost``."""
        self.gave_back(unanswered)


def given_back(
    written: Sequence[Exchange], queued: Sequence[Exchange], loss: Loss, server: str
) -> list[Unanswered]:
    """
    Withdraw the requests of a connection that cannot answer them; return the requests with their errors.

    The error of a request says whether the server may have acted on the request. The server has not seen
    unsent requests. It may have seen requests after a response with ``Connection: close``, but must not act
    on them (RFC 9112, section 9.6). For all other sent requests it is unknown whether the server acted on
    them.
    """
    for each in (*written, *queued):
        each.connection = None
    unanswered = [
        Unanswered(each, not_answered(each, server, loss, was_due=not place))
        for place, each in enumerate(written)
        if not each.abandoned
    ]
    unsent = [Unanswered(e, loss.error or not_sent(e, server, loss.reason)) for e in queued]
    return unanswered + unsent


def not_sent(exchange: Exchange, server: str, reason: str) -> RequestNotSent:
    """Return the error of a request of which nothing was written."""
    return RequestNotSent(f"The {_method(exchange)} was not sent to {server} ({reason}).", server)


def not_answered(exchange: Exchange, server: str, loss: Loss, *, was_due: bool) -> PipegridError:
    """
    Return the error of a request that was written, at least in part.

    Args:
        was_due: whether the response to this request was the next one.
    """
    method, reason = _method(exchange), loss.reason
    if exchange.response is not None:
        return ResponseError(
            f"The response of {server} to a {method} was interrupted after"
            f" {exchange.received_bytes} bytes ({reason}); ask again.",
            server,
        )
    if loss.announced_close:
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
