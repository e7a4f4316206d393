"""Connections made ahead: taken once, by whoever trusts the certificate; and none of them stays."""

from __future__ import annotations

import socket
import threading
from typing import Any
from unittest.mock import patch

from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.error import ConnectionRefusedError
from twisted.internet.protocol import Factory, Protocol
from twisted.python.failure import Failure
from twisted.trial.unittest import TestCase

from pipegrid.reactor import preconnect as module
from pipegrid.reactor.client_tls import PreconnectedEndpoint
from pipegrid.reactor.preconnect import MOST, Preconnected, Preconnector
from pipegrid.reactor.tcp_socks5_endpoints import endpoint_for
from pipegrid.reactor.tls_settings import http_context
from tests.reactor.test_server_tls import WHO

reactor: Any = installed_reactor
LOOPBACK = "127.0.0.1"


class Wrong(Exception):
    """What the check of a test finds."""


class Served(Protocol):
    """Answers each message, and notes what it got and that it ended."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def connectionMade(self) -> None:
        self.server.connections += 1

    def dataReceived(self, data: bytes) -> None:
        self.server.received += data
        assert self.transport is not None
        self.transport.write(b"answer to " + data)

    def connectionLost(self, reason: object = None) -> None:
        self.server.lost.append(reason)
        waiting, self.server.waiting = self.server.waiting, []
        for each in waiting:
            each.callback(None)


class Server(Factory):
    """A server over TLS, or one that accepts and says nothing."""

    noisy = False

    def __init__(self, tls: bool = True) -> None:
        self.connections = 0
        self.received = b""
        self.lost: list[object] = []
        self.waiting: list[Deferred[None]] = []
        if tls:
            self.port: Any = reactor.listenSSL(0, self, WHO.contexts(), interface=LOOPBACK)
        else:
            self.port = reactor.listenTCP(0, self, interface=LOOPBACK)
        self.address: tuple[str, int] = (LOOPBACK, self.port.getHost().port)

    def buildProtocol(self, addr: object) -> Protocol:
        return Served(self)

    def next_loss(self) -> Deferred[None]:
        """Fires when a connection has ended."""
        self.waiting.append(Deferred())
        return self.waiting[-1]


class Talker(Protocol):
    """Says a word, and notes the answer or the end."""

    def __init__(self) -> None:
        self.heard: Deferred[bytes] = Deferred()
        self.lost: Deferred[list[Failure]] = Deferred()

    def connectionMade(self) -> None:
        assert self.transport is not None
        self.transport.write(b"word")

    def dataReceived(self, data: bytes) -> None:
        self.heard.callback(data)

    def connectionLost(self, reason: Any = None) -> None:
        self.lost.callback([reason])


class AheadCase(TestCase):
    """Servers, and who connects to them ahead."""

    timeout = 30

    def serve(self, tls: bool = True) -> Server:
        """Start a server."""
        server = Server(tls)
        self.addCleanup(server.port.stopListening)
        return server

    def dial(self, *addresses: tuple[str, int]) -> Preconnector:
        """Connect ahead."""
        ahead = Preconnector(addresses, http_context())
        self.addCleanup(ahead.close)
        return ahead

    def endpoint(
        self, ahead: Preconnector, address: tuple[str, int], problem: Exception | None = None
    ) -> PreconnectedEndpoint:
        """Return what takes the connection."""
        return PreconnectedEndpoint(
            reactor,
            ahead,
            address,
            http_context(),
            lambda _: problem,
            endpoint_for(reactor, *address),
        )

    @staticmethod
    def taken(ahead: Preconnector, address: tuple[str, int]) -> Deferred[Preconnected | None]:
        """Take a connection; fires in the reactor's thread."""
        result: Deferred[Preconnected | None] = Deferred()
        if not ahead.take(address, lambda begun: reactor.callFromThread(result.callback, begun)):
            result.callback(None)
        return result


