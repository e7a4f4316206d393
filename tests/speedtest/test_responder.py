"""A responder and those who come to it, over the loopback interface; time-outs in virtual time."""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Callable
from typing import Any, cast

import attrs
from twisted.internet import reactor as installed_reactor
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase, TestCase

from pipegrid.errors import UsageError
from pipegrid.speedtest import responder as module
from pipegrid.speedtest.responder import (
    ACCEPT_AGAIN_S,
    BUSY_RESPONSES,
    IDLE_S,
    PROVE_S,
    ResponderService,
    ResponderSettings,
    responder_main,
)
from pipegrid.speedtest.responder_client import Probe, Responder, ResponderError, parse_responder

reactor: Any = installed_reactor
LOOPBACK = "127.0.0.1"
TOKEN = "token-of-the-tests"

KEY = module.make_key()
"""Making one takes a while."""


class Server(Protocol):
    """Says what the test wants, to whoever connects or speaks."""

    greeting = b""
    answer = b""

    def connectionMade(self) -> None:
        assert self.transport is not None
        if self.greeting:
            self.transport.write(self.greeting)

    def dataReceived(self, data: bytes) -> None:
        assert self.transport is not None
        if self.answer:
            self.transport.write(self.answer)


class ResponderTestCase(TestCase):
    """With a responder that runs while the test does."""

    def setUp(self) -> None:
        self.patch(module, "make_key", lambda: KEY)
        self.clock = Clock()

    def serve(self, **limits: Any) -> ResponderService:
        """Return a running responder."""
        settings = ResponderSettings(LOOPBACK, 0, TOKEN, **limits)
        service = ResponderService(reactor, settings, self.clock)

        def stop() -> None:
            service.stop()
            self.assertEqual(service.visitors, set())
            self.assertEqual(self.clock.getDelayedCalls(), [])

        self.addCleanup(stop)
        return service

    def address(self, service: ResponderService, token: str = TOKEN) -> Responder:
        """Return where it is."""
        return Responder(LOOPBACK, service.address[1], token, service.spki_hash)

    async def connect(self, address: Responder, **options: Any) -> Probe:
        """Return a connection that is closed at the end."""
        probe = await Probe.connect(reactor, address, **options)
        self.addCleanup(probe.close)
        return probe

    async def settle(self, reached: Callable[[], bool]) -> None:
        """Let the reactor turn until this is so."""
        while not reached():
            await self.turn()

    async def turn(self) -> None:
        """Let the reactor turn once."""
        turned: Deferred[None] = Deferred()
        reactor.callLater(0, turned.callback, None)
        await turned

    async def refused(self, work: Any, *words: str) -> str:
        """Return the sentence that this work fails with, which holds these words."""
        try:
            await work
        except ResponderError as error:
            text = str(error)
            for word in words:
                self.assertIn(word, text)
            return text
        raise AssertionError("it was not refused")


def asynchronous(test: Callable[[Any], Any]) -> Callable[[Any], Deferred[None]]:
    """Let a test be a coroutine."""

    def run(self: Any) -> Deferred[None]:
        return Deferred.fromCoroutine(test(self))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


class ServedTests(ResponderTestCase):
    """Who knows the token."""

    @asynchronous
    async def test_all_that_it_does_plain_and_over_tls(self) -> None:
        """Ping, send, receive, in any order, on one port."""
        service = self.serve()
        for tls in (False, True):
            probe = await self.connect(self.address(service), tls=tls)
            self.assertGreater(await probe.ping(), 0)
            for size_bytes in (1, 3_000_000, 65_536):
                before = service.allowance.left_bytes
                await probe.prepare_send(size_bytes)
                await probe.send()
                await probe.receive(size_bytes)
                self.assertEqual(before - service.allowance.left_bytes, 2 * size_bytes)
            self.assertGreater(await probe.ping(), 0)

    @asynchronous
    async def test_many_at_once(self) -> None:
        """They do not disturb each other."""
        service = self.serve()
        probes = [await self.connect(self.address(service), tls=bool(i % 2)) for i in range(6)]
        for probe in probes:
            await probe.prepare_send(500_000)
        sending = [Deferred.fromCoroutine(probe.send()) for probe in probes[:3]]
        for probe in probes[3:]:
            await probe.send()
        for each in sending:
            await each
        receiving = [Deferred.fromCoroutine(probe.receive(500_000)) for probe in probes]
        for each in receiving:
            await each

    @asynchronous
    async def test_the_limit_of_bytes(self) -> None:
        """What is beyond it is refused before a byte has moved, and the sentence says what to do."""
        service = self.serve(max_bytes=1000)
        probe = await self.connect(self.address(service))
        await probe.receive(600)
        await self.refused(probe.prepare_send(401), "limit of bytes", "--max-bytes")
        probe = await self.connect(self.address(service))
        await self.refused(probe.receive(401), "limit of bytes", "--max-bytes")

    @asynchronous
    async def test_the_limit_of_time(self) -> None:
        """Then it is no longer there, and who was connected knows why."""
        service = self.serve(max_seconds=30)
        probe = await self.connect(self.address(service))
        self.clock.advance(30)
        self.assertEqual(self.successResultOf(service.ended), None)
        await self.refused(probe.ping(), "limit of time", "--max-seconds")
        await self.refused(self.connect(self.address(service)), "could be reached", "start one")

    @asynchronous
    async def test_the_limit_of_connections(self) -> None:
        """One more is told so, and there is room again when one has left."""
        service = self.serve(max_connections=2)
        first, _ = [await self.connect(self.address(service)) for _ in range(2)]
        for tls in (False, True):
            work = self.connect(self.address(service), tls=tls)
            await self.refused(work, "as many connections")
        first.close()
        await self.settle(lambda: len(service.visitors) == 1)
        await self.connect(self.address(service))

    @asynchronous
    async def test_who_does_nothing_has_to_go(self) -> None:
        """After a while, even when known."""
        service = self.serve()
        probe = await self.connect(self.address(service))
        self.clock.advance(IDLE_S - 1)
        self.assertGreater(await probe.ping(), 0)
        self.clock.advance(IDLE_S - 1)
        self.assertEqual(len(service.visitors), 1)
        self.clock.advance(1)
        self.assertEqual(len(service.visitors), 0)
        await self.refused(probe.ping(), "closed the connection")


