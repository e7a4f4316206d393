"""TLS of clients (`ssl`); adoption of preconnected sockets."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
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
from pipegrid.reactor.sockets import Buffer, Outlet, socket_of
from pipegrid.reactor.tls_context import BATCH_BYTES, GATHERED_BYTES, RECORD_BYTES

# TLS of clients that know whom they want to talk to: Python's own ``ssl``, over memory.
#
# Twisted's TLS brings pyOpenSSL with it, and that X.509 as ``cryptography`` has it; importing them was a
# tenth of what a ``put`` of a small file computes. Of all that a client of storage servers needs the
# handshake, one look at the certificate, and records. What is common with ``tls``, which servers and
# Foolscap use: all records of one read are delivered together, those of one write are sent together and
# at once, large buffers are encrypted where they lie.
#
# ===========  ===================================================================================
# handshaking  what is written waits. When the handshake is over, and before its last bytes leave, the
#              certificate is checked; if it is not the right one nothing is sent any more
# open         bytes go both ways
# closing      ``loseConnection`` was called, and a producer still writes
# said         goodbye was sent, and the transport closes behind it. The other's goodbye is not waited for,
#              which would take a round trip: a client closes when all is answered
# lost         nothing is delivered and nothing sent: after the other's goodbye, an error, an abort,
#              or the transport's end
# ===========  ===================================================================================
#
# **The end, as the protocol hears it.** After a goodbye, of either side, what the transport says. Without
# one ``ConnectionLost``: whoever can cut the wire could otherwise make what was cut off look whole. After an
# error of TLS ``TlsFailed``, and after a wrong certificate the error of the check.
#
# **Renegotiation** is refused, as in TLS 1.3, which has none: it is one certificate that was checked.

log = Logger()

CheckCertificate = Callable[[bytes], Exception | None]
"""Is given the server's certificate, DER; returns what is wrong with it, or None."""

_PORTION_BYTES = 2 * RECORD_BYTES
"""Encrypted in one call: what fits into the processor's own cache is copied for nearly nothing."""

_DELIVERY_BYTES = 8 * BATCH_BYTES
"""Decrypted before it is copied: what one read of a client's brings, so that nothing is joined."""

