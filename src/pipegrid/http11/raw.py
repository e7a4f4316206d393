"""
The fast path: requests as bytes that are ready to be sent, answers with as little around them as can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IConsumer, IPushProducer
from zope.interface import implementer

from pipegrid.errors import PipegridError
from pipegrid.http11.errors import ResponseError
from pipegrid.http11.exchange import Exchange
from pipegrid.http11.parser import ResponseHead
from pipegrid.reactor.sockets import Buffer, gather


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
