"""Answers that have allocated one share, recognized as a whole: what Foolscap makes of the same bytes."""

from __future__ import annotations

import gc
from typing import Any

import attrs
from foolscap import eventual
from foolscap.referenceable import TubRef
from foolscap.tokens import Violation
from hypothesis import example, given
from hypothesis import strategies as st
from misc.attack.foolscap import string, token
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.wire import foolscap_broker as bounded
from pipegrid.wire.banana_receiver import (
    ALLOCATED_TOKENS,
    CLOSE,
    INT,
    MAX_FURL_BYTES,
    OPEN,
    STRING,
    VOCAB,
    Bounds,
    LimitExceeded,
)
from pipegrid.wire.foolscap_broker import BoundedBroker, call_remote
from pipegrid.wire.foolscap_interfaces import ALLOCATED, answer_cost
from tests.wire.test_broker import DECISION, BrokerTestCase, Transport
from tests.wire.test_calls import ALLOCATION, STORAGE, WORDS

TUB = "a" * 32
FURL = f"pb://{TUB}@tcp:127.0.0.1:1234/{'s' * 32}".encode()
WRITER = b"RIBucketWriter"
BOUNDS = Bounds(answer_cost=answer_cost, allocated=ALLOCATED)
PLAIN = Bounds(answer_cost=answer_cost)


def number(value: int) -> bytes:
    """Return an integer as Foolscap sends it: a zero has its digit."""
    return token(INT, value) if value else bytes((0, INT))


def opened(place: int, name: bytes, *parts: bytes) -> bytes:
    """Return an object under its own number, its name abbreviated."""
    digits = token(OPEN, place) if place else bytes((0, OPEN))
    ends = token(CLOSE, place) if place else bytes((0, CLOSE))
    return digits + token(VOCAB, WORDS[name]) + b"".join(parts) + ends


@attrs.frozen
class Answer:
    """What such an answer says."""

    request: int = 1
    share: int = 3
    clid: int = 7
    name: bytes = WRITER
    furl: bytes = FURL
    first: int = 0

    def writer(self) -> bytes:
        """Return the reference."""
        parts = number(self.clid), string(self.name), string(self.furl)
        return opened(self.first + 4, b"my-reference", *parts)

    def packed(self) -> bytes:
        """Return its bytes, as Foolscap sends them."""
        first = self.first
        there, writers = (
            opened(first + 2, b"set"),
            opened(first + 3, b"dict", number(self.share), self.writer()),
        )
        both = opened(first + 1, b"tuple", there, writers)
        return opened(first, b"answer", number(self.request), both)


def outcome(stream: bytes, bounds: Bounds, size: int = 1 << 20) -> tuple[Any, ...]:
    """Return what a broker makes of answers to three calls, and what it has then."""
    broker = BoundedBroker(TubRef(TUB), DECISION, bounds=bounds)
    broker.makeConnection(Transport())
    storage = broker.getTrackerForYourReference(1, STORAGE, None).getRef()
    told: list[Any] = []
    for _ in range(3):
        call_remote(storage, "allocate_buckets", *ALLOCATION, 5).addBoth(told.append)
    for at in range(0, len(stream), size):
        broker.dataReceived(stream[at : at + size])
    found = {
        clid: (tracker.url, tracker.interfaceName, tracker.interface, tracker.received_count)
        for clid, tracker in broker.yourReferenceByCLID.items()
    }
    said = [_plain(each) for each in told]
    waiting = sorted(broker.waitingForAnswers)
    ended = broker.connectionAbandoned
    counter = None if ended else broker.objectCounter
    broker.disconnected = True  # what it was given is given back to nobody
    return said, waiting, found, sorted(broker.yourReferenceByURL), ended, counter


def _plain(told: Any) -> Any:
    if isinstance(told, Failure):
        return type(told.value)
    there, writers = told
    return type(there), there, {share: writer.tracker.clid for share, writer in writers.items()}


NUMBERS = st.integers(0, 300) | st.sampled_from([(1 << 14) - 1, 1 << 14, 1 << 30, (1 << 35) - 1])
FURLS = st.sampled_from(
    [
        FURL,
        FURL.replace(b"a@", b"b@"),
        b"",
        b"pb://",
        FURL + b" ",
        FURL + bytes((0x89,)),
        FURL + "\N{SNOWMAN}".encode(),
        FURL + b"x" * (MAX_FURL_BYTES - len(FURL)),
        FURL + b"x" * (MAX_FURL_BYTES + 1 - len(FURL)),
    ]
) | st.integers(0, 200).map(lambda more: FURL + b"x" * more)
ANSWERS = st.builds(
    Answer,
    st.integers(1, 5) | NUMBERS,
    NUMBERS,
    NUMBERS,
    st.sampled_from([WRITER, b"", b"RIBucketReader", b"Nobody's", b"none"]),
    FURLS,
    NUMBERS,
)


