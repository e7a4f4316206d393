"""
Responses: a status with a text or JSON, work that returns one, and responses that are written piece by piece;
and errors of the web API: the status and text of each exception.

A client that disconnects cancels the work that its request has started. Clients compare words of Tahoe-LAFS's
texts, which come first: ``NotEnoughSharesError:``, ``No such child:``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any
from urllib.parse import quote

import attrs
from twisted.internet.defer import CancelledError
from twisted.internet.interfaces import IPushProducer
from twisted.logger import Logger
from twisted.python.failure import Failure
from twisted.web.server import NOT_DONE_YET
from zope.interface import implementer

from pipegrid.core.text import printable
from pipegrid.errors import (
    AccessProhibited,
    ChildExists,
    CorruptionError,
    DirectoryError,
    NoSuchChild,
    NotEnoughSharesError,
    PipegridError,
    RollbackError,
    SourceError,
    UncoordinatedWriteError,
    UnhappyError,
    UsageError,
)
from pipegrid.gateway.body_spool import BodyRefused
from pipegrid.reactor.deferreds import Waiters, start_cancellable


class WebError(PipegridError):
    """
    A request that gets an error as response.

    Attributes:
        status: of the response.
        headers: further ones.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


def no_such_child(name: str) -> WebError:
    """Return the error for a name that is not in its directory."""
    return WebError(404, f"No such child: {printable(name)}")


def problem_of(error: BaseException) -> WebError:
    """Return an exception as the error that its request gets as response."""
    if isinstance(error, WebError):
        return error
    if isinstance(error, BodyRefused):
        return WebError(error.status, str(error))
    if isinstance(error, NoSuchChild):
        return WebError(404, f"No such child: {printable(error.name)}: {error}")
    if isinstance(error, NotEnoughSharesError):
        return WebError(410, _not_enough(error))
    for kind, status, beginning in _PROBLEMS:
        if isinstance(error, kind):
            return WebError(status, f"{beginning}{error}")
    return WebError(500, "the gateway failed unexpectedly; its log has the details")


_PROBLEMS: tuple[tuple[type[PipegridError], int, str], ...] = (
    (AccessProhibited, 403, ""),
    (ChildExists, 409, ""),
    (CorruptionError, 410, "UnrecoverableFileError: "),
    (RollbackError, 410, "UnrecoverableFileError: "),
    (UnhappyError, 503, "UploadUnhappinessError: "),
    (UncoordinatedWriteError, 500, "UncoordinatedWriteError: "),
    (DirectoryError, 500, "the directory cannot be read: "),
    (UsageError, 400, ""),
    (SourceError, 507, ""),
    (PipegridError, 500, ""),
)
"""Of other errors the status, and the beginning of the text; the first that fits counts."""


def _not_enough(error: NotEnoughSharesError) -> str:
    if error.found:
        found = ",".join(f"sh{number}" for number in range(error.found))
        return (
            f"NotEnoughSharesError: ran out of shares: complete={found} pending= overdue= unused= "
            f"need {error.needed}: {error}"
        )
    return f"NoSharesError: no shares (need {error.needed}): {error}"


TEXT = "text/plain;charset=utf-8"
JSON_OF_OBJECTS = "text/plain;charset=utf-8"
"""The media type that Tahoe-LAFS sends with JSON of objects."""

log = Logger()


@attrs.frozen
class HttpResponse:
    """
    A response to a request.

    Attributes:
        body: text is sent in UTF-8.
        headers: further ones, by name.
    """

    body: str | bytes = b""
    status: int = 200
    content_type: str = TEXT
    headers: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def data(self) -> bytes:
        """The bytes of the body, as sent."""
        return self.body.encode("utf-8") if isinstance(self.body, str) else self.body


def json_text(value: object) -> str:
    """Return JSON as Tahoe-LAFS writes it for objects: ASCII, indented by one blank, with a line end."""
    return json.dumps(value, indent=1) + "\n"


def redirect(location: str, status: int = 302) -> HttpResponse:
    """Return a redirection; ``location`` is percent-encoded where necessary."""
    safe = quote(location, safe="/:?&=%#@+,;!$'()*~[]-._")
    return HttpResponse(f"The document is at {safe}\n", status, headers={"Location": safe})


