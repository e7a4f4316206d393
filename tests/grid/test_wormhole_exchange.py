"""Two ends of an invitation over a relay of the test's own, good or bad; each failure is one sentence."""

from __future__ import annotations

import gc
import json
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

from autobahn.twisted.websocket import WebSocketServerFactory, WebSocketServerProtocol
from twisted.internet import reactor
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.task import deferLater
from twisted.trial.unittest import TestCase

from pipegrid.core.encoding_parameters import Params
from pipegrid.errors import InvitationError, UsageError
from pipegrid.grid import wormhole_exchange
from pipegrid.grid.invitation_messages import AddReply, GridNumbers, Invitation, JoinReply
from pipegrid.grid.wormhole_exchange import Relay, WormholeExchange, start_relay
from pipegrid.reactor.connection_policy import DIRECT_CONNECTIONS
from tests.grid.test_invitation import LITERAL, server

NUMBERS = GridNumbers(Params(1, 1), 1)
OFFERED = Invitation(NUMBERS, (server(1),), (), {"photos": LITERAL})
HOUR_S = 3600.0


def refuse(server: Any) -> AddReply:
    """Add no server."""
    return AddReply(False, NUMBERS)


class ExchangeTestCase(TestCase):
    """Exchanges that are closed, and relays that are stopped, at the end."""

    def setUp(self) -> None:
        self.reactor: Any = reactor
        for name, seconds in (
            ("CONNECT_S", 5.0),
            ("MEET_S", 1.0),
            ("ANSWER_S", 1.0),
            ("_CLOSE_S", 0.5),
            ("_LEAVE_S", 0.5),
        ):
            limit = mock.patch.object(wormhole_exchange, name, seconds)
            limit.start()
            self.addCleanup(limit.stop)

    def exchange(self, url: str) -> WormholeExchange:
        """Return an end that is closed after the test."""
        found = WormholeExchange(self.reactor, url, "ask for a new code", DIRECT_CONNECTIONS)
        self.addCleanup(lambda: Deferred.fromCoroutine(found.close()))
        return found

    async def relay(self) -> Relay:
        """Start a good relay."""
        relay = await start_relay(self.reactor, "127.0.0.1", 0, "127.0.0.1")
        self.addCleanup(lambda: Deferred.fromCoroutine(relay.stop()))
        return relay

    async def listen(self, factory: Any) -> str:
        """Start any other relay; returns its address."""
        port: Any = await TCP4ServerEndpoint(self.reactor, 0, interface="127.0.0.1").listen(factory)
        self.addCleanup(port.stopListening)
        return f"ws://127.0.0.1:{port.getHost().port}/v1"

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until something holds."""
        while not condition():
            await deferLater(self.reactor, 0.01, lambda: None)

    async def sentence(self, work: Awaitable[object]) -> str:
        """Return the error with which an end fails."""
        try:
            await work
        except InvitationError as error:
            self.assertNotIn("\n", str(error))
            return str(error)
        raise AssertionError("it did not fail")


class GoodRelayTests(ExchangeTestCase):
    """Two ends that can meet."""

    async def _both(
        self, join: Callable[[WormholeExchange, str], Awaitable[Any]], add: Any = refuse
    ) -> list[Any]:
        relay = await self.relay()
        inviter, joiner = self.exchange(relay.url), self.exchange(relay.url)
        code = await inviter.new_code()

        async def ended(work: Awaitable[Any]) -> Any:
            try:
                return await work
            except InvitationError as error:
                return str(error)

        ends = (
            ended(wormhole_exchange.invite(inviter, OFFERED, HOUR_S, add)),
            ended(join(joiner, code)),
        )
        return list(await gatherResults([Deferred.fromCoroutine(each) for each in ends]))

    async def test_a_client_joins(self) -> None:
        """It has all that was offered, and says so."""

        async def join(joiner: WormholeExchange, code: str) -> Invitation:
            taken, answers = await wormhole_exchange.take(joiner, code)
            self.assertTrue(answers)
            joiner.send(JoinReply(True).as_message())
            return taken

        given, taken = await self._both(join)
        self.assertEqual(taken, OFFERED)
        self.assertEqual(given, (True, JoinReply(True)))

    async def test_a_server_joins(self) -> None:
        """The inviter adds it, and says its new numbers."""
        added = []

        def add(each: Any) -> AddReply:
            added.append(each)
            return AddReply(True, GridNumbers(Params(1, 2), 2))

        async def join(joiner: WormholeExchange, code: str) -> AddReply:
            await wormhole_exchange.take(joiner, code)
            reply = await wormhole_exchange.offer_server(joiner, server(2))
            joiner.send(JoinReply(True).as_message())
            return reply

        given, reply = await self._both(join, add)
        self.assertEqual(reply, AddReply(True, GridNumbers(Params(1, 2), 2)))
        self.assertEqual((given, added), ((True, JoinReply(True)), [server(2)]))

    async def test_a_wrong_code(self) -> None:
        """Both ends are told, and the code is spent."""
        given, taken = await self._both(
            lambda joiner, code: wormhole_exchange.take(joiner, f"{code}-wrong")
        )
        for sentence in (given, taken):
            self.assertIn("entered wrongly, or guessed, and cannot be used again; ask", sentence)

    async def test_a_relay_waits_for_who_is_leaving(self) -> None:
        """
        It stops when the last connection has ended: a joiner with a wrong code hears of it only then. It does
        not wait for ever.
        """
        for leaves in (True, False):
            relay = await self.relay()
            _, _, port = relay.url.rpartition("/")[0].partition("//")[2].partition(":")
            endpoint = TCP4ClientEndpoint(self.reactor, "127.0.0.1", int(port))
            joiner: Any = await endpoint.connect(Factory.forProtocol(Protocol))
            protocols = relay._port.factory.protocols
            await self.until(protocols.__len__)
            with mock.patch.object(wormhole_exchange, "_LEAVE_S", HOUR_S if leaves else 0.2):
                stopping = Deferred.fromCoroutine(relay.stop())
                await deferLater(self.reactor, 0.05, lambda: None)
                self.assertFalse(stopping.called)
                self.assertTrue(joiner.transport.connected)
                if leaves:
                    joiner.transport.loseConnection()
                await stopping

    async def test_a_joiner_that_falls_silent(self) -> None:
        """The inviter does not wait for ever."""
        given, _ = await self._both(lambda joiner, code: wormhole_exchange.take(joiner, code))
        self.assertIn("does not say whether it has joined", given)

    async def test_a_joiner_that_sends_nonsense(self) -> None:
        """The inviter says so."""

        async def join(joiner: WormholeExchange, code: str) -> None:
            await joiner.use_code(code)
            joiner.send(b"{}")

        given, _ = await self._both(join)
        self.assertIn("the other end of this code is not a client that joins", given)

    async def test_a_code_is_used_twice(self) -> None:
        """The second person hears that it was used."""
        relay = await self.relay()
        inviter, joiner = self.exchange(relay.url), self.exchange(relay.url)
        code = await inviter.new_code()

        async def join() -> None:
            await wormhole_exchange.take(joiner, code)
            joiner.send(JoinReply(True).as_message())

        joining = Deferred.fromCoroutine(join())
        await wormhole_exchange.invite(inviter, OFFERED, HOUR_S, refuse)
        await joining
        await inviter.close()
        await joiner.close()
        second = self.exchange(relay.url)
        sentence = await self.sentence(wormhole_exchange.take(second, code))
        self.assertIn("the code was used before, has expired, or its number is wrong", sentence)

    async def test_a_code_expires(self) -> None:
        """The inviter says so when its time is over."""
        inviter = self.exchange((await self.relay()).url)
        await inviter.new_code()
        work = wormhole_exchange.invite(inviter, OFFERED, 0.1, refuse)
        self.assertIn("was not used within", await self.sentence(work))

    async def test_a_relay_dies(self) -> None:
        """Whoever waits hears of it, and closing does not wait for it."""
        relay = await self.relay()
        inviter, joiner = self.exchange(relay.url), self.exchange(relay.url)
        code = await inviter.new_code()
        await relay.stop()
        work = wormhole_exchange.invite(inviter, OFFERED, 0.3, refuse)
        self.assertIn("the connection to the relay", await self.sentence(work))
        sentence = await self.sentence(wormhole_exchange.take(joiner, code))
        self.assertIn("the connection to the relay", sentence)

    async def test_it_learns_nothing(self) -> None:
        """Of what passes through it, no secret is in what it stores."""
        seen: list[bytes] = []
        receive = wormhole_exchange._RelayConnection.dataReceived

        def note(self: Any, data: bytes) -> None:
            seen.append(data)
            receive(self, data)

        with mock.patch.object(wormhole_exchange._RelayConnection, "dataReceived", note):
            await self._both(lambda joiner, code: wormhole_exchange.take(joiner, code))
        data = b"".join(seen)
        self.assertGreater(len(data), 1000)
        for secret in (b"secret1", b"example.org", b"shares-needed", b"URI:DIR2"):
            self.assertNotIn(secret, data)
            self.assertNotIn(secret.hex().encode(), data)

    async def test_many_connections(self) -> None:
        """Our own relay takes a number of them, and no more."""
        relay = await self.relay()
        factory: Any = relay._port.factory
        factory.protocols = dict.fromkeys(range(wormhole_exchange._MAX_CONNECTIONS))
        self.assertIsNone(factory.buildProtocol(None))
        factory.protocols = {}


class Liar(WebSocketServerProtocol):
    """A relay that says what the test says when a client comes, or for each message."""

    def onOpen(self) -> None:
        for text in self.factory.first:
            self.sendMessage(text if isinstance(text, bytes) else json.dumps(text).encode())

    def onMessage(self, payload: bytes, isBinary: bool) -> None:
        for text in self.factory.answers(json.loads(payload)):
            self.sendMessage(text if isinstance(text, bytes) else json.dumps(text).encode())


class BadRelayTests(ExchangeTestCase):
    """A relay that lies, or says nothing."""

    async def _lied(
        self, first: list[Any], answers: Any = lambda message: (), limit_s: float = 1.0
    ) -> str:
        factory: Any = WebSocketServerFactory()
        factory.protocol, factory.first, factory.answers = Liar, first, answers
        url = await self.listen(factory)
        with mock.patch.object(wormhole_exchange, "CONNECT_S", limit_s):
            joiner = self.exchange(url)
            try:
                return await self.sentence(wormhole_exchange.take(joiner, "1-a-b"))
            finally:
                await joiner.close()

    def setUp(self) -> None:
        self.addCleanup(self._drop)  # after all others
        super().setUp()

    def _drop(self) -> Deferred[None]:
        """Drop what the library's protocols hold, and their own errors, which only -v shows."""

        def drop() -> None:
            self.flushLoggedErrors()  # these keep the others alive
            gc.collect()
            self.flushLoggedErrors()

        return deferLater(self.reactor, 0.01, drop)

    async def test_it_refuses(self) -> None:
        """Its reason is shown, and cannot do anything to a terminal."""
        welcome = {"type": "welcome", "welcome": {"error": "go\x1b[2J away\nnow"}}
        replies = {"release": "released", "close": "closed"}

        def answers(message: dict[str, Any]) -> list[Any]:
            if message["type"] == "claim":
                return [{"type": "claimed", "mailbox": "m"}]
            return [{"type": replies[kind]} for kind in [message["type"]] if kind in replies]

        sentence = await self._lied([welcome], answers, 20.0)
        self.assertIn("refuses: 'go", sentence)
        self.assertTrue(sentence.isprintable(), sentence)

    async def test_it_sends_nonsense(self) -> None:
        """Neither a traceback nor a line on standard output comes of it."""
        lies: tuple[list[Any], ...] = (
            [b"no JSON"],
            [b"[1, 2"],
            [{"type": 7}],
            [{}],
            [{"type": "message"}],
            [{"type": "claimed", "mailbox": 7}],
            [{"type": "welcome", "welcome": 7}],
            [{"type": "error", "error": "\x1b" * 9, "orig": 7}],
        )
        for first in lies:
            sentence = await self._lied(first)
            self.assertIn("relay", sentence, first)
            self.assertTrue(sentence.isprintable(), sentence)

    async def test_it_floods(self) -> None:
        """What it sends is bounded in bytes."""
        sentence = await self._lied([b" " * (1 << 20)] * 4, limit_s=60.0)
        self.assertIn("sends too much", sentence)

    async def test_it_makes_up_a_peer(self) -> None:
        """Without the code no one can pretend to be the inviter."""

        def answers(message: dict[str, Any]) -> list[Any]:
            if message["type"] == "claim":
                return [{"type": "claimed", "mailbox": "m"}]
            if message["type"] == "add" and message["phase"] == "pake":
                body = json.dumps({"pake_v1": "00" * 33}).encode().hex()
                peer = {"type": "message", "side": "evil", "body": body}
                return [
                    {**peer, "phase": "pake"},
                    {**peer, "phase": "version", "body": "00" * 40},
                    {**peer, "phase": "0", "body": "00" * 40},
                ]
            return []

        sentence = await self._lied([{"type": "welcome", "welcome": {}}], answers)
        self.assertRegex(sentence, "entered wrongly, or guessed|makes no sense")

    async def test_it_reflects(self) -> None:
        """What one end says is not taken for the other's words."""

        def answers(message: dict[str, Any]) -> list[Any]:
            if message["type"] == "claim":
                return [{"type": "claimed", "mailbox": "m"}]
            if message["type"] == "add":
                return [{**message, "type": "message", "side": "other"}]
            return []

        sentence = await self._lied([{"type": "welcome", "welcome": {}}], answers)
        self.assertRegex(sentence, "entered wrongly, or guessed|makes no sense|is not an inviter")

    async def test_it_says_nothing(self) -> None:
        """The time limit is that of the connection."""
        with mock.patch.object(wormhole_exchange, "CONNECT_S", 0.3):
            joiner = self.exchange(await self.listen(Factory.forProtocol(Protocol)))
            sentence = await self.sentence(wormhole_exchange.take(joiner, "1-a-b"))
        self.assertIn("does not answer; try again", sentence)

    async def test_it_is_not_a_relay(self) -> None:
        """Another program may listen there."""

        class Other(Protocol):
            def dataReceived(self, data: bytes) -> None:
                transport: Any = self.transport
                transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                transport.loseConnection()

        joiner = self.exchange(await self.listen(Factory.forProtocol(Other)))
        sentence = await self.sentence(wormhole_exchange.take(joiner, "1-a-b"))
        self.assertIn("cannot reach the relay", sentence)
        self.assertTrue(sentence.isprintable(), sentence)

    async def test_a_port_in_use(self) -> None:
        """Our own relay needs another."""
        url = await self.listen(Factory.forProtocol(Protocol))
        port = int(url.split(":")[2].split("/")[0])
        with self.assertRaisesRegex(UsageError, f"cannot listen on port {port} for a relay"):
            await start_relay(self.reactor, "127.0.0.1", port, "127.0.0.1")
