"""Clients' own TLS: one check before anything is sent, the same bytes in few pieces, and honest ends."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import Mock

from cryptography.hazmat.primitives.serialization import Encoding
from OpenSSL import SSL
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionAborted, ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IHandshakeListener
from twisted.internet.protocol import Factory
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from pipegrid.reactor import client_tls
from pipegrid.reactor.bulk_tls import BatchingTLSFactory
from pipegrid.reactor.client_tls import ClientTLS, ClientTLSEndpoint, TlsFailed
from pipegrid.reactor.tcp_transport import Outlet, socket_of
from pipegrid.reactor.tls_settings import (
    BATCH_BYTES,
    GATHERED_BYTES,
    RECORD_BYTES,
    client_context,
    http_context,
)
from pipegrid.server import identity
from tests.reactor.test_server_tls import WHO, Beneath, Recorder, Socket

HANDSHAKE, ALERT, DATA = 22, 21, 23


class WrongOne(Exception):
    """What the check of a test finds."""


@implementer(IHandshakeListener)
class Listener(Recorder):
    """Notes when the handshake is over, and then may write."""

    def __init__(self) -> None:
        super().__init__()
        self.handshakes = 0
        self.greeting = b""

    def handshakeCompleted(self) -> None:
        self.handshakes += 1
        if self.greeting:
            assert self.transport is not None
            self.transport.write(self.greeting)


def records(data: bytes) -> list[int]:
    """Return the kinds of TLS records, in order."""
    kinds = []
    while data:
        kinds.append(data[0])
        data = data[5 + int.from_bytes(data[3:5], "big") :]
    return kinds


class ClientTlsCase(SynchronousTestCase):
    """A client and a server of Twisted's kind, their transports carried by hand."""

    def setUp(self) -> None:
        self.begin()
        self.carry()

    def begin(self, problem: Exception | None = None, options: Any = None) -> None:
        """Have two ends that have not exchanged a byte."""
        self.clock = Clock()
        self.certificates: list[bytes] = []

        def check(certificate: bytes) -> Exception | None:
            self.certificates.append(certificate)
            return problem

        self.recorder = Listener()
        self.client: Any = ClientTLS(http_context(), check, self.recorder)
        factory: Any = BatchingTLSFactory(
            options or WHO.contexts(), False, Factory.forProtocol(Recorder), clock=self.clock
        )
        self.server: Any = factory.buildProtocol(None)
        self.served: Recorder = self.server.wrappedProtocol
        self.server.makeConnection(Beneath())
        self.client.makeConnection(Beneath())

    def carry(self) -> None:
        """Carry bytes until there are none."""
        self.clock.advance(0)
        client, server = self.client, self.server
        while client.transport.written or server.transport.written:
            for source, target in ((client, server), (server, client)):
                data = source.transport.take()
                if data:
                    target.dataReceived(data)
            self.clock.advance(0)

    def send(self, data: bytes) -> bytes:
        """Have the server write; returns what it sends."""
        self.server.write(data)
        self.clock.advance(0)
        sent: bytes = self.server.transport.take()
        return sent

    def assertEnds(self, *kinds: type[BaseException]) -> BaseException:
        """The protocol has heard once how it ended."""
        [reason] = self.recorder.reasons
        self.assertTrue(reason.check(*kinds), reason)
        assert reason.value is not None
        return reason.value