class AdoptingTests(AheadCase):
    """``PreconnectedEndpoint``."""

    async def _talk(self, ahead: Preconnector, server: Server) -> None:
        talker: Any = await self.endpoint(ahead, server.address).connect(
            Factory.forProtocol(Talker)
        )
        self.assertEqual(await talker.heard, b"answer to word")
        talker.transport.loseConnection()
        await talker.lost
        while len(server.lost) < server.connections:
            await server.next_loss()

    async def _test_first_and_second(self) -> None:
        server = self.serve()
        ahead = self.dial(server.address)
        await self._talk(ahead, server)
        self.assertEqual(server.connections, 1)
        await self._talk(ahead, server)
        self.assertEqual(server.connections, 2)

    def test_first_and_second(self) -> Deferred[None]:
        """The first to connect gets what was made ahead, the second one dials."""
        return Deferred.fromCoroutine(self._test_first_and_second())

    async def _test_wrong(self) -> None:
        server = self.serve()
        ahead = self.dial(server.address)
        talker: Any = await self.endpoint(ahead, server.address, Wrong("it is another")).connect(
            Factory.forProtocol(Talker)
        )
        [reason] = await talker.lost
        self.assertIsInstance(reason.value, Wrong)
        while not server.lost:
            await server.next_loss()
        self.assertEqual((server.connections, server.received), (1, b""))

    def test_with_the_wrong_certificate_nothing_is_sent(self) -> Deferred[None]:
        """The check stands before the handshake's end, wherever that is made."""
        return Deferred.fromCoroutine(self._test_wrong())

    async def _test_refused(self) -> None:
        server = self.serve()
        await server.port.stopListening()
        ahead = self.dial(server.address)
        with self.assertRaises(ConnectionRefusedError):
            await self.endpoint(ahead, server.address).connect(Factory.forProtocol(Talker))

    def test_refused(self) -> Deferred[None]:
        """What failed is dialled again, and tells why."""
        return Deferred.fromCoroutine(self._test_refused())

    async def _test_lost_before_it_is_taken(self) -> None:
        server = self.serve()
        ahead = self.dial(server.address)
        begun = await self.taken(ahead, server.address)
        assert begun is not None
        begun.socket.shutdown(socket.SHUT_RDWR)
        while not server.lost:
            await server.next_loss()
        begun.socket.close()
        with patch.object(ahead, "take", lambda _address, ready: ready(begun) or True):
            await self._talk(ahead, server)
        self.assertEqual(server.connections, 2)

    def test_lost_before_it_is_taken(self) -> Deferred[None]:
        """Who gets a connection that cannot be used dials."""
        return Deferred.fromCoroutine(self._test_lost_before_it_is_taken())

    async def _test_refused_by_who_gets_it(self) -> None:
        server = self.serve()
        ahead = self.dial(server.address)
        asked: list[bytes] = []

        def check(certificate: bytes) -> None:
            asked.append(certificate)
            if len(asked) == 1:
                raise ValueError("a mistake in the check")

        endpoint = PreconnectedEndpoint(
            reactor,
            ahead,
            server.address,
            http_context(),
            check,
            endpoint_for(reactor, *server.address),
        )
        talker: Any = await endpoint.connect(Factory.forProtocol(Talker))
        self.assertEqual(await talker.heard, b"answer to word")
        talker.transport.loseConnection()
        await talker.lost
        while len(server.lost) < 2:
            await server.next_loss()

    def test_whatever_goes_wrong_in_the_hand_over(self) -> Deferred[None]:
        """It ends the connection that was made ahead, and another one is dialled."""
        return Deferred.fromCoroutine(self._test_refused_by_who_gets_it())

    async def _test_cancelled(self) -> None:
        silent = self.serve(tls=False)
        ahead = self.dial(silent.address)
        with patch.object(Served, "dataReceived", return_value=None):
            attempt = self.endpoint(ahead, silent.address).connect(Factory.forProtocol(Talker))
            attempt.cancel()
            with self.assertRaises(CancelledError):
                await attempt
            ahead.close()
            while not silent.lost:
                await silent.next_loss()

    def test_cancelled(self) -> Deferred[None]:
        """Whoever has waited long enough gives up, and hears nothing more."""
        return Deferred.fromCoroutine(self._test_cancelled())

    async def _test_closed_while_waited_for(self) -> None:
        silent = self.serve(tls=False)
        ahead = self.dial(silent.address)
        with patch.object(Served, "dataReceived", return_value=None):
            attempt = self.endpoint(ahead, silent.address).connect(Factory.forProtocol(Talker))
            ahead.close()
            talker: Any = await attempt
            talker.transport.abortConnection()
            while len(silent.lost) < 2:
                await silent.next_loss()

    def test_closed_while_waited_for(self) -> Deferred[None]:
        """Who waits for what is given up dials, which has a time limit of its own."""
        return Deferred.fromCoroutine(self._test_closed_while_waited_for())


