"""
One request and its response, for a connection; raw requests; and errors of requests.

An error says what happened, and whether the server may have acted on the request.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IConsumer, IPushProducer
from zope.interface import implementer

from pipegrid.errors import (
    PipegridError,
    ServerError,
    ServerProtocolError,
    ServerTimeout,
    ServerUnreachable,
)
from pipegrid.flow.window import Sent
from pipegrid.http11.response_parser import ResponseHead
from pipegrid.reactor.tcp_transport import Buffer, gather

if TYPE_CHECKING:
    from twisted.web.iweb import IBodyProducer

# Errors of one request. Each error says whether the request may have been processed.
#
# They are ``ServerError``s, so a transfer over HTTP needs no translation. ``may_have_happened`` is False if
# no byte of the request was sent, or if the server must have ignored it.


class RequestNotSent(ServerUnreachable):
    """The server did not process the request, so even one that is not idempotent can be repeated."""


class AgentClosed(RequestNotSent):
    """The agent was closed; wait for responses before you close it."""


class TooManyRequests(RequestNotSent):
    """Too many requests wait for this server; wait for some of the responses first."""


class WrongServerKey(RequestNotSent):
    """The server at this address does not own the expected key."""


class UntrustedCertificate(RequestNotSent):
    """
    The host's certificate is not trusted for the host's name; nothing of the request was sent.

    Attributes:
        error: the error of OpenSSL (``OpenSSL.SSL.Error``) or of the check of the name
            (``service_identity``).
    """

    def __init__(self, message: str, server: str, error: BaseException) -> None:
        super().__init__(message, server)
        self.error = self.__cause__ = error


class _MayHaveHappened(ServerError):
    """An error after which the server may nevertheless have processed the request."""

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
    Return the error that ended a connection if its message is enough by itself: a ``PipegridError``, or an
    error about the certificate.
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
    Return what is wrong with a certificate; None if the error is not about a certificate. Modules are not
    imported: if such an error exists, they are loaded.
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
    """Return the error of a request on a connection that accepts no more requests."""
    return RequestNotSent(
        f"The connection to {server} accepts no more requests ({reason}); connect again.", server
    )


def too_many_waiting(count: int, server: str) -> TooManyRequests:
    """Return the error of a request beyond the limit of waiting requests."""
    return TooManyRequests(
        f"{count} requests wait for {server} already; wait for some of them before making more.",
        server,
    )


def no_connection(server: str, why: str) -> RequestNotSent:
    """Return the error of requests that wait for a connection when no connection could be used."""
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


# One request and its response, for a connection.
#
# The connection calls these methods in this order, all but ``body_received`` at most once: ``handed_over``
# (only for a long body), ``head_received``, ``body_received`` for each piece, ``completed``. It can call
# ``failed`` at any time instead, and calls no method after that, nor after ``abandoned`` is set.

IDEMPOTENT_METHODS = frozenset((b"GET", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"TRACE"))


class Carrier(Protocol):
    """The connection that has an exchange, with the methods that an exchange calls."""

    @property
    def transport(self) -> Any:
        """The transport of the connection; None before the connection is made."""

    def cancel(self, exchange: Exchange, error: PipegridError | None = None) -> None:
        """Withdraw the request; if an error is given, the exchange fails with the error."""

    def pause_changed(self, exchange: Exchange) -> None:
        """React to a change of ``exchange.paused``: pause or resume reading."""


class Exchange:
    """
    One request and the state of its response.

    Attributes:
        head: request line and header lines, with the empty line at their end.
        body: the pieces of the body, in order.
        producer: writes the body, if ``body`` has none; ``chunked`` says whether the body is sent in chunks.
        request_bytes: the size of head and body, as far as known.
        idempotent: whether repeating the request is harmless, so that it is replayed after a loss.
        expected_response_bytes: the size of the response, head included; None if unknown.
        timeout_s: how long the server may be silent; None for the connection's default.
        again_after_silence: whether the request may be sent to the same host again after a silence that
            pipelining may have caused.
        closes: whether the request has ``Connection: close``.

        connection: the connection that has the request, if any.
        charged_bytes: the bytes of the connection's budget that the response takes.
        sent: whether the last byte of the request was given to the transport.
        response: the head of the response, once it has arrived.
        received_bytes: the bytes of the response so far.
        abandoned: whether the response is no longer wanted.
        wanted_bytes: the bytes of the response that arrived before the request was abandoned.
        paused: whether the reader of the response is paused.
        claimed: whether the response has a reader; a response without a reader is paused, but not without
            limit.
        attempts: how many connections were lost with the request.
        maybe_processed: whether the server may have received the request on one of these connections.
        written_s: when the request was given to the transport, if its response measures the round trip.
        token: the request's entry in the connection's measured window, if there is one.
    """

    __slots__ = (
        "abandoned",
        "again_after_silence",
        "attempts",
        "body",
        "charged_bytes",
        "chunked",
        "claimed",
        "closes",
        "connection",
        "expected_response_bytes",
        "expects_continue",
        "head",
        "idempotent",
        "is_head",
        "maybe_processed",
        "method",
        "paused",
        "producer",
        "producer_started",
        "received_bytes",
        "request_bytes",
        "response",
        "sent",
        "timeout_s",
        "token",
        "wanted_bytes",
        "written_s",
    )

    def __init__(
        self,
        method: bytes,
        head: bytes,
        body: Sequence[Buffer] = (),
        *,
        idempotent: bool | None,
        expected_response_bytes: int | None = None,
        timeout_s: float | None = None,
        again_after_silence: bool = True,
    ) -> None:
        self.method = method
        self.head = head
        self.body = body
        self.producer: IBodyProducer | None = None
        self.producer_started = False
        self.chunked = False
        self.request_bytes = len(head)
        for piece in body:
            self.request_bytes += len(piece)
        self.idempotent = method in IDEMPOTENT_METHODS if idempotent is None else idempotent
        self.is_head = method == b"HEAD"
        self.expected_response_bytes = expected_response_bytes
        self.timeout_s = timeout_s
        self.again_after_silence = again_after_silence
        self.closes = False
        self.expects_continue = False
        self.connection: Carrier | None = None
        self.charged_bytes = 0
        self.sent = False
        self.response: ResponseHead | None = None
        self.received_bytes = 0
        self.abandoned = False
        self.wanted_bytes = 0
        self.paused = False
        self.claimed = True
        self.attempts = 0
        self.maybe_processed = False
        self.written_s: float | None = None
        self.token: Sent | None = None

    def __repr__(self) -> str:
        state = (
            "abandoned"
            if self.abandoned
            else "answering"
            if self.response is not None
            else "sent"
            if self.sent
            else "unsent"
        )
        return f"<{type(self).__name__} {self.method.decode('latin-1')} {state}>"

    def withdraw(self) -> None:
        """Withdraw the request, even if it is on no connection; the exchange is not notified any more."""
        if self.connection is not None:
            self.connection.cancel(self)
        else:
            self.abandoned = True  # the pool drops the request later

    def set_paused(self, paused: bool) -> None:
        """Pause or resume the response, as its reader has asked."""
        self.paused = paused
        if self.connection is not None:
            self.connection.pause_changed(self)

    def make_placeholder(self) -> Exchange:
        """Return an abandoned exchange that takes the place of this exchange on its connection."""
        placeholder = Exchange(self.method, b"", idempotent=True, timeout_s=self.timeout_s)
        placeholder.connection = self.connection
        placeholder.sent = placeholder.abandoned = True
        placeholder.charged_bytes = self.charged_bytes
        placeholder.request_bytes = self.request_bytes
        placeholder.token, self.token = self.token, None
        self.connection = None
        return placeholder

    @property
    def can_be_repeated(self) -> bool:
        """Return whether the request's bytes are still available and no response has begun."""
        return not self.producer_started and self.response is None

    def handed_over(self) -> None:
        """
        The whole body has been passed to the transport. Called only for long bodies, which are written in
        pieces.
        """

    def head_received(self, head: ResponseHead) -> None:
        """The head of the final response has arrived."""

    def body_received(self, data: bytes) -> None:
        """A piece of the body has arrived."""

    def completed(self) -> None:
        """The response is complete, with or without a body."""

    def failed(self, error: PipegridError) -> None:
        """There will be no response, or no complete one."""