class HandshakeTests(ClientTlsCase):
    """Until it may be written."""

    def setUp(self) -> None:
        pass

    def test_the_check_sees_the_certificate(self) -> None:
        """The server's own, once; then the protocol hears that the handshake is over."""
        self.begin()
        self.assertEqual((self.certificates, self.recorder.handshakes), ([], 0))
        self.carry()
        pem = SSL.Connection(WHO.contexts().getContext(), None).get_certificate()
        assert pem is not None
        self.assertEqual(self.certificates, [pem.to_cryptography().public_bytes(Encoding.DER)])
        self.assertEqual(self.recorder.handshakes, 1)

    def test_every_version_from_12_on(self) -> None:
        """TLS 1.2 and 1.3 are spoken; 1.1 is not, and no byte of what was written leaves."""
        for version, works in (
            (SSL.TLS1_1_VERSION, False),
            (SSL.TLS1_2_VERSION, True),
            (SSL.TLS1_3_VERSION, True),
        ):
            options = WHO.contexts()
            context = options.getContext()
            context.set_min_proto_version(SSL.TLS1_VERSION)
            context.set_max_proto_version(version)
            context.set_cipher_list(b"ALL:@SECLEVEL=0")
            self.begin(options=options)
            self.client.write(b"hello")
            self.carry()
            self.assertEqual(b"".join(self.served.pieces), b"hello" if works else b"")
            if not works:
                self.client.connectionLost(Failure(ConnectionDone()))
                self.assertIn("TLS failed: ", str(self.assertEnds(TlsFailed)))

    def test_a_page_in_the_place_of_the_server(self) -> None:
        """Networks of hotels and trains answer all with one; the sentence says so."""
        self.begin()
        self.client.write(b"hello")
        self.client.dataReceived(b"HTTP/1.1 302 Found\r\nLocation: http://login.example/\r\n\r\n")
        self.client.connectionLost(Failure(ConnectionDone()))
        self.assertIn("require a login in the browser", str(self.assertEnds(TlsFailed)))

    def test_with_the_wrong_certificate_nothing_leaves(self) -> None:
        """Neither what was written nor the handshake's end; the protocol hears what the check found."""
        for version in (SSL.TLS1_2_VERSION, SSL.TLS1_3_VERSION):
            options = WHO.contexts()
            options.getContext().set_max_proto_version(version)
            self.begin(WrongOne(), options)
            self.recorder.greeting = b"secret"
            self.client.write(b"a secret too")
            sent = []
            while self.client.transport.written:
                sent += records(self.client.transport.written[0])
                self.server.dataReceived(self.client.transport.take())
                self.clock.advance(0)
                self.client.dataReceived(self.server.transport.take())
            self.assertNotIn(DATA, sent)
            self.assertTrue(self.client.transport.aborted)
            self.client.write(b"later")
            self.client.write_pieces([bytes(RECORD_BYTES)])
            self.assertEqual(self.client.transport.written, [])
            self.client.connectionLost(Failure(ConnectionAborted()))
            self.assertEnds(WrongOne)
            self.assertEqual((self.recorder.handshakes, self.served.pieces), (0, []))

    def test_what_is_written_before_waits(self) -> None:
        """In order, whatever becomes of its buffers; a producer is paused meanwhile, and then goes on."""
        self.begin()
        producer = Mock()
        self.client.registerProducer(producer, True)
        buffer = bytearray(b"1" * (RECORD_BYTES + 1))
        self.client.write_pieces([b"0", memoryview(buffer), b"2"])
        producer.pauseProducing.assert_called_with()
        producer.resumeProducing.assert_not_called()
        buffer[:] = bytes(RECORD_BYTES + 1)
        self.recorder.greeting = b"3"
        self.carry()
        producer.resumeProducing.assert_called_once_with()
        expected = b"0" + b"1" * (RECORD_BYTES + 1) + b"23"
        self.assertEqual(b"".join(self.served.pieces), expected)

    def test_closed_before(self) -> None:
        """Without anything to write it is aborted; else that is written, and goodbye said."""
        self.begin()
        self.client.loseConnection()
        self.assertTrue(self.client.transport.aborted)
        self.begin()
        self.client.write(b"all")
        self.client.loseConnection()
        self.assertFalse(self.client.transport.disconnecting)
        self.carry()
        self.assertEqual(self.served.pieces, [b"all"])
        self.assertTrue(self.client.transport.disconnecting)

    def test_cut_off(self) -> None:
        """A connection that ends with the handshake was lost, and holds nothing any more."""
        for reason in (ConnectionDone, ConnectionLost):
            self.begin()
            self.client.write(b"waits")
            self.client.dataReceived(self.answer()[:500])
            self.client.connectionLost(Failure(reason()))
            self.assertEnds(ConnectionLost)
            self.assertEqual(self.client._waiting, [])

    def answer(self) -> bytes:
        """Return what the server says first."""
        self.server.dataReceived(self.client.transport.take())
        self.clock.advance(0)
        said: bytes = self.server.transport.take()
        return said

    def test_any_cut_of_the_handshake(self) -> None:
        """It may come byte by byte."""
        self.begin()
        for byte in self.answer():
            self.client.dataReceived(bytes([byte]))
        self.carry()
        self.assertEqual(self.recorder.handshakes, 1)

    def test_any_nonsense(self) -> None:
        """Whatever a server says instead, the protocol hears of it as an error of TLS's, or of the loss."""
        rng = random.Random(8)
        for _ in range(200):
            self.begin()
            said = bytearray(self.answer())
            for _ in range(rng.randrange(1, 4)):
                said[rng.randrange(len(said))] = rng.randrange(256)
            self.client.dataReceived(bytes(said[: rng.randrange(1, len(said) + 1)]))
            self.client.connectionLost(Failure(ConnectionDone()))
            self.assertEnds(TlsFailed, ConnectionLost)

    def test_no_second_handshake(self) -> None:
        """TLS 1.2 lets servers ask for one; it is refused, so no other certificate comes unchecked."""
        self.patch(identity, "bound_handshakes", lambda _: None)  # this server would refuse itself
        options = WHO.contexts()
        options.getContext().set_max_proto_version(SSL.TLS1_2_VERSION)
        self.begin(options=options)
        self.carry()
        connection = self.server._tlsConnection
        connection.renegotiate()
        connection.do_handshake()
        asked = connection.bio_read(1 << 16)
        self.assertEqual(records(asked), [HANDSHAKE])
        self.client.dataReceived(asked)
        self.assertNotIn(HANDSHAKE, records(b"".join(self.client.transport.written)))
        self.assertEqual(len(self.certificates), 1)

    def test_endpoint(self) -> None:
        """It fires with the protocol, when the connection beneath is there."""
        beneath: Any = Mock()
        made: Deferred[Any] = Deferred()
        beneath.connect.return_value = made
        factory: Any = Mock()
        factory.buildProtocol.side_effect = [self, None]
        waiting = ClientTLSEndpoint(client_context(), lambda _: None, beneath).connect(factory)
        [[wrapping], _] = beneath.connect.call_args
        wrapping.doStart()
        factory.doStart.assert_called_once_with()
        tls = wrapping.buildProtocol("address")
        self.assertIs(tls.wrappedProtocol, self)
        self.assertIsNone(wrapping.buildProtocol("address"))
        made.callback(tls)
        self.assertIs(self.successResultOf(waiting), self)


