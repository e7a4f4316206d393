"""
Parsing of response heads, as far as the epoll driver supports them, and the meaning of statuses. Without
input or output.
"""

from __future__ import annotations

import re

MAX_HEAD_BYTES = 64 << 10
LF_ALONE = "it ends lines with LF alone"


class SmallResponses(dict[str, bytes]):
    """
    The contents of small files by path, for the files that a mirror gave.

    Attributes:
        refused: why the mirror did not give the other files, by path.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused: dict[str, str] = {}


def may_be(path: str, data: bytes) -> bool:
    """
    Return whether the content fits the file's name: servers may confuse the responses to pipelined requests.
    """
    begins = data.lstrip()[:30]
    if path.endswith("InRelease"):
        return begins.startswith(b"-----BEGIN PGP SIGNED")
    if path.endswith((".gpg", ".asc")):
        return begins.startswith(b"-----BEGIN PGP SIGNATURE") or data[:1] >= b"\x80"
    return not begins.startswith(b"-----BEGIN PGP")


class UnsupportedResponse(Exception):
    """
    The server does something that the epoll driver does not support; the text is a clause about the server.
    """


BUSY = frozenset({429, 503})
"""Statuses of an overloaded mirror, which say nothing about the file."""

REDIRECTS = frozenset({301, 302, 303, 307, 308})
"""Statuses of redirects that are followed."""

TRANSIENT = BUSY | {408, 425, 500, 502, 504}
"""Statuses of errors that may soon pass; the other errors are about the requested file."""


def judge(status: int) -> tuple[bool, str]:
    """Return whether a status other than 200 may soon change, and a clause about the status."""
    if 300 <= status < 400:
        return False, f"it answers {status}, which is not a redirect to follow"
    return status in TRANSIENT, f"it answers {status}"


class Head:
    """
    The parts of a response's head that the epoll driver needs.

    Attributes:
        length: of the body, in bytes.
        closes: whether this is the last response on its connection.
        locations: the values of the ``Location`` fields of a redirect.
    """

    __slots__ = ("closes", "length", "locations", "status")

    def __init__(
        self, status: int, length: int, closes: bool, locations: tuple[bytes, ...] = ()
    ) -> None:
        self.status = status
        self.length = length
        self.closes = closes
        self.locations = locations


USUAL_HEAD = re.compile(
    rb"HTTP/1\.1 200 OK\r\nServer: [^\r\n:]*\r\nDate: [^\r\n]*\r\n(?:Content-Type: [^\r\n]*\r\n)?"
    rb"Content-Length: ([0-9]{1,16})\r\nLast-Modified: [^\r\n]*\r\nConnection: keep-alive\r\n"
    rb"ETag: [^\r\n]*\r\n(?:Accept-Ranges: bytes\r\n)?\r\n"
)
"""Matches the head that nginx sends for nearly every file, so that one match replaces a dozen."""


def parse_head(head: bytes) -> Head:
    """
    Parse a head, without the empty line at its end.

    Raises:
        UnsupportedResponse: the head is invalid, or the epoll driver does not support it.
    """
    told_head, head = head, head.lower()
    if not head.startswith(b"http/1.1 ") or not head[9:12].isdigit():
        raise UnsupportedResponse("it does not speak HTTP/1.1")
    status = int(head[9:12])
    if status < 200 or status in (204, 304) or b"\r\ntransfer-encoding:" in head:
        raise UnsupportedResponse("its responses have no length")
    length, again = _field(head, b"\r\ncontent-length:")
    if again or not length.isdigit() or len(length) > 16:
        raise UnsupportedResponse("its responses have no length")
    options, again = _field(head, b"\r\nconnection:")
    locations = _locations(told_head, head) if status in REDIRECTS else ()
    return Head(status, int(length), again or b"close" in options, locations)


def _locations(head: bytes, lowered: bytes) -> tuple[bytes, ...]:
    """
    Return the values of the ``Location`` fields of a head, at most two: enough to detect that there are
    several.

    Raises:
        UnsupportedResponse: a field is folded over several lines.
    """
    found: list[bytes] = []
    name = b"\r\nlocation:"
    start = lowered.find(name)
    while start >= 0 and len(found) < 2:
        start += len(name)
        end = head.find(b"\r\n", start)
        end = len(head) if end < 0 else end
        if head[end + 2 : end + 3] in (b" ", b"\t"):
            raise UnsupportedResponse("it folds lines")
        found.append(head[start:end].strip())
        start = lowered.find(name, end)
    return tuple(found)


def _field(head: bytes, name: bytes) -> tuple[bytes, bool]:
    """
    Return the value of the first field of this name, and whether there is another. ``name`` includes the line
    end before it and the colon.
    """
    start = head.find(name)
    if start < 0:
        return b"", False
    end = head.find(b"\r\n", start + 2)
    value = head[start + len(name) : end if end >= 0 else len(head)]
    return value.strip(), end >= 0 and head.find(name, end) >= 0
