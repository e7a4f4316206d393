"""The first bytes of a connection: who goes on with it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from twisted.internet.address import IPv4Address
from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.reactor import bulk_tls, process_settings
from pipegrid.server.connection_turns import FairTurns
from pipegrid.server.listener import (
    DETECTION_S,
    MANY_ENDED,
    QUIET_S,
    ConnectionLimits,
    PortListener,
    ProtocolDetector,
)

ADDRESS = IPv4Address("TCP", "192.0.2.1", 1234)


class Inner(Protocol):
    """Keeps what it is handed."""

    def __init__(self) -> None:
        self.data = b""
        self.lost = 0
        self.quiet = 0.0
        self.on_known: Any = None

    def quiet_s(self) -> float:
        """For so long."""
        return self.quiet

    def dataReceived(self, data: bytes) -> None:
        """Keep it."""
        self.data += data

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """Count it."""
        self.lost += 1


class Server:
    """As much of a GBS server as the front needs; also what speaks Foolscap."""

    def __init__(self) -> None:
        self.made: list[Inner] = []
        self.reasons: list[str] = []
        self.refused = 0
        self.full = False
        self.on_known: Any = None
        self.turns: FairTurns[Any] = FairTurns(Clock())

    def buildProtocol(self, addr: IAddress | None, on_known: Any = None) -> Inner | None:
        """Make one, unless full."""
        if self.full:
            return None
        self.on_known = on_known
        self.made.append(Inner())
        return self.made[-1]

    def note_hostile(self, peer: str, reason: str) -> None:
        """Keep it."""
        self.reasons.append(f"{peer}: {reason}")


class Factory(PortListener):
    """Without TLS, so that tests see what is handed on."""

    def __init__(self, server: Any, clock: Clock, foolscap: Any) -> None:
        contexts: Any = None
        super().__init__(server, contexts, clock, foolscap, ConnectionLimits(2, 2))
        self._tls: Any = self

    def protocol(self, factory: Any, inner: Inner) -> Inner:
        """Pretend to wrap."""
        return inner


class FrontTests(SynchronousTestCase):
    """Eight bytes decide."""

    def setUp(self) -> None:
        # BatchingTLSFactory wants real contexts; the real one is tested over real connections.
        self.patch(
            bulk_tls,
            "BatchingTLSFactory",
            lambda *arguments: None,
        )
        self.clock = Clock()
        self.server, self.foolscap = Server(), Server()
        self.factory = Factory(self.server, self.clock, self.foolscap)

    def connect(self) -> tuple[ProtocolDetector, Any]:
        """Open a connection."""
        front = self.factory.buildProtocol(ADDRESS)
        assert front is not None
        transport = StringTransport()
        front.makeConnection(transport)
        return front, transport

    def test_foolscap(self) -> None:
        """Foolscap's first words, byte by byte, lead to Foolscap, with nothing lost."""
        front, _ = self.connect()
        words = b"GET /id/abc HTTP/1.1\r\n"
        for at in range(len(words)):
            front.dataReceived(words[at : at + 1])
        (inner,) = self.foolscap.made
        self.assertEqual(inner.data, words)
        self.assertIsNotNone(inner.transport)
        front.connectionLost(Failure(Exception()))
        self.assertEqual(inner.lost, 1)
        self.assertEqual(self.factory.connections, set())
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_anything_else(self) -> None:
        """Anything else is TLS, also what is nearly Foolscap."""
        for words in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET /ie/abc", b"get /id/abc"):
            front, _ = self.connect()
            front.dataReceived(words)
            front.dataReceived(b"more")
            self.clock.advance(0)
            self.assertEqual(self.server.made[-1].data, words + b"more")
            front.connectionLost(Failure(Exception()))
        self.assertEqual(len(self.server.made), 3)
        self.assertEqual(self.foolscap.made, [])

    def test_too_slow(self) -> None:
        """Seven bytes in half a minute are too few: the connection is cut, and nobody was bothered."""
        front, transport = self.connect()
        front.dataReceived(b"GET /id")
        self.clock.advance(DETECTION_S - 1)
        self.assertFalse(transport.disconnecting)
        self.clock.advance(1)
        self.assertTrue(transport.disconnected)
        front.dataReceived(b"/late")
        self.assertEqual(self.server.made + self.foolscap.made, [])
        self.assertIn("192.0.2.1", self.server.reasons[0])

    def test_eight_bytes_are_enough(self) -> None:
        """Whoever has said who he is may then take his time, as far as the front is concerned."""
        front, transport = self.connect()
        front.dataReceived(b"GET /id/")
        self.clock.advance(DETECTION_S * 2)
        self.assertFalse(transport.disconnected)

    def test_too_many(self) -> None:
        """The one more makes the oldest stranger go; where all are known and busy, it is turned away."""
        (first, cut), (second, kept) = self.connect(), self.connect()
        third, _ = self.connect()
        self.assertTrue(cut.disconnected)
        self.assertFalse(kept.disconnected)
        self.assertEqual(self.server.refused, 1)
        for front in (second, third):
            front.dataReceived(b"\x16" * 8)
            self.clock.advance(0)
            self.server.made[-1].on_known()
        self.assertIsNone(self.factory.buildProtocol(ADDRESS))
        self.assertEqual(self.server.refused, 2)
        first.connectionLost(Failure(Exception()))
        self.assertIsNone(self.factory.buildProtocol(ADDRESS))
        second.connectionLost(Failure(Exception()))
        self.connect()

    def test_the_quiet_make_room(self) -> None:
        """A known connection that is of no use goes when another one comes; HTTP says for how long it was."""
        fronts = [self.connect() for _ in range(2)]
        for front, _ in fronts:
            front.dataReceived(b"\x16" * 8)
            self.clock.advance(0)
            self.server.made[-1].on_known()
        self.server.made[1].quiet = QUIET_S
        self.connect()
        self.assertEqual([transport.disconnected for _, transport in fronts], [False, True])

    def test_handshakes_take_turns(self) -> None:
        """One begins in a turn of the reactor; addresses take turns, and what has gone is passed over."""
        factory = Factory(self.server, self.clock, None)
        factory._crowd = ConnectionLimits(100)
        fronts = []
        for host in ("a", "a", "a", "a", "b"):
            front = factory.buildProtocol(IPv4Address("TCP", host, 1))
            assert front is not None
            front.makeConnection(StringTransport())
            front.dataReceived(host.encode() * 8)
            fronts.append(front)
        fronts[2].connectionLost(Failure(Exception()))
        self.assertEqual([inner.data for inner in self.server.made], [b"a" * 8])
        self.assertEqual(fronts[-1].transport.producerState, "paused")
        self.clock.advance(0)
        begun = "".join(chr(inner.data[0]) for inner in self.server.made)
        self.assertEqual(begun, "abaa")
        paused = [front.transport.producerState for front in fronts]
        self.assertEqual(paused[:2] + paused[3:], ["producing"] * 4)
        self.assertFalse(factory._queue)

    def test_strangers_are_heard_in_turn(self) -> None:
        """Who has shown the secret is heard at once; what strangers say waits, and none of it is lost."""
        (known, _), (stranger, _) = self.connect(), self.connect()
        for front in (known, stranger):
            front.dataReceived(b"\x16" * 8)
            self.clock.advance(0)
        first, second = self.server.made
        known.has_shown_secret()
        for number in range(5):
            known.dataReceived(b"%d" % number)
            stranger.dataReceived(b"%d" % number)
        self.assertEqual((first.data[8:], second.data[8:]), (b"01234", b"0"))
        self.clock.advance(0)
        self.assertEqual(second.data[8:], b"01234")

    def test_what_cannot_be_heard_in_turn(self) -> None:
        """It is cut, as it would be out of turn: nobody waits for an answer that never comes."""
        (other, _), (front, transport) = self.connect(), self.connect()
        other.dataReceived(b"\x16" * 8)  # it is heard at once, and the next one in the next turn
        self.patch(Inner, "dataReceived", lambda _inner, _data: 1 // 0)
        front.dataReceived(b"\x16" * 8)
        self.clock.advance(0)
        self.assertTrue(transport.disconnecting)
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 1)

    def test_foolscap_is_quiet(self) -> None:
        """Over Foolscap, what comes is of use."""
        fronts = [self.connect() for _ in range(2)]
        for front, _ in fronts:
            front.dataReceived(b"GET /id/")
            self.clock.advance(0)
            self.foolscap.on_known()
        self.clock.pump([1] * 20)
        fronts[1][0].dataReceived(b"a call")
        self.clock.pump([1] * 5)
        self.connect()
        self.assertEqual([transport.disconnected for _, transport in fronts], [True, False])

    def test_nobody_speaks_it(self) -> None:
        """A server without Foolscap, or one that is full, cuts the connection."""
        bare = Factory(self.server, self.clock, None)
        self.assertIsNone(bare.choose(b"GET /id/", ProtocolDetector(bare, ADDRESS)))
        self.server.full = True
        front, transport = self.connect()
        front.dataReceived(b"\x16" * 8)
        self.assertTrue(transport.disconnected)

    def test_memory_of_those_that_ended(self) -> None:
        """What refers to itself is freed, and given back, when many have ended, whatever they spoke."""
        given: list[None] = []
        self.patch(process_settings, "trim_heap", lambda: given.append(None))
        gc.disable()  # as if Python saw no reason to look
        self.addCleanup(gc.enable)
        left = []
        for at in range(MANY_ENDED + 1):
            front, _ = self.connect()
            front.dataReceived(b"GET /id/abc" if at % 2 else b"\x16\x03\x01\x02\x00\x01\x00\x01")
            inner = (self.foolscap if at % 2 else self.server).made.pop()
            inner.on_known = front  # a cycle
            left.append(weakref.ref(inner))
            self.clock.advance(0)
            front.connectionLost(Failure(Exception()))
            del front, inner, _
            self.assertEqual(len(given), (at + 1) // MANY_ENDED)
        self.assertLess(sum(each() is not None for each in left), 5)

    def test_stopping(self) -> None:
        """Stopping cuts what is there, and waits for its end."""
        self.successResultOf(self.factory.stop())
        front, transport = self.connect()
        stopped = self.factory.stop()
        self.assertTrue(transport.disconnected)
        self.assertNoResult(stopped)
        front.connectionLost(Failure(Exception()))
        self.successResultOf(stopped)