class BytesTests(ClientTlsCase):
    """Both ways."""

    def test_few_pieces(self) -> None:
        """What is written goes down in few pieces, what is read comes up as one."""
        data = random.Random(1).randbytes(GATHERED_BYTES + BATCH_BYTES + 1000)
        self.client.write(data)
        self.assertEqual(len(self.client.transport.written), 2)
        self.carry()
        self.assertEqual(b"".join(self.served.pieces), data)
        self.client.dataReceived(self.send(data))
        self.assertEqual(self.recorder.pieces, [data])

    def test_any_cut(self) -> None:
        """Records that come in parts are delivered when they are whole."""
        data = random.Random(2).randbytes(5 * RECORD_BYTES)
        encrypted = self.send(data)
        for size in (1000, 10_007, RECORD_BYTES):
            self.recorder.pieces.clear()
            for at in range(0, len(encrypted), size):
                self.client.dataReceived(encrypted[at : at + size])
            self.assertEqual(b"".join(self.recorder.pieces), data)
            encrypted = self.send(data)

    def test_openssl_gets_a_little_at_a_time(self) -> None:
        """However much is read or written: it keeps a buffer as large as that for each connection."""
        client = self.client
        received, encrypted, given = client._received, client._encrypted, [0]
        held: list[int] = []

        class Noting:
            """OpenSSL's buffer, and how much it is given."""

            def __getattr__(self, name: str) -> Any:
                return getattr(received, name)

            def write(self, data: memoryview) -> int:
                given.append(len(data))
                return int(received.write(data))

        client._received = Noting()
        data = random.Random(3).randbytes(9 * BATCH_BYTES + 77)
        client.dataReceived(self.send(data))
        self.assertEqual((self.recorder.pieces, max(given)), ([data], BATCH_BYTES))
        outlet = Mock()
        outlet.send = lambda view, _transport: held.append(len(view))
        client._outlet = outlet
        client.write(data)
        self.assertLess(max(held), GATHERED_BYTES + BATCH_BYTES + 1000)
        self.assertEqual(encrypted.pending, 0)

    def test_pieces_of_any_kind_and_size(self) -> None:
        """They arrive in order, and the small ones together."""
        rng = random.Random(4)
        sizes = (3, RECORD_BYTES - 1, RECORD_BYTES, 0, 5, 2 * BATCH_BYTES + 1, 7)
        kinds: list[Any] = [bytes, bytearray, memoryview]
        pieces = [rng.choice(kinds)(rng.randbytes(size)) for size in sizes]
        self.client.write(b"before")
        self.client.write_pieces(pieces)
        self.client.writeSequence([b"af", b"ter"])
        self.client.write(b"")
        sent = self.client.transport.take()
        self.assertEqual(len(records(sent)), 1 + 3 + 9 + 1)
        self.server.dataReceived(sent)
        received = b"".join(self.served.pieces)
        self.assertEqual(received, b"before" + b"".join(pieces) + b"after")

    def test_buffers_are_not_kept(self) -> None:
        """The caller may change them as soon as ``write_pieces`` returns, though the socket is full."""
        socket = self.stand_on_socket(0)
        buffer = bytearray(b"x" * BATCH_BYTES)
        self.client.write_pieces([memoryview(buffer)])
        buffer[:] = bytes(BATCH_BYTES)
        self.server.dataReceived(socket.take())
        self.assertEqual(b"".join(self.served.pieces), b"x" * BATCH_BYTES)

    def stand_on_socket(self, space_bytes: int) -> Socket:
        """Have a socket beneath the client, as if it had always been there."""
        socket = Socket()
        socket.space_bytes = space_bytes
        self.client.transport = socket
        self.client._outlet = Outlet(socket_of(socket))
        return socket

    def test_a_full_socket_pauses_the_producer(self) -> None:
        """At once, and once; what comes later waits behind what the transport keeps."""
        socket = self.stand_on_socket(BATCH_BYTES)
        socket.producer = Mock()
        self.client.write_pieces([bytes(RECORD_BYTES)])
        self.assertFalse(socket.producerPaused)
        self.client.write_pieces([bytes(3 * BATCH_BYTES)])
        self.assertTrue(socket.producerPaused)
        socket.space_bytes = BATCH_BYTES
        self.client.write_pieces([b"x" * RECORD_BYTES])
        socket.producer.pauseProducing.assert_called_once_with()
        self.server.dataReceived(socket.take())
        received = b"".join(self.served.pieces)
        self.assertEqual(received, bytes(RECORD_BYTES + 3 * BATCH_BYTES) + b"x" * RECORD_BYTES)

    def test_what_a_socket_takes_is_sent_at_once(self) -> None:
        """In one call for all that was written in one."""
        socket = self.stand_on_socket(10 * GATHERED_BYTES)
        self.client.write_pieces([b"head", bytes(RECORD_BYTES), b"tail"])
        self.assertEqual((socket.calls, socket._tempDataBuffer), (1, []))

    def test_reading_can_be_paused(self) -> None:
        """The transport beneath is."""
        self.client.pauseProducing()
        self.assertEqual(self.client.transport.producerState, "paused")
        self.client.resumeProducing()
        self.assertEqual(self.client.transport.producerState, "producing")

    def test_pull_producers(self) -> None:
        """Those that wait to be asked are asked."""
        client = self.client

        class Pulled:
            """Has three pieces."""

            left = 3

            def resumeProducing(self) -> None:
                self.left -= 1
                client.write(b"%d" % self.left)
                if not self.left:
                    client.unregisterProducer()

            def stopProducing(self) -> None:
                raise AssertionError("nobody wants that")

        clock = self.clock
        self.patch(
            client_tls,
            "cooperate",
            __import__("twisted.internet.task")
            .internet.task.Cooperator(scheduler=lambda call: clock.callLater(0.1, call))
            .cooperate,
        )
        client.registerProducer(Pulled(), False)
        clock.pump([0.1] * 5)
        self.carry()
        self.assertEqual(b"".join(self.served.pieces), b"210")


