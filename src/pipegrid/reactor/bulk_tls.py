"""
TLS for bulk data, for storage servers and for Foolscap: Twisted's TLS transport with less work per record, or
Twisted's own transport where that is impossible.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import lru_cache
from types import MethodType
from typing import Any

from OpenSSL import SSL
from OpenSSL.SSL import Error, WantReadError, ZeroReturnError
from twisted.logger import Logger
from twisted.protocols.policies import ProtocolWrapper
from twisted.protocols.tls import BufferingTLSTransport, TLSMemoryBIOFactory, TLSMemoryBIOProtocol
from twisted.python.failure import Failure

from pipegrid.reactor.tcp_transport import Buffer, Outlet, socket_of
from pipegrid.reactor.tls_settings import BATCH_BYTES, DELIVERY_BYTES, GATHERED_BYTES, RECORD_BYTES

log = Logger()

_SSL_MODE_ENABLE_PARTIAL_WRITE = 1  # an OpenSSL constant that pyOpenSSL sets but does not name
_ENCRYPTED_BYTES = GATHERED_BYTES + RECORD_BYTES // 2  # space also for the bytes that TLS adds
_NOTHING = memoryview(b"")
_ffi: Any = getattr(SSL, "_ffi", None)
_lib: Any = getattr(SSL, "_lib", None)
if _ffi is not None:
    # All connections share these buffers: they are filled and emptied within one call.
    _records = _ffi.new("char[]", DELIVERY_BYTES + RECORD_BYTES)
    _encrypted = _ffi.new("char[]", _ENCRYPTED_BYTES)
    _encrypted_view = memoryview(_ffi.buffer(_encrypted))


class BatchingTLS(BufferingTLSTransport):
    """
    The TLS of one connection; in the reactor's thread only.

    Twisted passes every decrypted TLS record, at most 16 KiB, to the protocol separately, and every encrypted
    record to the transport. At 300 MB/s, 20 000 calls a second pass through parsers, spans, hashes and
    buffers, and they cost more than the cipher. This class delivers all records of one read together, and
    sends all records of one write together. The bytes on the wire are the same; so are their order, the
    errors and the end of the connection.

    The class reads and writes much data at a time, since a turn of the reactor costs as much as copying 100
    KiB. It encrypts large buffers in place (``write_pieces``), encrypts several records in one call, and
    decrypts records without a new buffer for each. With these changes, and with disks that start to write
    early, a put of 100 MB to ten servers on one machine took four fifths of the time. Encrypted data is sent
    at once if the socket accepts it (``_hand_down``); Twisted would copy, join and send it in the next turn.

    The class overrides undocumented methods of Twisted (unchanged since 2011), and calls OpenSSL as
    ``OpenSSL.SSL.Connection`` does. ``is_ours`` first checks that all these methods exist. If Twisted stopped
    calling one of them, a test would fail.
    """

    _outlet: Outlet | None = None
    _gathered_bytes = 0  # bytes of this connection in the shared buffer; 0 between calls
    _gathering = False

    def makeConnection(self, transport: Any) -> None:
        """Find the socket below the transport, then start TLS."""
        self.find_socket(transport)
        super().makeConnection(transport)

    def find_socket(self, transport: Any) -> None:
        """
        Send on Twisted's socket directly, unless a layer between TLS and the socket needs to see the data.

        Also replace ``write``, an attribute in Twisted, so that large data is not joined with waiting data.
        """
        self._outlet = Outlet(socket_of(transport))
        self.write = self._write_bytes  # type: ignore[method-assign]

    def dataReceived(self, data: bytes) -> None:
        """Accept encrypted input of any length; OpenSSL gets it in pieces."""
        view = memoryview(data)
        while view and not self._handshakeDone:
            BufferingTLSTransport.dataReceived(self, view[:BATCH_BYTES])
            view = view[BATCH_BYTES:]
        if view:
            if self._appSendBuffer:
                self._unbufferPendingWrites()
            self._flushReceiveBIO(view)

    def _flushReceiveBIO(self, encrypted: memoryview = _NOTHING) -> None:
        """
        Decrypt ``encrypted`` and the bytes that OpenSSL still has; deliver all complete records in one piece.
        """
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
        """
        Append the decrypted bytes of all complete records to ``received``. Raises what ``Connection.recv``
        raises, except WantReadError.
        """
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
                    # Repeat while the buffer has space for one more record of any size.
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
        self._gather()
        self._hand_down()

    def _gather(self) -> None:
        """Append OpenSSL's encrypted data to the data that will be sent together."""
        bio, read = self._tlsConnection._from_ssl, _lib.BIO_read
        while True:
            space = _ENCRYPTED_BYTES - self._gathered_bytes
            size = read(bio, _encrypted + self._gathered_bytes, space)
            if size <= 0:
                return
            self._gathered_bytes += size
            if size < space:  # OpenSSL has no more encrypted data
                return
            self._hand_down()

    def _hand_down(self) -> None:
        """Send the collected data; what the socket does not accept, the transport keeps and sends."""
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
        """Write bytes; short writes are collected until the end of the turn, as in Twisted."""
        if len(data) < RECORD_BYTES:
            self._aggregator.write(data)
        else:
            self.write_pieces((data,))

    def write_pieces(self, pieces: Iterable[Buffer]) -> None:
        """Write consecutive buffers, as ``writeSequence`` does; no reference to the buffers is kept."""
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
        """Encrypt data, and send it in few pieces, unless further data is being collected."""
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
        except WantReadError:  # a handshake is in progress, and its data must be sent now
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
    Make a connection's TLS, which Twisted has created and started, use the methods of ``BatchingTLS`` from
    now on.

    The class of the TLS object does not change: the object gets the methods as attributes.
    """
    for name in _METHODS:
        setattr(tls, name, MethodType(getattr(BatchingTLS, name), tls))
    taken: Any = tls
    taken._gathered_bytes, taken._gathering = 0, False
    taken.find_socket(tls.transport)


class BatchingTLSFactory(TLSMemoryBIOFactory):
    """
    A factory that adds ``BatchingTLS`` to connections; its arguments are those of ``TLSMemoryBIOFactory``.
    """

    protocol = BatchingTLS


# The private names that ``BatchingTLS`` needs; if one is missing, Twisted's own TLS is used.

FUNCTIONS = {
    "SSL_read": "int(*)(SSL *, void *, int)",
    "SSL_write": "int(*)(SSL *, void *, int)",
    "SSL_get_error": "int(*)(SSL *, int)",
    "BIO_read": "int(*)(BIO *, void *, int)",
    "BIO_write": "int(*)(BIO *, void *, int)",
}
"""Functions of OpenSSL that pyOpenSSL exports."""
FIELDS = {"_ssl": "SSL *", "_into_ssl": "BIO *", "_from_ssl": "BIO *"}
"""Private fields of pyOpenSSL's connections."""
CALLED = ("_raise_ssl_error",)
"""Private methods of pyOpenSSL's connections."""
TWISTED = {
    "_bufferedWrite": 1,
    "_flushReceiveBIO": 0,
    "_flushSendBIO": 0,
    "_shutdownTLS": 0,
    "_tlsShutdownFinished": 1,
    "_unbufferPendingWrites": 0,
    "_write": 1,
}
"""Methods of Twisted's TLS that ``BatchingTLS`` overrides or calls, each with its number of arguments."""
STATE = {
    "_aborted": "bool",
    "_aggregator": "_AggregateSmallWrites",
    "_appSendBuffer": "list",
    "_handshakeDone": "bool",
    "_lostTLSConnection": "bool",
    "_tlsConnection": "Connection",
}
"""Fields of a Twisted TLS connection whose handshake has begun, each with the name of its type."""


