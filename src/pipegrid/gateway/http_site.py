"""
The gateway's HTTP server: limits of requests, checks of request heads, default headers, and the access log.

``GatewayLimits`` has the limits. A ``BodySpool`` collects the body of a request; a form with files is parsed
into a ``FormBody``. A request is handled when its body is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from twisted.internet.defer import DeferredSemaphore
from twisted.internet.interfaces import IAddress, IHalfCloseableProtocol, IReactorTime
from twisted.internet.protocol import connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.http import HTTPChannel, parse_qs
from twisted.web.http_headers import Headers
from twisted.web.resource import IResource
from twisted.web.server import Request, Site
from zope.interface import implementer

from pipegrid.gateway.body_spool import BodyRefused, BodySpool, SpoolSpace
from pipegrid.gateway.form_body import FormBody
from pipegrid.gateway.gateway_settings import GatewayLimits, GatewaySettings
from pipegrid.gateway.http_response import problem_of, send
from pipegrid.gateway.request_origin import refusal
from pipegrid.gateway.web_api.web_arguments import MULTIPART, form_kind
from pipegrid.gateway.web_ui.page_templates import problem_response
from pipegrid.gateway.web_ui.transfers_page import UploadProgress
from pipegrid.reactor.deferreds import Timer
from pipegrid.reactor.tcp_transport import send_written, socket_of, unsent_bytes

MAX_HEAD_BYTES = 64 << 10
"""Maximum size of a request line with all headers: a file name of 5000 characters takes up to 45 kB."""

MAX_HEADERS = 100

MAX_EARLY_BYTES = 16 << 10
"""Maximum size of further requests that are read from a client before its current request is answered."""

LINGER_S = 2.0
"""How long a connection stays open after its request head was refused, for the client to read the error."""

HEADERS = (
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'",
    ),
)
"""Headers of every response; a resource can replace them."""

SHOWN = frozenset(
    {
        b"",
        b"interface",
        b"statistics",
        b"status",
        b"storage",
        b"static",
        b"metrics",
        b"restic",
        b"helper_status",
    }
)
"""First parts of paths that the log shows, apart from ``uri`` and similar; others may be mistyped caps."""

log = Logger()


@runtime_checkable
class LooksAtHeads(Protocol):
    """A resource below ``/`` that can refuse a request body before the body arrives."""

    def look_at_head(
        self, method: bytes, path: bytes, headers: Headers, length: int | None, body: BodySpool
    ) -> None:
        """
        Refuse the body of a request, set its maximum size, or do nothing.

        Args:
            path: path of the request, with its query.
            length: size of the body that the request announced, in bytes; None: not announced.
        """


class GatewayRequest(Request):
    """
    One request to the gateway.

    Attributes:
        body: the request body; complete when the request is rendered, unless it was refused.
        has_head: whether the head has arrived.
        is_whole: whether the head and the body have arrived, or the body was refused before the client sent
            it.
    """

    defaultContentType = b"text/plain;charset=utf-8"

    body: BodySpool
    channel: Any
    transport: Any

    def __init__(self, channel: Any, *args: Any, **options: Any) -> None:
        super().__init__(channel, *args, **options)
        self._began_s = channel.site.clock.seconds()
        self.has_head = self.is_whole = False

    def gotLength(self, length: int | None) -> None:
        """Check the head of the request, and create the ``BodySpool`` for its body."""
        channel = self.channel
        self.has_head = True
        self.body = self.content = self._new_body(channel, length)
        why = self._refusal(channel)
        if why is not None:
            self.body.refuse(BodyRefused(why, 403))
        else:
            channel.site.look_at_head(
                channel.method, channel.path, self.requestHeaders, length, self.body
            )

    def _new_body(self, channel: Any, length: int | None) -> BodySpool:
        if channel.method == b"POST":
            given = (self.requestHeaders.getRawHeaders("content-type") or [""])[0]
            kind, boundary = form_kind(given)
            if kind == MULTIPART:
                fields_bytes = channel.site.limits.form_bytes
                return FormBody(channel.site.space, boundary, fields_bytes, length)
        return BodySpool(channel.site.space, length)

    def _refusal(self, channel: Any) -> str | None:
        def values(name: bytes) -> list[bytes]:
            return list(self.requestHeaders.getRawHeaders(name) or [])

        own = str(getattr(channel.getHost(), "host", "")).lower()
        return refusal(
            channel.method,
            values(b"host"),
            values(b"origin"),
            values(b"sec-fetch-site"),
            (values(b"sec-fetch-mode") or [b""])[0],
            {own, *channel.site.hosts},
        )

    def requestReceived(self, command: bytes, path: bytes, version: bytes) -> None:
        """Handle the request, whose body is complete or was refused."""
        self.is_whole = True
        self.method, self.uri, self.clientproto = command, path, version
        self.path, _, query = path.partition(b"?")
        self.args = parse_qs(query, True)
        self.process()

    def process(self) -> None:
        """Find the resource for the request; if its body was refused, send the error instead."""
        for name, value in HEADERS:
            self.setHeader(name, value)
        refused = self.body.refused
        if refused is not None:
            self.setHeader(b"connection", b"close")
            send(self, problem_response(self, problem_of(refused)))
            return
        super().process()

    def processingFailed(self, reason: Failure) -> Failure:
        """Answer a request whose resource raised an exception, and log the exception."""
        log.failure("a request failed", reason)
        self.setHeader(b"connection", b"close")
        send(self, problem_response(self, problem_of(Exception())))
        return reason

    def unregisterProducer(self) -> None:
        """Remove the producer of the response; the connection may be closed already."""
        if self.channel is None:
            self.producer = None
        else:
            super().unregisterProducer()

    def abort(self) -> None:
        """Close the connection, which shows the client that the response is incomplete."""
        self.transport.abortConnection()

    def log_line(self) -> dict[str, Any]:
        """Return the fields of the request's line in the log; they contain no secret."""
        clock: IReactorTime = self.channel.site.clock
        return {
            "method": self.method.decode("ascii", "replace")[:10],
            "path": shown_path(self.path or b""),
            "status": self.code,
            "bytes": self.sentLength,
            "ms": round((clock.seconds() - self._began_s) * 1000),
        }


