"""What a server's Foolscap connections may cost it, all together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from foolscap.api import Tub
from foolscap.referenceable import TubRef
from misc.attack.foolscap import ask_name, call, string, token, value
from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.server.connection_turns import BURST_S, SHARE, CpuUsage
from pipegrid.server.foolscap import broker as bounds
from pipegrid.server.foolscap.broker import (
    ACTIVE_S,
    MAX_HELD_BYTES,
    REST,
    Governor,
    HeldMemory,
    MessageLimits,
    ServerBroker,
)
from pipegrid.server.foolscap.port import MAX_REMEMBERED, _Recent
from pipegrid.wire.banana_receiver import PING, STRING
from tests.wire.test_broker import DECISION, BrokerTestCase, Echo, Transport

MIB = 1 << 20


class Socket(Transport):
    """Full behind each large write, if it is slow."""

    producer: Any = None
    slow = False

    def write(self, data: bytes) -> None:
        """Take it."""
        super().write(data)
        if self.slow and len(data) > 65536:
            self.producer.pauseProducing()

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """Know who writes."""
        self.producer = producer

    def unregisterProducer(self) -> None:
        """Forget it."""
        self.producer = None


class ServerTestCase(BrokerTestCase):
    """A server's connection; its object answers what it is told to."""

    def setUp(self) -> None:
        self.held = 0
        self.told: list[str] = []
        self.known = 0
        self.memory = HeldMemory(self.hold)
        self.named = Echo()
        super().setUp()

    def hold(self, more: int) -> bool:
        """Keep the books of the whole server."""
        self.held += more
        return True

    def vouch(self) -> None:
        """Hear that a client is no stranger."""
        self.known += 1

    def make(self) -> ServerBroker:
        """Return a connection's broker."""
        broker = ServerBroker(
            TubRef("a" * 32),
            DECISION,
            limits=MessageLimits(self.memory),
            governor=Governor(self.clock, lambda: 0),
            refused=self.told.append,
            known=self.vouch,
        )
        tub = self.tub = Tub.__new__(Tub)
        tub.brokers, tub.logLocalFailures = {}, False
        tub.getReferenceForName = {"secret": self.named}.__getitem__
        tub.getOrCreateURLForReference = lambda obj: None
        broker.tub = tub
        return broker

    def make_transport(self) -> Any:
        """Return a socket that may be full."""
        return Socket()


class StrangerTests(ServerTestCase):
    """Until the secret is shown."""

    def test_a_few_kib_in_all(self) -> None:
        """PINGs are counted, too."""
        self.receive(token(PING) * bounds.STRANGER_BYTES)
        self.assertFalse(self.broker.connectionAbandoned)
        self.receive(token(PING))
        self.assert_refused("named no object of this server")
        self.assertEqual(len(self.told), 1)
        self.assertEqual(self.known, 0)

    def test_half_a_minute(self) -> None:
        """And no longer."""
        self.clock.advance(bounds.STRANGER_S)
        self.assert_refused("named no object of this server for 30 s")

    def test_with_the_secret(self) -> None:
        """Who names something is known from then on; a wrong name is none."""
        self.receive(ask_name(b"wrong"))
        self.assertEqual(self.known, 0)
        self.receive(ask_name(b"secret", 2), ask_name(b"secret", 3))
        self.assertEqual(self.known, 1)
        self.receive(token(PING) * 2 * bounds.STRANGER_BYTES)
        self.clock.advance(bounds.STRANGER_S)
        self.assertFalse(self.broker.connectionAbandoned)


