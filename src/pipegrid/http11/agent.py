"""``PipelinedAgent``: Twisted's ``IAgent`` over pipelined connections, and its responses (``IResponse``)."""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Literal, cast

import attrs
from twisted.internet.defer import AlreadyCalledError, Deferred, DeferredList, fail
from twisted.internet.interfaces import (
    IAddress,
    IProtocol,
    IPushProducer,
    IReactorTime,
    ITransport,
)
from twisted.python.failure import Failure
from twisted.web.client import URI, ResponseDone, ResponseFailed
from twisted.web.http import PotentialDataLoss
from twisted.web.http_headers import Headers
from twisted.web.iweb import (
    UNKNOWN_LENGTH,
    IAgent,
    IAgentEndpointFactory,
    IBodyProducer,
    IClientRequest,
    IPolicyForHTTPS,
    IResponse,
)
from zope.interface import implementer

from pipegrid.argument_checks import check_has, check_kind, check_seconds, check_whole, shown
from pipegrid.errors import PipegridError, UsageError
from pipegrid.http11.connection_limits import Limits
from pipegrid.http11.endpoints import ProxyEndpoints, StandardEndpoints
from pipegrid.http11.exchange import AgentClosed, Exchange
from pipegrid.http11.host_pool import HostPool
from pipegrid.http11.proxy_settings import Proxy
from pipegrid.http11.request_body_sender import framing_of
from pipegrid.http11.response_parser import ResponseHead
from pipegrid.reactor.deferreds import check_own_thread

# The response as Twisted programs know it (``IResponse``), and the request to which it belongs.

# Headers about the connection, not about the content; Twisted's own agent also hides them.
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
    """A request of an agent; fires ``result`` with the head of the response."""

    __slots__ = ("answer", "clock", "request_headers", "result", "uri")

    def __init__(
        self,
        clock: IReactorTime,
        method: bytes,
        uri: bytes,
        headers: Headers | None,
        head: bytes,
        idempotent: bool | None,
    ) -> None:
        Exchange.__init__(self, method, head, idempotent=idempotent)
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
    """The request to which a response belongs, as ``IResponse.request`` shows it: method, URI and headers."""

    def __init__(self, exchange: AgentExchange) -> None:
        self.method = exchange.method
        self.absoluteURI = exchange.uri
        self.headers = exchange.request_headers or _NO_HEADERS.copy()


