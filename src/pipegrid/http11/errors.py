"""
What can go wrong with one request, answered by the one question that matters: did it happen?

They are ``ServerError``s, so a transfer over HTTP handles them without translation;
``may_have_happened`` is False where no byte of the request was sent, or where the server is bound
not to have looked at it.
"""

from __future__ import annotations

import sys
from typing import Any

from pipegrid.errors import (
    PipegridError,
    ServerError,
    ServerProtocolError,
    ServerTimeout,
    ServerUnreachable,
)


class RequestNotSent(ServerUnreachable):
    """The server did not process the request; repeating it is safe, whatever it does."""


class AgentClosed(RequestNotSent):
    """The agent was closed; who wants an answer waits for it before."""


class TooManyRequests(RequestNotSent):
    """More requests wait for this server than the limit allows; wait for some of them first."""


class WrongServerKey(RequestNotSent):
    """Whoever answers at the server's address does not own the key that was promised."""


class UntrustedCertificate(RequestNotSent):
    """
    The host answers, and its certificate is not to be trusted for its name; nothing of the request was sent.

    Attributes:
        error: as OpenSSL (``OpenSSL.SSL.Error``) or the check of the name (``service_identity``) has it.
    """

    def __init__(self, message: str, server: str, error: BaseException) -> None:
        super().__init__(message, server)
        self.error = self.__cause__ = error


class _MayHaveHappened(ServerError):
    """What the server may have carried out all the same."""

    def __init__(self, message: str, server: str = "") -> None:
        super().__init__(message, server, may_have_happened=True)


class RequestMaybeProcessed(_MayHaveHappened, ServerUnreachable):
    """The request was sent and not answered: the server may have carried it out, or not."""


class RequestTimedOut(_MayHaveHappened, ServerTimeout):
    """The server was silent for too long while it had a request to answer."""


class RequestBodyError(_MayHaveHappened, ServerUnreachable):
    """The source of a request's body failed, or gave another number of bytes than it said."""


class ResponseError(_MayHaveHappened, ServerProtocolError):
    """An answer came, but not a whole or proper one; the request was most likely processed."""


def why_refused(error: BaseException | None, server: str) -> PipegridError | None:
    """Return what ended a connection if that says enough itself: an error of ours, or a certificate."""
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
    """Return what is wrong with a certificate, if that is the error. Loads nothing: who raised it has."""
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
    """What is said when a request comes too late for a connection."""
    return RequestNotSent(
        f"The connection to {server} takes no more requests ({reason}); connect again.", server
    )


def too_many_waiting(count: int, server: str) -> TooManyRequests:
    """What is said when one request more than the limit is made."""
    return TooManyRequests(
        f"{count} requests wait for {server} already; wait for some of them before making more.",
        server,
    )


def no_connection(server: str, why: str) -> RequestNotSent:
    """What is said of requests that wait for a connection when there is none."""
    return RequestNotSent(
        f"No connection to {server} could be used ({why}); check that it runs and can be reached.",
        server,
    )


def not_connected(server: str, error: BaseException) -> PipegridError:
    """The same for what an attempt to connect failed with, unless that says enough itself."""
    if isinstance(error, PipegridError):
        return error
    sentence = no_connection(server, str(error).rstrip(".") or type(error).__name__)
    sentence.__cause__ = error
    return sentence