class ReceivingTests(ServerTestCase):
    """Long bodies, which nobody looks at before their end."""

    others = 0

    def make(self) -> ServerBroker:
        """Have others ask for things."""
        broker = super().make()
        broker._governor = Governor(self.clock, lambda: self.others)
        return broker

    def pour(self, pieces: int) -> None:
        """Begin with a body of 100 MiB, and send so much of it."""
        self.receive(ask_name(b"secret"))
        write = call(2, 1, b"set", value(b"?"))
        head, _, _ = write.partition(string(b"?"))
        self.receive(head + token(STRING, 100 * MIB))
        self.clock.advance(2 * ACTIVE_S)
        for _ in range(pieces):
            self.receive(bytes(65536))

    def test_alone(self) -> None:
        """Nothing waits."""
        self.pour(500)
        self.assertFalse(self.broker._yielded)

    def test_while_others_ask(self) -> None:
        """Beyond a burst each piece has its turn, behind a rest of four times what it took."""
        self.others += 1
        self.pour(100)
        self.others += 1
        self.assertFalse(self.broker._yielded)
        self.receive(*[bytes(65536)] * 50)
        self.assertTrue(self.broker._yielded)
        rests = 0.0
        while self.broker._yielded and rests < 1:
            self.others += 1
            self.clock.advance(0.0001)
            rests += 0.0001
        self.assertGreaterEqual(rests, 3.5 * 65536 * bounds.RECEIVE_BYTE_S)
        self.assertFalse(self.broker.connectionAbandoned)