# Raw requests: the caller gives bytes that are ready to send, and gets the response with as few objects as
# possible.


class RawResponse:
    """
    One response.

    Attributes:
        status: 200 to 999.
        body: the whole body, or b"" if a consumer has received it.
        body_bytes: the length of the body, even if a consumer has received it.
        header_list: (lower-case name, value) in the order of arrival.
    """

    __slots__ = ("_headers", "body", "body_bytes", "header_list", "reason", "status")

    def __init__(self, head: ResponseHead) -> None:
        self.status = head.status
        self.reason = head.reason
        self.header_list = head.headers
        self.body = b""
        self.body_bytes = 0
        self._headers: dict[bytes, bytes] | None = None

    def __repr__(self) -> str:
        return f"<RawResponse {self.status}, {self.body_bytes} bytes>"

    @property
    def headers(self) -> dict[bytes, bytes]:
        """The headers by lower-case name; several headers of one name are joined with a comma."""
        if self._headers is None:
            headers = self._headers = {}
            for name, value in self.header_list:
                headers[name] = headers[name] + b", " + value if name in headers else value
        return self._headers


# A function that gets status and headers, and returns a consumer for the body; None: collect the body.
ConsumerChoice = Callable[[RawResponse], IConsumer | None]


@attrs.define(eq=False, repr=False)
class RawRequest:
    """
    One request, ready to be sent.

    Attributes:
        head: request line and header lines, with the empty line at their end, and with the header that gives
            the length of ``body``.
        body: the pieces of the body; they must not change until the response has arrived. Empty once
            released.
        idempotent: whether the request may be repeated; None: the method decides.
        expected_response_bytes: the size of the response, head included, as well as known; None if unknown.
        timeout_s: how long the server may be silent; None for the connection's default.
        max_body_bytes: the limit of a collected body; a longer body is a ``ResponseError``.
        consumer_for: called with the head; if it returns a consumer, the consumer gets the body, with the
            connection as push producer, and the Deferred fires after the last byte.
        release: called when a long body has been passed to the transport. The request then releases the body
            and cannot be repeated. None: the body is kept until the response has arrived.
        is_gone: whether the body was released.
        again_after_silence: False: if the connection is silent for too long, fail at once, even if an earlier
            request's response was due; for callers that have another host.
    """

    head: bytes
    body: Sequence[Buffer] = ()
    idempotent: bool | None = None
    expected_response_bytes: int | None = None
    timeout_s: float | None = None
    max_body_bytes: int = 2**20
    consumer_for: ConsumerChoice | None = None
    release: Callable[[], None] | None = None
    is_gone: bool = False
    again_after_silence: bool = True