def what_is_missing() -> str | None:
    """
    Return the first name that is missing or has a wrong type for ``BatchingTLS``; None if all names are
    right.

    Another release of pyOpenSSL or Twisted may rename the private functions, methods and fields, or change
    their meaning. Then Twisted's own TLS is used, which takes more CPU time, and a line is logged.
    """
    from OpenSSL import SSL
    from twisted.protocols import tls

    ffi, lib = getattr(SSL, "_ffi", None), getattr(SSL, "_lib", None)
    if ffi is None or lib is None:
        return "OpenSSL.SSL._ffi and _lib"
    for name, kind in FUNCTIONS.items():
        if _kind(ffi, getattr(lib, name, None)) != kind:
            return f"OpenSSL.SSL._lib.{name}"
    if not isinstance(getattr(lib, "SSL_ERROR_WANT_READ", None), int):
        return "OpenSSL.SSL._lib.SSL_ERROR_WANT_READ"
    connection: Any = SSL.Connection(SSL.Context(SSL.TLS_METHOD), None)
    for name, kind in FIELDS.items():
        if _kind(ffi, getattr(connection, name, None)) != kind:
            return f"OpenSSL.SSL.Connection.{name}"
    for name in CALLED:
        if not callable(getattr(connection, name, None)):
            return f"OpenSSL.SSL.Connection.{name}"
    transport = getattr(tls, "BufferingTLSTransport", None)
    for name, arguments in TWISTED.items():
        if not _takes(getattr(transport, name, None), arguments):
            return f"twisted.protocols.tls.BufferingTLSTransport.{name}"
    begun = _begun()
    for name, kind in STATE.items():
        if type(getattr(begun, name, None)).__name__ != kind:
            return f"twisted.protocols.tls.BufferingTLSTransport.{name}"
    return None


