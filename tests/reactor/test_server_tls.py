"""TLS in batches: the same bytes, in fewer pieces; and it ends as Twisted's own does."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import Mock

from OpenSSL import SSL
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.protocols.policies import ProtocolWrapper
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from pipegrid.reactor import bulk_tls
from pipegrid.reactor.bulk_tls import BatchingTLSFactory, write_whole
from pipegrid.reactor.tcp_transport import HELD_BACK_BYTES, SEND_BYTES, set_bulk_buffers
from pipegrid.reactor.tls_settings import BATCH_BYTES, GATHERED_BYTES, RECORD_BYTES
from pipegrid.server import identity

WHO = identity.from_pem(identity.make_pem(), "unused", "a test's key")


@implementer(IOpenSSLClientConnectionCreator)
class Client:
    """Makes the client's side; what it trusts is not the question here."""

    def __init__(self, context: SSL.Context | None = None) -> None:
        self.context = context

    def clientConnectionForTLS(self, _protocol: object) -> SSL.Connection:
        context = self.context or SSL.Context(SSL.TLS_METHOD)
        context.set_verify(SSL.VERIFY_NONE, lambda *_: True)
        connection = SSL.Connection(context, None)
        connection.set_connect_state()
        return connection


class NotingOpenSSL:
    """OpenSSL, and how much it was given at a time."""

    def __init__(self) -> None:
        self.given: list[int] = []
        self._lib = bulk_tls._lib

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)

    def BIO_write(self, bio: Any, start: Any, size: int) -> int:
        self.given.append(size)
        return int(self._lib.BIO_write(bio, start, size))


class FailingOpenSSL:
    """OpenSSL, which fails after so many writes."""

    def __init__(self, writes: int) -> None:
        self.writes = writes
        self._lib = bulk_tls._lib

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lib, name)

    def SSL_write(self, ssl: Any, start: Any, size: int) -> int:
        self.writes -= 1
        return int(self._lib.SSL_write(ssl, start, size)) if self.writes >= 0 else 0


class Recorder(Protocol):
    """Notes what it gets, piece by piece."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.reasons: list[Failure] = []

    def dataReceived(self, data: bytes) -> None:
        self.pieces.append(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.reasons.append(reason)


class Beneath(StringTransport):
    """A transport that remembers the pieces, too."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def abortConnection(self) -> None:
        self.aborted = True

    def take(self) -> bytes:
        """Return what was written, once."""
        data = b"".join(self.written)
        self.written.clear()
        return data


class Socket(Beneath):
    """A transport that takes some bytes at once, as Twisted's sockets do, and keeps the others."""

    def __init__(self) -> None:
        super().__init__()
        self.connected = True
        self.dataBuffer = b""
        self._tempDataBuffer: list[bytes] = []
        self.producer: Any = None
        self.streamingProducer = True
        self.producerPaused = False
        self.space_bytes = 0
        self.error: Exception | None = None
        self.sent = bytearray()
        self.calls = 0

    def writeSomeData(self, data: memoryview) -> int | Exception:
        self.calls += 1
        if self.error is not None:
            return self.error
        size = min(len(data), self.space_bytes)
        self.space_bytes -= size
        self.sent += data[:size]
        return size

    def write(self, data: bytes) -> None:
        self._tempDataBuffer.append(data)

    def take(self) -> bytes:
        """Return what was sent, and what was kept behind it, once."""
        data = bytes(self.sent) + self.dataBuffer + b"".join(self._tempDataBuffer)
        self.sent.clear()
        self._tempDataBuffer.clear()
        self.dataBuffer = b""
        return data


