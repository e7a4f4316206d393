"""
TLS of clients, by Python's ``ssl`` module with memory buffers, which starts faster than Twisted's TLS;
preconnected sockets can be used, too.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import (
    IHandshakeListener,
    INegotiated,
    IProtocol,
    IProtocolFactory,
    IPushProducer,
    IStreamClientEndpoint,
)
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.task import TaskFinished, cooperate
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import directlyProvides, implementer, providedBy

from pipegrid.reactor.preconnect import HostPort, Preconnected, Preconnector, handshake
from pipegrid.reactor.tcp_transport import Buffer, Outlet, socket_of
from pipegrid.reactor.tls_settings import BATCH_BYTES, GATHERED_BYTES, RECORD_BYTES

# Importing pyOpenSSL and ``cryptography``'s X.509 takes a tenth of the CPU time of a ``put`` of a small file.
# A client of storage servers needs only the handshake, one check of the certificate, and records. As in
# ``bulk_tls``, all records of one read are delivered together, all records of one write are sent together and
# at once, and large buffers are encrypted in place.

log = Logger()

CheckCertificate = Callable[[bytes], Exception | None]
"""Gets the server's certificate (DER) and returns the error to raise, or None if the certificate is right."""

_PORTION_BYTES = 2 * RECORD_BYTES
"""How much is encrypted in one call: little enough to stay in the CPU's cache, where copying is cheap."""

_DELIVERY_BYTES = 8 * BATCH_BYTES
"""Maximum bytes decrypted before they are copied: what a client reads at once, so that it joins no pieces."""

# The buffer is filled and emptied within one call, so all connections share it.
_records = memoryview(bytearray(_DELIVERY_BYTES + RECORD_BYTES))


class TlsFailed(ConnectionError):
    """TLS has failed; the text of the error says why."""


