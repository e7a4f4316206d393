"""The bounds that every Foolscap connection has, on either side."""

from __future__ import annotations

from typing import Any

from foolscap import eventual, negotiate
from foolscap.api import Referenceable
from foolscap.referenceable import TubRef
from foolscap.tokens import Violation
from misc.attack.foolscap import call, opened, string, token, value
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.wire import banana_receiver
from pipegrid.wire import foolscap_broker as bounded
from pipegrid.wire.banana_receiver import (
    ERROR,
    LONGINT,
    OPEN,
    PING,
    STRING,
    VOCAB,
    Bounds,
    LimitExceeded,
)
from pipegrid.wire.foolscap_broker import GRACE_S, BoundedBroker, BoundedNegotiation
from pipegrid.wire.foolscap_interfaces import MAX_SHARES, RIStorageServer, answer_cost

DECISION = negotiate.Negotiation().loopbackDecision()
PIECE = b"x" * 65536


class Transport:
    """Remembers what it is told."""

    connected = True

    def __init__(self) -> None:
        self.written = b""
        self.events: list[str] = []

    def write(self, data: bytes) -> None:
        """Take it."""
        self.written += data

    def __getattr__(self, name: str) -> Any:
        if name not in ("loseConnection", "abortConnection", "pauseProducing", "resumeProducing"):
            raise AttributeError(name)
        return lambda: self.events.append(name)