@implementer(IResponse)
class PipelinedResponse:
    """
    One response. ``deliverBody`` starts reading the body. Before that, only the bytes that came in the same
    read as the head are kept, and the following responses wait.

    The headers include ``Content-Length``, but no headers about the connection.
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
        """The HTTP version of the response, as in ``IResponse``: ``(b"HTTP", major, minor)``."""
        return (b"HTTP", *self._head.version)

    @property
    def headers(self) -> Headers:
        """The headers, made on first use: making headers for every response cost a fifth of the speed."""
        headers = self._headers
        if headers is None:
            headers = self._headers = Headers()
            for name, value in self._head.headers:
                if name not in _HOP_BY_HOP:
                    headers.addRawHeader(name, value)
        return headers

    @property
    def request(self) -> IClientRequest:
        """The request to which this response belongs; a new object for each access."""
        return cast(IClientRequest, ClientRequest(self._exchange))

    def setPreviousResponse(self, response: IResponse) -> None:
        self.previousResponse = response

    def deliverBody(self, protocol: IProtocol) -> None:
        if self._was_delivered:
            raise RuntimeError("The body of this response was already delivered.")
        self._was_delivered = True
        exchange = self._exchange
        exchange.paused, exchange.claimed = False, True
        self.protocol = protocol
        protocol.makeConnection(cast(ITransport, BodyTransport(self)))
        buffered, self.buffer = self.buffer, []
        for data in buffered:
            if self.protocol is not None:  # the protocol may have stopped reading
                protocol.dataReceived(data)
        if self._reason is not None:
            self._say_lost(self._reason)
        elif exchange.connection is not None:
            exchange.connection.pause_changed(exchange)

    def finish(self, error: PipegridError | None) -> None:
        """End the body as complete if ``error`` is None, else with the error."""
        if error is not None:
            reason = Failure(ResponseFailed([Failure(error)], self))
        elif self._head.until_close:
            reason = Failure(PotentialDataLoss())
        else:
            reason = Failure(ResponseDone("The response is complete."))
        self._reason = reason
        self._say_lost(reason)

    def _say_lost(self, reason: Failure) -> None:
        protocol, self.protocol = self.protocol, None
        if protocol is not None:
            protocol.connectionLost(reason)

    def set_paused(self, paused: bool) -> None:
        """Pause or resume the body, as its reader has asked."""
        self._exchange.set_paused(paused)

    def stop(self) -> None:
        """
        Stop the body, as its reader has asked. The connection survives if little of the response is left.

        The reader's ``connectionLost`` is called in a later turn of the reactor, as by a real transport:
        readers rely on that.
        """
        if self.protocol is None:
            return
        protocol, self.protocol = self.protocol, None
        self._exchange.withdraw()
        self._exchange.clock.callLater(0, _say_stopped, protocol, self)


def _say_stopped(protocol: IProtocol, response: PipelinedResponse) -> None:
    stopped = PipegridError("The reader stopped this response.")
    with suppress(AlreadyCalledError):  # twisted.web.client.readBody, cancelled
        protocol.connectionLost(Failure(ResponseFailed([Failure(stopped)], response)))


@implementer(ITransport, IPushProducer)
class BodyTransport:
    """The transport that a body's reader gets, by which the reader can pause or stop the body."""

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
        raise RuntimeError("The reader of a response cannot write to its connection.")

    def writeSequence(self, data: Any) -> None:
        self.write(b"")

    def getPeer(self) -> IAddress:
        return self._address("getPeer")

    def getHost(self) -> IAddress:
        return self._address("getHost")

    def _address(self, getter: str) -> IAddress:
        connection = self._response._exchange.connection
        if connection is None or connection.transport is None:
            raise RuntimeError(
                "The response is complete, and its connection is used for others now."
            )
        return cast(IAddress, getattr(connection.transport, getter)())


# ``PipelinedAgent``: pipelined HTTP for any program that uses Twisted's ``IAgent``, treq included.
#
# **Speed** (misc/speedtest/agent.py, 200-byte GETs on one connection): 8 times Twisted's ``Agent`` without
# latency, over 100 times at a latency of 20 ms. A request takes about 30 µs, and the profile is flat, because
# work is done for each read instead of each request where possible: one parser call and one write for each
# read, no timer for each request, header objects only when they are used, each host's URI parsed once. The
# rest is mostly Deferreds and ``readBody``. Raw requests, with one Deferred each, are 20 times as fast as
# Twisted's.

_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_URI = re.compile(rb"[\x21-\x7e]+")
_ORIGIN = re.compile(rb"https?://[^/?#@\\]+", re.IGNORECASE)
_BAD_IN_VALUE = re.compile(rb"[\r\n\0]")

# Headers that callers must not set, since they describe how the agent sends the request.
_FRAMING = frozenset((b"content-length", b"transfer-encoding"))
_METHODS_WITH_BODY = frozenset((b"POST", b"PUT", b"PATCH"))
_KNOWN_METHODS = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"))

_AGENT = "A PipelinedAgent"

MAX_HOSTS = 1000  # how many hosts are remembered before idle ones are dropped


