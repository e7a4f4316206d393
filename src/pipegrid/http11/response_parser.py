"""The parser that turns the bytes of responses into events, with llhttp (through httptools). Pure."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import httptools

# The maximum number of interim responses in a row. RFC 9110 section 15.2 sets no limit; a server that sends
# more only keeps the client waiting.
MAX_INFORMATIONAL = 32

PASSED_ON_BYTES = 32768
"""If at least this many bytes of a body are left, they bypass llhttp; for fewer, a new llhttp costs more."""


MANY_EVENTS = 100
"""
If one read gives more events than this, adjacent pieces of a body are joined. Otherwise a server that sends
chunks of one byte would cause a call of the reader for each byte.
"""


class End:
    """The type of ``END``, the event that the response is complete."""

    def __repr__(self) -> str:
        return "END"


END: Final = End()


class Informational:
    """An interim response (1xx); the final response to the same request follows."""

    __slots__ = ("status",)

    def __init__(self, status: int) -> None:
        self.status = status

    def __repr__(self) -> str:
        return f"Informational({self.status})"


class ResponseHead:
    """
    The head of a response.

    Attributes:
        status: 200 to 999.
        reason: the phrase after the status, for people.
        version: (1, 0) or (1, 1).
        headers: (lower-case name, value) in the order of arrival.
        length: the length of the body in bytes; None if it is not announced.
        until_close: whether the body ends with the connection, so that it is unknown whether the body is
            complete.
        keep_alive: whether the server will answer more requests on this connection.
        says_close: whether the head has ``Connection: close``; then the server must ignore later requests.
        head_bytes: the approximate size of the head as sent.
    """

    __slots__ = (
        "head_bytes",
        "headers",
        "keep_alive",
        "length",
        "reason",
        "says_close",
        "status",
        "until_close",
        "version",
    )

    def __init__(self, status: int, reason: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.reason = reason
        self.headers = headers
        self.version = (1, 1)
        self.length: int | None = None
        self.until_close = False
        self.keep_alive = True
        self.says_close = False
        self.head_bytes = 0

    def __repr__(self) -> str:
        return f"<ResponseHead {self.status} {self.length} keep_alive={self.keep_alive}>"


Event = ResponseHead | Informational | bytes | End

_FRAMING = frozenset((b"content-length", b"transfer-encoding", b"connection"))

_LENIENCIES = {
    # Accept a Content-Length in the trailer of a chunked response; in its head, this class refuses one.
    "lenient_chunked_length": True,
    "lenient_headers": True,  # for line folding; control characters are refused here
    "lenient_optional_cr_before_lf": True,
    "lenient_spaces_after_chunk_size": True,  # old Apaches write such spaces
}

_LENGTH_FIELD = b"content-length:"


class _Violation(Exception):
    """Stops llhttp from within a callback; the clause is in ``ResponseParser.error``."""


class ResponseParser:
    """
    Parses the bytes of one connection into the responses to its requests.

    ``expect`` announces, in order, each request that was written. ``feed`` returns a flat list of events. For
    each response these are

        ResponseHead, any number of bytes objects (the body), END

    with ``Informational`` (1xx) before the head. In addition to llhttp's work, this class pairs responses
    with requests, limits heads, and handles HEAD.

    **HEAD.** The framing of a response to HEAD depends on the request, which httptools cannot express, and
    llhttp cannot be stopped within a buffer. But a message ends either after a known number of bytes or at
    the end of a line. So while a response to HEAD is expected, the input is fed in pieces that end at these
    places, and at the end of a head in response to HEAD, a new llhttp is used.

    **Leniency.** As RFC 9112 permits, and as Twisted's ``Agent`` does: a line of a head may end with LF
    alone, a field may continue in an indented line, and repeated equal Content-Lengths count as one. llhttp
    does not support repeated Content-Lengths. So the first response of each connection is fed line by line,
    and later responses too if an earlier one repeated its length.

    **Long bodies** of known length bypass llhttp, which would copy them. After such a body, a new llhttp is
    used.

    Attributes:
        error: a clause that says what was wrong with the input; nothing is parsed after an error.
        closed: whether the last response announced the close; further input is ignored.
        passed_on_bytes: if at least this many bytes of a body are left, they bypass llhttp.
    """

    passed_on_bytes = PASSED_ON_BYTES

    def __init__(self, max_header_bytes: int = 2**16, max_headers: int = 256) -> None:
        self.error: str | None = None
        self.closed = False
        self._max_header_bytes = max_header_bytes
        self._max_headers = max_headers
        # For each outstanding response, whether its request is a HEAD request.
        self._expected: deque[bool] = deque()
        self._heads = 0  # how many of ``_expected`` are True
        self._events: list[Event] = []
        self._silent_bytes = 0  # received since the last event: part of a head or chunk line
        self._informational = 0  # number of interim responses in a row
        self._by_lines = True  # whether the next head is fed line by line
        self._repeats_lengths = False
        self._line = b""  # the beginning of a line that may be a Content-Length
        self._starts_line = True
        self._length_told: bytes | None = None  # the Content-Length in the current head, if any
        self._new_llhttp()

    def __repr__(self) -> str:
        state = self.error or ("closed" if self.closed else "open")
        return f"<ResponseParser {state}, {len(self._expected)} expected>"

    def expect(self, is_head: bool = False) -> None:
        """Announce one more request that is written."""
        self._expected.append(is_head)
        self._heads += is_head

    def feed(self, data: bytes) -> list[Event]:
        """
        Parse received bytes and return the events; never raises. After processing the events, check ``error``
        and ``closed``.

        The returned list belongs to the caller.
        """
        events = self._events = []
        if self.closed or self.error is not None:
            return events
        if self._body_left >= self.passed_on_bytes or self._passes_on:
            data = self._pass_on(data)
            if not data or self.closed:
                return events
        try:
            if self._heads or self._by_lines:
                self._feed_by_lines(data)
            else:
                self._llhttp.feed_data(data)
        except httptools.HttpParserError as error:
            if not self.closed and self.error is None:
                self.error = f"it is not HTTP ({str(error).rstrip('.') or 'no reason known'})"
        if events:
            self._silent_bytes = 0
            if len(events) > MANY_EVENTS:
                events = self._events = _joined(events)
        else:
            self._silent_bytes += len(data)
            if self._silent_bytes > self._max_header_bytes and self.error is None:
                self.error = f"a head is longer than {self._max_header_bytes} bytes"
        return events

    def _pass_on(self, data: bytes) -> bytes:
        """Add a part of a body to the events without parsing; return the bytes after the body."""
        body = data[: self._body_left]  # usually all bytes, without a copy
        self._events.append(body)
        self._silent_bytes = 0
        self._body_left -= len(body)
        self._passes_on = self._body_left > 0
        if not self._passes_on:
            self._complete()
            self._new_llhttp()
        return data[len(body) :]

    def end(self) -> list[Event]:
        """
        Return the events of an orderly close: the close completes a body of unknown length, and nothing else.
        """
        if self._head is not None and self._head.until_close and self.error is None:
            self._events = []
            self._complete()
            return self._events
        return []

    def _feed_by_lines(self, data: bytes) -> None:
        start, size = 0, len(data)
        while start < size and not self.closed:
            if not self._heads and not self._by_lines:
                self._llhttp.feed_data(memoryview(data)[start:])
                return
            if self._head is not None and self._body_left >= 0:
                end = min(start + self._body_left, size)
                self._llhttp.feed_data(data[start:end])
            else:
                end = data.find(b"\n", start) + 1 or size
                self._feed_line(data[start:end])
            start = end
            if self._bodiless:
                self._new_llhttp()

    def _feed_line(self, piece: bytes) -> None:
        """Feed a line, or a part of a line. Of several equal Content-Lengths, only the first is fed."""
        line = self._line + piece
        starts, self._starts_line = self._starts_line, piece.endswith(b"\n")
        name = line[: len(_LENGTH_FIELD)].lower()
        if self._head is not None or not starts or not _LENGTH_FIELD.startswith(name):
            self._line = b""
            self._llhttp.feed_data(line)
            return
        if not self._starts_line:
            # The whole line must be examined; ``feed`` limits its length.
            self._line = line
            self._starts_line = True
            return
        self._line = b""
        values = {each.strip(b" \t\r\n") for each in line[len(_LENGTH_FIELD) :].split(b",")}
        repeated = self._length_told is not None or b"," in line
        if self._length_told is not None:
            values.add(self._length_told)
        value = values.pop()
        if not values and value.isdigit() and name == _LENGTH_FIELD:
            if self._length_told is None:
                self._llhttp.feed_data(b"Content-Length: %s\r\n" % value)
            self._length_told = value
            self._repeats_lengths |= repeated
        else:
            self._llhttp.feed_data(line)

    def _new_llhttp(self) -> None:
        self._llhttp: Any = httptools.HttpResponseParser(self)
        self._llhttp.set_dangerous_leniencies(**_LENIENCIES)
        self._bodiless = False  # a response to HEAD has ended, though llhttp expects a body
        self._interim = False
        self._passes_on = False  # whether the current body bypasses llhttp
        self._head: ResponseHead | None = None  # the head of the response whose body is being read
        self._body_left: int = -1
        self._reset_head()

    def _reset_head(self) -> None:
        self._length_told = None
        self._reason = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._framing = False

    def _fail(self, clause: str) -> None:
        self.error = clause
        raise _Violation(clause)

    # Callbacks of llhttp. Each is called for every response, so they must be short.

    def on_message_begin(self) -> None:
        if not self._expected:
            self._fail("it belongs to no request")

    def on_status(self, reason: bytes) -> None:
        self._reason += reason
        if len(self._reason) > self._max_header_bytes:
            self._fail(f"a head is longer than {self._max_header_bytes} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > self._max_header_bytes:
            self._fail(f"a head is longer than {self._max_header_bytes} bytes")
        if b"\r" in value or b"\n" in value or b"\0" in value:
            self._fail("a field of a head has control characters")
        name = name.lower()
        headers = self._headers
        headers.append((name, value))
        if len(headers) > self._max_headers:
            self._fail(f"a head has more than {self._max_headers} lines")
        if name in _FRAMING:
            self._framing = True

    def on_headers_complete(self) -> None:
        llhttp = self._llhttp
        status: int = llhttp.get_status_code()
        if status < 200:
            return self._interim_answer(status)
        head = ResponseHead(status, self._reason, self._headers)
        version = llhttp.get_http_version()
        if version != "1.1":
            if version != "1.0":
                self._fail(f"its version is HTTP/{version}, which was not requested")
            head.version = (1, 0)
        head.head_bytes = self._head_bytes + len(self._reason) + 15
        head.keep_alive = llhttp.should_keep_alive()
        if self._expected[0]:
            self._answer_to_head(head)
        elif status == 204 or status == 304:
            head.length = 0
        else:
            self._find_framing(head)
        if not head.keep_alive:
            head.says_close = b"close" in _connection_options(head)
        self._head = head
        self._events.append(head)
        self._reset_head()
        if self._bodiless:
            self._complete()
        return None

    def on_body(self, data: bytes) -> None:
        if self._interim:
            # llhttp expects no body after 100, 102 and 103, but may expect one after other 1xx statuses.
            self._fail("it is an interim response with a body")
        if not self._bodiless:
            self._events.append(data)
            self._body_left -= len(data)

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        elif not self._bodiless:
            self._complete()

    def _complete(self) -> None:
        head = self._head
        assert head is not None
        self._events.append(END)
        self._head = None
        self._body_left = -1
        self._informational = 0
        self._by_lines = self._repeats_lengths
        self._heads -= self._expected.popleft()
        if not head.keep_alive:
            self.closed = True
        if self._headers:  # drop trailers
            self._reset_head()

    def _interim_answer(self, status: int) -> None:
        self._informational += 1
        if not 100 <= status < 200 or self._informational > MAX_INFORMATIONAL:
            self._fail(f"its status is {status}")
        if status == 101:
            self._fail("it switches to a protocol that was not requested")
        self._interim = True
        self._events.append(Informational(status))
        self._reset_head()

    def _answer_to_head(self, head: ResponseHead) -> None:
        """
        Complete a response to HEAD, which has no body: its Content-Length is that of the response to a GET.
        """
        self._bodiless = True
        head.length = 0
        options = _connection_options(head)
        head.keep_alive = (
            b"close" not in options if head.version == (1, 1) else b"keep-alive" in options
        )

    def _find_framing(self, head: ResponseHead) -> None:
        if self._framing:
            codings = []
            for name, value in head.headers:
                if name == b"content-length":
                    head.length = self._body_left = int(value)
                elif name == b"transfer-encoding":
                    codings.append(value.strip().lower())
            if head.length is not None:
                if codings:
                    self._fail("it has both a length and a transfer coding")
                return
            if codings == [b"chunked"]:
                return
            if codings:
                self._fail(f"its transfer coding is {b', '.join(codings)!r}, not chunked")
        head.until_close = True
        head.keep_alive = False


def _connection_options(head: ResponseHead) -> list[bytes]:
    joined = b",".join(value for name, value in head.headers if name == b"connection")
    return [option.strip() for option in joined.lower().split(b",")]


def _joined(events: list[Event]) -> list[Event]:
    """Return the events with adjacent pieces of a body joined."""
    joined: list[Event] = []
    run: list[bytes] = []
    for event in events:
        if isinstance(event, bytes):
            run.append(event)
            continue
        if run:
            joined.append(b"".join(run))
            run = []
        joined.append(event)
    if run:
        joined.append(b"".join(run))
    return joined