@implementer(INegotiated)
class ClientTLS(Protocol):
    """
    The TLS of one connection: it is the protocol of a TCP transport, and the transport of another protocol.
    Its states:

    * handshaking: written data waits. When the handshake is complete, but before its last bytes are sent,
      the certificate is checked; if the certificate is wrong, nothing more is sent.
    * open: data is sent and received.
    * closing: ``loseConnection`` was called, and a producer still writes.
    * notified: close_notify was sent, and the transport closes afterwards. The peer's close_notify is not
      awaited, since that would take a round trip: a client closes after all its requests are answered.
    * lost: after the peer's close_notify, an error, an abort, or the transport's end. Nothing is delivered
      or sent.

    After close_notify from either side, the protocol's ``connectionLost`` gets the transport's reason.
    Without a close_notify it gets ``ConnectionLost``, since an attacker could have truncated the data.
    After an error of TLS it gets ``TlsFailed``, and after a wrong certificate the error of the check.
    Renegotiation is rejected, since the certificate is checked only once; TLS 1.3 has no renegotiation.

    Args:
        begun: the preconnected connection, if any; its certificate has not been checked yet.

    Attributes:
        wrappedProtocol: the protocol over TLS.
        disconnecting: whether the connection is closing or closed, as in Twisted.
    """

    transport: Any

    def __init__(
        self,
        context: ssl.SSLContext,
        check: CheckCertificate,
        wrapped: Any,
        begun: Preconnected | None = None,
    ) -> None:
        self.wrappedProtocol = wrapped
        self.disconnecting = False
        tls, received, encrypted = handshake(context) if begun is None else begun.handshake
        self._tls: ssl.SSLObject | None = tls
        self._received = received
        self._encrypted = encrypted
        self._check = check
        self._handshaking = True
        self._lost = False
        self._aborted = False
        self._close_notified = False  # whether either side has sent close_notify
        self._reason: Failure | None = None
        self._waiting: list[bytes] = []  # data written before the handshake was complete
        self._producer: Any = None
        self._pulling: Any = None
        self._outlet = Outlet(None)

    def __getattr__(self, name: str) -> Any:
        transport = None if name.startswith("__") else self.__dict__.get("transport")
        if transport is None:
            raise AttributeError(name)
        return getattr(transport, name)

    def __repr__(self) -> str:
        state = "lost" if self._lost else "handshaking" if self._handshaking else "open"
        return f"<ClientTLS {state} of {self.wrappedProtocol!r}>"

    @property
    def negotiatedProtocol(self) -> bytes | None:
        """
        The protocol that ALPN has selected; None if ALPN has selected none, or the handshake is not complete.
        """
        name = None if self._tls is None else self._tls.selected_alpn_protocol()
        return None if name is None else name.encode("ascii")

    # Methods that the transport calls.

    def makeConnection(self, transport: Any) -> None:
        """Give the protocol its transport, then start the handshake."""
        directlyProvides(self, providedBy(transport))
        self._outlet = Outlet(socket_of(transport))
        self.transport = transport
        self.connected = 1
        self.wrappedProtocol.makeConnection(self)
        if not self._lost:
            self._shake_hands()
            if not self._handshaking and not self._lost:  # a preconnected connection
                self._deliver(memoryview(b""))
            self._flush()

    def dataReceived(self, data: bytes) -> None:
        """Accept encrypted input of any length; OpenSSL gets it in pieces."""
        view = memoryview(data)
        while self._handshaking and view and not self._lost:
            self._received.write(view[:BATCH_BYTES])
            view = view[BATCH_BYTES:]
            self._shake_hands()
        if not self._handshaking and not self._lost:
            self._deliver(view)
        self._flush()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Notify the protocol that the connection has ended, and why."""
        if not self._lost and not self._close_notified and reason.check(ConnectionDone):
            reason = Failure(ConnectionLost("it ended without TLS's close_notify"))
        self._lost = self._aborted = True
        self.connected = 0
        self._waiting.clear()
        self._tls = None
        reason, self._reason = self._reason or reason, None
        self.wrappedProtocol.connectionLost(reason)

    # The handshake.

    def _shake_hands(self) -> None:
        tls = self._tls
        assert tls is not None
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        except (OSError, ValueError) as error:
            self._fail(_failed(error))
            return
        certificate = tls.getpeercert(binary_form=True)
        problem = self._check(certificate) if certificate else TlsFailed("it has no certificate")
        if problem is not None:
            self._reason = Failure(problem)
            self.abortConnection()
            return
        self._handshaking = False
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._encrypt(b"".join(waiting))
            if self._producer is not None:
                self._producer.resumeProducing()
        if IHandshakeListener.providedBy(self.wrappedProtocol):
            self.wrappedProtocol.handshakeCompleted()
        if self.disconnecting and self._producer is None:
            self._send_close_notify()

    # Receiving.

    def _deliver(self, encrypted: memoryview) -> None:
        """
        Decrypt ``encrypted`` and the bytes that OpenSSL still has; deliver all complete records in one piece.
        """
        received: list[bytes] = []
        close_notify, failure = False, None
        try:
            close_notify = self._decrypt(encrypted, received)
        except (OSError, ValueError) as error:
            failure = _failed(error)
        if received:
            self.wrappedProtocol.dataReceived(
                received[0] if len(received) == 1 else b"".join(received)
            )
        if self._lost:
            return
        if failure is not None:
            self._fail(failure)
        elif close_notify:
            self._send_close_notify()

    def _decrypt(self, encrypted: memoryview, received: list[bytes]) -> bool:
        """
        Append the decrypted bytes of all complete records to ``received``; return whether the peer has sent
        close_notify.
        """
        tls, bio, size = self._tls, self._received, 0
        assert tls is not None
        try:
            while True:
                if encrypted:
                    bio.write(encrypted[:BATCH_BYTES])
                    encrypted = encrypted[BATCH_BYTES:]
                try:
                    # Repeat while the buffer has space for one more record of any size.
                    while bio.pending:
                        got = tls.read(RECORD_BYTES, _records[size:])
                        if not got:
                            return True
                        size += got  # type: ignore[operator]
                        if size > _DELIVERY_BYTES:
                            received.append(bytes(_records[:size]))
                            size = 0
                except ssl.SSLWantReadError:
                    pass
                except ssl.SSLZeroReturnError:
                    return True
                if not encrypted:
                    return False
        finally:
            if size:
                received.append(bytes(_records[:size]))

    # Sending.

    def write(self, data: Buffer) -> None:
        """Encrypt bytes and send them; no reference to the buffer is kept."""
        self.write_pieces((data,))

    def writeSequence(self, iovec: Iterable[Buffer]) -> None:
        """Write consecutive buffers, as ``write_pieces`` does."""
        self.write_pieces(iovec)

    def write_pieces(self, pieces: Iterable[Buffer]) -> None:
        """Write consecutive buffers, in few records; no reference to the buffers is kept."""
        if self._lost or (self.disconnecting and self._producer is None):
            return
        if self._handshaking:
            self._waiting.extend(bytes(each) for each in pieces)
            if self._producer is not None:
                self._producer.pauseProducing()
            return
        joined: list[Buffer] = []
        size = 0
        for piece in tuple(
            pieces
        ):  # a tuple, since an iterator that makes the pieces may write to another connection
            if not joined and len(piece) >= RECORD_BYTES:
                self._encrypt(piece)
                continue
            joined.append(piece)
            size += len(piece)
            if size >= BATCH_BYTES:
                self._encrypt(b"".join(joined))
                joined, size = [], 0
        if joined:
            self._encrypt(joined[0] if len(joined) == 1 else b"".join(joined))
        self._flush()

    def _encrypt(self, data: Buffer) -> None:
        """Encrypt data; OpenSSL collects it until ``_flush`` or until ``GATHERED_BYTES`` are pending."""
        view = memoryview(data)
        try:
            while view and not self._lost:
                assert self._tls is not None
                view = view[self._tls.write(view[:_PORTION_BYTES]) :]
                if self._encrypted.pending >= GATHERED_BYTES:
                    self._flush()
        except (OSError, ValueError) as error:
            self._fail(_failed(error))

    def _flush(self) -> None:
        encrypted = self._encrypted.read()
        if encrypted and not self._aborted:
            self._outlet.send(memoryview(encrypted), self.transport)

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """
        Let the transport pause and resume a producer; a pull producer is adapted to a push producer first.
        """
        if self._lost:
            producer.stopProducing()
            return
        if not streaming:
            producer = self._pulling = _Pulling(producer, self)
        self.transport.registerProducer(producer, True)
        self._producer = producer
        if self._pulling is not None:
            self._pulling.startStreaming()

    def unregisterProducer(self) -> None:
        """Forget the producer, which has written all; close if ``loseConnection`` was called meanwhile."""
        if self._producer is None:
            return
        pulling, self._pulling = self._pulling, None
        if pulling is not None:
            pulling.stopStreaming()
        self._producer = None
        self.transport.unregisterProducer()
        if self.disconnecting and not self._handshaking and not self._lost:
            self._send_close_notify()

    # Ends.

    def loseConnection(self) -> None:
        """
        Close after all written data has been sent; at once if none was written and the handshake is not
        complete.
        """
        if self.disconnecting or self._lost:
            return
        self.disconnecting = True
        if self._handshaking and not self._waiting:
            self.abortConnection()
        elif not self._handshaking and self._producer is None:
            self._send_close_notify()

    def abortConnection(self) -> None:
        """Close now and drop unsent data; nothing more is delivered."""
        self.disconnecting = self._lost = self._aborted = True
        if self.transport is not None:
            getattr(self.transport, "abortConnection", self.transport.loseConnection)()

    def _send_close_notify(self) -> None:
        """Send close_notify, whether or not the peer has sent one, and close."""
        self._close_notified = self.disconnecting = True
        if self._lost:
            return
        self._lost = True
        try:
            assert self._tls is not None
            self._tls.unwrap()
        except (OSError, ValueError):
            pass  # expected: the peer's close_notify is not awaited
        self._flush()
        self.transport.loseConnection()  # the transport first sends its remaining data

    def _fail(self, error: Exception) -> None:
        """Close the connection because of an error; the peer gets an alert if TLS has one for the error."""
        self._lost = True
        self._reason = Failure(error)
        self._flush()
        self.disconnecting = True
        self.transport.loseConnection()


@implementer(IPushProducer)
class _Pulling:
    """Adapts a pull producer to a push producer, which writes until it is paused."""

    def __init__(self, producer: Any, consumer: ClientTLS) -> None:
        self._producer = producer
        self._consumer = consumer
        self._task: Any = None

    def startStreaming(self) -> None:
        """Ask the producer for one piece in each turn of the reactor."""
        self._task = cooperate(self._pieces())

    def stopStreaming(self) -> None:
        """Stop asking the producer; a second call has no effect."""
        with suppress(TaskFinished):
            self._task.stop()

    def pauseProducing(self) -> None:
        self._task.pause()

    def resumeProducing(self) -> None:
        self._task.resume()

    def stopProducing(self) -> None:
        """Stop asking the producer, and notify it."""
        self.stopStreaming()
        self._producer.stopProducing()

    def _pieces(self) -> Iterator[None]:
        while True:
            try:
                self._producer.resumeProducing()
            except Exception:
                log.failure("a producer failed; what it has written is sent")
                self._consumer.unregisterProducer()
                return
            yield None


def _failed(error: Exception) -> Exception:
    """Return the error to report in place of an OpenSSL error."""
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return ConnectionLost("it ended without TLS's close_notify")
    reason = (getattr(error, "reason", None) or str(error)).replace("_", " ").lower()
    if reason == "wrong version number":  # the other end speaks HTTP without TLS
        reason = "the other end does not speak TLS, as in networks that require a login in the browser first"
    failed = TlsFailed(f"TLS failed: {reason}")
    failed.__cause__ = error
    return failed


# Endpoints that add client TLS to TCP connections.


class ClientTLSFactory(Factory):
    """
    A factory that adds TLS to the connections of another factory.

    Args:
        begun: the preconnected connection, if any; with it, the factory must build only one protocol.

    Attributes:
        built: the last protocol made; None if the wrapped factory returned none.
    """

    noisy = False

    def __init__(
        self,
        context: ssl.SSLContext,
        check: CheckCertificate,
        wrapped: IProtocolFactory,
        begun: Preconnected | None = None,
    ) -> None:
        self.built: ClientTLS | None = None
        self._context = context
        self._check = check
        self._wrapped = wrapped
        self._begun = begun

    def doStart(self) -> None:
        self._wrapped.doStart()

    def doStop(self) -> None:
        self._wrapped.doStop()

    def buildProtocol(self, addr: Any) -> ClientTLS | None:
        wrapped = self._wrapped.buildProtocol(addr)
        self.built = None
        if wrapped is not None:
            self.built = ClientTLS(self._context, self._check, wrapped, self._begun)
        return self.built


@implementer(IStreamClientEndpoint)
class ClientTLSEndpoint:
    """
    TLS around an endpoint, as ``twisted.internet.endpoints.wrapClientTLS`` does with Twisted's TLS.

    Args:
        context: see ``client_context``.
        check: checks the certificate of each connection; its error reaches ``connectionLost``.
        endpoint: makes the TCP connection.
    """

    def __init__(
        self, context: ssl.SSLContext, check: CheckCertificate, endpoint: IStreamClientEndpoint
    ) -> None:
        self._context = context
        self._check = check
        self._endpoint = endpoint

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """Connect; fires with the protocol over TLS while its handshake continues."""
        factory: Any = ClientTLSFactory(self._context, self._check, protocolFactory)
        connecting: Deferred[Any] = self._endpoint.connect(factory)
        return connecting.addCallback(lambda tls: tls.wrappedProtocol)


# Preconnected connections, which the reactor adopts.


@implementer(IStreamClientEndpoint)
class PreconnectedEndpoint:
    """
    TLS as from ``ClientTLSEndpoint``, over a preconnected connection if one exists.

    Args:
        reactor: adopts the preconnected connection.
        address: of the preconnected connection.
        context, check, endpoint: as for ``ClientTLSEndpoint``.
    """

    def __init__(
        self,
        reactor: Any,
        ahead: Preconnector,
        address: HostPort,
        context: ssl.SSLContext,
        check: CheckCertificate,
        endpoint: IStreamClientEndpoint,
    ) -> None:
        self.reactor = reactor
        self._ahead = ahead
        self._address = address
        self._context = context
        self._check = check
        self._otherwise = ClientTLSEndpoint(context, check, endpoint)

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """Connect; fires with the protocol over TLS. The Deferred can be cancelled."""
        return Deferred.fromCoroutine(self._connect(protocolFactory))

    async def _connect(self, factory: IProtocolFactory) -> IProtocol:
        waiting: Deferred[Preconnected | None] = Deferred()

        def arrived(begun: Preconnected | None) -> None:
            if not waiting.called:
                waiting.callback(begun)
            elif begun is not None:  # the Deferred was cancelled
                begun.socket.close()

        def ready(begun: Preconnected | None) -> None:
            """Pass the connection from any thread to the reactor's thread."""
            self.reactor.callFromThread(arrived, begun)

        begun = await waiting if self._ahead.take(self._address, ready) else None
        if begun is not None:
            with suppress(Exception):  # the endpoint connects again, and reports what is wrong
                return self._adopt(begun, factory)
        return await self._otherwise.connect(factory)

    def _adopt(self, begun: Preconnected, factory: IProtocolFactory) -> IProtocol:
        """
        Return the protocol over a preconnected connection.

        Raises:
            OSError: the connection is already lost, or no protocol was made for it.
            Exception: an error of the protocol or its factory; the connection has been closed.
        """
        tls = ClientTLSFactory(self._context, self._check, factory, begun)
        with begun.socket as socket:  # the reactor has duplicated the descriptor
            try:
                self.reactor.adoptStreamConnection(socket.fileno(), socket.family, tls)
            except Exception:
                if tls.built is not None:
                    tls.built.abortConnection()
                raise
        if tls.built is None:
            raise OSError("it is not wanted any more")
        wrapped: IProtocol = tls.built.wrappedProtocol
        return wrapped