class StrangersTests(ResponderTestCase):
    """Who does not know it."""

    @asynchronous
    async def test_a_wrong_token(self) -> None:
        """Gets a sentence, plain and over TLS."""
        service = self.serve()
        for tls in (False, True):
            address = self.address(service, "not-that-token")
            await self.refused(self.connect(address, tls=tls), "refuses the token", address.address)

    @asynchronous
    async def test_who_says_nothing_has_to_go_soon(self) -> None:
        """Before the first byte, in the middle of a line, in the middle of TLS's handshake."""
        service = self.serve()
        for beginning in (b"", b"PIPEGR", b"\x16\x03\x01"):
            with socket.create_connection(service.address) as stranger:
                stranger.sendall(beginning)
                await self.settle(lambda: len(service.visitors) == 1)
                self.clock.advance(PROVE_S - 1)
                self.assertEqual(len(service.visitors), 1)
                self.clock.advance(1)
                self.assertEqual(len(service.visitors), 0)

    @asynchronous
    async def test_dripping_does_not_help(self) -> None:
        """A byte now and then is no proof."""
        service = self.serve()
        with socket.create_connection(service.address) as stranger:
            await self.settle(lambda: len(service.visitors) == 1)
            for _ in range(int(PROVE_S)):
                stranger.sendall(b"P")
                for _turn in range(3):
                    await self.turn()
                self.clock.advance(1)
            self.assertEqual(len(service.visitors), 0)

    @asynchronous
    async def test_noise(self) -> None:
        """Is cut off at once, without a word."""
        service = self.serve()
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000, b"\x16" + b"\0" * 5000, b"\n"):
            with socket.create_connection(service.address) as stranger:
                await self.settle(lambda: len(service.visitors) == 1)
                stranger.sendall(noise)
                await self.settle(lambda: not service.visitors)
        await (await self.connect(self.address(service))).receive(10)

    @asynchronous
    async def test_without_descriptors_it_waits(self) -> None:
        """It does not spin; a second later it takes the connection."""
        service = self.serve()
        listening = service._sock

        class Exhausted:
            def accept(self) -> None:
                raise OSError(errno.EMFILE, "too many open files")

            def __getattr__(self, name: str) -> Any:
                return getattr(listening, name)

        service._sock = cast(socket.socket, Exhausted())
        with socket.create_connection(service.address):
            await self.settle(lambda: service not in reactor.getReaders())
            service._sock = listening
            self.clock.advance(ACCEPT_AGAIN_S)
            await self.settle(lambda: len(service.visitors) == 1)

    @asynchronous
    async def test_a_crowd_is_bounded(self) -> None:
        """Beyond the limit and those who are told so, connections are just closed."""
        service = self.serve(max_connections=1)
        crowd = [socket.create_connection(service.address) for _ in range(BUSY_RESPONSES + 5)]
        try:
            for each in crowd:
                each.setblocking(False)
            for _turn in range(100):
                await self.turn()
            self.assertLessEqual(len(service.visitors), BUSY_RESPONSES + 1)
        finally:
            for each in crowd:
                each.close()
        await self.settle(lambda: not service.visitors)