class _Origin:
    """What is common to all requests to one origin (scheme, host and port)."""

    __slots__ = ("before", "for_proxy", "host_line", "pool", "prefix_length")

    def __init__(
        self, pool: HostPool, prefix_length: int, netloc: bytes, proxy: Proxy | None
    ) -> None:
        self.pool = pool
        self.prefix_length = prefix_length
        # A request to a proxy contains the whole URI (RFC 9112, 3.2.2), and the credentials for the proxy.
        self.before = b"" if proxy is None else b"http://" + netloc
        self.for_proxy = b"" if proxy is None else proxy.authorization
        self.host_line = b" HTTP/1.1\r\nHost: " + netloc + b"\r\n" + self.for_proxy


@implementer(IAgent)
class PipelinedAgent:
    """
    An ``IAgent`` that sends requests without waiting for the responses to earlier ones.

    ::

        client = treq.client.HTTPClient(PipelinedAgent(reactor))

    Requests to one host are sent at once, one after the other, on few connections. Responses are delivered in
    the order in which the host sends them, and their bodies are streamed with back-pressure. If a connection
    is lost, its idempotent requests are sent again on another connection.

    Errors before the head of a response are those of ``pipegrid.http11.exchange``. After the head, the body's
    protocol gets ``twisted.web.client.ResponseFailed``, as ``IResponse`` requires.

    Calls from other threads than the reactor's are refused (``UsageError``).

    Args:
        reactor: for timeouts, and for connections unless endpoints are given.
        endpoints: how to connect; see ``pipegrid.http11.endpoints``. Excludes ``contextFactory`` and
            ``bindAddress``.
        limits: the limits for each host.
        contextFactory: an ``IPolicyForHTTPS``, which decides whose certificates are trusted, as for Twisted's
            ``Agent``.
        connectTimeout: seconds to open a connection, TLS included; replaces the limit in ``limits``.
        bindAddress: the local address, and port or 0, to connect from.
        serial: True: one request at a time on each connection; or the names of hosts that get one request at
            a time, because they confuse the responses to pipelined requests.

    Raises:
        UsageError: an argument is of the wrong kind, or is given twice.
    """

    def __init__(
        self,
        reactor: Any,
        endpoints: IAgentEndpointFactory | None = None,
        limits: Limits | None = None,
        *,
        contextFactory: IPolicyForHTTPS | None = None,
        connectTimeout: float | None = None,
        bindAddress: Any = None,
        serial: bool | Collection[str] = False,
    ) -> None:
        check_has(reactor, ("seconds", "callLater"), "reactor", "an IReactorTime")
        if endpoints is not None:
            check_has(endpoints, ("endpointForURI",), "endpoints", "an IAgentEndpointFactory")
        check_kind(limits, (Limits, type(None)), "limits", "a Limits")
        self._clock: IReactorTime = reactor
        if endpoints is not None and (contextFactory is not None or bindAddress is not None):
            raise UsageError(
                "an endpoint factory decides itself about trust and local addresses; give either it, or "
                "contextFactory and bindAddress"
            )
        self._endpoints: Any = endpoints or StandardEndpoints(
            reactor, contextFactory, connectTimeout, bindAddress
        )
        self._limits = limits or Limits()
        if connectTimeout is not None:
            check_seconds(connectTimeout, "connectTimeout")
            self._limits = attrs.evolve(self._limits, connect_timeout_s=connectTimeout)
        self._serial = _serial_hosts(serial)
        self._pools: dict[tuple[bytes, bytes, int], HostPool] = {}
        self._origins: dict[bytes, _Origin] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"<PipelinedAgent {list(self._pools.values())}>"

    def request(
        self,
        method: bytes,
        uri: bytes,
        headers: Headers | None = None,
        bodyProducer: IBodyProducer | None = None,
        *,
        expected_response_bytes: int | None = None,
        timeout_s: float | None = None,
        idempotent: bool | None = None,
        again_after_silence: bool = True,
    ) -> Deferred[IResponse]:
        """
        Send a request; fires with the response's head. Cancelling withdraws the request.

        Args:
            expected_response_bytes: the size of the response, if known, so that a large response does not
                delay others; by default, estimated from the host's earlier responses.
            timeout_s: how long the server may be silent; by default the limit in ``limits``.
            idempotent: whether the request may be repeated; by default, the method decides.
            again_after_silence: False: after a silence of the host, fail instead of sending the request to
                this host again; for callers that have another host.
        """
        try:
            check_own_thread(_AGENT)
            origin, head = self._head_of(method, uri, headers, bodyProducer)
            if expected_response_bytes is not None:
                check_whole(expected_response_bytes, "expected_response_bytes", least=0)
            if timeout_s is not None:
                check_seconds(timeout_s, "timeout_s")
        except (UsageError, AgentClosed) as error:
            return fail(error)
        except (TypeError, AttributeError):
            try:
                _check_kinds(method, uri, headers, bodyProducer)
            except UsageError as error:
                return fail(error)
            raise
        exchange = AgentExchange(self._clock, method, uri, headers, head, idempotent)
        exchange.expected_response_bytes = expected_response_bytes
        exchange.timeout_s = timeout_s
        exchange.again_after_silence = again_after_silence
        if headers is not None:
            exchange.closes = _closes(headers)
            exchange.expects_continue = bodyProducer is not None and headers.hasHeader(b"expect")
        if bodyProducer is not None:
            _add_body(exchange, bodyProducer)
        origin.pool.submit(exchange)
        return exchange.result

    def _head_of(
        self, method: bytes, uri: bytes, headers: Headers | None, body: IBodyProducer | None
    ) -> tuple[_Origin, bytes]:
        """Return the origin and the head of a request. Raises UsageError, AgentClosed."""
        if method not in _KNOWN_METHODS:
            _check_method(method)
        if _URI.fullmatch(uri) is None:
            raise UsageError(f"The URI {uri!r} has characters that must be percent-encoded.")
        slash = uri.find(b"/", 8)
        origin = self._origins.get(uri[:slash]) if slash > 0 else None
        if origin is None:
            origin = self._origin_of(uri)
        target = uri[origin.prefix_length :]
        if b"#" in target:
            target = target[: target.index(b"#")]
        if target[:1] != b"/":
            target = b"/" + target
        target = origin.before + target
        if headers is None and body is None and method == b"GET":
            return origin, b"GET " + target + origin.host_line + b"\r\n"
        return origin, _head(method, target, origin, headers, body)

    def pool_for(self, uri: bytes) -> HostPool:
        """Return the pool of connections to the host of a URI, for raw requests."""
        check_own_thread(_AGENT)
        return self._origin_of(uri).pool

    def drop(self, uri: bytes, reason: str) -> None:
        """
        Abort all connections to the host of a URI; the host's requests fail and are not repeated.

        Args:
            reason: a clause for the errors, such as "it was too slow".
        """
        check_own_thread(_AGENT)
        self._origin_of(uri).pool.drop(reason)

    def close(self) -> Deferred[None]:
        """
        Fail all requests and close all connections; fires when the connections are closed.

        Wait for responses before you call this. Later requests fail with ``AgentClosed``.
        """
        try:
            check_own_thread(_AGENT)
        except UsageError as error:
            return fail(error)
        self._closed = True
        self._origins = {}
        closed: Deferred[None] = DeferredList(
            [pool.close() for pool in self._pools.values()]
        ).addCallback(lambda _: None)
        return closed

    def _origin_of(self, uri: bytes) -> _Origin:
        check_kind(uri, bytes, "the URI of a request", "bytes")
        if self._closed:
            raise AgentClosed(
                "The agent was closed, so it sends no more requests; make another one."
            )
        match = _ORIGIN.match(uri)
        if match is None or uri[match.end() : match.end() + 1] not in (b"/", b"?", b"#", b""):
            raise UsageError(
                f"The URI {uri!r} must begin with http:// or https:// and a host, without a user."
            )
        prefix = match.group()
        parsed = URI.fromBytes(prefix.lower())
        key = (parsed.scheme, parsed.host, parsed.port)
        pool = self._pools.get(key)
        if pool is None:
            if len(self._pools) >= MAX_HOSTS:
                self._pools = {key: pool for key, pool in self._pools.items() if not pool.is_idle}
                self._origins.clear()
            server = f"{parsed.host.decode('latin-1')}:{parsed.port}"
            pool = self._pools[key] = HostPool(
                self._clock,
                lambda: self._endpoints.endpointForURI(parsed),
                server,
                self._limits,
                serial=self._serial is True or parsed.host in self._serial,
                cautious=True,
            )
        if len(self._origins) >= MAX_HOSTS:
            self._origins.clear()
        netloc = prefix[prefix.index(b"//") + 2 :]
        proxy = None
        if parsed.scheme == b"http" and isinstance(self._endpoints, ProxyEndpoints):
            proxy = self._endpoints.proxy_of(parsed)
            # A SOCKS5 proxy forwards bytes, not requests.
            proxy = proxy if proxy is None or proxy.socks is None else None
        origin = self._origins[prefix] = _Origin(pool, len(prefix), netloc, proxy)
        return origin


