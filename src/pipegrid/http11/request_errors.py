"""Errors of requests: what happened, and whether the server may have acted on the request."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pipegrid.errors import (
    PipegridError,
    ServerError,
    ServerProtocolError,
    ServerTimeout,
    ServerUnreachable,
)

if TYPE_CHECKING:
    pass


# Errors of one request. Each one answers the question that matters: may the request have been processed?
#
# They are ``ServerError``s, so a transfer over HTTP needs no translation. ``may_have_happened`` is False if
# no byte of the request was sent, or if the server must have ignored it.


class RequestNotSent(ServerUnreachable):
    """The server did not process the request, so any request may safely be repeated."""


class AgentClosed(RequestNotSent):
    """The agent was closed; wait for responses before you close it."""


class TooManyRequests(RequestNotSent):
    """More requests wait for this server than the limit allows; wait for some of them first."""


class WrongServerKey(RequestNotSent):
    """The server at this address does not own the expected key."""


class UntrustedCertificate(RequestNotSent):
    """
    The host's certificate is not trusted for its name; nothing of the request was sent.

    Attributes:
        error: the error of OpenSSL (``OpenSSL.SSL.Error``) or of the check of the name
            (``service_identity``).
    """

    def __init__(self, message: str, server: str, error: BaseException) -> None:
        super().__init__(message, server)
        self.error = self.__cause__ = error


class _MayHaveHappened(ServerError):
    """An error of a request that the server may nevertheless have processed."""

    def __init__(self, message: str, server: str = "") -> None:
        super().__init__(message, server, may_have_happened=True)


class RequestMaybeProcessed(_MayHaveHappened, ServerUnreachable):
    """The request was sent and not answered: the server may have processed it."""


class RequestTimedOut(_MayHaveHappened, ServerTimeout):
    """The server was silent for too long while a response was outstanding."""


class RequestBodyError(_MayHaveHappened, ServerUnreachable):
    """The source of a request's body failed, or gave a different number of bytes than announced."""


class ResponseError(_MayHaveHappened, ServerProtocolError):
    """The response is incomplete or invalid; the request was most likely processed."""


def why_refused(error: BaseException | None, server: str) -> PipegridError | None:
    """
    Return the error that ended a connection if it explains itself: a ``PipegridError``, or one about the
    certificate.
    """
    if isinstance(error, PipegridError):
        return error
    why = None if error is None else _certificate_fault(error)
    if error is None or why is None:
        return None
    return UntrustedCertificate(
        f"The certificate of {server} is not trusted ({why}); nothing was sent. Make sure that this is the "
        "right host, or trust its authority.",
        server,
        error,
    )


def _certificate_fault(error: BaseException) -> str | None:
    """
    Return what is wrong with a certificate, if that is the error. The modules are loaded if such an error
    exists.
    """
    ssl = sys.modules.get("OpenSSL.SSL")
    if ssl is not None and isinstance(error, ssl.Error):
        parts = error.args[0] if error.args and isinstance(error.args[0], (list, tuple)) else []
        reasons = [str(part[-1]) for part in parts if part]
        return next((each for each in reasons if "certificate verify failed" in each), None)
    names = sys.modules.get("service_identity")
    if names is not None and isinstance(error, (names.VerificationError, names.CertificateError)):
        mismatches = getattr(error, "errors", None)
        if mismatches:
            wanted = [str(getattr(_id_of(each), "hostname", _id_of(each))) for each in mismatches]
            return f"it is not for {', '.join(wanted)}"
        return str(error) or type(error).__name__
    return None


def _id_of(mismatch: Any) -> Any:
    pattern = getattr(mismatch, "mismatched_id", mismatch)
    address = getattr(pattern, "ip", None)
    return pattern if address is None else address


def takes_no_more(server: str, reason: str) -> RequestNotSent:
    """Return the error of a request for a connection that accepts no more."""
    return RequestNotSent(
        f"The connection to {server} accepts no more requests ({reason}); connect again.", server
    )


def too_many_waiting(count: int, server: str) -> TooManyRequests:
    """Return the error of a request beyond the limit."""
    return TooManyRequests(
        f"{count} requests wait for {server} already; wait for some of them before making more.",
        server,
    )


def no_connection(server: str, why: str) -> RequestNotSent:
    """Return the error of requests that wait for a connection when there is none."""
    return RequestNotSent(
        f"No connection to {server} could be used ({why}); check that it runs and can be reached.",
        server,
    )


def not_connected(server: str, error: BaseException) -> PipegridError:
    """Return the error of requests after a failed connection attempt."""
    if isinstance(error, PipegridError):
        return error
    sentence = no_connection(server, str(error).rstrip(".") or type(error).__name__)
    sentence.__cause__ = error
    return sentence