class Echo(Referenceable):  # type: ignore[misc]
    """Remembers what it was called with."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.answer: Any = None

    def remote_echo(self, *arguments: Any) -> Any:
        """Be called."""
        self.heard.append(arguments)
        return self.answer


class BrokerTestCase(SynchronousTestCase):
    """A broker that has one object, and a clock."""

    bounds = Bounds(call_cost=1 << 20, answer_cost=answer_cost)

    def setUp(self) -> None:
        self.clock = Clock()
        self.patch(eventual, "reactor", self.clock)
        self.patch(eventual, "_theSimpleQueue", eventual._SimpleCallQueue())
        self.broker = self.make()
        self.transport = self.make_transport()
        self.broker.makeConnection(self.transport)
        # References that are collected after this test are given back to nobody, instead of by a timer
        # in another test; what was asked and not answered does not fail.
        self.addCleanup(setattr, self.broker, "disconnected", True)
        self.echo = Echo()
        self.broker.getTrackerForMyReference(self.echo.processUniqueID(), self.echo).send()

    def make(self) -> BoundedBroker:
        """Return one."""
        return BoundedBroker(TubRef("a" * 32), DECISION, bounds=self.bounds)

    def make_transport(self) -> Any:
        """Return what it is connected to."""
        return Transport()

    def settle(self) -> None:
        """Let all turns be taken."""
        for _ in range(10_000):
            soon = [each for each in self.clock.getDelayedCalls() if not each.getTime()]
            if not soon:
                return
            self.clock.advance(0)
        raise AssertionError("it never comes to rest")

    def receive(self, *pieces: bytes) -> None:
        """Have something arrive."""
        for piece in pieces:
            self.broker.dataReceived(piece)
        self.settle()

    def assert_refused(self, why: str) -> None:
        """It was told why, and is over."""
        self.assertTrue(self.broker.connectionAbandoned, "nothing was refused")
        self.assertIn(why.encode("ascii"), self.transport.written)
        self.assertIn("loseConnection", self.transport.events)
        self.assertEqual(self.broker._tokens.waiting_bytes, 0)
        self.clock.advance(GRACE_S)
        self.assertIn("abortConnection", self.transport.events)


class MessageTests(BrokerTestCase):
    """What a message may be."""

    def test_calls(self) -> None:
        """Usual calls are carried out."""
        self.receive(call(1, 1, b"echo", value(b"one")), call(2, 1, b"echo", value([1, 2])))
        self.assertEqual(self.echo.heard, [(b"one",), ([1, 2],)])
        self.assertFalse(self.broker.connectionAbandoned)

    def test_a_name_of_any_length(self) -> None:
        """Calls of the tub itself have a few KiB, and no more is kept of them."""
        head, _, _ = call(1, 0, b"getReferenceByName", value(b"?")).partition(string(b"?"))
        self.receive(head + token(STRING, 900 << 20))
        self.assert_refused("larger than its kind")

    def test_methods_in_the_place_of_objects(self) -> None:
        """Foolscap has references to methods, too, and to call one as an object is an assertion there."""
        method = opened(b"my-reference", value(-5), value(RIStorageServer.__remote_name__.encode()))
        self.receive(call(1, 1, b"echo", method))
        self.assert_refused("a method in the place of an object")
        self.assertEqual(self.echo.heard, [])

    def test_a_string_of_any_length(self) -> None:
        """Calls of objects have what their kind may have."""
        head, _, _ = call(1, 1, b"echo", value(b"?")).partition(string(b"?"))
        self.receive(head + token(STRING, (1 << 20) - 4096), *[PIECE] * 3)
        self.assertFalse(self.broker.connectionAbandoned)
        self.receive(*[PIECE] * 14)
        self.broker = self.make()
        self.broker.makeConnection(self.transport)
        self.broker.getTrackerForMyReference(1, self.echo).send()
        self.receive(head + token(STRING, 1 << 20))
        self.assert_refused("larger than its kind")

    def test_depth(self) -> None:
        """Nobody goes deeper than calls do; neither in what is discarded."""
        self.receive((token(OPEN, 1) + string(b"list")) * 50)
        self.assert_refused("within more than")

    def test_many_small_parts(self) -> None:
        """A message is bounded in tokens, and counted as what it becomes."""
        self.receive(call(1, 1, b"echo", value([0] * 9000)))
        self.assert_refused("larger than its kind")

    def test_parts_that_are_used_again(self) -> None:
        """A reference to a part costs as much as the part."""
        again = opened(b"reference", value(2)) * 20
        self.receive(call(1, 1, b"echo", value([b"x"] * 10), opened(b"list", again)))
        self.assert_refused("larger than its kind")

    def test_nonsense(self) -> None:
        """What no client sends ends the connection at once."""
        for sent, why in (
            (b"\x01" * 100, "more than 9 bytes"),
            (token(LONGINT, 1 << 30), "an integer of"),
            (token(ERROR, 1 << 30), "its error message has"),
            (token(OPEN, 1) + token(VOCAB, 999), "abbreviation 999"),
            (token(OPEN, 1) + token(OPEN, 2), "opened something"),
            (bytes((0x80,)), "unknown type"),
            (b"\xff", "unknown type"),
            (opened(b"answer", value(1), value(b"x")), "a call that was not made"),
            (opened(b"error", value(1), value(b"x")), "a call that was not made"),
            (token(OPEN, 1) + string(b"\xff\xff"), "makes no sense"),
        ):
            self.setUp()
            self.receive(sent)
            self.assert_refused(why)

    def test_gifts(self) -> None:
        """No gift is taken, nor any other object that nobody needs; the next call is."""
        gift = opened(b"their-reference", value(1), value(b"pb://a@tcp:127.0.0.1:1/x"))
        copied = opened(b"copyable", string(b"foolscap.SturdyRef"))
        for what in (gift, copied, opened(b"your-reference", value(1)), opened(b"decimal")):
            self.receive(call(1, 1, b"echo", what))
        self.receive(call(9, 1, b"echo", value(b"next")))
        self.assertEqual(self.echo.heard, [(b"next",)])

    def test_references(self) -> None:
        """Objects of the other end's are bounded in number."""
        self.patch(bounded, "MAX_REFERENCES", 3)
        self.echo.answer = None
        for number in range(1, 5):
            canary = opened(b"my-reference", value(number), value(b""))
            self.receive(call(number, 1, b"echo", canary))
        self.assert_refused("more than 3 objects")


class TurnTests(BrokerTestCase):
    """Others have their turn."""

    bounds = Bounds(call_cost=1 << 20, turn_tokens=100)

    def test_pings(self) -> None:
        """Of a flood of PINGs so many are looked at in a turn; meanwhile nothing is read."""
        self.broker.dataReceived(token(PING) * 1000)
        self.assertEqual(len(self.transport.written), 100)
        self.assertEqual(self.transport.events, ["pauseProducing"])
        self.settle()
        self.assertEqual(len(self.transport.written), 1000)
        self.assertEqual(self.transport.events, ["pauseProducing", "resumeProducing"])

    def test_calls(self) -> None:
        """Of calls fewer."""
        calls = [call(number, 1, b"echo", value(number)) for number in range(1, 101)]
        self.broker.dataReceived(b"".join(calls))
        self.assertLessEqual(len(self.broker.inboundDeliveryQueue), banana_receiver.TURN_CALLS)
        self.settle()
        self.assertEqual([heard for (heard,) in self.echo.heard], list(range(1, 101)))

    def test_calls_that_take_their_time(self) -> None:
        """So many calls are under way, and no more is read until one of them has ended."""
        answers: list[Deferred[None]] = []
        self.echo.remote_echo = lambda: answers.append(Deferred()) or answers[-1]  # type: ignore
        calls = [call(number, 1, b"echo") for number in range(1, 2 * banana_receiver.MAX_CALLS)]
        self.receive(b"".join(calls))
        self.assertEqual(len(answers), banana_receiver.MAX_CALLS - 1)  # and one is being received
        self.assertEqual(self.transport.events[-1], "pauseProducing")
        while waiting := [answer for answer in answers if not answer.called]:
            self.assertLess(len(waiting), banana_receiver.MAX_CALLS)
            for answer in waiting:
                answer.callback(None)
            self.settle()
        self.assertEqual(len(answers), 2 * banana_receiver.MAX_CALLS - 1)
        self.assertEqual(self.transport.events[-1], "resumeProducing")


