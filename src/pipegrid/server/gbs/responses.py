"""
The answers of the GBS server as bytes: small answers are constants, large ones have a head and a stream.

Source: Tahoe-LAFS's ``http-storage-node-protocol.rst``, and how its server 1.20 behaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Protocol

import attrs

from pipegrid.core.hashes import Buffer
from pipegrid.wire import gbs_cbor_bodies, gbs_paths_headers

STREAM_PIECE_BYTES = 128 * 1024

REASONS = {each.value: each.phrase.encode("ascii") for each in HTTPStatus}
# Python before 3.13 has older phrases for these two.
REASONS |= {413: b"Content Too Large", 416: b"Range Not Satisfiable"}

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class ResponseBody(Protocol):
    """The body of a large answer."""

    length: int

    def read(self) -> bytes:
        """Return the next bytes, or nothing at the end; waits at most for the disk."""

    def close(self) -> None:
        """Release the resources of the body; may be called twice."""


@attrs.frozen(eq=False)
class Answer:
    """
    One answer, independent of the connection; ``render`` adds the parts that depend on the connection.

    Attributes:
        status: the HTTP status.
        head: status line and headers, without the empty line.
        body: the bytes of the body, if there is no stream.
        stream: the body of a large answer, which the receiver of the answer must close; None for a small one.
    """

    status: int
    head: bytes
    body: bytes = b""
    stream: ResponseBody | None = None

    def render(self, with_body: bool, connection: bytes = b"") -> bytes:
        """
        Return head and body; if there is a stream, only the head.

        Args:
            with_body: False for the answer to a HEAD request.
            connection: a whole header line to add, or nothing.
        """
        if with_body:
            return self.head + connection + b"\r\n" + self.body
        return self.head + connection + b"\r\n"


def make(
    status: int,
    body: bytes = b"",
    content_type: str = "",
    headers: bytes = b"",
    stream: ResponseBody | None = None,
) -> Answer:
    """
    Return an answer.

    Args:
        headers: whole header lines to add.
    """
    head = b"HTTP/1.1 %d %s\r\n" % (status, REASONS[status])
    if content_type:
        head += b"Content-Type: %s\r\n" % content_type.encode("ascii")
    if status != 204:
        length = len(body) if stream is None else stream.length
        head += b"Content-Length: %d\r\n" % length
    return Answer(status, head + headers, body, stream)


def text(status: int, sentence: str) -> Answer:
    """Return an answer that rejects a request, with the reason."""
    return make(status, sentence.encode("utf-8"), "text/plain; charset=utf-8")


def page(status: int, headers: bytes = b"") -> Answer:
    """Return a page for browsers that shows the status."""
    title = b"%d %s" % (status, REASONS[status])
    body = b"<!doctype html>\n<title>%s</title>\n<h1>%s</h1>\n" % (title, title)
    return make(status, body, "text/html; charset=utf-8", headers)


def cbor(body: bytes, status: int = 200, headers: bytes = b"") -> Answer:
    """Return an answer whose body is CBOR; ``headers`` are whole lines, as in ``make``."""
    return make(status, body, gbs_paths_headers.CONTENT_TYPE, headers)


class ResponsePieces:
    """
    A long message in memory, sent in pieces.

    Args:
        held: called once, when the message is no longer in memory, to stop counting it.
    """

    def __init__(self, pieces: Sequence[Buffer], held: Callable[[], None]) -> None:
        self.length = sum(map(len, pieces))
        self._pieces: deque[memoryview] = deque(memoryview(each) for each in pieces)
        self._held: Callable[[], None] | None = held

    def read(self) -> bytes:
        """Return the next bytes, up to ``STREAM_PIECE_BYTES``, like a stream of a share."""
        gathered: list[memoryview] = []
        room = STREAM_PIECE_BYTES
        while self._pieces and room:
            piece = self._pieces.popleft()
            if len(piece) > room:
                self._pieces.appendleft(piece[room:])
                piece = piece[:room]
            gathered.append(piece)
            room -= len(piece)
        return b"".join(gathered)

    def close(self) -> None:
        """Drop the unsent bytes, and call ``held`` if it was not called yet."""
        self._pieces.clear()
        held, self._held = self._held, None
        if held is not None:
            held()


OK = make(200)
LEASE_ADDED = make(204)
UNAUTHORIZED = make(401, b"Wrong Authorization header")
WRONG_SECRET = make(401)
NOT_FOUND = make(404)
NO_PAGE = page(404)
ABORT_TOO_LATE = make(405)
NOT_ACCEPTABLE = make(406)
CONFLICT = make(409)
TOO_LARGE = make(413)
WRONG_TYPE = make(415)
BAD_CONTENT_RANGE = make(416)
HEAD_TOO_LARGE = make(431)
FAILED = page(500)
BUSY = make(503)
NO_SPACE = make(507)
QUOTA_REACHED = text(507, "the quota of this server is used up")
SHARE_COMPLETE = cbor(gbs_cbor_bodies.pack_required(()), 201)
SHARE_MISSING = make(404, content_type=gbs_paths_headers.SHARE_CONTENT_TYPE)
BAD_RANGE = make(416, content_type=gbs_paths_headers.SHARE_CONTENT_TYPE)
EMPTY_RANGE = make(204, content_type=gbs_paths_headers.SHARE_CONTENT_TYPE)
