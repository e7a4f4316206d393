"""Calls that are sent in one piece: Foolscap's bytes, in the order of the calls."""

from __future__ import annotations

import gc
from typing import Any

from foolscap import eventual
from foolscap.api import Referenceable
from foolscap.referenceable import TubRef
from foolscap.slicer import BaseSlicer
from foolscap.tokens import Violation
from foolscap.vocab import INITIAL_VOCAB_TABLES
from hypothesis import given
from hypothesis import strategies as st
from misc.attack.foolscap import token
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.wire.banana_receiver import CLOSE, INT, OPEN, STRING, VOCAB, Bounds, LimitExceeded
from pipegrid.wire.foolscap_broker import (
    GRACE_S,
    IDLE_CHECK_S,
    MAX_CALL_BYTES,
    MAX_UNNEEDED,
    RELEASES_PER_CHECK,
    BoundedBroker,
    call_remote,
    can_pack,
)
from pipegrid.wire.foolscap_interfaces import RIStorageServer, answer_cost
from tests.wire.test_broker import DECISION, BrokerTestCase, Transport

STORAGE = str(RIStorageServer.__remote_name__)
HASH = b"h" * 32
WORDS = {name: number for number, name in enumerate(INITIAL_VOCAB_TABLES[1])}
ALLOCATION = b"i" * 16, HASH, HASH, {3, 200}, 1000


class Slow(BaseSlicer):  # type: ignore[misc]
    """An argument that is not there yet."""

    opentype = ("list",)

    def sliceBody(self, streamable: bool, banana: Any) -> Any:
        """Wait, then send it."""
        yield self.obj
        yield b"late"


def word(kind: int, name: str) -> bytes:
    """Return what begins something, with its name abbreviated; a zero has its digit, as Foolscap has it."""
    number = WORDS[name.encode("ascii")]
    return token(kind, 1) + (token(VOCAB, number) if number else bytes((0, VOCAB)))


def answer(request: int, *parts: bytes) -> bytes:
    """Return an answer."""
    return word(OPEN, "answer") + token(INT, request) + b"".join(parts) + token(CLOSE, 1)


NOTHING = word(OPEN, "none") + token(CLOSE, 1)