def _serial_hosts(serial: object) -> Literal[True] | frozenset[bytes]:
    """Return the names of the hosts that get one request at a time; True for all hosts. Raises UsageError."""
    if serial is True:
        return True
    names = [] if serial is False else serial
    if (
        isinstance(names, (str, bytes))
        or not isinstance(names, Collection)
        or not all(isinstance(name, str) and name.isascii() for name in names)
    ):
        raise UsageError(f"serial is True, False, or a list of names of hosts, not {shown(serial)}")
    return frozenset(name.lower().encode("ascii") for name in names)


def _closes(headers: Headers) -> bool:
    """Return whether the headers of a request have ``Connection: close``."""
    return b"close" in b",".join(headers.getRawHeaders(b"connection", [])).lower()


def _add_body(exchange: AgentExchange, body: IBodyProducer) -> None:
    exchange.producer = body
    exchange.chunked = framing_of(body)[1]
    if not exchange.chunked:
        exchange.request_bytes += int(body.length)


def _check_kinds(method: object, uri: object, headers: object, producer: object) -> None:
    """Raise UsageError for the first argument of a request that has a wrong type."""
    check_kind(method, bytes, "the method of a request", "bytes")
    check_kind(uri, bytes, "the URI of a request", "bytes")
    check_kind(headers, (Headers, type(None)), "headers", "a Headers")
    if producer is not None:
        attributes = ("length", "startProducing", "stopProducing")
        check_has(producer, attributes, "the body of a request", "an IBodyProducer")