class AnswerTests(BrokerTestCase):
    """What may be answered to a call of ours."""

    interface: str | None = None

    def ask(self, method: str, *arguments: Any) -> Deferred[Any]:
        """Call something at the other end."""
        reference = self.broker.getTrackerForYourReference(1, self.interface, None).getRef()
        self.reference = reference
        answer: Deferred[Any] = reference.callRemote(method, *arguments)
        self.settle()
        return answer

    def test_as_much_as_was_asked_for(self) -> None:
        """A read brings what it asked for, and not much more."""
        answer = self.ask("read", 0, 100_000)
        self.receive(opened(b"answer", value(1), value(b"x" * 100_000)))
        self.assertEqual(self.successResultOf(answer), b"x" * 100_000)
        answer = self.ask("read", 0, 100_000)
        self.receive(token(OPEN, 1) + string(b"answer") + value(2) + token(STRING, 200_000))
        failure = self.failureResultOf(answer, LimitExceeded)
        self.assertIn("larger than its kind", str(failure.value))

    def test_a_tuple_that_ends_early(self) -> None:
        """An answer has all the parts that are declared."""
        self.interface = RIStorageServer.__remote_name__
        secrets = (bytes(32),) * 3
        method = "slot_testv_and_readv_and_writev"
        parts = (opened(b"boolean", value(1)), value({}))
        for number, count in enumerate((2, 1, 0), 1):
            answer = self.ask(method, bytes(16), secrets, {}, [])
            found = opened(b"tuple", *parts[:count])
            self.receive(opened(b"answer", value(number), found))
            if count == 2:
                self.assertEqual(self.successResultOf(answer), (True, {}))
            else:
                self.assertIn("ends after", str(self.failureResultOf(answer, Violation).value))

    def test_a_version_of_300_mb(self) -> None:
        """A version is small."""
        answer = self.ask("get_version")
        self.receive(token(OPEN, 1) + string(b"answer") + value(1) + token(STRING, 300 << 20))
        self.failureResultOf(answer, LimitExceeded)
        self.assertEqual(self.broker._tokens.missing_bytes, 0)

    def test_what_each_call_may_bring(self) -> None:
        """Enough for the largest true answer; reads of slots as much as they ask for."""
        self.assertGreater(answer_cost("get_buckets", (b"",)), MAX_SHARES * 1500)
        self.assertLess(answer_cost("get_buckets", (b"",)), 1 << 20)
        self.assertLess(answer_cost("get_version", ()), 1 << 16)
        self.assertGreater(answer_cost("slot_readv", (b"", [1], [(0, 5 << 20)])), 5 << 20)
        self.assertLess(answer_cost("slot_readv", (b"", [1], [(0, 5 << 20)])), 6 << 20)
        asked: tuple[Any, ...] = (b"", (), {}, [(0, 1000)])
        self.assertLess(answer_cost("slot_testv_and_readv_and_writev", asked), 1 << 20)


class NegotiationTests(SynchronousTestCase):
    """What comes before."""

    def test_after_it_failed(self) -> None:
        """Nothing is kept of what comes behind a failure, and who does not hang up is cut off."""
        clock = Clock()
        self.patch(eventual, "reactor", clock)
        negotiation: Any = BoundedNegotiation()
        negotiation.isClient = False
        transport: Any = Transport()
        negotiation.transport = transport
        negotiation.dataReceived(b"x" * 5000)
        negotiation.dataReceived(b"x" * 5000)
        self.assertEqual(negotiation.buffer, b"")
        self.assertEqual(transport.events, ["loseConnection", "pauseProducing"])
        clock.advance(GRACE_S)
        self.assertEqual(transport.events[-1], "abortConnection")

    def test_its_time(self) -> None:
        """It has half a minute."""
        self.assertEqual(BoundedNegotiation.SERVER_TIMEOUT, 30)
