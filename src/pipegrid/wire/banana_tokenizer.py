"""
A tokenizer for Banana, Foolscap's encoding, that holds no more in memory than its caller allows.

Source: Foolscap 24.9's documentation of Banana ("specifications/banana").
"""

from __future__ import annotations

import re
from collections import deque
from io import BytesIO

INT, STRING, NEG, FLOAT, LONGINT, LONGNEG, VOCAB = range(0x81, 0x88)
OPEN, CLOSE, ABORT = range(0x88, 0x8B)
ERROR, PING, PONG = range(0x8D, 0x90)

FLOAT_BYTES = 8
MAX_NUMBER_BITS = 63
"""The limit of a token's number, nine bytes: lengths, counts, and integers below 2^31."""


class BananaTooLong(ValueError):
    """A number has more bytes than allowed."""


class Tokens:
    """
    Splits input in any pieces into tokens.

    A token is a number in base 128, its lowest seven bits first; a byte from 0x80 up, which is its type;
    and for some types a body of as many bytes as the number says. After each header the caller calls
    ``body``, ``skip``, or neither. Invariant: of an incomplete body only what has arrived is in memory, in
    one buffer.

    Foolscap's own ``Banana.handleData`` asks what is expected before it accepts a string, but many such
    expectations have no limit (a name, a string to write, any answer of a tub). It has no limit for a whole
    message, for depth, or for the time that one piece of input takes; and it copies all input for every
    token, so that 64 KiB of PINGs take a second. A filter before it would read all headers twice, and could
    not know to which call a string belongs. ``wire.foolscap_broker`` checks the limits, and passes each
    token to Foolscap's code.
    """

    __slots__ = ("_at", "_chunk", "_chunks", "_gathered", "_missing", "_shift", "_skip", "_value")

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()  # the chunks after the current one
        self._chunk = b""
        self._at = 0
        self._value = self._shift = 0  # of an incomplete header
        self._gathered: BytesIO | None = None
        self._missing = 0  # of the current body
        self._skip = 0

    def __repr__(self) -> str:
        return f"<Tokens, {self.waiting_bytes} bytes to look at, {self.missing_bytes} to come>"

    @property
    def waiting_bytes(self) -> int:
        """How many bytes were fed and not yet consumed."""
        return len(self._chunk) - self._at + sum(map(len, self._chunks))

    @property
    def missing_bytes(self) -> int:
        """How many bytes of a body, or of a skipped one, have not arrived."""
        return self._missing + self._skip

    def feed(self, data: bytes) -> bool:
        """Add input; returns whether there may be tokens to read (else all of it belongs to a body)."""
        if self._at == len(self._chunk) and not self._chunks:
            if self._missing > len(data):
                assert self._gathered is not None
                self._gathered.write(data)
                self._missing -= len(data)
                return False
            if self._skip >= len(data):
                self._skip -= len(data)
                return False
        if data:
            self._chunks.append(data)
        return True

    def clear(self) -> None:
        """Drop all input and state."""
        self.__init__()  # type: ignore[misc]

    def header(self) -> tuple[int, int] | None:
        """
        Return the next token's type and number, or None if it has not arrived.

        Raises:
            BananaTooLong: a number of more than ``MAX_NUMBER_BITS``.
        """
        if self._skip and not self._skipped():
            return None
        while True:
            chunk, at, end = self._chunk, self._at, len(self._chunk)
            while at < end:
                byte = chunk[at]
                at += 1
                if byte >= 0x80:
                    value = self._value
                    self._at, self._value, self._shift = at, 0, 0
                    return byte, value
                if self._shift >= MAX_NUMBER_BITS:
                    raise BananaTooLong("a token's number has more than 9 bytes")
                self._value |= byte << self._shift
                self._shift += 7
            self._at = at
            if not self._next():
                return None

    def match_next(self, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
        """
        Return the pattern's match for the next tokens, if they arrived in one piece and no token is
        incomplete.
        """
        if self._skip or self._shift or (self._at == len(self._chunk) and not self._next()):
            return None
        return pattern.match(self._chunk, self._at)

    def skip_match(self, found: re.Match[bytes]) -> None:
        """Continue after the match that ``match_next`` has just returned."""
        self._at = found.end()

    def body(self, size: int) -> bytes | None:
        """Return the body after a header; None if it is incomplete: then call again after more input."""
        if self._gathered is None:
            at, end = self._at, self._at + size
            if end <= len(self._chunk):
                self._at = end
                return self._chunk[at:end]
            self._gathered = BytesIO()
            self._missing = size
        while self._missing:
            part = memoryview(self._chunk)[self._at : self._at + self._missing]
            self._gathered.write(part)
            self._at += len(part)
            self._missing -= len(part)
            if self._missing and not self._next():
                return None
        gathered, self._gathered = self._gathered, None
        return gathered.getvalue()  # the buffer itself, not a copy

    def skip(self, size: int) -> None:
        """Skip the body after a header."""
        self._skip = size
        self._skipped()

    def _skipped(self) -> bool:
        while True:
            part = min(self._skip, len(self._chunk) - self._at)
            self._at += part
            self._skip -= part
            if not self._skip:
                return True
            if not self._next():
                return False

    def _next(self) -> bool:
        if not self._chunks:
            self._chunk, self._at = b"", 0  # it may be large
            return False
        self._chunk, self._at = self._chunks.popleft(), 0
        return True