class EndTests(ClientTlsCase):
    """How it ends, and what the protocol hears."""

    def test_close_behind_data(self) -> None:
        """What was written arrives, then the goodbye, which is not waited for; the server sees good order."""
        self.client.write(b"last words")
        self.client.loseConnection()
        self.client.loseConnection()
        self.assertTrue(self.client.transport.disconnecting)
        self.client.write(b"too late")
        self.server.dataReceived(self.client.transport.take())
        self.assertEqual(self.served.pieces, [b"last words"])
        for end in (self.client, self.server):
            end.connectionLost(Failure(ConnectionDone()))
        self.assertEnds(ConnectionDone)
        self.assertTrue(self.served.reasons[0].check(ConnectionDone))

    def test_the_server_closes(self) -> None:
        """What came before its goodbye is delivered, the goodbye is returned, and it ends in good order."""
        self.server.write(b"last words")
        self.clock.advance(0)
        self.server.loseConnection()
        self.client.dataReceived(self.server.transport.take())
        self.assertEqual(self.recorder.pieces, [b"last words"])
        self.assertEqual(len(records(b"".join(self.client.transport.written))), 1)
        self.assertTrue(self.client.transport.disconnecting)
        self.client.write(b"too late")
        self.carry()
        self.assertEqual(self.served.pieces, [])
        self.client.connectionLost(Failure(ConnectionDone()))
        self.assertEnds(ConnectionDone)

    def test_cut_off_without_a_goodbye(self) -> None:
        """An end that anybody on the way could have made is a loss, not an end in good order."""
        encrypted = self.send(b"whole") + self.send(b"cut off")[:-1]
        self.client.dataReceived(encrypted)
        self.client.connectionLost(Failure(ConnectionDone()))
        self.assertEqual(self.recorder.pieces, [b"whole"])
        self.assertEnds(ConnectionLost)

    def test_nonsense_behind_data(self) -> None:
        """What came before is delivered, the server gets an alert, the protocol the error."""
        self.client.dataReceived(self.send(b"good") + b"\x17\x03\x03\x00\x20" + bytes(32))
        self.assertEqual(self.recorder.pieces, [b"good"])
        self.assertTrue(self.client.transport.disconnecting)
        self.assertNotEqual(self.client.transport.written, [])
        self.client.dataReceived(self.send(b"more"))
        self.client.connectionLost(Failure(ConnectionDone()))
        self.assertEqual(self.recorder.pieces, [b"good"])
        self.assertIn("TLS failed: ", str(self.assertEnds(TlsFailed)))

    def test_nothing_after_abort(self) -> None:
        """Who has aborted hears and says nothing more, but how it ended."""
        encrypted = self.send(b"too late")
        self.client.abortConnection()
        self.client.dataReceived(encrypted)
        self.client.write(b"nobody hears")
        self.client.write_pieces([bytes(RECORD_BYTES)])
        self.assertEqual((self.recorder.pieces, self.client.transport.written), ([], []))
        self.assertTrue(self.client.transport.aborted)
        self.client.connectionLost(Failure(ConnectionAborted()))
        self.assertEnds(ConnectionAborted)

    def test_an_abort_while_it_is_read(self) -> None:
        """What one read brought behind the abort is not delivered either."""
        pieces = self.recorder.pieces

        def receive(data: bytes) -> None:
            pieces.append(data)
            self.client.abortConnection()

        self.patch(self.recorder, "dataReceived", receive)
        self.client.dataReceived(self.send(b"first"))
        self.client.dataReceived(self.send(b"second"))
        self.assertEqual(self.recorder.pieces, [b"first"])

    def test_closing_waits_for_a_producer(self) -> None:
        """Until it is unregistered, it may write."""
        self.client.registerProducer(Mock(), True)
        self.client.loseConnection()
        self.client.write(b"still")
        self.assertFalse(self.client.transport.disconnecting)
        self.client.unregisterProducer()
        self.assertTrue(self.client.transport.disconnecting)
        self.carry()
        self.assertEqual(self.served.pieces, [b"still"])

    def test_a_producer_that_comes_too_late(self) -> None:
        """It is stopped."""
        self.client.abortConnection()
        producer = Mock()
        self.client.registerProducer(producer, True)
        producer.stopProducing.assert_called_once_with()
