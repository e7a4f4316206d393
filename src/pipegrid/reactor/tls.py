"""
TLS for bulk data, of servers and of Foolscap: Twisted's own transport, with less to do for each record.

Clients over HTTPS have ``clienttls``, which needs no pyOpenSSL.

Twisted hands every TLS record, 16 KiB at most, to the protocol by itself, and every one that it has encrypted
to the transport beneath: at 300 MB/s that is 20 000 turns a second through parsers, spans, hashes and
buffers, which cost more than the cipher. Here all records of one read are handed over together, and those
of one write are handed down together. What is sent is the same; so are order, errors and the end.

Much is read from and written to the socket at a time (``move_much``), for every turn of the reactor
costs as much as copying 100 KiB; large buffers are encrypted where they lie (``write_pieces``); one call
encrypts several records (``write_whole``), and records are decrypted without a buffer for each. With these,
and disks that begin early, a put of 100 MB to ten servers on one machine took four fifths of the time.

What is encrypted goes to the socket at once if that takes it (``_hand_down``). Twisted would make it bytes,
join those and send them in the next turn: a turn for every 112 KiB, and two copies of each byte.

It overrides methods that Twisted does not document (their like has been there since 2011), and calls OpenSSL
as ``OpenSSL.SSL.Connection`` does. Should Twisted no longer call the former, all works as without; a
test would say so. Who wants TLS asks ``bulktls``, which looks first whether all that is called here is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

from OpenSSL import SSL
from OpenSSL.SSL import Error, WantReadError, ZeroReturnError
from twisted.protocols.policies import ProtocolWrapper
from twisted.protocols.tls import BufferingTLSTransport, TLSMemoryBIOFactory, TLSMemoryBIOProtocol
from twisted.python.failure import Failure

from pipegrid.reactor.sockets import Buffer, Outlet, socket_of
from pipegrid.reactor.tls_context import BATCH_BYTES, DELIVERY_BYTES, GATHERED_BYTES, RECORD_BYTES

_SSL_MODE_ENABLE_PARTIAL_WRITE = 1  # which pyOpenSSL sets, and does not name
_ENCRYPTED_BYTES = GATHERED_BYTES + RECORD_BYTES // 2  # with what TLS adds
_NOTHING = memoryview(b"")
_ffi: Any = SSL._ffi  # type: ignore[attr-defined]
_lib: Any = SSL._lib  # type: ignore[attr-defined]
# These are filled and emptied within one call, so all connections share them.
_records = _ffi.new("char[]", DELIVERY_BYTES + RECORD_BYTES)
_encrypted = _ffi.new("char[]", _ENCRYPTED_BYTES)
_encrypted_view = memoryview(_ffi.buffer(_encrypted))


def clear_partial_writes(context: SSL.Context) -> None:
    """Have connections of a context encrypt all of a write in one call, not a record."""
    context.clear_mode(_SSL_MODE_ENABLE_PARTIAL_WRITE)


class BatchingTLS(BufferingTLSTransport):
    """One connection's TLS; see above. The reactor's thread only."""

    _outlet: Outlet | None = None
    _gathered_bytes = 0  # of this connection, in the common buffer, within one call
    _gathering = False

    def makeConnection(self, transport: Any) -> None:
        """Look whether a socket is just beneath, then begin."""
        self.find_socket(transport)
        super().makeConnection(transport)

    def find_socket(self, transport: Any) -> None:
        """
        Send on a socket of Twisted's, without its transport; unless layers between want to see it all.

        And write what is large without joining it to what waits (Twisted has an attribute for ``write``).
        """
        self._outlet = Outlet(socket_of(transport))
        self.write = self._write_bytes  # type: ignore[method-assign]

    def dataReceived(self, data: bytes) -> None:
        """Take what the socket has read, however much; OpenSSL has it piece by piece."""
        view = memoryview(data)
        while view and not self._handshakeDone:
            BufferingTLSTransport.dataReceived(self, view[:BATCH_BYTES])
            view = view[BATCH_BYTES:]
        if view:
            if self._appSendBuffer:
                self._unbufferPendingWrites()
            self._flushReceiveBIO(view)

    def _flushReceiveBIO(self, encrypted: memoryview = _NOTHING) -> None:
        """Deliver, in one piece, all that can be decrypted now with these bytes behind what OpenSSL has."""
        received: list[bytes] = []
        ended, failure = False, None
        try:
            if not self._lostTLSConnection:
                self._decrypt(encrypted, received)
        except ZeroReturnError:
            ended = True
        except Error:
            ended, failure = True, Failure()
        if received and not self._aborted:
            ProtocolWrapper.dataReceived(self, b"".join(received))
        if ended and not self._lostTLSConnection:
            if failure is None:
                self._shutdownTLS()
            self._tlsShutdownFinished(failure)
        self._flushSendBIO()

    def _decrypt(self, encrypted: memoryview, received: list[bytes]) -> None:
        """Add the records that are complete. Raises what ``Connection.recv`` does, but for WantReadError."""
        connection: Any = self._tlsConnection
        ssl, size, read = connection._ssl, 0, _lib.SSL_read
        try:
            with _ffi.from_buffer(encrypted) as start:
                left = len(encrypted)
                while True:
                    if left:
                        taken = _lib.BIO_write(connection._into_ssl, start, min(left, BATCH_BYTES))
                        if taken <= 0:
                            raise MemoryError("OpenSSL cannot hold what was received")
                        start, left = start + taken, left - taken
                    # Where one more record fits, whatever its size.
                    while (got := read(ssl, _records + size, RECORD_BYTES)) > 0:
                        size += got
                        if size > DELIVERY_BYTES:
                            received.append(_ffi.buffer(_records, size)[:])
                            size = 0
                    if _lib.SSL_get_error(ssl, got) != _lib.SSL_ERROR_WANT_READ:
                        connection._raise_ssl_error(ssl, got)
                    if not left:
                        break
        finally:
            if size:
                received.append(_ffi.buffer(_records, size)[:])

    def _flushSendBIO(self) -> None:
        """Hand down all that was encrypted."""
        self._gather()
        self._hand_down()

    def _gather(self) -> None:
        """Put what was encrypted behind what will be handed down with it."""
        bio, read = self._tlsConnection._from_ssl, _lib.BIO_read
        while True:
            room = _ENCRYPTED_BYTES - self._gathered_bytes
            size = read(bio, _encrypted + self._gathered_bytes, room)
            if size <= 0:
                return
            self._gathered_bytes += size
            if size < room:  # then that was all
                return
            self._hand_down()

    def _hand_down(self) -> None:
        """Send what was gathered, or have the transport beneath keep and send it; it is not kept here."""
        if not self._gathered_bytes:
            return
        encrypted = _encrypted_view[: self._gathered_bytes]
        self._gathered_bytes = 0
        assert self.transport is not None
        if self._outlet is None or self._aborted:
            self.transport.write(bytes(encrypted))
        else:
            self._outlet.send(encrypted, self.transport)

    def _write_bytes(self, data: bytes) -> None:
        """Write bytes, as Twisted does if they are few: they wait for others until the turn ends."""
        if len(data) < RECORD_BYTES:
            self._aggregator.write(data)
        else:
            self.write_pieces((data,))

    def write_pieces(self, pieces: Iterable[Buffer]) -> None:
        """Write buffers one behind the other, as ``writeSequence`` does; they are not kept."""
        small: list[Buffer] = []
        self._gathering = True
        try:
            for piece in pieces:
                if len(piece) < RECORD_BYTES:
                    small.append(piece)
                    continue
                if small:
                    self._aggregator.write(b"".join(small))
                    small = []
                self._aggregator.flush()
                TLSMemoryBIOProtocol.write(self, piece)
        finally:
            self._gathering = False
            self._hand_down()
        if small:
            self._aggregator.write(b"".join(small))

    def _write(self, data: Buffer) -> None:
        """Encrypt data, and hand it down in few pieces, unless more is gathered first."""
        if self._lostTLSConnection:
            return
        connection: Any = self._tlsConnection
        ssl, write, length, sent = connection._ssl, _lib.SSL_write, len(data), 0
        try:
            with _ffi.from_buffer(data) as start:
                while sent < length:
                    batch_end = min(sent + BATCH_BYTES, length)
                    while sent < batch_end:
                        written = write(ssl, start + sent, batch_end - sent)
                        if written <= 0:
                            connection._raise_ssl_error(ssl, written)
                        sent += written
                    self._gather()
        except WantReadError:  # a handshake is under way, and takes what is to be sent now
            self._flushSendBIO()
            self._bufferedWrite(bytes(memoryview(data)[sent:]))
        except Error:
            failure = Failure()
            self._flushSendBIO()
            self._tlsShutdownFinished(failure)
        finally:
            if not self._gathering:
                self._hand_down()


_METHODS = (
    "dataReceived",
    "find_socket",
    "write_pieces",
    "_decrypt",
    "_flushReceiveBIO",
    "_flushSendBIO",
    "_gather",
    "_hand_down",
    "_write",
    "_write_bytes",
)


def take_over(tls: BufferingTLSTransport) -> None:
    """
    Have one connection's TLS, which Twisted has made and begun, do all this from now on.

    Its class stays what it is: it is given methods of its own.
    """
    for name in _METHODS:
        setattr(tls, name, MethodType(getattr(BatchingTLS, name), tls))
    taken: Any = tls
    taken._gathered_bytes, taken._gathering = 0, False
    taken.find_socket(tls.transport)


class BatchingTLSFactory(TLSMemoryBIOFactory):
    """Adds such TLS to connections; called as its base is."""

    protocol = BatchingTLS
    noisy = False
