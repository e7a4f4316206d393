"""TCP and TLS streams for measurements: a socket in the reactor with as little overhead as possible."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable
from typing import Any, Protocol

PIECE_BYTES = 256 * 1024
TURN_BYTES = 1 << 20
"""The most bytes that a TLS connection receives before other connections are served."""

_again = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Buffers:
    """Buffers that all streams share: one for received bytes, and one with incompressible bytes to send."""

    def __init__(self) -> None:
        self.place = memoryview(bytearray(PIECE_BYTES))
        self.piece = memoryview(os.urandom(PIECE_BYTES))


class Talker(Protocol):
    """The protocol that uses a stream."""

    def ready(self) -> None:
        """Handle that the connection is ready, after the TLS handshake if any."""

    def received(self, data: memoryview) -> None:
        """Handle received bytes, which are valid only during the call."""

    def bulk_bytes(self) -> int:
        """Return how many arbitrary bytes to send now, after all lines."""

    def bulk_sent(self, size_bytes: int) -> None:
        """Handle that this many of the arbitrary bytes were sent."""

    def lost(self, error: Exception | None) -> None:
        """
        Handle that the other end has closed the connection, or that the connection broke. Called once; not
        called after ``close`` on this side.
        """


class RawStream:
    """
    One connection for measurements.

    A baseline must not be slow itself. Twisted's transports copy written data twice and read data once, and
    its TLS uses a memory BIO. This class receives into one shared buffer and sends from another, and OpenSSL
    uses the socket directly; on the loopback interface this is two to three times as fast. Only lines to send
    are buffered.

    Args:
        sock: a socket that is connected or connecting.
        connecting: whether the socket is still connecting.
        secure: wraps the socket in TLS, if given.

    Attributes:
        tls: the TLS socket; None without TLS.
    """

    def __init__(
        self,
        reactor: Any,
        sock: socket.socket,
        talker: Talker,
        buffers: Buffers,
        *,
        connecting: bool = False,
        secure: Callable[[socket.socket], ssl.SSLSocket] | None = None,
    ) -> None:
        self._reactor = reactor
        self._sock = sock
        self._talker = talker
        self._buffers = buffers
        self._lines = b""
        self._secure = secure
        self.tls: ssl.SSLSocket | None = None
        self._connecting = connecting
        self._ready = False
        self._reading = False
        self._writing = False
        self._finishing = False
        self.closed = False
        sock.setblocking(False)

    def start(self) -> None:
        """Start the stream; call this once, when the talker is ready to be called."""
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._connecting:
            self._write_on(True)
        else:
            self._begin()

    def _begin(self) -> None:
        if self._secure is None:
            self._be_ready()
            return
        try:
            self._sock = self.tls = self._secure(self._sock)
        except OSError as error:  # the peer has already closed the connection
            self._fail(error)
        else:
            self._shake_hands()

    def _be_ready(self) -> None:
        self._ready = True
        self._write_on(False)
        self._read_on(True)
        self._talker.ready()

    def send(self, line: bytes) -> None:
        """Send a short line, before any arbitrary bytes that are still unsent; do nothing after closing."""
        if line and not self.closed:
            self._lines += line
            self._flush()

    def go_on(self) -> None:
        """Ask the talker again for bytes to send."""
        if not self.closed and self._ready:
            self._write_on(bool(self._lines) or self._talker.bulk_bytes() > 0)

    def pause(self, paused: bool) -> None:
        """Stop reading, or with False read again."""
        if self.closed or not self._ready:
            return
        self._read_on(not paused)
        if not paused and self._pending():  # in OpenSSL: no selector reports these bytes
            self._reactor.callLater(0, self._read_pending)

    def finish(self) -> None:
        """Close the connection when all lines have been sent; the talker is notified."""
        self._finishing = True
        self.pause(True)
        if not self._lines:
            self._fail(None)

    def close(self) -> None:
        """Close the connection now; the talker is not notified."""
        if self.closed:
            return
        self._read_on(False)
        self._write_on(False)
        self.closed = True
        self._sock.close()

    # Methods that the reactor calls.

    def fileno(self) -> int:
        return self._sock.fileno()

    def logPrefix(self) -> str:
        return "raw stream"

    def connectionLost(self, _reason: object) -> None:
        """End the stream: the reactor has removed it, since the peer is gone or was unreachable."""
        self._fail(self._socket_error())

    def doRead(self) -> None:
        """Read, or continue the handshake."""
        if not self._ready:
            self._shake_hands()
            return
        place, left = self._buffers.place, TURN_BYTES
        try:
            while not self.closed and self._reading:
                size = self._sock.recv_into(place)
                if not size:
                    self._fail(None)
                    return
                self._talker.received(place[:size])
                left -= size
                if self.tls is None or (left <= 0 and not self._pending()):
                    return
        except _again:
            pass
        except OSError as error:
            self._fail(error)

    def doWrite(self) -> None:
        """Write, or continue to connect."""
        if self._connecting:
            self._connecting = False
            error = self._socket_error()
            if error is not None:
                self._fail(error)
            else:
                self._write_on(False)
                self._begin()
        elif not self._ready:
            self._shake_hands()
        else:
            self._flush()

    def _socket_error(self) -> OSError | None:
        if self.closed:
            return None
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return OSError(code, os.strerror(code)) if code else None

    def _read_pending(self) -> None:
        if self._reading and self._pending():
            self.doRead()

    def _pending(self) -> bool:
        """Return whether OpenSSL has bytes that no selector reports."""
        return self.tls is not None and not self.closed and self.tls.pending() > 0

    def _shake_hands(self) -> None:
        assert self.tls is not None
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            self._read_on(True)
            self._write_on(False)
        except ssl.SSLWantWriteError:
            self._write_on(True)
        except OSError as error:
            self._fail(error)
        else:
            self._be_ready()

    def _flush(self) -> None:
        if not self._ready:
            return
        try:
            while self._lines:
                sent = self._sock.send(self._lines)
                self._lines = self._lines[sent:]
            size = min(self._talker.bulk_bytes(), PIECE_BYTES)
            if self._finishing:
                self._fail(None)
            elif size:
                self._talker.bulk_sent(self._sock.send(self._buffers.piece[:size]))
        except _again:
            pass
        except OSError as error:
            self._fail(error)
            return
        self.go_on()

    def _fail(self, error: Exception | None) -> None:
        if not self.closed:
            self.close()
            self._talker.lost(error)

    def _read_on(self, wanted: bool) -> None:
        if wanted != self._reading:
            self._reading = wanted
            (self._reactor.addReader if wanted else self._reactor.removeReader)(self)

    def _write_on(self, wanted: bool) -> None:
        if wanted != self._writing:
            self._writing = wanted
            (self._reactor.addWriter if wanted else self._reactor.removeWriter)(self)