# These are filled and emptied within one call, so all connections share them.
_records = memoryview(bytearray(_DELIVERY_BYTES + RECORD_BYTES))
_gathered = memoryview(bytearray(GATHERED_BYTES + RECORD_BYTES // 2))  # with what TLS adds


class TlsFailed(ConnectionError):
    """TLS could not go on; the text says why."""


@implementer(INegotiated)
class ClientTLS(Protocol):
    """
    One connection's TLS: the protocol of a transport, and the transport of a protocol. See above.

    Args:
        begun: the connection, if it was made ahead; its certificate was not looked at.

    Attributes:
        wrappedProtocol: which this is the transport of.
        disconnecting: no more is to be written.
    """

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
        self._said_goodbye = False  # one of the two sides has
        self._reason: Failure | None = None
        self._waiting: list[bytes] = []  # written before the handshake was over
        self._producer: Any = None
        self._pulling: Any = None
        self._outlet = Outlet(None)
        self._gathered_bytes = 0  # of this connection, in the common buffer, within one call

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
        """What ALPN has chosen; None: nothing, or nothing yet."""
        name = None if self._tls is None else self._tls.selected_alpn_protocol()
        return None if name is None else name.encode("ascii")

    # From the transport.

    def makeConnection(self, transport: Any) -> None:
        """Give the protocol its transport, then begin the handshake."""
        directlyProvides(self, providedBy(transport))
        self._outlet = Outlet(socket_of(transport))
        self.transport = transport
        self.connected = 1
        self.wrappedProtocol.makeConnection(self)
        if not self._lost:
            self._shake_hands()
            if not self._handshaking and not self._lost:  # it was made ahead
                self._deliver(memoryview(b""))
            self._flush()

    def dataReceived(self, data: bytes) -> None:
        """Take what the socket has read, however much; OpenSSL has it piece by piece."""
        view = memoryview(data)
        while self._handshaking and view and not self._lost:
            self._received.write(view[:BATCH_BYTES])
            view = view[BATCH_BYTES:]
            self._shake_hands()
        if not self._handshaking and not self._lost:
            self._deliver(view)
        self._flush()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Tell the protocol how it ended."""
        if not self._lost and not self._said_goodbye and reason.check(ConnectionDone):
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
            self._say_goodbye()

    # Receiving.

    def _deliver(self, encrypted: memoryview) -> None:
        """Deliver, in one piece, all that can be decrypted now with these bytes behind what OpenSSL has."""
        received: list[bytes] = []
        goodbye, failure = False, None
        try:
            goodbye = self._decrypt(encrypted, received)
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
        elif goodbye:
            self._say_goodbye()

    def _decrypt(self, encrypted: memoryview, received: list[bytes]) -> bool:
        """Add the records that are complete; returns whether there will be no more, by the other's word."""
        tls, bio, size = self._tls, self._received, 0
        assert tls is not None
        try:
            while True:
                if encrypted:
                    bio.write(encrypted[:BATCH_BYTES])
                    encrypted = encrypted[BATCH_BYTES:]
                try:
                    # Where one more record fits, whatever its size.
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
        """Encrypt bytes and send them; they are not kept."""
        self.write_pieces((data,))

    def writeSequence(self, iovec: Iterable[Buffer]) -> None:
        """Write buffers one behind the other."""
        self.write_pieces(iovec)

    def write_pieces(self, pieces: Iterable[Buffer]) -> None:
        """Write buffers one behind the other, in as few records as that takes; they are not kept."""
        if self._lost or (self.disconnecting and self._producer is None):
            return
        if self._handshaking:
            self._waiting.extend(bytes(each) for each in pieces)
            if self._producer is not None:
                self._producer.pauseProducing()
            return
        small: list[Buffer] = []
        for piece in tuple(pieces):  # to make them may be to write elsewhere
            if len(piece) < RECORD_BYTES:
                small.append(piece)
                continue
            if small:
                self._encrypt(b"".join(small))
                small = []
            self._encrypt(piece)
        if small:
            self._encrypt(small[0] if len(small) == 1 else b"".join(small))
        self._flush()

    def _encrypt(self, data: Buffer) -> None:
        """Encrypt data, and gather it; it is sent by ``_flush``, or as soon as there is much of it."""
        view = memoryview(data)
        try:
            while view and not self._lost:
                assert self._tls is not None
                view = view[self._tls.write(view[:_PORTION_BYTES]) :]
                self._gather()
        except (OSError, ValueError) as error:
            self._fail(_failed(error))

    def _gather(self) -> None:
        """
        Put what was encrypted behind what will be handed down with it.

        Copied, for the C library gives large buffers of Python's back to the system, and gets new ones from
        it, each time: that took longer.
        """
        while self._encrypted.pending:
            room = len(_gathered) - self._gathered_bytes
            encrypted = self._encrypted.read(min(room, BATCH_BYTES))
            end = self._gathered_bytes + len(encrypted)
            _gathered[self._gathered_bytes : end] = encrypted
            self._gathered_bytes = end
            if end == len(_gathered):
                self._hand_down()

    def _hand_down(self) -> None:
        encrypted = _gathered[: self._gathered_bytes]
        self._gathered_bytes = 0
        if encrypted and not self._aborted:
            self._outlet.send(encrypted, self.transport)

    def _flush(self) -> None:
        """Hand down all that was encrypted."""
        self._gather()
        self._hand_down()

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """Have a producer told when there is room, as the transport does."""
        if self._lost:
            producer.stopProducing()
            return
        if not streaming:
            producer = self._pulling = _Pulling(producer, self)
        transport: Any = self.transport
        transport.registerProducer(producer, True)
        self._producer = producer
        if self._pulling is not None:
            self._pulling.startStreaming()

    def unregisterProducer(self) -> None:
        """The producer has written all; close, if that waited for it."""
        if self._producer is None:
            return
        pulling, self._pulling = self._pulling, None
        if pulling is not None:
            pulling.stopStreaming()
        self._producer = None
        transport: Any = self.transport
        transport.unregisterProducer()
        if self.disconnecting and not self._handshaking and not self._lost:
            self._say_goodbye()

    # Ends.

    def loseConnection(self) -> None:
        """Close behind all that was written; at once if that is nothing, and the handshake is not over."""
        if self.disconnecting or self._lost:
            return
        self.disconnecting = True
        if self._handshaking and not self._waiting:
            self.abortConnection()
        elif not self._handshaking and self._producer is None:
            self._say_goodbye()

    def abortConnection(self) -> None:
        """End it now, whatever was to be sent; nothing more is delivered."""
        self.disconnecting = self._lost = self._aborted = True
        transport: Any = self.transport
        if transport is not None:
            getattr(transport, "abortConnection", transport.loseConnection)()

    def _say_goodbye(self) -> None:
        """Tell the other side that this is all, or that it was understood, and close."""
        self._said_goodbye = self.disconnecting = True
        if self._lost:
            return
        self._lost = True
        try:
            assert self._tls is not None
            self._tls.unwrap()
        except (OSError, ValueError):
            pass  # it has not said so itself: see above
        self._flush()
        assert self.transport is not None
        self.transport.loseConnection()  # behind what it has still to send

    def _fail(self, error: Exception) -> None:
        """End with an error, which the other side is told if TLS has words for it."""
        self._lost = True
        self._reason = Failure(error)
        self._flush()
        self.disconnecting = True
        assert self.transport is not None
        self.transport.loseConnection()


@implementer(IPushProducer)
class _Pulling:
    """A producer that is asked for each piece, as one that writes until it is paused."""

    def __init__(self, producer: Any, consumer: ClientTLS) -> None:
        self._producer = producer
        self._consumer = consumer
        self._task: Any = None

    def startStreaming(self) -> None:
        """Ask again and again, a piece in a turn of the reactor."""
        self._task = cooperate(self._pieces())

    def stopStreaming(self) -> None:
        """Ask no more; again does nothing."""
        with suppress(TaskFinished):
            self._task.stop()

    def pauseProducing(self) -> None:
        self._task.pause()

    def resumeProducing(self) -> None:
        self._task.resume()

    def stopProducing(self) -> None:
        """Ask no more, and say so."""
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
    """Return what to tell of an error of OpenSSL's."""
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return ConnectionLost("it ended without TLS's close_notify")
    reason = (getattr(error, "reason", None) or str(error)).replace("_", " ").lower()
    if reason == "wrong version number":  # which is what OpenSSL makes of a page of HTML
        reason = "the other end does not speak TLS, as in networks that require a login in the browser first"
    failed = TlsFailed(f"TLS failed: {reason}")
    failed.__cause__ = error
    return failed


# Clients' own TLS around connections that are yet to be made.


class ClientTLSFactory(Factory):
    """
    Adds TLS to the connections of another factory.

    Args:
        begun: the only connection, if it was made ahead.

    Attributes:
        built: the last protocol; None: the other factory wanted no connection.
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
    Such TLS around an endpoint, as ``twisted.internet.endpoints.wrapClientTLS`` does with Twisted's.

    Args:
        context: see ``clientcontext``.
        check: of each connection's certificate; what it returns reaches ``connectionLost``.
        endpoint: for the connection beneath.
    """

    def __init__(
        self, context: ssl.SSLContext, check: CheckCertificate, endpoint: IStreamClientEndpoint
    ) -> None:
        self._context = context
        self._check = check
        self._endpoint = endpoint

    def connect(self, protocolFactory: IProtocolFactory) -> Deferred[IProtocol]:
        """Connect; fires with the protocol over TLS, whose handshake goes on."""
        factory: Any = ClientTLSFactory(self._context, self._check, protocolFactory)
        connecting: Deferred[Any] = self._endpoint.connect(factory)
        return connecting.addCallback(lambda tls: tls.wrappedProtocol)


# Connections that were made ahead, given to the reactor.


@implementer(IStreamClientEndpoint)
class PreconnectedEndpoint:
    """
    Such TLS as ``ClientTLSEndpoint`` makes, over the connection that was made ahead if there is one.

    Args:
        reactor: gets the connection.
        address: whose connection it is.
        context, check, endpoint: as ``ClientTLSEndpoint`` is given them.
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
        """Connect; fires with the protocol over TLS. Cancelling gives up."""
        attempt = _Attempt(self, protocolFactory)
        if not self._ahead.take(self._address, attempt.ready):
            return self._otherwise.connect(protocolFactory)
        return attempt.made

    def adopt(self, begun: Preconnected, factory: IProtocolFactory) -> IProtocol:
        """
        Return the protocol over a connection that was made ahead.

        Raises:
            OSError: it is lost already, or it is not wanted any more.
            Exception: whatever those who got it thought of it. It has ended, in any case.
        """
        tls = ClientTLSFactory(self._context, self._check, factory, begun)
        with begun.socket as socket:  # the reactor has a descriptor of its own
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

    def dial(self, factory: IProtocolFactory) -> Deferred[IProtocol]:
        """Connect as if nothing had been made ahead."""
        return self._otherwise.connect(factory)


class _Attempt:
    """Waits for the connection that is on its way."""

    def __init__(self, endpoint: PreconnectedEndpoint, factory: IProtocolFactory) -> None:
        self.made: Deferred[IProtocol] = Deferred(self._cancelled)
        self._endpoint = endpoint
        self._factory = factory
        self._dialling: Deferred[IProtocol] | None = None

    def ready(self, begun: Preconnected | None) -> None:
        """Go on in the reactor's thread, from whichever."""
        self._endpoint.reactor.callFromThread(self._go_on, begun)

    def _go_on(self, begun: Preconnected | None) -> None:
        if begun is not None:
            if self.made.called:  # it was cancelled
                begun.socket.close()
                return
            try:
                protocol = self._endpoint.adopt(begun, self._factory)
            except Exception:
                pass  # dialling will tell what is wrong, and nobody else would
            else:
                self.made.callback(protocol)
                return
        if not self.made.called:
            self._dialling = self._endpoint.dial(self._factory)
            self._dialling.chainDeferred(self.made)

    def _cancelled(self, made: Deferred[IProtocol]) -> None:
        if self._dialling is not None:
            self._dialling.cancel()
        if not made.called:
            made.errback(CancelledError())
