"""
TLS of servers and of Foolscap, for bulk data: Twisted's own transport, with less to do for each record.

Clients over HTTPS have ``client_tls``, which needs no pyOpenSSL.

Twisted hands every TLS record, 16 KiB at most, to the protocol by itself, and every one that it has encrypted
to the transport beneath: at 300 MB/s that is 20 000 turns a second through parsers, spans, hashes and
buffers, which cost more than the cipher. Here all records of one read are handed over together, and those
of one write are handed down together. What is sent is the same; so are order, errors and the end.

Much is read from and written to the socket at a time (``set_bulk_buffers``), for every turn of the reactor
costs as much as copying 100 KiB; large buffers are encrypted where they lie (``write_pieces``); one call
encrypts several records (``write_whole``), and records are decrypted without a buffer for each.

What is encrypted goes to the socket at once if that takes it (``_hand_down``). Twisted would make it bytes,
join those and send them in the next turn: a turn for every 112 KiB, and two copies of each byte.

**Private names.** It overrides methods that Twisted does not document, and calls OpenSSL by names that
pyOpenSSL keeps private. Another release of either may rename them, or give them another meaning. So they are
looked at once, before the first use (``what_is_missing``): whether each is there, and of the type that it is
called with. If not, TLS is Twisted's own, for more of the processor's time, and a line in the log says so.
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

from pipegrid.reactor.sockets import Buffer, Outlet, socket_of
from pipegrid.reactor.tls_context import BATCH_BYTES, DELIVERY_BYTES, GATHERED_BYTES, RECORD_BYTES

log = Logger()

_SSL_MODE_ENABLE_PARTIAL_WRITE = 1  # which pyOpenSSL sets, and does not name
_ENCRYPTED_BYTES = GATHERED_BYTES + RECORD_BYTES // 2  # with what TLS adds
_NOTHING = memoryview(b"")
_ffi: Any = getattr(SSL, "_ffi", None)
_lib: Any = getattr(SSL, "_lib", None)
if _ffi is not None:
    # These are filled and emptied within one call, so all connections share them.
    _records = _ffi.new("char[]", DELIVERY_BYTES + RECORD_BYTES)
    _encrypted = _ffi.new("char[]", _ENCRYPTED_BYTES)
    _encrypted_view = memoryview(_ffi.buffer(_encrypted))


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


# Whether all of this may be used, or Twisted's own TLS has to do.

FUNCTIONS = {
    "SSL_read": "int(*)(SSL *, void *, int)",
    "SSL_write": "int(*)(SSL *, void *, int)",
    "SSL_get_error": "int(*)(SSL *, int)",
    "BIO_read": "int(*)(BIO *, void *, int)",
    "BIO_write": "int(*)(BIO *, void *, int)",
}
"""OpenSSL's, as pyOpenSSL passes them on."""
FIELDS = {"_ssl": "SSL *", "_into_ssl": "BIO *", "_from_ssl": "BIO *"}
"""Of pyOpenSSL's connections."""
CALLED = ("_raise_ssl_error",)
"""Of the same: called."""
TWISTED = {
    "_bufferedWrite": 1,
    "_flushReceiveBIO": 0,
    "_flushSendBIO": 0,
    "_shutdownTLS": 0,
    "_tlsShutdownFinished": 1,
    "_unbufferPendingWrites": 0,
    "_write": 1,
}
"""Methods of Twisted's TLS that ours overrides or calls, and with how many arguments they are called."""
STATE = {
    "_aborted": "bool",
    "_aggregator": "_AggregateSmallWrites",
    "_appSendBuffer": "list",
    "_handshakeDone": "bool",
    "_lostTLSConnection": "bool",
    "_tlsConnection": "Connection",
}
"""What one that has begun its handshake keeps, and the names of the types."""


def what_is_missing() -> str | None:
    """Return the first name that is not there, or not what ours takes it for; None: all are."""
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
    """Whether a function takes itself and so many arguments."""
    try:
        inspect.signature(method).bind(None, *[None] * arguments)
    except (TypeError, ValueError):
        return False
    return True


def _begun() -> object:
    """Return Twisted's TLS for a client, on nothing, with its handshake begun; None: that fails by now."""
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
    """Return whether TLS is ours; looked at once, and said in the log if it is not."""
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
    """Return what adds TLS to connections; called as Twisted's ``TLSMemoryBIOFactory`` is, and one."""
    if is_ours():
        return BatchingTLSFactory(contexts, is_client, wrapped, clock)
    from twisted.protocols.tls import TLSMemoryBIOFactory

    class Quiet(TLSMemoryBIOFactory):
        noisy = False

    return Quiet(contexts, is_client, wrapped, clock)


def write_whole(context: SSL.Context) -> None:
    """Have connections of a context encrypt all of a write in one call, not a record, if TLS is ours."""
    if is_ours() and hasattr(context, "clear_mode"):
        context.clear_mode(_SSL_MODE_ENABLE_PARTIAL_WRITE)


def upgrade_started_tls(transport: Any) -> None:
    """
    Have TLS that was started on a TCP connection (``startTLS``, as Foolscap does) be ours from now on.

    Nothing happens where Twisted has other layers than it has today, or TLS cannot be ours.
    """
    layer = getattr(transport, "protocol", None)
    if type(layer) is BufferingTLSTransport and is_ours():
        take_over(layer)