class NoResponderTests(ResponderTestCase):
    """What else an address may lead to."""

    def listen(self, **says: bytes) -> Responder:
        """Return the address of a server that is no responder."""
        kind = type("Other", (Server,), says)
        port = reactor.listenTCP(0, Factory.forProtocol(kind), interface=LOOPBACK)
        self.addCleanup(port.stopListening)
        return Responder(LOOPBACK, port.getHost().port, TOKEN)

    @asynchronous
    async def test_another_server(self) -> None:
        """It answers something else, or speaks first."""
        for says in (
            {"answer": b"HTTP/1.1 400 Bad Request\r\n\r\n"},
            {"greeting": b"SSH-2.0-OpenSSH_9.6\r\n"},
            {"greeting": b"\n"},
            {"answer": b"\0" * 1000},
            {"answer": b"READY\n"},
        ):
            address = self.listen(**says)
            await self.refused(self.connect(address), "not a responder", address.address)

    @asynchronous
    async def test_another_server_instead_of_tls(self) -> None:
        """It does not understand TLS."""
        address = self.listen(answer=b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await self.refused(self.connect(address, tls=True), "TLS", address.address)

    @asynchronous
    async def test_a_server_that_says_nothing(self) -> None:
        """The wait has an end."""
        address = self.listen()
        connecting = Deferred.fromCoroutine(self.connect(address, clock=self.clock))
        await self.settle(lambda: bool(self.clock.getDelayedCalls()))
        for _ in range(20):
            await self.turn()
        self.clock.advance(15)
        self.clock.advance(15)
        await self.refused(connecting, "sent nothing for 15 s", address.address)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    @asynchronous
    async def test_nobody_listens(self) -> None:
        """The sentence says where, why, and what to do."""
        with socket.create_server((LOOPBACK, 0)) as free:
            port = free.getsockname()[1]
        work = self.connect(Responder(LOOPBACK, port, TOKEN))
        await self.refused(work, f"{LOOPBACK}:{port}", "refused", "start one")

    @asynchronous
    async def test_another_key(self) -> None:
        """Its TLS is not that of the responder that was named, so it is not used."""
        service = self.serve()
        wrong = attrs.evolve(self.address(service), spki_hash=bytes(32))
        await self.refused(self.connect(wrong, tls=True), "another key")
        unpinned = attrs.evolve(wrong, spki_hash=None)
        await (await self.connect(unpinned, tls=True)).ping()

    @asynchronous
    async def test_cancelling(self) -> None:
        """Ends the wait and the connection."""
        service = self.serve()
        probe = await self.connect(self.address(service))
        await probe.prepare_send(10**9)
        sending = Deferred.fromCoroutine(probe.send())
        sending.cancel()
        self.failureResultOf(sending, CancelledError)
        await self.settle(lambda: not service.visitors)


class SettingsTests(SynchronousTestCase):
    """What a responder is told."""

    def test_what_makes_no_sense_gets_a_sentence(self) -> None:
        """Short tokens, and limits of nothing."""
        for wrong in (
            {"token": "short"},
            {"token": "with blank in it"},
            {"max_bytes": 0},
            {"max_seconds": 0.5},
            {"max_connections": 0},
        ):
            settings = {"host": LOOPBACK, "port": 0, "token": TOKEN, **wrong}
            self.assertRaises(UsageError, ResponderSettings, **settings)

    def test_the_token_is_not_shown(self) -> None:
        """Neither in the representation of the settings nor in that of the address."""
        settings = ResponderSettings(LOOPBACK, 0, TOKEN)
        self.assertNotIn(TOKEN, repr(settings) + repr(Responder(LOOPBACK, 1, TOKEN)))

    def test_an_address_is_read_as_it_is_written(self) -> None:
        """With or without a key, with names and numbers."""
        for responder in (
            Responder("example.net", 8097, TOKEN, bytes(range(32))),
            Responder("::1", 65535, TOKEN),
            Responder("10.0.0.1", 1, TOKEN, b"\xff" * 32),
        ):
            self.assertEqual(parse_responder(str(responder)), responder)

    def test_what_is_no_address_gets_a_sentence_without_the_token(self) -> None:
        """Somebody may look at the screen."""
        for text in ("", TOKEN, f"{TOKEN}@host", f"{TOKEN}@host:0", f"{TOKEN}@host:1#x", "a@b:1"):
            error = self.assertRaises(UsageError, parse_responder, text)
            self.assertIn("TOKEN@HOST:PORT", str(error))
            self.assertNotIn(TOKEN, str(error))


class MainTests(ResponderTestCase):
    """The command's work."""

    @asynchronous
    async def test_it_says_how_to_reach_it_and_ends_when_told(self) -> None:
        """What it says is what the client takes."""
        said: list[str] = []
        settings = ResponderSettings(LOOPBACK, 0, TOKEN)
        running = responder_main(reactor, settings, said.append)
        probe = await self.connect(parse_responder(said[0]), tls=True)
        await probe.ping()
        running.cancel()
        await running
        await self.refused(probe.ping(), "limit of time")

    @asynchronous
    async def test_a_port_that_is_taken(self) -> None:
        """Gets a sentence."""
        with socket.create_server((LOOPBACK, 0)) as taken:
            settings = ResponderSettings(LOOPBACK, taken.getsockname()[1], TOKEN)
            try:
                await responder_main(reactor, settings, lambda _: None)
            except UsageError as error:
                self.assertIn("choose another port", str(error))
            else:
                self.fail("it listens where another does")

    def test_its_tls_is_modern(self) -> None:
        """1.2 at the least."""
        self.assertGreaterEqual(module.make_context(KEY).minimum_version, ssl.TLSVersion.TLSv1_2)
