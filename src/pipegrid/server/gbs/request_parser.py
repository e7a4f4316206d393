"""
Parses a client's bytes into requests (heads, pieces of bodies, and ends) with limits; uses llhttp through
httptools.
"""

from __future__ import annotations

from typing import Any, Protocol

import httptools

from pipegrid.server.gbs import responses
from pipegrid.server.gbs.request_check import SECRET_HEADER, WANTED_HEADERS, Request
from pipegrid.server.gbs.responses import Answer

MAX_HEAD_BYTES = 16384
MAX_HEADERS = 500

PASSED_ON_BYTES = 32768
"""
If at least this many bytes of a body are left, they bypass llhttp, which would only copy them. After the
body, a new llhttp is created, which takes some time.
"""

FEW_CHUNKS = 1000
LEAST_CHUNK_BYTES = 64
"""Smallest average chunk in bytes if a body has many: each takes a microsecond, however small it is."""


class Listener(Protocol):
    """Receives the parts of requests that ``RequestParser.feed`` finds."""

    def request_began(self) -> None:
        """Note that the first byte of a request has arrived."""

    def head_found(self, request: Request) -> None:
        """Accept the complete head of a request; pieces of its body may follow, and then its end."""

    def body_found(self, data: bytes) -> None:
        """Accept a piece of the body that belongs to the last head."""

    def end_found(self) -> None:
        """Note that the request is complete, including its body."""

    def nonsense_found(self, answer: Answer, reason: str) -> None:
        """
        Note that the input from here on is not HTTP, or exceeds a limit. This is called at most once, and
        last.
        """


class _Enough(Exception):
    """Stops httptools: no later input is parsed."""


