"""
HTTP responses, whole or written in pieces, and the status and text with which the web API reports each
exception.

A client that disconnects cancels the work that its request started. Some clients search error texts for
Tahoe-LAFS's words, such as ``NotEnoughSharesError:`` and ``No such child:``, so error texts begin with these
words.
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
    An error that is sent as the response to a request.

    Attributes:
        status: HTTP status of the response.
        headers: additional headers of the response.
    """

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


def no_such_child(name: str) -> WebError:
    """Return the error for a name that does not exist in a directory."""
    return WebError(404, f"No such child: {printable(name)}")


def problem_of(error: BaseException) -> WebError:
    """Return the ``WebError`` that reports an exception to the client."""
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
"""Exception class, HTTP status and beginning of the text; the first class that matches is used."""


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
"""Media type with which Tahoe-LAFS sends JSON about objects."""

log = Logger()


@attrs.frozen
class HttpResponse:
    """
    A response to a request.

    Attributes:
        body: a text is sent as UTF-8.
        headers: additional headers, by name.
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
    """Return JSON as Tahoe-LAFS writes it for objects: ASCII, indented by one space, with a final newline."""
    return json.dumps(value, indent=1) + "\n"


def redirect(location: str, status: int = 302) -> HttpResponse:
    """Return a redirect to ``location``, which is percent-encoded where necessary."""
    safe = quote(location, safe="/:?&=%#@+,;!$'()*~[]-._")
    return HttpResponse(f"The document is at {safe}\n", status, headers={"Location": safe})


def send(request: Any, response: HttpResponse) -> None:
    """Send a complete response to a request."""
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
    """Return the response that reports an error to a program, as text."""
    return HttpResponse(str(problem), problem.status, TEXT, problem.headers)


def respond(
    request: Any,
    work: Coroutine[Any, Any, HttpResponse | None],
    clock: Any,
    explain: Callable[[Any, WebError], HttpResponse] = plain_problem,
) -> int:
    """
    Answer a request with the result or the error of a coroutine; for use in ``IResource.render``.

    Args:
        work: returns the response; None if it has written and finished the response itself.
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
    """Send an error as response; if a response has begun already, close the connection."""
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
    Writes a response in pieces, as fast as the client reads.

    Args:
        request: twisted.web's request.

    Attributes:
        has_begun: whether a piece was written; until then, another response can be sent instead.
    """

    def __init__(self, request: Any) -> None:
        self._request = request
        self._paused = False
        self._resumed: Waiters[None] = Waiters()
        self._producer: IPushProducer | None = None
        self.has_begun = False

    def write(self, data: bytes) -> None:
        """Write a piece of the response; if the response may be long, await ``ready`` before each piece."""
        if not self.has_begun:
            self.has_begun = True
            self._request.registerProducer(self, True)
        self._request.write(data)

    async def ready(self) -> None:
        """Return as soon as the client has read most of what was written."""
        while self._paused:
            await self._resumed.wait()

    def follow(self, producer: IPushProducer | None) -> None:
        """
        Pause ``producer``, which makes the pieces, while the client reads slowly; None: pause no producer any
        more.
        """
        self._producer = producer
        if producer is not None and self._paused:
            producer.pauseProducing()

    def finish(self) -> None:
        """End the response; nothing more can be written."""
        if self.has_begun:
            self._request.unregisterProducer()
        self._request.finish()

    def pauseProducing(self) -> None:
        """See ``IPushProducer``; the client reads more slowly than the pieces are written."""
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
        """See ``IPushProducer``; the client has disconnected, so ``respond`` cancels the work."""
        self.resumeProducing()
