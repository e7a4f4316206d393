"""The heads of answers, as far as a sprint understands them: what goes well. Pure."""

from __future__ import annotations

import re

MAX_HEAD_BYTES = 64 << 10
LF_ALONE = "it ends lines with LF alone"


class Odd(Exception):
    """The server does something that a sprint does not understand; the text is a clause."""


BUSY = frozenset({429, 503})
"""Statuses that say "not so much": of the mirror, and of no file in particular."""

TRANSIENT = BUSY | {408, 425, 500, 502, 504}
"""Statuses that say "not now"; the others say "not this"."""


def judge(status: int) -> tuple[bool, str]:
    """Return whether a status other than 200 is one of the moment, and what it means, as a clause."""
    if 300 <= status < 400:
        return False, "it redirects elsewhere, where nobody said that it may be fetched from"
    return status in TRANSIENT, f"it answers {status}"


class Head:
    """
    What a sprint wants to know of an answer.

    Attributes:
        length: of the body, in bytes.
        closes: it is the last on its connection.
    """

    __slots__ = ("closes", "length", "status")

    def __init__(self, status: int, length: int, closes: bool) -> None:
        self.status = status
        self.length = length
        self.closes = closes


USUAL_HEAD = re.compile(
    rb"HTTP/1\.1 200 OK\r\nServer: [^\r\n:]*\r\nDate: [^\r\n]*\r\n(?:Content-Type: [^\r\n]*\r\n)?"
    rb"Content-Length: ([0-9]{1,16})\r\nLast-Modified: [^\r\n]*\r\nConnection: keep-alive\r\n"
    rb"ETag: [^\r\n]*\r\n(?:Accept-Ranges: bytes\r\n)?\r\n"
)
"""As nginx says it of nearly every file: one look instead of a dozen."""


def parse_head(head: bytes) -> Head:
    """
    Take a head apart, that comes without the empty line at its end.

    Raises:
        Odd: it is none, or says what a sprint does not understand.
    """
    head = head.lower()
    if not head.startswith(b"http/1.1 ") or not head[9:12].isdigit():
        raise Odd("it does not speak HTTP/1.1")
    status = int(head[9:12])
    if status < 200 or status in (204, 304) or b"\r\ntransfer-encoding:" in head:
        raise Odd("its answers have no length")
    told, again = _field(head, b"\r\ncontent-length:")
    if again or not told.isdigit() or len(told) > 16:
        raise Odd("its answers have no length")
    options, again = _field(head, b"\r\nconnection:")
    return Head(status, int(told), again or b"close" in options)


def _field(head: bytes, name: bytes) -> tuple[bytes, bool]:
    """Return the first field of a name (with the end of the line before it); is there another?"""
    start = head.find(name)
    if start < 0:
        return b"", False
    end = head.find(b"\r\n", start + 2)
    value = head[start + len(name) : end if end >= 0 else len(head)]
    return value.strip(), end >= 0 and head.find(name, end) >= 0
