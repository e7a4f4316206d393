"""TLS in batches: the same bytes, in fewer pieces; and it ends as Twisted's own does."""

from __future__ import annotations

import random
from typing import Any

from OpenSSL import SSL
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IOpenSSLClientConnectionCreator
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from pipegrid.flow.tls import BATCH_BYTES, RECORD_BYTES, BatchingTLSFactory
from pipegrid.storage import identity

WHO = identity.from_pem(identity.make_pem(), "unused", "a test's key")


@implementer(IOpenSSLClientConnectionCreator)
class Client:
    """Makes the client's side; what it trusts is not the question here."""

    def clientConnectionForTLS(self, _protocol: object) -> SSL.Connection:
        context = SSL.Context(SSL.TLS_METHOD)
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
        self.clock = Clock()
        self.ends: list[Any] = []
        creators: list[tuple[Any, bool]] = [(Client(), True), (WHO.contexts(), False)]
        for creator, is_client in creators:
            factory: Any = BatchingTLSFactory(
                creator, is_client, Factory.forProtocol(Recorder), clock=self.clock
            )
            end = factory.buildProtocol(None)
            end.makeConnection(Beneath())
            self.ends.append(end)
        self.recorders: list[Recorder] = [end.wrappedProtocol for end in self.ends]
        self.carry()

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
