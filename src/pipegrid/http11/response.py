"""The answer as Twisted programs know it (``IResponse``), and the request that waits for it."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast

from twisted.internet.defer import AlreadyCalledError, Deferred
from twisted.internet.interfaces import IAddress, IProtocol, IPushProducer, IReactorTime, ITransport
from twisted.python.failure import Failure
from twisted.web.client import ResponseDone, ResponseFailed
from twisted.web.http import PotentialDataLoss
from twisted.web.http_headers import Headers
from twisted.web.iweb import UNKNOWN_LENGTH, IClientRequest, IResponse
from zope.interface import implementer

from pipegrid.errors import PipegridError
from pipegrid.http11.exchange import Exchange
from pipegrid.http11.parser import ResponseHead

# About the connection, not about the content; Twisted's own agent hides them too.
_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_NO_HEADERS = Headers({})


class AgentExchange(Exchange):
    """A request of an agent: fires ``result`` with the head of the answer."""

    __slots__ = ("answer", "clock", "request_headers", "result", "uri")

    def __init__(
        self,
        clock: IReactorTime,
        method: bytes,
        uri: bytes,
        headers: Headers | None,
        head: bytes,
        expected_response_bytes: int | None = None,
        timeout_s: float | None = None,
        idempotent: bool | None = None,
        again_after_silence: bool = True,
    ) -> None:
        Exchange.__init__(
            self,
            method,
            head,
            idempotent=idempotent,
            expected_response_bytes=expected_response_bytes,
            timeout_s=timeout_s,
            again_after_silence=again_after_silence,
        )
        self.clock = clock
        self.uri = uri
        self.request_headers = headers
        self.answer: PipelinedResponse | None = None
        self.result: Deferred[IResponse] = Deferred(lambda _: self.withdraw())

    def head_received(self, head: ResponseHead) -> None:
        self.paused, self.claimed = True, False  # until ``deliverBody``
        answer = self.answer = PipelinedResponse(self, head)
        self.result.callback(answer)

    def body_received(self, data: bytes) -> None:
        answer = self.answer
        assert answer is not None
        if answer.protocol is not None:
            answer.protocol.dataReceived(data)
        else:
            answer.buffer.append(data)

    def completed(self) -> None:
        assert self.answer is not None
        self.answer.finish(None)

    def failed(self, error: PipegridError) -> None:
        if self.answer is None:
            self.result.errback(error)
        else:
            self.answer.finish(error)


@implementer(IClientRequest)
class ClientRequest:
    """The request of an answer, as ``IResponse.request`` shows it: method, URI and headers."""

    def __init__(self, exchange: AgentExchange) -> None:
        self.method = exchange.method
        self.absoluteURI = exchange.uri
        self.headers = exchange.request_headers or _NO_HEADERS.copy()


@implementer(IResponse)
class PipelinedResponse:
    """
    One answer. Its body is read from the connection once ``deliverBody`` is called: until then, at most
    what came in the same read as the head is held, and the answers behind it wait.

    The headers hold ``Content-Length``, and not what concerns only the connection.
    """

    __slots__ = (
        "_exchange",
        "_head",
        "_headers",
        "_reason",
        "_was_delivered",
        "buffer",
        "code",
        "length",
        "phrase",
        "previousResponse",
        "protocol",
    )

    def __init__(self, exchange: AgentExchange, head: ResponseHead) -> None:
        self._exchange = exchange
        self._head = head
        self._headers: Headers | None = None
        self.code = head.status
        self.phrase = head.reason
        self.length = UNKNOWN_LENGTH if head.length is None else head.length
        self.previousResponse: IResponse | None = None
        self.protocol: IProtocol | None = None
        self.buffer: list[bytes] = []
        self._reason: Failure | None = None
        self._was_delivered = False

    def __repr__(self) -> str:
        return f"<PipelinedResponse {self.code} to {self._exchange.method.decode('latin-1')}>"

    @property
    def version(self) -> tuple[bytes, int, int]:
        """The version that the answer names, as in ``IResponse``: ``(b"HTTP", major, minor)``."""
        return (b"HTTP", *self._head.version)

    @property
    def headers(self) -> Headers:
        """Made when somebody looks: making them for every answer cost a fifth of the speed."""
        headers = self._headers
        if headers is None:
            headers = self._headers = Headers()
            for name, value in self._head.headers:
                if name not in _HOP_BY_HOP:
                    headers.addRawHeader(name, value)
        return headers

    @property
    def request(self) -> IClientRequest:
        """The request that this answers, made anew at each look."""
        return cast(IClientRequest, ClientRequest(self._exchange))

    def setPreviousResponse(self, response: IResponse) -> None:
        self.previousResponse = response

    def deliverBody(self, protocol: IProtocol) -> None:
        if self._was_delivered:
            raise RuntimeError("The body of this answer was delivered already.")
        self._was_delivered = True
        exchange = self._exchange
        exchange.paused, exchange.claimed = False, True
        self.protocol = protocol
        protocol.makeConnection(cast(ITransport, BodyTransport(self)))
        buffered, self.buffer = self.buffer, []
        for data in buffered:
            if self.protocol is not None:  # it may have had enough
                protocol.dataReceived(data)
        if self._reason is not None:
            self._say_lost(self._reason)
        elif exchange.connection is not None:
            exchange.connection.pause_changed(exchange)

    def finish(self, error: PipegridError | None) -> None:
        """There is no more of the body."""
        if error is not None:
            reason = Failure(ResponseFailed([Failure(error)], self))
        elif self._head.until_close:
            reason = Failure(PotentialDataLoss())
        else:
            reason = Failure(ResponseDone("The answer is complete."))
        self._reason = reason
        self._say_lost(reason)

    def _say_lost(self, reason: Failure) -> None:
        protocol, self.protocol = self.protocol, None
        if protocol is not None:
            protocol.connectionLost(reason)

    def set_paused(self, paused: bool) -> None:
        """The reader has had enough for now, or has not."""
        self._exchange.set_paused(paused)

    def stop(self) -> None:
        """
        The reader wants no more. The connection survives if little of the answer is left.

        It is told of the end in a later turn, as with a real transport: readers count on that.
        """
        if self.protocol is None:
            return
        protocol, self.protocol = self.protocol, None
        self._exchange.withdraw()
        self._exchange.clock.callLater(0, _say_stopped, protocol, self)


def _say_stopped(protocol: IProtocol, response: PipelinedResponse) -> None:
    stopped = PipegridError("The reader wanted no more of this answer.")
    with suppress(AlreadyCalledError):  # twisted.web.client.readBody, cancelled
        protocol.connectionLost(Failure(ResponseFailed([Failure(stopped)], response)))


@implementer(ITransport, IPushProducer)
class BodyTransport:
    """What a body's reader sees of the connection: it can be paused and dropped."""

    __slots__ = ("_response",)

    disconnecting = False

    def __init__(self, response: PipelinedResponse) -> None:
        self._response = response

    def pauseProducing(self) -> None:
        self._response.set_paused(True)

    def resumeProducing(self) -> None:
        self._response.set_paused(False)

    def stopProducing(self) -> None:
        self._response.stop()

    loseConnection = abortConnection = stopProducing

    def write(self, data: bytes) -> None:
        raise RuntimeError("The reader of an answer cannot write to its connection.")

    def writeSequence(self, data: Any) -> None:
        self.write(b"")

    def getPeer(self) -> IAddress:
        return self._address("getPeer")

    def getHost(self) -> IAddress:
        return self._address("getHost")

    def _address(self, getter: str) -> IAddress:
        connection = self._response._exchange.connection
        if connection is None or connection.transport is None:
            raise RuntimeError("The answer is complete, and its connection serves others now.")
        return cast(IAddress, getattr(connection.transport, getter)())