class AnswerTests(ServerTestCase):
    """Answers are made as fast as they are read."""

    def setUp(self) -> None:
        super().setUp()
        self.receive(ask_name(b"secret"))
        self.transport.written = b""

    def test_a_large_one(self) -> None:
        """It is written in pieces, and nothing between them; its memory is held until then."""
        self.echo.answer = bytes(range(256)) * 4 * (MIB // 256)
        idle = self.held
        self.transport.slow = True
        self.receive(call(2, 1, b"echo") + token(PING, 5))
        for piece in range(1, 4 * MIB // bounds.PIECE_BYTES + 1):
            self.assertLess(len(self.transport.written), piece * bounds.PIECE_BYTES + 100)
            self.assertGreater(self.held - idle, 4 * MIB - 1)
            self.transport.producer.resumeProducing()
            self.settle()
        self.assertIn(self.echo.answer, self.transport.written)
        self.assertEqual(self.held, idle)

    def test_one_that_is_not_read(self) -> None:
        """No other call is carried out, or read, before it is on its way."""
        self.transport.producer.pauseProducing()
        self.receive(b"".join(call(number, 1, b"echo") for number in range(2, 20)))
        self.assertEqual(self.echo.heard, [])
        self.assertEqual(self.transport.events[-1], "pauseProducing")
        self.transport.producer.resumeProducing()
        self.settle()
        self.assertEqual(len(self.echo.heard), 18)

    def test_when_the_client_is_gone(self) -> None:
        """Nothing is left of what it asked for, sent, or had begun to send."""
        self.echo.answer = bytes(4 * MIB)
        head, _, _ = call(3, 1, b"echo", value(b"?")).partition(string(b"?"))
        self.transport.producer.pauseProducing()
        self.broker.output_free()
        self.receive(call(2, 1, b"echo"), head + token(STRING, 8 * MIB) + b"x" * MIB)
        self.assertGreater(self.held, 4 * MIB)
        self.broker.connectionLost(Failure(ConnectionDone()))
        self.settle()
        self.assertEqual(self.held, 0)
        self.assertEqual(self.broker.slicerStack, [])
        self.assertEqual(self.broker._tokens.missing_bytes, 0)


class Connection:
    """Holds, and is cut off."""

    def __init__(self) -> None:
        self.gone = 0

    def crowd_out(self) -> None:
        """Be cut off."""
        self.gone += 1


class MemoryTests(SynchronousTestCase):
    """Who goes when there is no room."""

    def setUp(self) -> None:
        self.held = 0
        self.memory = HeldMemory(self.hold, 100)
        self.one, self.other, self.third = Connection(), Connection(), Connection()

    def hold(self, more: int) -> bool:
        """Have 1000 in all."""
        if more > 0 and self.held + more > 1000:
            return False
        self.held += more
        return True

    def test_the_one_with_most(self) -> None:
        """It goes, for one that would hold less; its room is the other's."""
        self.assertTrue(self.memory.hold(self.one, 60))
        self.assertTrue(self.memory.hold(self.other, 30))
        self.assertTrue(self.memory.hold(self.third, 20))
        self.assertEqual([each.gone for each in (self.one, self.other, self.third)], [1, 0, 0])
        self.assertEqual((self.memory.total_bytes, self.held), (50, 50))

    def test_the_one_that_asks(self) -> None:
        """It goes itself if it would be the one with most."""
        self.memory.hold(self.one, 30)
        self.memory.hold(self.other, 60)
        self.assertFalse(self.memory.hold(self.other, 20))
        self.assertFalse(self.memory.hold(self.third, 80))
        self.assertEqual(self.one.gone + self.other.gone, 0)

    def test_what_others_hold(self) -> None:
        """The server's other protocol has its part of the whole."""
        self.held = 950
        self.assertFalse(self.memory.hold(self.one, 60))
        self.assertTrue(self.memory.hold(self.one, 50))
        self.memory.release(self.one, 20)
        self.memory.release_all(self.one)
        self.memory.release_all(self.one)
        self.memory.release(self.one, 20)
        self.assertEqual((self.memory.total_bytes, self.held), (0, 950))

    def test_the_largest_message(self) -> None:
        """It fits."""
        self.assertGreater(MAX_HELD_BYTES, bounds.BOUNDS.call_cost)


class GovernorTests(SynchronousTestCase):
    """Who waits."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(1000)
        self.requests = 0
        self.governor = Governor(self.clock, lambda: self.requests)
        self.turns: list[float] = []

    def turn(self, again: int = 0) -> Callable[[], None]:
        """Return a turn of ten milliseconds, and so many more."""

        def take() -> None:
            self.turns.append(round(self.clock.seconds() - 1000, 3))
            self.clock.rightNow += 0.01
            self.governor.heavy_work(0.01)
            if again:
                self.governor.enter(self.turn(again - 1))

        return take

    def test_spending(self) -> None:
        """A burst is free; after it one waits, until it is paid back."""
        spending = CpuUsage(0.0)
        spending.spend(BURST_S, 1.0)
        self.assertFalse(spending.is_heavy(1.0))
        spending.spend(0.01, 1.0)
        self.assertTrue(spending.is_heavy(1.5))
        self.assertFalse(spending.is_heavy(1.0 + 0.011 / SHARE))

    def test_alone(self) -> None:
        """Nobody rests while nobody else is there."""
        self.governor.enter(self.turn(3))
        self.clock.pump([0, 0, 0, 0])
        self.assertEqual(self.turns, [0.0, 0.01, 0.02, 0.03])

    def test_while_others_work(self) -> None:
        """All rest behind each turn, whoever took it."""
        for _ in range(2):
            self.governor.enter(self.turn(1))
        for _ in range(60):
            self.requests += 1
            self.clock.advance(0.005)
        self.assertEqual(len(self.turns), 4)
        for before, after in zip(self.turns, self.turns[1:], strict=False):
            self.assertGreaterEqual(after - before, 0.01 * (1 + REST) - 1e-9)

    def test_when_the_others_are_done(self) -> None:
        """Soon the rests end."""
        self.governor.light_work()
        self.clock.advance(2 * ACTIVE_S)
        self.governor.enter(self.turn(2))
        self.clock.pump([0, 0, 0])
        self.assertEqual(len(self.turns), 3)


class RememberedTests(SynchronousTestCase):
    """What is kept of clients that are gone."""

    def test_the_latest(self) -> None:
        """Of so many, and no more."""
        table = _Recent()
        for number in range(MAX_REMEMBERED + 10):
            table[f"tub {number}"] = number
            table["often"] = number
        self.assertEqual(len(table), MAX_REMEMBERED)
        self.assertIn("often", table)
        self.assertNotIn("tub 0", table)
