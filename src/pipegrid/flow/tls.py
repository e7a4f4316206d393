"""
TLS for bulk data: Twisted's own transport, with less to do for each record.

Twisted hands every TLS record, 16 KiB at most, to the protocol by itself, and every one that it has encrypted
to the transport beneath: at 300 MB/s that is 20 000 turns a second through parsers, spans, hashes and
buffers, which cost more than the cipher. Here all records of one read are handed over together, and those
of one write are handed down together. What is sent is the same; so are order, errors and the end.

It overrides two methods that Twisted does not document (their like has been there since 2011). Should Twisted
no longer call them, all works as without; a test would say so.
"""

from __future__ import annotations

from typing import Any

from OpenSSL.SSL import Error, WantReadError, ZeroReturnError
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import (
    IOpenSSLClientConnectionCreator,
    IProtocolFactory,
    IReactorTime,
    IStreamClientEndpoint,
)
from twisted.protocols.policies import ProtocolWrapper
from twisted.protocols.tls import BufferingTLSTransport, TLSMemoryBIOFactory
from twisted.python.failure import Failure
from zope.interface import implementer

RECORD_BYTES = 2**14
"""No record holds more."""

BATCH_BYTES = 4 * RECORD_BYTES
"""Encrypted before it is handed down: each connection's OpenSSL keeps as large a buffer."""


def read_much(transport: Any, size_bytes: int) -> None:
    """
    Have the socket beneath a transport, TLS or not, read so many bytes at a time.

    Every turn of the reactor costs as much as copying 100 KiB; Twisted's own 64 KiB are little.
    """
    beneath = getattr(transport, "transport", None) or transport
    if hasattr(beneath, "bufferSize"):
        beneath.bufferSize = size_bytes


class BatchingTLS(BufferingTLSTransport):
    """One connection's TLS; see above."""

    def _flushReceiveBIO(self) -> None:
        """Deliver all that can be decrypted now, in one piece."""
        received: list[bytes] = []
        ended, failure = False, None
        try:
            while not self._lostTLSConnection:
                received.append(self._tlsConnection.recv(RECORD_BYTES))
        except WantReadError:
            pass
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

    def _write(self, data: bytes) -> None:
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
                self._bufferedWrite(data[sent:])
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