def shown_path(path: bytes) -> str:
    """Return a path for the log, without caps and without names of children."""
    first, slash, rest = path[1:].partition(b"/")
    if first in SHOWN:
        return "/" + first.decode("ascii") + ("/[CENSORED]" if rest else slash.decode("ascii"))
    if first not in (b"uri", b"cap", b"file", b"named", b"operations"):
        return "/[CENSORED]"
    return "/" + first.decode("ascii") + ("/[CENSORED]" if slash else "")


@implementer(IHalfCloseableProtocol)
class GatewayChannel(HTTPChannel):
    """
    One connection.

    Attributes:
        used_s: time of the last activity, by the clock.
        unread_bytes: response bytes written since the client stopped reading.
        stalled_s: time when the client last stopped reading, by the clock.
    """

    site: GatewaySite
    transport: Any
    _head: Timer
    _stall: Timer
    MAX_LENGTH = MAX_HEAD_BYTES
    totalHeadersSize = MAX_HEAD_BYTES
    maxHeaders = MAX_HEADERS

    def __init__(self) -> None:
        super().__init__()
        self.used_s = 0.0
        self.unread_bytes = 0
        self.stalled_s = 0.0
        self._unsent_bytes = 0
        self._stopped_reading = False
        self._kept: list[bytes] = []
        self._early_bytes = 0
        self._in_head = self._refused = False
        self._head_bytes = self._head_lines = 0

    @property
    def method(self) -> bytes:
        """The method of the request whose head has arrived last."""
        return bytes(self._command)

    @property
    def path(self) -> bytes:
        """The path and query of the request whose head has arrived last."""
        return bytes(self._path)

    def connectionMade(self) -> None:
        """Add the connection to the site's open connections, and set its time limits."""
        limits, clock = self.site.limits, self.site.clock
        self.used_s = clock.seconds()
        self._head = Timer(clock, self.abort)
        self._stall = Timer(clock, self._stalled)
        self.site.channels[self] = None
        self.timeOut = int(limits.idle_s)
        mine: Any = self
        mine.callLater = clock.callLater
        super().connectionMade()

    def dataReceived(self, data: bytes) -> None:
        """Read input; the whole head of a request must arrive within ``head_s``."""
        self.used_s = self.site.clock.seconds()
        if self._refused:
            return
        if self._stopped_reading and not self._is_answering:
            self._keep(data)
            return
        if not self._in_head and not self.requests:
            self._in_head = True
            self._head.set(self.site.limits.head_s)
        try:
            super().dataReceived(data)
        except Exception:
            log.failure("a connection failed")
            self.abort()

    def _keep(self, data: bytes) -> None:
        """Keep input, and read no more until the client has read the responses to its earlier requests."""
        self._kept.append(data)
        self.transport.pauseProducing()

    def allHeadersReceived(self) -> None:
        """Handle the complete head of a request; the time limit for the head ends."""
        self._in_head = False
        self._head_bytes = self._head_lines = 0
        self._head.stop()
        super().allHeadersReceived()

    def _send100Continue(self) -> None:
        """
        Ask the client, which waits for this, to send the body; if the body is refused, send the error
        instead.
        """
        if self.length == 0:  # the client sends no body
            return
        request = self.requests[-1]
        if request.body.refused is None:
            super()._send100Continue()
            return
        self.persistent = False
        request.requestReceived(self.method, self.path, self._version)

    def lineReceived(self, line: bytes) -> None:
        """Read a line of a request head, unless the connection is refused."""
        self._head_bytes += len(line)
        self._head_lines += 1
        if not self._refused:
            super().lineReceived(line)

    def lineLengthExceeded(self, line: bytes) -> None:
        """Refuse a line that is longer than a whole head may be."""
        self._refuse(_TOO_LARGE, _TOO_LONG)

    def rawDataReceived(self, data: bytes) -> None:
        """Read a part of a body, unless the request has been answered."""
        if not self.requests or self._refused:
            return
        if self._is_answering:
            self._early_bytes += len(data)
            if self._early_bytes > MAX_EARLY_BYTES:
                # Twisted pauses the transport as well, but not while the client has stopped reading the
                # response.
                self.transport.pauseProducing()
        super().rawDataReceived(data)

    @property
    def _is_answering(self) -> bool:
        """Whether a request has arrived completely and is not answered completely."""
        return bool(self.requests and self.requests[0].is_whole)

    def requestDone(self, request: Any) -> None:
        """Begin the next request of the client, or wait for it, since a response is complete."""
        self.used_s = self.site.clock.seconds()
        self._early_bytes = 0
        super().requestDone(request)
        if self._stopped_reading and (rest := self.clearLineBuffer()):
            self._keep(rest)  # further requests, which arrived together with this one

    def write(self, data: bytes) -> None:
        """Write to the client; what is written after the client has stopped reading counts as unread."""
        super().write(data)
        self._count_unread(len(data))

    def writeSequence(self, iovec: Iterable[bytes]) -> None:
        """Write pieces to the client."""
        pieces = list(iovec)
        super().writeSequence(pieces)
        self._count_unread(sum(map(len, pieces)))

    def _count_unread(self, size: int) -> None:
        if self._stopped_reading:
            self.site.hold_unread(self, size)

    def pauseProducing(self) -> None:
        """
        Note that the client reads too slowly; it is disconnected after ``limits.stalled_s`` without reading.
        """
        self._stopped_reading = True
        self.stalled_s = self.site.clock.seconds()
        self._stall.set(self.site.limits.stalled_s)
        self._unsent_bytes = unsent_bytes(self.transport)
        super().pauseProducing()

    def _stalled(self) -> None:
        """Disconnect the client, unless it has read some bytes since the previous check."""
        before, self._unsent_bytes = self._unsent_bytes, unsent_bytes(self.transport)
        if 0 < self._unsent_bytes < before:
            self._stall.set(self.site.limits.stalled_s)
        else:
            self.abort()

    def timeoutConnection(self) -> None:
        """
        Close an idle connection; if its client still has a response to read, wait for another ``idle_s``
        instead.
        """
        if self._stopped_reading:
            self.setTimeout(self.timeOut)
        else:
            super().timeoutConnection()

    def resumeProducing(self) -> None:
        """Continue, since the client has read what was written."""
        self._stall.stop()
        self._stopped_reading = False
        self.site.release_unread(self)
        super().resumeProducing()
        kept, self._kept = b"".join(self._kept), []
        if kept:
            self.dataReceived(kept)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Remove the connection from the site, and cancel its requests."""
        self._head.stop()
        self._stall.stop()
        self.site.channels.pop(self, None)
        self.site.release_unread(self)
        self._kept = []
        for request in self.requests:
            self.site.log_interrupted(self, request)
        super().connectionLost(reason)

    def readConnectionLost(self) -> None:
        """
        Close the connection of a client that sends no more; if its last request is incomplete, send an error
        first.
        """
        if self._refused:
            self.transport.loseConnection()  # after the error is sent
        elif not self.requests or self.requests[-1].is_whole:
            self.abort()
        else:
            text = "the body ended before its length, or its last chunk; send it again, whole"
            self._refuse(_BAD, text, sends_on=False)

    def writeConnectionLost(self) -> None:
        """Do nothing: the connection is about to end."""

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abortConnection()

    def _respondToBadRequestAndDisconnect(self) -> None:
        if self._head_bytes > self.totalHeadersSize or self._head_lines > self.maxHeaders:
            self._refuse(_TOO_LARGE, _TOO_LONG)
        else:
            self._refuse(
                _BAD,
                "this is not a valid HTTP request; its line, a header or its length is malformed",
            )

    def _refuse(self, status: bytes, text: str, sends_on: bool = True) -> None:
        """
        Send an error, and drop what the client still sends; an immediate close could destroy the error.

        Args:
            sends_on: False: the client has ended its side of the connection, so nothing is left to drop.
        """
        if self._refused:
            return
        self._refused = True
        data = f"{text}\n".encode()
        self.transport.write(
            b"HTTP/1.1 %s\r\nConnection: close\r\nContent-Type: text/plain\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (status, len(data), data)
        )
        if not sends_on or not hasattr(self.transport, "loseWriteConnection"):
            self.loseConnection()
            return
        self.transport.unregisterProducer()
        self.transport.loseWriteConnection()
        self._head.stop()
        self._head.set(LINGER_S)


_BAD, _TOO_LARGE = b"400 Bad Request", b"431 Request Header Fields Too Large"
_TOO_LONG = (
    f"the head of the request has more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers; shorten the "
    "name, or leave out headers"
)


class GatewaySite(Site):
    """
    Accepts connections, up to a maximum number.

    Args:
        root: the resource of ``/``.
        clock: the reactor as a source of time.

    Attributes:
        channels: open connections.
        downloads: limits how many large downloads are fetched at the same time.
        archives: limits how many archives are sent at the same time; a further one is refused.
        uploads: progress of the uploads that pages watch.
        unread_bytes: response bytes written to clients that have stopped reading.
        accepted, refused: number of connections since the start.
        served: number of answered requests since the start, by status.
    """

    displayTracebacks = False
    noisy = False
    protocol: Any = GatewayChannel

    def __init__(
        self,
        root: IResource,
        settings: GatewaySettings,
        clock: IReactorTime,
        tell: Callable[..., object] | None = None,
    ) -> None:
        super().__init__(root, requestFactory=GatewayRequest, reactor=clock)
        self.clock = clock
        self.limits: GatewayLimits = settings.limits
        self.hosts = settings.hosts
        self.space = SpoolSpace(settings.temporary, settings.limits.spare_bytes)
        self.downloads = DeferredSemaphore(settings.limits.downloads)
        self.archives = DeferredSemaphore(settings.limits.archives)
        self.uploads = UploadProgress()
        self.channels: dict[GatewayChannel, None] = {}
        self.unread_bytes = 0
        self.accepted = self.refused = 0
        self.served: dict[int, int] = {}
        self._tell = tell or log.info

    def buildProtocol(self, addr: IAddress | None) -> Any:
        """
        Return a new connection. If the maximum number is open, close the one that has been idle the longest;
        return None if all have requests.
        """
        if len(self.channels) >= self.limits.connections and not self._make_space():
            self.refused += 1
            return None
        self.accepted += 1
        return super().buildProtocol(addr)

    def _make_space(self) -> bool:
        idle = [channel for channel in self.channels if not channel.requests]
        victim = min(idle, key=lambda channel: channel.used_s, default=None)
        if victim is None:
            return False
        self.channels.pop(victim, None)
        victim.abort()
        return True

    def hold_unread(self, channel: GatewayChannel, size: int) -> None:
        """
        Count bytes that were written to a client that has stopped reading.

        If the bytes for all these clients exceed ``unread_bytes``, the client that stopped first is
        disconnected. The last such client stays connected, since a single response may exceed the limit.
        """
        channel.unread_bytes += size
        self.unread_bytes += size
        if self.unread_bytes > self.limits.unread_bytes:
            for each in self.channels:
                self._deduct_read(each)
        while channel.unread_bytes < self.unread_bytes > self.limits.unread_bytes:
            stalled = [each for each in self.channels if each.unread_bytes]
            if len(stalled) < 2:
                return
            first = min(stalled, key=lambda each: each.stalled_s)
            self.release_unread(first)
            first.abort()

    def _deduct_read(self, channel: GatewayChannel) -> None:
        """
        Subtract a client's response bytes that the operating system has taken: they are not in this process's
        memory any more.
        """
        socket = socket_of(channel.transport)
        if socket is not None:
            read_bytes = max(0, channel.unread_bytes - unsent_bytes(socket))
            channel.unread_bytes -= read_bytes
            self.unread_bytes -= read_bytes

    def release_unread(self, channel: GatewayChannel) -> None:
        """Subtract all unread bytes of a client that has read everything or has disconnected."""
        self.unread_bytes -= channel.unread_bytes
        channel.unread_bytes = 0

    def look_at_head(
        self, method: bytes, path: bytes, headers: Headers, length: int | None, body: BodySpool
    ) -> None:
        """Let the resource that handles a path refuse a request body before the body arrives."""
        first = path.split(b"?")[0].split(b"/", 2)[1:2]
        resource: Any = self.resource
        part = resource.children.get(first[0]) if first else None
        if isinstance(part, LooksAtHeads):
            part.look_at_head(method, path, headers, length, body)

    def startFactory(self) -> None:
        """Do nothing: twisted.web's log file is not used."""

    def stopFactory(self) -> None:
        """Do nothing: connections are closed by ``close_all``."""

    def close_all(self) -> None:
        """Close all connections at once."""
        for channel in list(self.channels):
            channel.abort()

    @property
    def running(self) -> list[Any]:
        """Requests that are being received or handled."""
        return [request for channel in self.channels for request in channel.requests]

    def log(self, request: Any) -> None:
        """Log a request that was answered, and count it."""
        send_written(request.transport)  # the client need not wait until the log is written
        self.served[request.code] = self.served.get(request.code, 0) + 1
        self._tell("{method} {path} {status} {bytes} B {ms} ms", **request.log_line())

    def log_interrupted(self, channel: GatewayChannel, request: GatewayRequest) -> None:
        """Log a request whose client disconnected before the request or the response was complete."""
        if request.is_whole:
            self._tell("{method} {path} interrupted after {bytes} B {ms} ms", **request.log_line())
        elif request.has_head:
            self._tell(
                "{method} {path} interrupted after {bytes} B of its body",
                method=channel.method.decode("ascii", "replace")[:10],
                path=shown_path(channel.path.partition(b"?")[0]),
                bytes=request.body.size,
            )