def _takes(method: Any, arguments: int) -> bool:
    """Return whether a method accepts this number of arguments."""
    try:
        inspect.signature(method).bind(None, *[None] * arguments)
    except (TypeError, ValueError):
        return False
    return True


def _begun() -> object:
    """
    Start the handshake of a client's TLS object of Twisted, without a transport; return the object, or None
    if that fails.
    """
    from OpenSSL import SSL
    from twisted.internet.interfaces import IOpenSSLClientConnectionCreator
    from twisted.internet.protocol import Factory, Protocol
    from twisted.internet.task import Clock
    from twisted.protocols import tls
    from zope.interface import implementer

    @implementer(IOpenSSLClientConnectionCreator)
    class Creator:
        def clientConnectionForTLS(self, _: object) -> Any:
            return SSL.Connection(SSL.Context(SSL.TLS_METHOD), None)

    class Nowhere:
        disconnecting = False

        def write(self, _: bytes) -> None:
            pass

        def loseConnection(self) -> None:
            pass

    anywhere: Any = Creator()
    nowhere: Any = Nowhere()
    try:
        factory = tls.TLSMemoryBIOFactory(anywhere, True, Factory(), Clock())
        factory.noisy = False
        begun = tls.BufferingTLSTransport(factory, Protocol())
        begun.makeConnection(nowhere)
    except Exception as error:
        log.debug("Twisted's TLS does not begin as it did: {error!r}", error=error)
        return None
    return begun


def _kind(ffi: Any, value: object) -> str | None:
    try:
        kind: str = ffi.typeof(value).cname
    except (AttributeError, TypeError):
        return None
    return kind


@lru_cache(maxsize=1)
def is_ours() -> bool:
    """Return whether ``BatchingTLS`` can be used; this is checked once, and a failed check is logged."""
    missing = what_is_missing()
    if missing is None:
        return True
    log.warn(
        "{name} has changed, so TLS uses Twisted's own code, which takes more processor time; report "
        "this, with the releases of pyOpenSSL and Twisted",
        name=missing,
    )
    return False


def tls_factory(contexts: Any, is_client: bool, wrapped: Any, clock: Any) -> Any:
    """
    Return a factory that adds TLS to connections; the arguments are those of Twisted's
    ``TLSMemoryBIOFactory``.
    """
    kind = BatchingTLSFactory if is_ours() else TLSMemoryBIOFactory
    return kind(contexts, is_client, wrapped, clock)


def write_whole(context: SSL.Context) -> None:
    """
    Make connections of a context encrypt a whole write in one call, if ``BatchingTLS`` is used.
    """
    if is_ours() and hasattr(context, "clear_mode"):
        context.clear_mode(_SSL_MODE_ENABLE_PARTIAL_WRITE)


def upgrade_started_tls(transport: Any) -> None:
    """
    Make TLS that was started on a TCP connection (``startTLS``, as Foolscap does) use ``BatchingTLS``.

    Does nothing if ``BatchingTLS`` cannot be used, or if Twisted has put other layers on the connection.
    """
    layer = getattr(transport, "protocol", None)
    if type(layer) is BufferingTLSTransport and is_ours():
        take_over(layer)