class Writes(Transport):
    """Counts what it is told, too."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def write(self, data: bytes) -> None:
        """Take it."""
        self.writes += 1
        super().write(data)


def connected() -> tuple[BoundedBroker, Writes]:
    """Return a broker, and what it writes to."""
    broker = BoundedBroker(TubRef("a" * 32), DECISION, bounds=Bounds(answer_cost=answer_cost))
    transport = Writes()
    broker.makeConnection(transport)
    return broker, transport


def both_ways(
    calls: list[tuple[str, tuple[Any, ...]]], canary: Referenceable | None
) -> list[bytes]:
    """Return what is written for calls by Foolscap, and by us."""
    written = []
    for at_once in (False, True):
        broker, transport = connected()
        reference = broker.getTrackerForYourReference(1, None, None).getRef()
        for method, arguments in calls:
            given_ = (*arguments, canary) if canary is not None else arguments
            if at_once:
                call_remote(reference, method, *given_)
            else:
                reference.callRemote(method, *given_)
        written.append(transport.written)
        broker.disconnected = True  # the reference is given back to nobody
        del reference
    return written


NUMBERS = st.integers(0, 1 << 70) | st.sampled_from([0, 127, 128, (1 << 31) - 1, 1 << 31])
STRINGS = st.binary(max_size=200) | st.sampled_from([b"none", b"answer", b""])
ARGUMENTS = st.lists(NUMBERS | STRINGS | st.sets(NUMBERS, max_size=5), max_size=6).map(tuple)


class BytesTests(SynchronousTestCase):
    """What is sent."""

    def setUp(self) -> None:
        self.patch(eventual, "reactor", Clock())
        self.patch(eventual, "_theSimpleQueue", eventual._SimpleCallQueue())

    @given(st.lists(st.tuples(st.sampled_from(["write", "close", "dict"]), ARGUMENTS), max_size=4))
    def test_they_are_those_of_foolscap(self, calls: list[tuple[str, tuple[Any, ...]]]) -> None:
        """Whatever the arguments, one call behind the other."""
        theirs, ours = both_ways(calls, None)
        self.assertEqual(ours, theirs)

    def test_an_object_of_ours(self) -> None:
        """It is introduced with the first call, and only named in those behind it."""
        theirs, ours = both_ways([("allocate_buckets", ALLOCATION)] * 3, Referenceable())
        self.assertEqual(ours, theirs)

    def test_in_one_write(self) -> None:
        """A call is one write to the transport, unless it is long, or has other arguments."""
        for arguments, packed in (
            (ALLOCATION, True),
            ((b"x" * 1000, 5), True),
            ((b"x" * MAX_CALL_BYTES, 5), True),
            ((b"x" * MAX_CALL_BYTES, 5, b"x"), False),
            (((1, 2), [3]), False),
            (({"text"},), False),
            ((-1,), False),
            ((True,), False),
        ):
            broker, transport = connected()
            reference = broker.getTrackerForYourReference(1, None, None).getRef()
            call_remote(reference, "method", *arguments).addErrback(lambda _: None)
            self.assertEqual(transport.writes == 1, packed, f"{arguments!r:.50}")
            self.assertIs(can_pack(arguments), packed)
            broker.disconnected = True


class CallTests(BrokerTestCase):
    """What becomes of the answer."""

    bounds = Bounds(answer_cost=answer_cost)

    def ask(self, method: str, *arguments: Any) -> Deferred[Any]:
        """Call a storage server."""
        tracker = self.broker.getTrackerForYourReference(1, STORAGE, None)
        self.reference = tracker.getRef()
        return call_remote(self.reference, method, *arguments)

    def test_it_is_held_to_the_interface(self) -> None:
        """An answer of another shape than the interface's fails the call, as it does with Foolscap."""
        asked = self.ask("add_lease", b"i" * 16, HASH, HASH)
        self.receive(answer(1, token(INT, 5)))
        self.failureResultOf(asked, LimitExceeded)

    def test_it_may_bring_what_the_call_may(self) -> None:
        """And no more; a reader's method here, since no storage server's brings as much."""
        reader = self.broker.getTrackerForYourReference(2, "RIBucketReader", None).getRef()
        asked = call_remote(reader, "read", 0, 100_000)
        self.receive(answer(1, token(STRING, 100_000, b"x" * 100_000)))
        self.assertEqual(self.successResultOf(asked), b"x" * 100_000)
        asked = call_remote(reader, "read", 0, 100_000)
        self.receive(word(OPEN, "answer") + token(INT, 2) + token(STRING, 200_000))
        self.failureResultOf(asked, LimitExceeded)

    def test_a_method_that_is_none(self) -> None:
        """It fails as with Foolscap."""
        self.failureResultOf(self.ask("no_such_method"), Violation)

    def test_a_connection_that_is_lost(self) -> None:
        """What is unanswered fails, and what is asked then."""
        asked = self.ask("add_lease", b"i" * 16, HASH, HASH)
        self.broker.connectionLost(Failure(ConnectionDone()))
        self.settle()
        self.failureResultOf(asked)
        self.failureResultOf(self.ask("add_lease", b"i" * 16, HASH, HASH))

    def test_in_the_order_of_the_calls(self) -> None:
        """While Foolscap is sending what has to wait, a call waits behind it."""
        waiting: Deferred[None] = Deferred()
        tracker = self.broker.getTrackerForYourReference(1, None, None)
        self.reference = tracker.getRef()
        first = self.reference.callRemote("first", Slow(waiting))
        before = self.transport.written
        second = call_remote(self.reference, "second", b"x")
        self.assertEqual(self.transport.written, before)
        waiting.callback(None)
        self.assertIn(b"second", self.transport.written.partition(b"late")[2])
        for asked in (first, second):
            asked.addErrback(lambda _: None)