def _check_method(method: bytes) -> None:
    if _TOKEN.fullmatch(method) is None:
        raise UsageError(f"{method!r} is not a method of HTTP.")
    if method == b"CONNECT":
        raise UsageError("CONNECT is not supported by this agent; use ProxyEndpoints for a proxy.")


def _head(
    method: bytes,
    target: bytes,
    origin: _Origin,
    headers: Headers | None,
    producer: IBodyProducer | None,
) -> bytes:
    """Return request line and header lines; raise UsageError if an argument would inject a line."""
    lines = [method, b" ", target, origin.host_line]
    if headers is not None:
        for name, values in headers.getAllRawHeaders():
            lower = name.lower()
            if lower in _FRAMING:
                continue
            if lower == b"host":
                lines[3] = b" HTTP/1.1\r\n" + origin.for_proxy
            if _TOKEN.fullmatch(name) is None:
                raise UsageError(f"{name!r} is not the name of a header.")
            for value in values:
                if _BAD_IN_VALUE.search(value):
                    raise UsageError(f"The value of the header {name!r} has a line break in it.")
                lines += (name, b": ", value, b"\r\n")
    if producer is not None:
        lines.append(framing_of(producer)[0])
    elif method in _METHODS_WITH_BODY:
        lines.append(b"Content-Length: 0\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)