class AheadTests(AheadCase):
    """``Preconnector``."""

    async def _test_taken_at_the_last_moment(self) -> None:
        servers = [self.serve() for _ in range(3)]
        result: dict[tuple[str, int], Deferred[Preconnected | None]] = {
            each.address: Deferred() for each in servers
        }
        began = threading.Event()
        go_on = module._Connecting.go_on

        def take(address: tuple[str, int]) -> None:
            fire = result[address].callback
            self.assertTrue(ahead.take(address, lambda begun: reactor.callFromThread(fire, begun)))

        def take_behind(it: Any) -> bool:
            began.wait()
            over = go_on(it)
            if over:  # whoever takes it now does so before this is known to anybody
                take(it.socket.getpeername())
            return over

        with patch.object(module._Connecting, "go_on", take_behind):
            ahead = self.dial(*(each.address for each in servers))
            began.set()
            for each in result.values():
                begun = await each
                assert begun is not None
                begun.socket.close()

    def test_taken_while_it_becomes_ready(self) -> Deferred[None]:
        """Between the handshake's end and its being known, as at any time: it is given away, once."""
        return Deferred.fromCoroutine(self._test_taken_at_the_last_moment())

    async def _test_out_of_files(self) -> None:
        silent = self.serve(tls=False)
        taken = threading.Event()

        def fail(_ahead: Preconnector) -> None:
            taken.wait()
            raise OSError("no files to spare")

        with patch.object(Preconnector, "_make_all", fail):
            ahead = self.dial(silent.address)
            waiting = self.taken(ahead, silent.address)
            taken.set()
            self.assertIs(await waiting, None)
        self.assertFalse(ahead.take(silent.address, self.fail))

    def test_out_of_files(self) -> Deferred[None]:
        """Who waits is told, whatever ends the thread."""
        return Deferred.fromCoroutine(self._test_out_of_files())

    async def _test_what_nobody_takes(self) -> None:
        servers = [self.serve(), self.serve(), self.serve(tls=False)]
        with (
            patch.object(module, "KEPT_S", 0.3),
            patch.object(Served, "dataReceived", return_value=None),
        ):
            ahead = self.dial(*(each.address for each in servers))
            for each in servers:
                while not each.lost:
                    await each.next_loss()
        for each in servers:
            self.assertIs(await self.taken(ahead, each.address), None)
            self.assertEqual((each.connections, each.received), (1, b""))

    def test_what_nobody_takes(self) -> Deferred[None]:
        """It is closed after a while, ready or not, and nobody gets it any more."""
        return Deferred.fromCoroutine(self._test_what_nobody_takes())

    async def _test_closing(self) -> None:
        server, silent = self.serve(), self.serve(tls=False)
        ahead = self.dial(server.address, silent.address)
        with patch.object(Served, "dataReceived", return_value=None):
            waiting = self.taken(ahead, silent.address)
            ahead.close()
            ahead.close()
            self.assertIs(await waiting, None)
            for each in (server, silent):
                while len(each.lost) < each.connections:
                    await each.next_loss()
        self.assertFalse(ahead.take(server.address, self.fail))

    def test_closing(self) -> Deferred[None]:
        """All that was not taken is closed, and who waits is told; twice is no more than once."""
        return Deferred.fromCoroutine(self._test_closing())

    async def _test_bound(self) -> None:
        server = self.serve(tls=False)
        port = server.address[1]
        addresses = [(f"127.0.0.{1 + number}", port) for number in range(MOST + 4)]
        ahead = self.dial(*addresses, *addresses)
        there = [ahead.take(each, lambda _: None) for each in addresses]
        # Those beyond 127.0.0.1 are refused, now or soon: what counts is how many are tried at all.
        self.assertEqual(there[MOST:], [False] * 4)
        self.assertFalse(ahead.take(addresses[0], self.fail), "taken twice")

    def test_bound(self) -> Deferred[None]:
        """No more than so many, each once; and each is given away once."""
        return Deferred.fromCoroutine(self._test_bound())

    async def _test_nonsense(self) -> None:
        class Nonsense(Served):
            def connectionMade(self) -> None:
                super().connectionMade()
                assert self.transport is not None
                self.transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        with patch.object(Server, "buildProtocol", lambda server, _: Nonsense(server)):
            server = self.serve(tls=False)
            ahead = self.dial(server.address)
            self.assertIs(await self.taken(ahead, server.address), None)
            while not server.lost:
                await server.next_loss()

    def test_nonsense(self) -> Deferred[None]:
        """A server that speaks no TLS is one that cannot be connected to."""
        return Deferred.fromCoroutine(self._test_nonsense())