class RequestParser:
    """
    Parses the requests of one connection. After the first invalid input nothing is parsed.

    Attributes:
        in_head: whether a request has begun whose head is not complete.
        broken: whether the input was invalid, so that parsing has ended.
        passed_on_bytes: how many bytes of a body must be left to bypass llhttp.
    """

    passed_on_bytes = PASSED_ON_BYTES

    def __init__(self, listener: Listener) -> None:
        self.broken = False
        self._listener = listener
        self._parser: Any = httptools.HttpRequestParser(self)
        self._head: Request | None = None
        self._head_bytes = 0
        self._header_count = 0
        # Bytes that llhttp has not reported yet: it keeps all of a header, and never reports one that does
        # not end.
        self._unseen_bytes = 0
        self._pieces: list[bytes] = []  # pieces of a body, from this feed
        self._chunks = 0  # chunks of a chunked body
        self._chunked_bytes = 0
        self._body_left = 0  # bytes of a body of known length
        self._passes_on = False

    @property
    def in_head(self) -> bool:
        return self._head is not None

    def feed(self, data: bytes) -> None:
        """
        Parse the next bytes.

        Raises:
            httptools.HttpParserCallbackError: the listener has raised an exception, which is this error's
                cause.
        """
        if self._passes_on:
            data = self._pass_on(data)
            if not data:
                return
        self._unseen_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._give_up(responses.text(400, "this server speaks HTTP/1.1"), "it wants to upgrade")
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _Enough):
                raise  # an error of the server, not of the client
        except httptools.HttpParserError as error:
            self._give_up(responses.text(400, "this is not HTTP/1.1"), f"it sends no HTTP: {error}")
        if self._pieces:
            try:
                self._hand_over()
            except Exception as error:
                raise httptools.HttpParserCallbackError("the listener failed") from error
        if self._unseen_bytes > MAX_HEAD_BYTES:
            self._give_up_head()
        self._passes_on = self._body_left >= self.passed_on_bytes and not self.broken

    def _pass_on(self, data: bytes) -> bytes:
        """Pass part of a body to the listener; returns the bytes that follow the body."""
        body = data[: self._body_left]  # usually all of ``data``, without a copy
        self._body_left -= len(body)
        try:
            self._listener.body_found(body)
            if not self._body_left:
                self._passes_on = False
                self._parser = httptools.HttpRequestParser(self)
                self._listener.end_found()
        except Exception as error:
            raise httptools.HttpParserCallbackError("the listener failed") from error
        return data[len(body) :]

    def _give_up_head(self) -> None:
        self._give_up(responses.HEAD_TOO_LARGE, "its request's head is too large")

    def _give_up(self, answer: Answer, reason: str) -> None:
        if not self.broken:
            self._hand_over()
            self.broken = True
            self._head = None
            self._listener.nonsense_found(answer, reason)

    # Methods that httptools calls.

    def on_message_begin(self) -> None:
        self._head = Request()
        self._head_bytes = 0
        self._header_count = 0
        self._listener.request_began()

    def on_url(self, url: bytes) -> None:
        """Add a part of the URL to the head."""
        self._unseen_bytes = 0
        if self._head is not None:
            self._head_bytes += len(url)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._give_up_head()
            else:
                self._head.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add one whole header to the head, or ignore a trailer."""
        self._unseen_bytes = 0
        self._head_bytes += len(name) + len(value) + 4
        self._header_count += 1
        if self._head_bytes > MAX_HEAD_BYTES or self._header_count > MAX_HEADERS:
            self._give_up_head()
            return
        head = self._head
        if head is None:
            return  # trailers are ignored
        name = name.lower()
        if name == SECRET_HEADER:
            head.secrets.append(value)
        elif name in WANTED_HEADERS:
            head.headers.setdefault(name, value)
        elif name == b"host":
            head.hosts.append(value)
        elif name == b"content-length":
            # llhttp has checked that the value is one number.
            head.content_length = int(value)
        elif name == b"transfer-encoding":
            head.content_length = None
            if value.strip().lower() != b"chunked":
                self._give_up(
                    responses.text(501, "only Transfer-Encoding: chunked is supported"),
                    "it sends a body in a coding that this server does not know",
                )

    def on_headers_complete(self) -> None:
        head, self._head = self._head, None
        if head is None or self.broken:
            return
        parser = self._parser
        head.method = parser.get_method()
        head.keep_alive = parser.should_keep_alive()
        head.http10 = parser.get_http_version() == "1.0"
        if head.http10 and head.content_length is None:
            # A proxy that does not understand chunks, but passes them on, would see another end of the
            # request (RFC 9112, 6.1).
            self._give_up(
                responses.text(400, "HTTP/1.0 does not support chunks"),
                "it sends chunks over HTTP/1.0",
            )
            return
        head.locate()
        self._body_left = head.content_length or 0
        self._chunks = self._chunked_bytes = 0
        self._listener.head_found(head)

    def on_chunk_header(self) -> None:
        """Count the next chunk of a body; stop if the chunks are too small."""
        least_bytes = self._chunks * LEAST_CHUNK_BYTES
        self._chunks += 1
        if self._chunks > FEW_CHUNKS and self._chunked_bytes < least_bytes:
            self._give_up(
                responses.text(400, "its chunks are too small; send longer ones, or a length"),
                f"it sends thousands of chunks with less than {LEAST_CHUNK_BYTES} bytes",
            )
            raise _Enough

    def on_body(self, data: bytes) -> None:
        """
        Keep a piece of a body until all of this feed is parsed: there may be thousands of chunks with one
        byte.
        """
        if not self.broken:
            self._chunked_bytes += len(data)
            self._pieces.append(data)

    def _hand_over(self) -> None:
        """Join the pieces of a body from this feed, and pass them to the listener."""
        pieces = self._pieces
        if not pieces:
            return
        self._pieces = []
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._unseen_bytes = 0
        self._body_left = max(self._body_left - len(data), 0)  # stays 0 for a chunked body
        if not self.broken:
            self._listener.body_found(data)

    def on_message_complete(self) -> None:
        self._hand_over()
        if not self.broken:
            self._listener.end_found()
