"""
The responder's protocol, client and server side, without I/O.

Lines are ASCII, end with a line feed and have at most ``LINE_BYTES`` bytes including the line feed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable

HELLO = b"PIPEGRID-RESPONDER 1"
LINE_BYTES = 128
TLS_HANDSHAKE = 22
"""First byte of a TLS connection."""

BAD_TOKEN, NO_BYTES, NO_TIME, BUSY, NOT_UNDERSTOOD = "token", "bytes", "time", "busy", "protocol"
REFUSALS = {
    BAD_TOKEN: "refuses the token; give the one that it printed when it started",
    NO_BYTES: "has reached its limit of bytes; start it again, with a larger --max-bytes",
    NO_TIME: "has reached its limit of time; start it again, with a larger --max-seconds",
    BUSY: "has as many connections as it takes; try again when others are done",
    NOT_UNDERSTOOD: "did not understand the request; use the same version of PipeGrid at both ends",
}

_NONCE = re.compile(rb"NONCE ([0-9a-f]{64})")
_PROOF = re.compile(rb"PROOF ([0-9a-f]{64})")
_PING = re.compile(rb"PING ([0-9A-Za-z]{1,32})")
_SIZE = re.compile(rb"(TAKE|GIVE) ([1-9][0-9]{0,17})")
_REFUSED = re.compile(rb"REFUSED ([a-z]{1,16})")


def proof(token: str, nonce: bytes) -> bytes:
    """Return the hexadecimal digits by which a client proves that it knows the token."""
    return hmac.new(token.encode(), nonce, hashlib.sha256).hexdigest().encode()


def nonce_of(line: bytes) -> bytes | None:
    """Return the digits of the nonce in a line; None if the line contains none."""
    match = _NONCE.fullmatch(line)
    return match[1] if match else None


def refusal_of(line: bytes) -> str | None:
    """
    Return the server's reason, in the words of ``REFUSALS``, from a line that rejects the client; None for
    other lines.
    """
    match = _REFUSED.fullmatch(line)
    if match is None:
        return None
    return REFUSALS.get(match[1].decode(), "refuses for a reason that this version does not know")


class ByteAllowance:
    """The number of bytes that a service may still receive and send, over all its connections."""

    def __init__(self, limit_bytes: int) -> None:
        self.left_bytes = limit_bytes

    def take(self, size_bytes: int) -> bool:
        """Reserve bytes, if that many are left; return whether they were."""
        if size_bytes > self.left_bytes:
            return False
        self.left_bytes -= size_bytes
        return True


class LineReader:
    """Splits bytes into lines; a line that is too long is returned as an empty line, which is invalid."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def next(self, data: memoryview) -> tuple[bytes | None, memoryview]:
        """Return the next line without its end, or None if it is incomplete; and the rest of the data."""
        room = LINE_BYTES - len(self._buffer)
        head = bytes(data[:room])
        end = head.find(b"\n")
        if end >= 0:
            line = bytes(self._buffer) + head[:end]
            self._buffer.clear()
            return line, data[end + 1 :]
        self._buffer += head
        if len(self._buffer) >= LINE_BYTES:
            self._buffer.clear()
            return b"", data[:0]
        return None, data[:0]


class ServerSession:
    """
    The server's side of one connection. C is the client:

        C  PIPEGRID-RESPONDER 1
        S  NONCE <64 hexadecimal digits>
        C  PROOF <HMAC-SHA256 of the nonce's digits, keyed with the token, in hexadecimal>
        S  READY

    Afterwards any number of requests, one after the other:

        C  PING <word>          S  PONG <word>
        C  TAKE <n>             S  GO            C  n bytes          S  TAKEN <n>
        C  GIVE <n>             S  GO, and n bytes

    Instead of any answer the server may send ``REFUSED <reason>`` and close the connection; the reasons are
    those of ``REFUSALS``. The client speaks first, so that the same port can accept TLS: a TLS connection
    begins with the byte 22, and carries the same protocol. The token is never sent, the nonce is new for
    each connection, and proofs are compared in constant time. Sizes are decimal, without sign or leading
    zeros, and at least 1. An unauthenticated client gets only the nonce and ``REFUSED``. Bytes to receive or
    send count against the ``ByteAllowance`` of the service as soon as the client requests them.

    The code that does the I/O passes input to ``receive``. It sends what ``output`` returns, and afterwards
    ``give_bytes`` arbitrary bytes, which it reports to ``gave``. It closes the connection when ``over`` is
    set and everything is sent. It does not read while ``give_bytes`` is not 0.

    Attributes:
        give_bytes: how many arbitrary bytes must still be sent.
        over: whether no more input is accepted.
        proved: whether the client has proved that it knows the token.
    """

    def __init__(
        self,
        token: str,
        allowance: ByteAllowance,
        make_nonce: Callable[[], str] = lambda: secrets.token_hex(32),
    ) -> None:
        self._token = token
        self._allowance = allowance
        self._nonce = make_nonce().encode()
        self._lines = LineReader()
        self._output = bytearray()
        self._greeted = False
        self._take_bytes = 0
        self._taking_bytes = 0
        self.proved = False
        self.give_bytes = 0
        self.over = False

    def output(self) -> bytes:
        """Return the bytes that must be sent now, and remove them."""
        output = bytes(self._output)
        self._output.clear()
        return output

    def receive(self, data: memoryview) -> None:
        """Process bytes from the client; this may change ``output`` and ``over``."""
        while len(data) and not self.over:
            if self._take_bytes:
                size = min(self._take_bytes, len(data))
                self._take_bytes -= size
                data = data[size:]
                if not self._take_bytes:
                    self._say(b"TAKEN %d" % self._taking_bytes)
                continue
            line, data = self._lines.next(data)
            if line is not None:
                self._understand(line)
            if self.give_bytes and len(data):
                self.refuse(NOT_UNDERSTOOD)  # the client may have only one request pending

    def gave(self, size_bytes: int) -> None:
        """Count bytes of ``give_bytes`` that were sent."""
        assert 0 <= size_bytes <= self.give_bytes
        self.give_bytes -= size_bytes

    def refuse(self, reason: str) -> None:
        """Send the reason why the session ends, and end it."""
        if not self.over:
            self._say(b"REFUSED " + reason.encode())
            self.give_bytes = self._take_bytes = 0
            self.over = True

    def _understand(self, line: bytes) -> None:
        if not self._greeted:
            if line != HELLO:
                self.over = True  # not a responder's client, so it would not understand an answer
                return
            self._greeted = True
            self._say(b"NONCE " + self._nonce)
        elif not self.proved:
            self._check_proof(line)
        elif match := _PING.fullmatch(line):
            self._say(b"PONG " + match[1])
        elif match := _SIZE.fullmatch(line):
            self._start(match[1], int(match[2]))
        else:
            self.refuse(NOT_UNDERSTOOD)

    def _check_proof(self, line: bytes) -> None:
        match = _PROOF.fullmatch(line)
        if match is None:
            self.refuse(NOT_UNDERSTOOD)
        elif hmac.compare_digest(match[1], proof(self._token, self._nonce)):
            self.proved = True
            self._say(b"READY")
        else:
            self.refuse(BAD_TOKEN)

    def _start(self, verb: bytes, size_bytes: int) -> None:
        if not self._allowance.take(size_bytes):
            self.refuse(NO_BYTES)
            return
        self._say(b"GO")
        if verb == b"TAKE":
            self._take_bytes = self._taking_bytes = size_bytes
        else:
            self.give_bytes = size_bytes

    def _say(self, line: bytes) -> None:
        self._output += line + b"\n"