def send(request: Any, response: HttpResponse) -> None:
    """Send a response to a request, and finish it."""
    data = response.data
    request.setResponseCode(response.status)
    for name, value in response.headers.items():
        request.setHeader(name, value)
    if response.status == 304:
        request.finish()
        return
    request.setHeader("content-type", response.content_type)
    request.setHeader("content-length", str(len(data)))
    if request.method != b"HEAD":
        request.write(data)
    request.finish()


def plain_problem(request: Any, problem: WebError) -> HttpResponse:
    """Return the response of an error for programs: text."""
    return HttpResponse(str(problem), problem.status, TEXT, problem.headers)


def respond(
    request: Any,
    work: Coroutine[Any, Any, HttpResponse | None],
    clock: Any,
    explain: Callable[[Any, WebError], HttpResponse] = plain_problem,
) -> int:
    """
    Answer a request with the result of work, or with its error; for ``IResource.render``.

    Args:
        work: returns None if it has written the response itself, and finished it.
        clock: the reactor as a source of time.
        explain: returns the response for an error.
    """
    running = start_cancellable(work, clock)
    gone: list[bool] = []

    def left(_: Failure) -> None:
        gone.append(True)
        running.cancel()

    request.notifyFinish().addErrback(left)

    def ended(result: HttpResponse | Failure | None) -> None:
        if gone:
            return
        if isinstance(result, Failure):
            _fail(request, result, explain)
        elif result is not None:
            send(request, result)

    running.addBoth(ended)
    running.addErrback(lambda failure: log.failure("a response was not sent", failure))
    return NOT_DONE_YET


def _fail(request: Any, failure: Failure, explain: Callable[[Any, WebError], HttpResponse]) -> None:
    """Answer with an error or, if the response has begun, close the connection."""
    if request.startedWriting:
        log.info("a response ended before its end: {error}", error=str(failure.value))
        request.abort()
        return
    assert failure.value is not None
    if failure.check(CancelledError):
        log.info("a request was cancelled")
    elif not failure.check(PipegridError):
        log.failure("a request failed", failure)
    for name in (b"content-range", b"content-disposition", b"etag"):
        request.responseHeaders.removeHeader(name)
    send(request, explain(request, problem_of(failure.value)))


@implementer(IPushProducer)
class ResponseStream:
    """
    Writes a response piece by piece, as fast as its client reads.

    Args:
        request: twisted.web's request.

    Attributes:
        has_begun: whether a piece was written; until then another response can be sent instead.
    """

    def __init__(self, request: Any) -> None:
        self._request = request
        self._paused = False
        self._resumed: Waiters[None] = Waiters()
        self._producer: IPushProducer | None = None
        self.has_begun = False

    def write(self, data: bytes) -> None:
        """Write a piece; if the response may be long, call ``ready`` first."""
        if not self.has_begun:
            self.has_begun = True
            self._request.registerProducer(self, True)
        self._request.write(data)

    async def ready(self) -> None:
        """Return when the client has read most of the pieces written so far."""
        while self._paused:
            await self._resumed.wait()

    def follow(self, producer: IPushProducer | None) -> None:
        """Pause a producer of pieces while the client reads slowly; None: there is no producer any more."""
        self._producer = producer
        if producer is not None and self._paused:
            producer.pauseProducing()

    def finish(self) -> None:
        """End the response; nothing more can be written."""
        if self.has_begun:
            self._request.unregisterProducer()
        self._request.finish()

    def pauseProducing(self) -> None:
        """See ``IPushProducer``; the client reads more slowly than pieces are written."""
        self._paused = True
        if self._producer is not None:
            self._producer.pauseProducing()

    def resumeProducing(self) -> None:
        """See ``IPushProducer``; the client has read most of the pieces."""
        self._paused = False
        self._resumed.fire(None)
        if self._producer is not None:
            self._producer.resumeProducing()

    def stopProducing(self) -> None:
        """See ``IPushProducer``; the client has disconnected, and ``respond`` cancels the work."""
        self.resumeProducing()