class ForeignTests(SynchronousTestCase):
    """Whatever comes, it is what Foolscap makes of it."""

    def setUp(self) -> None:
        self.patch(eventual, "reactor", Clock())
        self.patch(eventual, "_theSimpleQueue", eventual._SimpleCallQueue())

    @given(st.lists(ANSWERS, max_size=3), st.sampled_from([1, 3, 50, 1 << 20]))
    @example([Answer(1), Answer(2, clid=8), Answer(3, clid=9)], 1 << 20)
    @example([Answer(1), Answer(2, clid=7), Answer(1)], 1 << 20)
    def test_answers(self, answers: list[Answer], size: int) -> None:
        """Of any numbers, names and fURLs."""
        stream = b"".join(each.packed() for each in answers)
        self.assertEqual(outcome(stream, BOUNDS, size), outcome(stream, PLAIN))

    @given(ANSWERS, st.data())
    def test_bytes(self, said: Answer, data: st.DataObject) -> None:
        """Also where a few bytes are others, missing, or too many."""
        stream = bytearray(said.packed())
        at = data.draw(st.integers(0, len(stream) - 1))
        stream[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
        again = bytes(stream) + Answer(2, clid=8).packed()
        self.assertEqual(outcome(again, BOUNDS), outcome(again, PLAIN))


class AllocatedTests(BrokerTestCase):
    """What is recognized, and what is not."""

    bounds = BOUNDS

    def setUp(self) -> None:
        super().setUp()
        self.storage = self.broker.getTrackerForYourReference(1, STORAGE, None).getRef()
        self.opened: list[Any] = []
        self.watch("handleOpen", self.opened)

    def watch(self, name: str, heard: list[Any]) -> None:
        """Note with what the broker's method is called."""
        method = getattr(self.broker, name)

        def noted(*arguments: Any) -> Any:
            heard.append(arguments)
            return method(*arguments)

        self.patch(self.broker, name, noted)

    def ask(self, method: str = "allocate_buckets") -> Deferred[Any]:
        """Ask for room."""
        arguments = (*ALLOCATION, 5) if method == "allocate_buckets" else ALLOCATION[:1]
        return call_remote(self.storage, method, *arguments)

    def test_it_is_taken_without_foolscap(self) -> None:
        """Each that has arrived whole; the writer can be called."""
        asked = [self.ask() for _ in range(3)]
        answers = (Answer(1 + at, 200 + at, 5000 + at, first=1000 * at) for at in range(3))
        self.receive(b"".join(each.packed() for each in answers))
        for at, each in enumerate(asked):
            there, writers = self.successResultOf(each)
            self.assertEqual((there, list(writers)), (set(), [200 + at]))
            call_remote(writers[200 + at], "close")
        self.assertEqual((self.opened, self.broker.objectCounter), ([], 15))
        self.assertIn(b"close", self.transport.written)

    def test_a_writer_that_is_not_needed(self) -> None:
        """It is given back as others are."""
        asked = self.ask()
        self.receive(Answer().packed())
        self.successResultOf(asked)
        del asked
        gc.collect()
        self.settle()
        self.clock.advance(1)
        self.assertIn(b"decref", self.transport.written)

    def test_to_another_question(self) -> None:
        """It is an answer to allocations alone: the call fails, the connection stays."""
        asked = self.ask("get_buckets")
        self.receive(Answer().packed())
        self.failureResultOf(asked, Violation)
        self.assertEqual(len(self.opened), 2)
        self.assertFalse(self.broker.connectionAbandoned)

    def test_references_are_bounded(self) -> None:
        """As where Foolscap takes them."""
        self.patch(bounded, "MAX_REFERENCES", len(self.broker.yourReferenceByCLID) + 1)
        asked = [self.ask() for _ in range(2)]
        self.receive(Answer(1).packed())
        self.successResultOf(asked[0])
        self.receive(Answer(2, clid=8).packed())
        self.assert_refused("more than")
        self.failureResultOf(asked[1], LimitExceeded)
        self.assertEqual(self.opened, [])

    def test_a_long_furl_is_no_such_answer(self) -> None:
        """It is Foolscap's, within the bounds of any answer; a longer one is the end."""
        asked = self.ask()
        self.receive(Answer(furl=FURL + b"x" * MAX_FURL_BYTES).packed())
        self.successResultOf(asked)
        self.assertEqual(len(self.opened), 5)
        asked = self.ask()
        self.receive(Answer(2, furl=b"x" * (1 << 20)).packed()[:200])
        self.assert_refused("larger than its kind")
        self.failureResultOf(asked, LimitExceeded)

    def test_its_tokens(self) -> None:
        """They count as those that they are, and more than a turn bears wait for the next."""
        asked = [self.ask() for _ in range(100)]
        stream = b"".join(Answer(1 + at, clid=10 + at).packed() for at in range(100))
        self.broker.dataReceived(stream)
        done = sum(each.called for each in asked)
        self.assertEqual(done, -(-self.broker.bounds.turn_tokens // ALLOCATED_TOKENS))
        self.settle()
        self.assertTrue(all(each.called for each in asked))
        self.assertEqual(self.opened, [])

    def test_how_many_tokens_it_has(self) -> None:
        """As many as are counted without it."""
        taken: list[tuple[int, int]] = []
        self.watch("_take_header", taken)
        asked, packed = self.ask(), Answer().packed()
        self.receive(packed[:9], packed[9:])
        self.successResultOf(asked)
        self.assertEqual(len(taken), ALLOCATED_TOKENS)
        self.assertEqual(taken[0][0], OPEN)
        self.assertEqual([kind for kind, _ in taken].count(STRING), 2)
