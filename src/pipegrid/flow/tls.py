"""
TLS for bulk data: Twisted's own transport, with less to do for each record.

Twisted hands every TLS record, 16 KiB at most, to the protocol by itself, and every one that it has encrypted
to the transport beneath: at 300 MB/s that is 20 000 turns a second through parsers, spans, hashes and
buffers, which cost more than the cipher. Here all records of one read are handed over together, and those
of one write are handed down together. What is sent is the same; so are order, errors and the end.

Much is read from and written to the socket at a time (``move_much``), for every turn of the reactor
costs as much as copying 100 KiB; large buffers are encrypted where they lie (``write_pieces``); one call
encrypts several records (``write_whole``), and records are decrypted without a buffer for each. With these,
and disks that begin early, a put of 100 MB to ten servers on one machine took four fifths of the time.

It overrides methods that Twisted does not document (their like has been there since 2011), and calls OpenSSL
as ``OpenSSL.SSL.Connection.recv`` does. Should Twisted no longer call the former, all works as without; a
test would say so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from OpenSSL import SSL
from OpenSSL.SSL import Error, WantReadError, ZeroReturnError
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import (
    IOpenSSLClientConnectionCreator,
    IProtocolFactory,
    IReactorTime,
    IStreamClientEndpoint,
)
from twisted.protocols.policies import ProtocolWrapper
from twisted.protocols.tls import (
    BufferingTLSTransport,
    TLSMemoryBIOFactory,
    TLSMemoryBIOProtocol,
)
from twisted.python.failure import Failure
from zope.interface import implementer

Buffer = bytes | bytearray | memoryview

RECORD_BYTES = 2**14
"""No record holds more."""

BATCH_BYTES = 4 * RECORD_BYTES
"""Given to OpenSSL at a time, in either direction: for each connection it keeps as large a buffer."""

SEND_BYTES = 512 * 1024
"""Given to the socket at a time, if as much waits."""

_SSL_MODE_ENABLE_PARTIAL_WRITE = 1  # which pyOpenSSL sets, and does not name
_NOTHING = memoryview(b"")
_ffi: Any = SSL._ffi  # type: ignore[attr-defined]
_SSL_read: Any = SSL._lib.SSL_read  # type: ignore[attr-defined]
_records = _ffi.new("char[]", BATCH_BYTES + RECORD_BYTES)  # emptied within a turn of the reactor


def move_much(transport: Any, receive_bytes: int) -> None:
    """
    Have the socket beneath a transport, TLS or not, move much at a time.

    Args:
        receive_bytes: asked of it at a time; Twisted's own 64 KiB are little.
    """
    beneath = getattr(transport, "transport", None) or transport
    if hasattr(beneath, "bufferSize"):
        beneath.bufferSize = receive_bytes
    if hasattr(beneath, "SEND_LIMIT"):
        beneath.SEND_LIMIT = SEND_BYTES


def write_whole(context: SSL.Context) -> None:
    """Have connections of a context encrypt all of a write in one call, not a record."""
    context.clear_mode(_SSL_MODE_ENABLE_PARTIAL_WRITE)


class BatchingTLS(BufferingTLSTransport):
    """One connection's TLS; see above. The reactor's thread only."""

    _undecrypted = _NOTHING

    def dataReceived(self, data: bytes) -> None:
        """Take what the socket has read, however much; OpenSSL has it piece by piece."""
        view = memoryview(data)
        while view:
            self._undecrypted = view[BATCH_BYTES:]
            super().dataReceived(view[:BATCH_BYTES])
            # Nothing is left, unless they are still shaking hands.
            view, self._undecrypted = self._undecrypted, _NOTHING

    def _flushReceiveBIO(self) -> None:
        """Deliver all that can be decrypted now, in one piece."""
        received: list[bytes] = []
        ended, failure = False, None
        more, self._undecrypted = self._undecrypted, _NOTHING
        try:
            while not self._lostTLSConnection:
                self._decrypt(received)
                if not more:
                    break
                self._tlsConnection.bio_write(more[:BATCH_BYTES])
                more = more[BATCH_BYTES:]
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

    def _decrypt(self, received: list[bytes]) -> None:
        """Add the records that are complete. Raises what ``Connection.recv`` does, but for WantReadError."""
        connection: Any = self._tlsConnection
        ssl, size = connection._ssl, 0
        try:
            while True:
                # Where one more fits, whatever its size.
                got = _SSL_read(ssl, _records + size, RECORD_BYTES)
                if got <= 0:
                    connection._raise_ssl_error(ssl, got)
                size += got
                if size > BATCH_BYTES:
                    received.append(_ffi.buffer(_records, size)[:])
                    size = 0
        except WantReadError:
            pass
        finally:
            if size:
                received.append(_ffi.buffer(_records, size)[:])

    def write_pieces(self, pieces: Iterable[Buffer]) -> None:
        """Write buffers one behind the other, as ``writeSequence`` does; they are not kept."""
        small: list[Buffer] = []
        for piece in pieces:
            if len(piece) < RECORD_BYTES:
                small.append(piece)
                continue
            if small:
                self.write(b"".join(small))
                small = []
            self._aggregator.flush()
            TLSMemoryBIOProtocol.write(self, piece)
        if small:
            self.write(b"".join(small))

    def _write(self, data: Buffer) -> None:
        """Encrypt data, and hand it down in few pieces."""
        if self._lostTLSConnection:
            return
        connection, view = self._tlsConnection, memoryview(data)
        sent = 0
        while sent < len(view):
            batch_end = min(sent + BATCH_BYTES, len(view))
            try:
                while sent < batch_end:
                    sent += connection.send(view[sent:batch_end])
            except WantReadError:  # a handshake is under way, and takes what is to be sent now
                self._flush_batch()
                self._bufferedWrite(bytes(view[sent:]))
                return
            except Error:
                self._tlsShutdownFinished(Failure())
                return
            self._flush_batch()

    def _flush_batch(self) -> None:
        """Hand down all that was encrypted."""
        more_bytes = BATCH_BYTES + RECORD_BYTES // 8  # and what TLS adds
        assert self.transport is not None
        try:
            while len(encrypted := self._tlsConnection.bio_read(more_bytes)) == more_bytes:
                self.transport.write(encrypted)
            self.transport.write(encrypted)
        except WantReadError:
            pass  # that was all


def batch_from_now_on(transport: Any) -> None:
    """
    Have TLS that was started on a TCP connection (``startTLS``, as Foolscap does) be such TLS from now on.

    Nothing happens where Twisted has other layers than it has today.
    """
    tls = getattr(transport, "protocol", None)
    if type(tls) is BufferingTLSTransport:
        tls.__class__ = BatchingTLS  # the same, but for what is done with the records


class BatchingTLSFactory(TLSMemoryBIOFactory):
    """Adds such TLS to connections; called as its base is."""

    protocol = BatchingTLS
    noisy = False


@implementer(IStreamClientEndpoint)
class BatchingTLSEndpoint:
    """
    Such TLS around an endpoint, as ``twisted.internet.endpoints.wrapClientTLS`` does with Twisted's.

    Args:
        creator: makes the client's side.
        endpoint: for the connection beneath.
        clock: None for the reactor.
    """

    def __init__(
        self,
        creator: IOpenSSLClientConnectionCreator,
        endpoint: IStreamClientEndpoint,
        clock: IReactorTime | None = None,
    ) -> None:
        self._creator = creator
        self._endpoint = endpoint
        self._clock = clock

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[Any]:
        """Connect; fires with the protocol over TLS, whose handshake goes on."""
        factory: Any = BatchingTLSFactory(self._creator, True, protocolFactory, clock=self._clock)
        connecting: Deferred[Any] = self._endpoint.connect(factory)
        return connecting.addCallback(lambda tls: tls.wrappedProtocol)