class NothingTests(BrokerTestCase):
    """Answers that say nothing, which are recognized as a whole."""

    bounds = Bounds(answer_cost=answer_cost)

    def setUp(self) -> None:
        super().setUp()
        self.reference = self.broker.getTrackerForYourReference(1, STORAGE, None).getRef()

    def lease(self) -> Deferred[Any]:
        """Ask for what is answered so."""
        return call_remote(self.reference, "add_lease", b"i" * 16, HASH, HASH)

    def test_whole_or_in_pieces(self) -> None:
        """The pieces make no difference."""
        for size in (1, 2, 5, 9, 100):
            self.setUp()
            asked = [self.lease() for _ in range(300)]
            stream = b"".join(answer(number + 1, NOTHING) for number in range(300))
            self.receive(*(stream[at : at + size] for at in range(0, len(stream), size)))
            self.assertEqual([self.successResultOf(each) for each in asked], [None] * 300)
            self.assertEqual(self.broker.objectCounter, 600)
            self.assertFalse(self.broker.waitingForAnswers)

    def test_without_a_look_at_its_tokens(self) -> None:
        """One that has arrived whole is taken without Foolscap."""
        self.patch(self.broker, "handleOpen", None)
        asked = self.lease()
        self.receive(answer(1, NOTHING))
        self.assertIsNone(self.successResultOf(asked))

    def test_to_nothing(self) -> None:
        """A second answer to a call, or one to a call that was not made, ends the connection."""
        for number in (1, 7):
            self.setUp()
            asked = self.lease()
            self.receive(answer(1, NOTHING))
            self.successResultOf(asked)
            self.receive(answer(number, NOTHING))
            self.assert_refused("a call that was not made")

    def test_where_something_is_expected(self) -> None:
        """Nothing is no list of shares: the call fails, and the next ones do not."""
        asked = call_remote(self.reference, "get_buckets", b"i" * 16)
        behind = self.lease()
        self.receive(answer(1, NOTHING), answer(2, NOTHING))
        self.failureResultOf(asked, Violation)
        self.assertIsNone(self.successResultOf(behind))

    def test_ends_that_do_not_fit(self) -> None:
        """What is opened is closed under its own number."""
        asked = self.lease()
        self.receive(answer(1, NOTHING)[:-2] + token(CLOSE, 2))
        self.failureResultOf(asked, LimitExceeded)

    def test_many_take_turns(self) -> None:
        """They count as the tokens that they are."""
        asked = [self.lease() for _ in range(200)]
        self.broker.dataReceived(b"".join(answer(number + 1, NOTHING) for number in range(200)))
        done = sum(each.called for each in asked)
        self.assertLessEqual(done, self.broker.bounds.turn_tokens // 7 + 1)
        self.assertEqual(self.transport.events, ["pauseProducing"])
        self.settle()
        self.assertTrue(all(each.called for each in asked))


class GivingBackTests(BrokerTestCase):
    """Objects of the other end's that are not needed any more."""

    def take(self, count: int) -> None:
        """Be given objects, and need them no more."""
        for number in range(10, 10 + count):
            self.broker.getTrackerForYourReference(number, None, None).getRef()
        gc.collect()
        self.settle()

    def given_back(self) -> int:
        """Return how many the other end was told of."""
        written: bytes = self.transport.written
        return written.count(b"decref")

    def test_when_there_is_time(self) -> None:
        """Not while somebody waits for the other end."""
        reference = self.broker.getTrackerForYourReference(1, None, None).getRef()
        asked = call_remote(reference, "write", 0, b"x")
        self.take(3)
        self.clock.pump([IDLE_CHECK_S] * 5)
        self.assertEqual(self.given_back(), 0)
        self.receive(answer(1, NOTHING))
        self.successResultOf(asked)
        self.clock.advance(IDLE_CHECK_S)
        self.assertEqual(self.given_back(), 3)

    def test_not_all_at_once(self) -> None:
        """Many are given back one lot after the other, when the one before was taken."""
        self.take(RELEASES_PER_CHECK + 1)
        self.clock.advance(IDLE_CHECK_S)
        self.assertEqual(self.given_back(), RELEASES_PER_CHECK)
        self.clock.advance(IDLE_CHECK_S)
        self.assertEqual(self.given_back(), RELEASES_PER_CHECK)
        numbers = list(self.broker.waitingForAnswers)
        self.receive(*(answer(number, NOTHING) for number in numbers))
        self.assertEqual(len(self.broker.yourReferenceByCLID), 1)
        self.clock.advance(IDLE_CHECK_S)
        self.assertEqual(self.given_back(), RELEASES_PER_CHECK + 1)

    def test_how_many_are_kept(self) -> None:
        """Of more than a bound the oldest are given back at once."""
        self.take(MAX_UNNEEDED + 2)
        self.assertEqual(self.given_back(), 2)

    def test_one_that_is_given_again(self) -> None:
        """What is given back is only what was given before."""
        self.take(1)
        again = self.broker.getTrackerForYourReference(10, None, None).getRef()
        self.clock.advance(IDLE_CHECK_S)
        self.assertEqual(self.given_back(), 1)
        self.receive(answer(1, NOTHING))
        self.assertIn(10, self.broker.yourReferenceByCLID)
        del again

    def test_the_end(self) -> None:
        """Nothing is left of them, and nothing is told."""
        self.take(2)
        self.broker.connectionLost(Failure(ConnectionDone()))
        self.take(2)
        self.settle()
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertEqual(self.given_back(), 0)

    def test_the_end_that_we_make(self) -> None:
        """Nor while it is waited for that the connection is gone."""
        self.take(2)
        self.broker.shutdown(Failure(ConnectionDone()))
        self.settle()
        self.assertEqual([each.time for each in self.clock.calls], [GRACE_S])
        self.broker.connectionLost(Failure(ConnectionDone()))
        self.assertEqual(self.clock.getDelayedCalls(), [])