class BatchingTests(SynchronousTestCase):
    """Two ends, their transports carried by hand."""

    def setUp(self) -> None:
        self.set_up_unconnected()
        self.carry()

    def set_up_unconnected(self, context: SSL.Context | None = None) -> None:
        """Have two ends that have not exchanged a byte."""
        self.clock = Clock()
        self.ends: list[Any] = []
        creators: list[tuple[Any, bool]] = [(Client(context), True), (WHO.contexts(), False)]
        for creator, is_client in creators:
            factory: Any = BatchingTLSFactory(
                creator, is_client, Factory.forProtocol(Recorder), clock=self.clock
            )
            end = factory.buildProtocol(None)
            end.makeConnection(Beneath())
            self.ends.append(end)
        self.recorders: list[Recorder] = [end.wrappedProtocol for end in self.ends]

    def carry(self) -> None:
        """Carry bytes until there are none."""
        self.clock.advance(0)
        client, server = self.ends
        while client.transport.written or server.transport.written:
            for source, target in ((client, server), (server, client)):
                data = source.transport.take()
                if data:
                    target.dataReceived(data)
            self.clock.advance(0)

    def test_fewer_pieces(self) -> None:
        """
        What is written goes down in few pieces, and what is read comes up as one.

        This fails if Twisted no longer calls what BatchingTLS overrides.
        """
        client, server = self.ends
        data = random.Random(1).randbytes(GATHERED_BYTES + BATCH_BYTES + 1000)
        for source, target in ((client, server), (server, client)):
            source.write(data)
            self.clock.advance(0)
            self.assertEqual(len(source.transport.written), 2)
            target.dataReceived(source.transport.take())
            self.assertEqual(target.wrappedProtocol.pieces, [data])
            target.wrappedProtocol.pieces.clear()

    def test_any_cut(self) -> None:
        """Records that come in parts are delivered when they are whole, and nothing is lost."""
        client, server = self.ends
        data = random.Random(2).randbytes(5 * RECORD_BYTES)
        client.write(data)
        self.clock.advance(0)
        encrypted = client.transport.take()
        for at in range(0, len(encrypted), 10_007):
            server.dataReceived(encrypted[at : at + 10_007])
        self.assertEqual(b"".join(server.wrappedProtocol.pieces), data)
        self.assertLess(len(server.wrappedProtocol.pieces), 10)

    def test_a_large_write(self) -> None:
        """It is sent with what waits, in one call, but not joined to it; what is behind waits itself."""
        client, server = self.ends
        socket = self.connect_to_socket(10 * BATCH_BYTES)
        joined: list[int] = []
        write = bulk_tls.BatchingTLS._write

        def noting(client: bulk_tls.BatchingTLS, data: bytes) -> None:
            joined.append(len(data))
            write(client, data)

        self.patch(bulk_tls.BatchingTLS, "_write", noting)
        for data in (b"head", bytes(RECORD_BYTES), b"tail"):
            client.write(data)
        self.assertEqual(socket.calls, 1)
        self.clock.advance(0)
        self.assertEqual((joined, socket.calls), ([4, RECORD_BYTES, 4], 2))
        server.dataReceived(socket.take())
        self.assertEqual(server.wrappedProtocol.pieces, [b"head" + bytes(RECORD_BYTES) + b"tail"])

    def test_much_at_once(self) -> None:
        """However much the socket has read, OpenSSL gets a little at a time, and all arrives as one piece."""
        client, server = self.ends
        data = random.Random(3).randbytes(9 * BATCH_BYTES + 77)
        client.write(data)
        self.clock.advance(0)
        openssl = NotingOpenSSL()
        self.patch(bulk_tls, "_lib", openssl)
        server.dataReceived(client.transport.take())
        self.assertEqual(server.wrappedProtocol.pieces, [data])
        self.assertEqual(max(openssl.given), BATCH_BYTES)

    def test_pieces_of_any_kind_and_size(self) -> None:
        """They arrive in order behind what was written before and in front of what is written after."""
        client, server = self.ends
        rng = random.Random(4)
        sizes = (3, RECORD_BYTES - 1, RECORD_BYTES, 0, 5, 2 * BATCH_BYTES + 1, 7)
        kinds: list[Any] = [bytes, bytearray, memoryview]
        pieces = [rng.choice(kinds)(rng.randbytes(size)) for size in sizes]
        client.write(b"before")
        client.write_pieces(pieces)
        client.write(b"after")
        self.carry()
        received = b"".join(server.wrappedProtocol.pieces)
        self.assertEqual(received, b"before" + b"".join(pieces) + b"after")

    def test_a_large_buffer_is_encrypted_where_it_lies(self) -> None:
        """It is not kept: the caller may change it as soon as ``write_pieces`` returns."""
        client, server = self.ends
        buffer = bytearray(b"x" * BATCH_BYTES)
        client.write_pieces([memoryview(buffer)])
        buffer[:] = bytes(BATCH_BYTES)
        self.carry()
        self.assertEqual(b"".join(server.wrappedProtocol.pieces), b"x" * BATCH_BYTES)

    def test_pieces_before_the_handshake_and_after_the_end(self) -> None:
        """Those before wait, in order, whatever becomes of their buffers; those after are dropped."""
        self.set_up_unconnected()
        client, server = self.ends
        buffer = bytearray(b"1" * (RECORD_BYTES + 1))
        client.write_pieces([b"0", memoryview(buffer), b"2"])
        self.clock.advance(0)
        buffer[:] = bytes(RECORD_BYTES + 1)
        self.carry()
        expected = b"0" + b"1" * (RECORD_BYTES + 1) + b"2"
        self.assertEqual(b"".join(server.wrappedProtocol.pieces), expected)
        client.connectionLost(Failure(ConnectionLost()))
        client.transport.take()
        client.write_pieces([bytes(RECORD_BYTES), b"gone"])
        self.assertEqual(client.transport.take(), b"")

    def test_a_context_that_encrypts_all_of_a_write_in_one_call(self) -> None:
        """``write_whole``: several records with one call of OpenSSL's, where pyOpenSSL (25.2) lets it."""
        context = SSL.Context(SSL.TLS_METHOD)
        write_whole(context)
        self.set_up_unconnected(context)
        client, _ = self.ends
        self.carry()
        at_once = BATCH_BYTES if hasattr(context, "clear_mode") else RECORD_BYTES
        self.assertEqual(client._tlsConnection.send(bytes(BATCH_BYTES)), at_once)

    def test_nothing_to_write(self) -> None:
        """No bytes make no record."""
        self.ends[0].write(b"")
        self.clock.advance(0)
        self.assertEqual(self.ends[0].transport.take(), b"")

    def test_close_behind_data(self) -> None:
        """What came in the same read as the other side's goodbye is delivered before it."""
        client, server = self.ends
        client.write(b"last words")
        client.loseConnection()
        server.dataReceived(client.transport.take())
        self.assertEqual(server.wrappedProtocol.pieces, [b"last words"])
        self.carry()
        self.assertTrue(server.transport.disconnecting)
        for end, recorder in zip(self.ends, self.recorders, strict=True):
            end.connectionLost(Failure(ConnectionDone()))
            [reason] = recorder.reasons
            self.assertTrue(reason.check(ConnectionDone))

    def test_nonsense_behind_data(self) -> None:
        """What came before broken bytes is delivered, and then the connection fails as TLS says."""
        client, server = self.ends
        client.write(b"good")
        self.clock.advance(0)
        server.dataReceived(client.transport.take() + b"\x17\x03\x03\x00\x20" + bytes(32))
        self.assertEqual(server.wrappedProtocol.pieces, [b"good"])
        server.connectionLost(Failure(ConnectionLost()))
        [reason] = self.recorders[1].reasons
        self.assertTrue(reason.check(SSL.Error))

    def test_nothing_after_abort(self) -> None:
        """Who has aborted hears and says nothing more."""
        client, server = self.ends
        client.write(b"too late")
        self.clock.advance(0)
        server.abortConnection()
        server.dataReceived(client.transport.take())
        server.write(b"nobody hears")
        self.clock.advance(0)
        self.assertEqual(server.wrappedProtocol.pieces, [])
        self.assertTrue(server.transport.aborted)

    def connect_to_socket(self, space_bytes: int) -> Socket:
        """Have a socket beneath the client, with nothing waiting."""
        client = self.ends[0]
        socket = client.transport = Socket()
        client.find_socket(socket)
        socket.space_bytes = space_bytes
        return socket

    def assertArrives(self, data: bytes, socket: Socket) -> None:
        """What went to a socket, whichever way, is these bytes to the other end."""
        self.ends[1].dataReceived(socket.take())
        self.assertEqual(b"".join(self.ends[1].wrappedProtocol.pieces), data)

    def test_what_a_socket_takes_is_sent_at_once(self) -> None:
        """Nothing waits for the reactor's next turn."""
        socket = self.connect_to_socket(10 * BATCH_BYTES)
        data = random.Random(5).randbytes(3 * BATCH_BYTES + 5)
        self.ends[0].write_pieces([data])
        self.assertEqual(socket._tempDataBuffer, [])
        self.assertGreater(len(socket.sent), len(data))
        self.assertArrives(data, socket)

    def test_a_layer_between(self) -> None:
        """What stands between TLS and the socket sees all that is sent."""
        socket = self.connect_to_socket(BATCH_BYTES)
        seen = []

        class Layer(ProtocolWrapper):
            def write(self, data: bytes) -> None:
                seen.append(data)

        layer: Any = Layer(Mock(), Mock())
        layer.transport = socket
        self.ends[0].transport = layer
        self.ends[0].find_socket(layer)
        self.ends[0].write_pieces([bytes(RECORD_BYTES)])
        self.assertEqual(socket.sent, b"")
        self.assertEqual(len(seen), 1)

    def test_a_socket_that_takes_a_part(self) -> None:
        """The rest is kept by the transport, and all that follows is behind it."""
        for space_bytes in (0, 1, BATCH_BYTES + 100):
            with self.subTest(space_bytes=space_bytes):
                self.set_up_unconnected()
                self.carry()
                socket = self.connect_to_socket(space_bytes)
                data = random.Random(6).randbytes(3 * BATCH_BYTES)
                self.ends[0].write_pieces([data])
                self.assertEqual(len(socket.sent), space_bytes)
                socket.space_bytes = BATCH_BYTES  # too late: something waits
                self.ends[0].write_pieces([data])
                self.assertEqual(len(socket.sent), space_bytes)
                self.assertArrives(data + data, socket)

    def test_nothing_overtakes_what_waits(self) -> None:
        """Neither what the transport has not looked at yet, nor what it is about to send."""
        for waiting in ("dataBuffer", "_tempDataBuffer"):
            with self.subTest(waiting):
                self.set_up_unconnected()
                self.carry()
                socket = self.connect_to_socket(0)
                self.ends[0].write_pieces([bytes(RECORD_BYTES)])
                if waiting == "dataBuffer":
                    [socket.dataBuffer], socket._tempDataBuffer = socket._tempDataBuffer, []
                socket.space_bytes = BATCH_BYTES
                self.ends[0].write_pieces([b"x" * RECORD_BYTES])
                self.assertEqual(socket.sent, b"")
                self.assertArrives(bytes(RECORD_BYTES) + b"x" * RECORD_BYTES, socket)

    def test_a_socket_that_is_full_pauses_the_producer(self) -> None:
        """At once, and once; as the transport would do itself later, so that it lets it go on again."""
        client = self.ends[0]
        socket = self.connect_to_socket(BATCH_BYTES)
        socket.producer = Mock()
        client.write_pieces([bytes(RECORD_BYTES)])
        self.assertFalse(socket.producerPaused)
        client.write_pieces([bytes(3 * BATCH_BYTES)])
        self.assertTrue(socket.producerPaused)
        socket.producer.pauseProducing.assert_called_once_with()

    def test_others_have_their_turn(self) -> None:
        """However much a socket takes, after ``SEND_BYTES`` the reactor looks at the others."""
        socket = self.connect_to_socket(100 * SEND_BYTES)
        data = bytes(2 * SEND_BYTES)
        self.ends[0].write_pieces([data])
        self.assertLess(len(socket.sent), SEND_BYTES + 2 * BATCH_BYTES)
        self.assertGreaterEqual(len(socket.sent), SEND_BYTES - HELD_BACK_BYTES)
        self.assertNotEqual(socket._tempDataBuffer, [])
        self.assertArrives(data, socket)
        self.ends[0].write_pieces([b"again" * RECORD_BYTES])
        self.assertEqual(socket._tempDataBuffer, [])

    def test_little_waits_when_others_have_their_turn(self) -> None:
        """The transport comes back for a page, and has not been given copies of more."""
        socket = self.connect_to_socket(100 * SEND_BYTES)
        socket.producer = Mock()
        size_bytes = 0
        while not socket.producerPaused:
            self.ends[0].write_pieces([bytes(BATCH_BYTES)])
            size_bytes += BATCH_BYTES
        self.assertEqual(sum(map(len, socket._tempDataBuffer)), HELD_BACK_BYTES)
        self.assertGreaterEqual(size_bytes, SEND_BYTES - BATCH_BYTES)
        self.assertArrives(bytes(size_bytes), socket)

    def test_pieces_are_sent_together(self) -> None:
        """Those of one call, if they are not too long for that; and nothing of them stays behind."""
        data = random.Random(7).randbytes(GATHERED_BYTES)
        cuts = (
            (0, 100, 20_000, 60_000, 60_001, 100_000),
            (0, *range(4000, 40_000, 4000), 60_000),  # small ones that are many
            (0, GATHERED_BYTES // 2),
        )
        for cut in cuts:
            with self.subTest(cut):
                self.set_up_unconnected()
                self.carry()
                socket = self.connect_to_socket(10 * GATHERED_BYTES)
                ends = (*cut[1:], GATHERED_BYTES)
                pieces = [data[a:b] for a, b in zip(cut, ends, strict=True)]
                calls = socket.calls
                self.ends[0].write_pieces(pieces)
                self.clock.advance(0)
                self.assertEqual(socket.calls - calls, 1)
                self.assertArrives(data, socket)

    def test_a_failure_after_some_of_the_pieces(self) -> None:
        """What was encrypted before is sent, then the connection ends; nothing is left for the next call."""
        for pieces in (1, 2):
            with self.subTest(pieces):
                self.set_up_unconnected()
                self.carry()
                socket = self.connect_to_socket(10 * GATHERED_BYTES)
                patch = self.patch(bulk_tls, "_lib", FailingOpenSSL(pieces))
                self.ends[0].write_pieces([bytes(RECORD_BYTES)] * 4)
                patch.restore()
                self.assertEqual(self.ends[0]._gathered_bytes, 0)
                self.assertTrue(socket.disconnecting)
                self.assertArrives(bytes(RECORD_BYTES * pieces), socket)

    def test_a_socket_that_is_broken(self) -> None:
        """It keeps what it was given, and the reactor will find out."""
        socket = self.connect_to_socket(0)
        socket.error = ConnectionLost()
        self.ends[0].write_pieces([bytes(RECORD_BYTES)])
        self.assertEqual(socket.sent, b"")
        self.assertArrives(bytes(RECORD_BYTES), socket)

    def test_a_socket_that_is_gone(self) -> None:
        """Nothing is sent on what is not connected any more."""
        socket = self.connect_to_socket(BATCH_BYTES)
        socket.connected = False
        self.ends[0].write_pieces([bytes(RECORD_BYTES)])
        self.assertEqual(socket.sent, b"")

    def test_nothing_is_sent_after_abort(self) -> None:
        """Not even while a producer is registered, which writes until it hears of the end."""
        client = self.ends[0]
        socket = self.connect_to_socket(BATCH_BYTES)
        client.registerProducer(Mock(), True)
        client.abortConnection()
        client.write_pieces([bytes(RECORD_BYTES)])
        self.assertEqual(socket.sent, b"")

    def test_sockets_move_much(self) -> None:
        """Beneath TLS or not; what is no socket is left as it is."""
        socket = Mock(spec_set=["bufferSize", "SEND_LIMIT"])
        for transport in (socket, self.ends[0]):
            self.ends[0].transport = socket
            socket.bufferSize = socket.SEND_LIMIT = 1
            set_bulk_buffers(transport, 12345)
            self.assertEqual((socket.bufferSize, socket.SEND_LIMIT), (12345, SEND_BYTES))
        set_bulk_buffers(StringTransport(), 12345)