@implementer(IPushProducer)
class RawExchange(Exchange):
    """
    A raw request; also the producer of its response's body, for a consumer.

    The outcome is passed to ``answered`` or ``gave_up``; ``RawCall`` turns both into a Deferred.
    """

    __slots__ = ("_answer", "_consumer", "_pieces", "_request", "_server")

    def __init__(self, request: RawRequest, server: str) -> None:
        head = request.head
        method = head[: head.index(b" ")]
        Exchange.__init__(
            self,
            method,
            head,
            request.body,
            idempotent=request.idempotent,
            expected_response_bytes=request.expected_response_bytes,
            timeout_s=request.timeout_s,
            again_after_silence=request.again_after_silence,
        )
        self._request = request
        self._server = server
        self._answer: RawResponse | None = None
        self._pieces: list[bytes | bytearray] = []
        self._consumer: IConsumer | None = None

    def answered(self, answer: RawResponse) -> None:
        """Receive the response, which is complete, with or without a body."""

    def gave_up(self, error: PipegridError) -> None:
        """Receive the error, since there will be no complete response."""

    @property
    def can_be_repeated(self) -> bool:
        return self.response is None and not self._request.is_gone

    def handed_over(self) -> None:
        request = self._request
        release, request.release = request.release, None
        if release is not None:
            request.body = self.body = ()
            request.is_gone = True
            release()

    def head_received(self, head: ResponseHead) -> None:
        answer = self._answer = RawResponse(head)
        choose = self._request.consumer_for
        if choose is not None:
            self._consumer = choose(answer)
            if self._consumer is not None:
                self._consumer.registerProducer(self, True)
                return
        if head.length is not None and head.length > self._request.max_body_bytes:
            self._too_long(head.length)

    def body_received(self, data: bytes) -> None:
        answer = self._answer
        assert answer is not None
        answer.body_bytes += len(data)
        if self._consumer is not None:
            self._consumer.write(data)
        elif answer.body_bytes > self._request.max_body_bytes:
            self._too_long(answer.body_bytes)
        else:
            gather(self._pieces, data)

    def completed(self) -> None:
        answer = self._answer
        assert answer is not None
        if self._consumer is not None:
            self._release_consumer()
        else:
            pieces = self._pieces
            answer.body = bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)
        self.answered(answer)

    def failed(self, error: PipegridError) -> None:
        self._release_consumer()
        self._pieces = []
        self.gave_up(error)

    def pauseProducing(self) -> None:
        self.set_paused(True)

    def resumeProducing(self) -> None:
        self.set_paused(False)

    def stopProducing(self) -> None:
        """Stop the body, as the consumer has asked."""
        self.take_back()

    def take_back(self) -> None:
        """Withdraw the request without reporting an outcome."""
        self.withdraw()
        self._release_consumer()

    def _release_consumer(self) -> None:
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.unregisterProducer()

    def _too_long(self, size: int) -> None:
        assert self.connection is not None
        self.connection.cancel(
            self,
            ResponseError(
                f"The response of {self._server} to {self.method.decode('latin-1')} has {size} bytes"
                f" or more, and at most {self._request.max_body_bytes} were expected.",
                self._server,
            ),
        )


class RawCall(RawExchange):
    """
    A raw request with a Deferred.

    Attributes:
        result: fires with the response; cancelling the Deferred withdraws the request.
    """

    __slots__ = ("result",)

    def __init__(self, request: RawRequest, server: str) -> None:
        super().__init__(request, server)
        self.result: Deferred[RawResponse] = Deferred(lambda _: self.take_back())

    def answered(self, answer: RawResponse) -> None:
        self.result.callback(answer)

    def gave_up(self, error: PipegridError) -> None:
        self.result.errback(error)

    def stopProducing(self) -> None:
        """Stop the body, as the consumer has asked; the request fails as if it had been cancelled."""
        self.result.cancel()
