"""One request and its response; raw requests; request errors."""

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
from pipegrid.reactor.sockets import Buffer, gather

if TYPE_CHECKING:
    from twisted.web.iweb import IBodyProducer


# One request and what becomes of its answer: what a connection needs to know of both.
#
# The connection calls, in this order and each at most once but for the third: ``handed_over`` (only for a
# long body), ``head_received``, ``body_received`` for each piece, ``completed``; or, at any time, ``failed``
# and then nothing more. After ``abandon`` it calls none of them.

IDEMPOTENT_METHODS = frozenset((b"GET", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"TRACE"))


class Carrier(Protocol):
    """The connection that has an exchange, as far as the exchange calls it."""

    @property
    def transport(self) -> Any:
        """The transport of the connection; None before it is made."""

    def cancel(self, exchange: Exchange, error: PipegridError | None = None) -> None:
        """Take the request back; with an error, the exchange fails with it."""

    def pause_changed(self, exchange: Exchange) -> None:
        """``exchange.paused`` is another than before: reading may have to stop, or to go on."""


class Exchange:
    """
    Attributes:
        head: request line and header lines, with the empty line at their end.
        body: pieces that follow it as they are.
        producer: writes the body instead, while it is sent; then ``chunked`` says how.
        request_bytes: of all that, as far as it is held in memory or known.
        idempotent: repeating the request harms nothing, so a lost one is replayed.
        expected_response_bytes: of the answer, head and body; None if nobody knows.
        timeout_s: silence of the server that is too long; None for the connection's default.
        again_after_silence: whether the same host may be asked again when the connection was silent for
            too long, where that may have been pipelining's fault.
        closes: the request asks the server to close the connection after it.

        connection: which one has it now, if any.
        charged_bytes: what the connection's budget was charged with.
        sent: the last byte was handed to the transport.
        response: the head of the answer, once it came.
        received_bytes: of the answer so far.
        abandoned: nobody wants the answer any more.
        wanted_bytes: of the answer were received before that.
        paused: the reader of the answer wants no more bytes for now.
        claimed: the answer has a reader (until then it is paused, but not without limit).
        attempts: connections lost under it.
        maybe_processed: one of those may have brought it to the server.
        written_s: when it was handed to the transport, if its answer shows the round trip.
        token: of the connection's window, where that is measured.
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
        """Take the request back, wherever it is; nothing more is told to the exchange."""
        if self.connection is not None:
            self.connection.cancel(self)
        else:
            self.abandoned = True  # a pool drops it when its turn comes

    def set_paused(self, paused: bool) -> None:
        """Whoever reads the answer has had enough for now, or has not."""
        self.paused = paused
        if self.connection is not None:
            self.connection.pause_changed(self)

    def make_placeholder(self) -> Exchange:
        """An abandoned one that takes this one's place on its connection."""
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
        """Whether its bytes are still there to be sent once more, and nobody saw an answer."""
        return not self.producer_started and self.response is None

    def handed_over(self) -> None:
        """The transport has all of a body that was long enough to be handed over in pieces."""

    def head_received(self, head: ResponseHead) -> None:
        """The head of the final answer is here."""

    def body_received(self, data: bytes) -> None:
        """Some more of its body is here."""

    def completed(self) -> None:
        """All of it was received."""

    def failed(self, error: PipegridError) -> None:
        """There will be no (more of the) answer."""


# What can go wrong with one request, answered by the one question that matters: did it happen?
#
# They are ``ServerError``s, so a transfer over HTTP handles them without translation;
# ``may_have_happened`` is False where no byte of the request was sent, or where the server is bound
# not to have looked at it.


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


# The fast path: requests as bytes that are ready to be sent, answers with as little around them as can be.


class RawResponse:
    """
    One answer.

    Attributes:
        status: 200 to 999.
        body: all of it, or b"" if it went to a consumer.
        body_bytes: its length, wherever it went.
        header_list: (lower-case name, value) as they came.
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
        """By lower-case name; several of one name are joined with a comma."""
        if self._headers is None:
            headers = self._headers = {}
            for name, value in self.header_list:
                headers[name] = headers[name] + b", " + value if name in headers else value
        return self._headers


# Looks at status and headers and may name who gets the body as it comes; None: collect it.
ConsumerChoice = Callable[[RawResponse], IConsumer | None]


@attrs.define
class RawRequest:
    """
    One request, ready to be sent.

    Attributes:
        head: request line and header lines, with the empty line behind them, and with whatever
            header tells the length of ``body``.
        body: pieces behind the head; they must not change until the answer is there. Empty once let go of.
        idempotent: None: as the method is.
        expected_response_bytes: of the answer, head included, as good as you know; None if you do not.
        timeout_s: silence of the server that is too long; None for the default of the connection.
        max_body_bytes: of an answer that is collected; a longer one is a ``ResponseError``.
        consumer_for: called with the head; the consumer it returns gets the body, with the
            connection's reading as its push producer, and the answer fires at the end of that.
        let_go: called when all of a long body has been handed to the transport; from then on the request
            does not hold it any more, and cannot be repeated. None: it is held until the answer is there.
        is_gone: whether that has happened.
        again_after_silence: False: if the connection is silent for too long, this fails at once, also if
            it stood behind the one whose answer was due; for whoever has another host to ask.
    """

    head: bytes
    body: Sequence[Buffer] = ()
    idempotent: bool | None = None
    expected_response_bytes: int | None = None
    timeout_s: float | None = None
    max_body_bytes: int = 2**20
    consumer_for: ConsumerChoice | None = None
    let_go: Callable[[], None] | None = None
    is_gone: bool = False
    again_after_silence: bool = True


@implementer(IPushProducer)
class RawExchange(Exchange):
    """
    A raw request under way; also the producer of its answer's body, for a consumer.

    Who it is for is told through ``answered`` or ``gave_up``: ``RawCall`` has a Deferred for that.
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
        """All of the answer is here."""

    def gave_up(self, error: PipegridError) -> None:
        """There will be no answer, or not all of it; ``error`` says why."""

    @property
    def can_be_repeated(self) -> bool:
        return self.response is None and not self._request.is_gone

    def handed_over(self) -> None:
        request = self._request
        let_go, request.let_go = request.let_go, None
        if let_go is not None:
            request.body = self.body = ()
            request.is_gone = True
            let_go()

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
        """For the consumer: it wants no more."""
        self.take_back()

    def take_back(self) -> None:
        """Nobody wants the answer any more; nobody is told."""
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
                f"The answer of {self._server} to {self.method.decode('latin-1')} has {size} bytes"
                f" or more, and at most {self._request.max_body_bytes} were expected.",
                self._server,
            ),
        )


class RawCall(RawExchange):
    """
    One whose answer somebody waits for.

    Attributes:
        result: fires with the answer; cancelling it takes the request back.
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
        """For the consumer: it wants no more, so the request fails as if cancelled."""
        self.result.cancel()
