"""
Banana, what Foolscap says on the wire, cut into tokens: pure, and with no more in memory than was asked for.

A token is a number in base 128, its lowest seven bits first; a byte from 0x80 up, which says what it is; and
for some types as many bytes of body as the number says. Lists and calls are what stands between an OPEN and
its CLOSE.

**Why not Foolscap's own.** Its ``Banana.handleData`` asks the shape that is expected before it takes a
string, but many shapes have no bound (a name, a string to write, whatever a tub may answer); it has none for
a message as a whole, for depth, or for how long one piece of input may keep everybody waiting; and it copies
all that it was given for every token, so that 64 KiB of PINGs cost a second. The other way was a guard
before it, which counts tokens and hands the bytes on: it reads all headers twice, and cannot know of which
call a string is. So tokens are cut here; ``wire.foolscap_broker`` holds them to bounds, and hands each to
what Foolscap does with a token. A body is gathered in one buffer, once: half the memory of pieces that
are joined in the end.

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
"""Of a token's number, nine bytes: lengths, counts, and integers below 2^31."""


class BananaTooLong(ValueError):
    """A number has more bytes than any may have."""


class Tokens:
    """
    Gives the tokens of what it was fed, whatever the pieces.

    Whoever takes them says for each header what follows: ``body`` or ``skip``, or neither. Invariant: of a
    body that is not complete only what has arrived is in memory, in one buffer.
    """

    __slots__ = ("_at", "_chunk", "_chunks", "_gathered", "_missing", "_shift", "_skip", "_value")

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()  # behind the one that is looked at
        self._chunk = b""
        self._at = 0
        self._value = self._shift = 0  # of a header that has only begun
        self._gathered: BytesIO | None = None
        self._missing = 0  # of that body
        self._skip = 0

    def __repr__(self) -> str:
        return f"<Tokens, {self.waiting_bytes} bytes to look at, {self.missing_bytes} to come>"

    @property
    def waiting_bytes(self) -> int:
        """How many bytes were fed and not looked at."""
        return len(self._chunk) - self._at + sum(map(len, self._chunks))

    @property
    def missing_bytes(self) -> int:
        """How many bytes of a body, or of what is skipped, have not arrived."""
        return self._missing + self._skip

    def feed(self, data: bytes) -> bool:
        """Take what arrived; returns whether there is anything to look at (else it was part of a body)."""
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
        """Forget all that was fed, as if nothing had come yet."""
        self.__init__()  # type: ignore[misc]

    def header(self) -> tuple[int, int] | None:
        """
        Return the next token's type and number; None: it has not arrived.

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

    def ahead(self, pattern: re.Pattern[bytes]) -> re.Match[bytes] | None:
        """Return what the next tokens match, if they have arrived in one piece and none has begun."""
        if self._skip or self._shift or (self._at == len(self._chunk) and not self._next()):
            return None
        return pattern.match(self._chunk, self._at)

    def pass_over(self, found: re.Match[bytes]) -> None:
        """Go on behind what ``ahead`` has just returned."""
        self._at = found.end()

    def body(self, size: int) -> bytes | None:
        """Return the bytes behind a header; None: they have not all arrived, ask again when more was fed."""
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
        """Pass over the bytes behind a header."""
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
