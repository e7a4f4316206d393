"""
One request and what becomes of its answer: what a connection needs to know of both.

The connection calls, in this order and each at most once but for the third: ``handed_over`` (only for a
long body), ``head_received``, ``body_received`` for each piece, ``completed``; or, at any time, ``failed``
and then nothing more. After ``abandon`` it calls none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pipegrid.errors import PipegridError
from pipegrid.flow.window import Sent
from pipegrid.http11.parser import ResponseHead
from pipegrid.reactor.sockets import Buffer

if TYPE_CHECKING:
    from twisted.web.iweb import IBodyProducer

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
