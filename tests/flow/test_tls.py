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
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from pipegrid.flow.tls import (
    BATCH_BYTES,
    RECORD_BYTES,
    SEND_BYTES,
    BatchingTLSFactory,
    move_much,
    write_whole,
)
from pipegrid.storage import identity

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
        What is written goes down by the batch, and what is read comes up as one piece.

        This fails if Twisted no longer calls what BatchingTLS overrides.
        """
        client, server = self.ends
        data = random.Random(1).randbytes(3 * BATCH_BYTES + 1000)
        for source, target in ((client, server), (server, client)):
            source.write(data)
            self.clock.advance(0)
            self.assertEqual(len(source.transport.written), 4)
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

    def test_much_at_once(self) -> None:
        """However much the socket has read, OpenSSL gets a little at a time, and all arrives as one piece."""
        client, server = self.ends
        data = random.Random(3).randbytes(9 * BATCH_BYTES + 77)
        client.write(data)
        self.clock.advance(0)
        given: list[int] = []
        connection = server._tlsConnection
        original = connection.bio_write

        def note(piece: bytes) -> int:
            given.append(len(piece))
            return int(original(piece))

        connection.bio_write = note
        server.dataReceived(client.transport.take())
        self.assertEqual(server.wrappedProtocol.pieces, [data])
        self.assertLessEqual(max(given), BATCH_BYTES)

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
        """``write_whole``: several records with one call of OpenSSL's."""
        context = SSL.Context(SSL.TLS_METHOD)
        write_whole(context)
        self.set_up_unconnected(context)
        client, _ = self.ends
        self.carry()
        self.assertEqual(client._tlsConnection.send(bytes(BATCH_BYTES)), BATCH_BYTES)

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

    def test_sockets_move_much(self) -> None:
        """Beneath TLS or not; what is no socket is left as it is."""
        socket = Mock(spec_set=["bufferSize", "SEND_LIMIT"])
        for transport in (socket, self.ends[0]):
            self.ends[0].transport = socket
            socket.bufferSize = socket.SEND_LIMIT = 1
            move_much(transport, 12345)
            self.assertEqual((socket.bufferSize, socket.SEND_LIMIT), (12345, SEND_BYTES))
        move_much(StringTransport(), 12345)
