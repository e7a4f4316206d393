"""Bundles: what is held back, what leaves when and how, and what becomes of each part of it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from random import Random
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.encoding_parameters import Params
from pipegrid.core.hashes import Buffer
from pipegrid.errors import (
    ConflictingWrite,
    NoSpace,
    NoSuchShare,
    ServerError,
    ServerProtocolError,
    ServerUnreachable,
)
from pipegrid.http11.exchange import RawRequest, RawResponse
from pipegrid.http11.response_parser import ResponseHead
from pipegrid.http11.upload_connection import Answered
from pipegrid.transport.gbs.bundles import (
    BUSY,
    BUSY_SHARES,
    MAX_SHARE_BYTES,
    SEND_BYTES,
    GbsBundles,
    OrdinaryRequests,
)
from pipegrid.transport.gbs.client import GbsServer
from pipegrid.transport.gbs.requests import GbsRequests
from pipegrid.transport.gbs.response_outcomes import GbsAnswers
from pipegrid.wire import cbor, gbs_bundles, gbs_cbor_bodies, gbs_paths_headers
from pipegrid.wire.gbs_bundles import (
    MAX_BUNDLE_BYTES,
    MAX_NUMBERS,
    MAX_SHARES,
    MAX_UPLOADS,
    BundledAnswer,
    BundledUpload,
)
from pipegrid.wire.gbs_paths_headers import Resource
from pipegrid.wire.server_address import Nurl
from pipegrid.wire.storage_messages import Allocation, Stored, UploadSecrets, WriteAnswer
from tests.transport.contract import IDENTITY, OTHERS_SECRETS, SECRETS
from tests.transport.gbs_world import PORT, SWISSNUM

SHARE_BYTES = 200
PARAMS = Params(2, 5, 65536)
NURL = Nurl(b"\0" * 32, "s0", PORT, SWISSNUM)
OFFER = (gbs_bundles.HEADER, b"%d" % MAX_BUNDLE_BYTES)
REFUSALS = (400, 401, 404, 405, 413, 500, 503)


def index(number: int) -> bytes:
    """Return a storage index by a number that names it in tests."""
    return bytes([number]) * 16


def response(status: int, body: bytes = b"", *headers: tuple[bytes, bytes]) -> RawResponse:
    """Return an answer as the connection gives it."""
    answer = RawResponse(ResponseHead(status, b"", list(headers)))
    answer.body = body
    return answer


def describe(request: RawRequest) -> str:
    """Return what a request is, and for which indexes and shares: "bundle 1 2", "write 1/0"."""
    method, path, _ = request.head.split(b" ", 2)
    target = gbs_paths_headers.parse_path(path.decode())
    assert target is not None
    if target.resource is Resource.BUNDLE:
        return "bundle " + " ".join(str(each.storage_index[0]) for each in unpack(request))
    name = "write" if method == b"PATCH" else target.resource.name.lower()
    share = f"/{target.share_number}" if "/<n>" in target.resource.value else ""
    return f"{name} {target.storage_index[0]}{share}"


def unpack(request: RawRequest) -> list[BundledUpload]:
    """Return the uploads in a bundle."""
    return gbs_bundles.unpack_bundle(b"".join(request.body))


def allocated(*numbers: int) -> Allocation:
    """Return the answer of a server that had none of these, and takes them all."""
    return Allocation(frozenset(), frozenset(numbers))


def stored(upload: BundledUpload) -> BundledAnswer:
    """Return the answer for an upload with which all went well."""
    return BundledAnswer(allocated(*upload.share_numbers), dict.fromkeys(upload.shares, 201))


def without_collector(test: SynchronousTestCase) -> None:
    """Let cycles stay where they are for the rest of a test."""
    if gc.isenabled():
        gc.disable()
        test.addCleanup(gc.enable)


class Call:
    """
    A request, or a call for one, that a test answers.

    Attributes:
        name: as ``describe`` has it.
        request: what was sent on the uploads' connection, if it was.
        cancelled: whether nobody wants the answer any more.
    """

    def __init__(self, name: str, request: RawRequest | None = None) -> None:
        self.name = name
        self.request = request
        self.cancelled = False
        self.result: Deferred[Any] = Deferred(self._cancel)

    def _cancel(self, _: Deferred[Any]) -> None:
        self.cancelled = True

    @property
    def indexes(self) -> list[int]:
        """The numbers of the indexes that it is about."""
        return [int(each.partition("/")[0]) for each in self.name.split()[1:]]

    @property
    def uploads(self) -> list[BundledUpload]:
        """What is in the bundle."""
        assert self.request is not None
        return unpack(self.request)

    @property
    def body_bytes(self) -> int:
        """The length of the bundle."""
        assert self.request is not None
        return sum(map(len, self.request.body))

    def answer(
        self,
        status: int = 200,
        body: bytes = b"",
        *headers: tuple[bytes, bytes],
        repeated: bool = False,
    ) -> None:
        """Answer what was sent."""
        self.result.callback((response(status, body, *headers), repeated))

    def settle(self, *results: BundledAnswer, repeated: bool = False) -> None:
        """Answer a bundle."""
        self.answer(200, gbs_bundles.pack_answers(results), repeated=repeated)

    def store(self) -> None:
        """Answer that all is stored."""
        self.settle(*map(stored, self.uploads))


class Calls:
    """All calls, in their order, whoever got them."""

    def __init__(self) -> None:
        self.made: list[Call] = []

    @property
    def names(self) -> list[str]:
        """What they are."""
        return [call.name for call in self.made]

    def send(self, request: RawRequest) -> Deferred[Answered]:
        """Take a request for the uploads' connection."""
        return self._note(Call(describe(request), request))

    def close(self, reason: Callable[[], Exception]) -> Deferred[None]:
        """Fail what is unanswered, as the uploads' connection does."""
        for call in self.made:
            if not call.result.called:
                call.cancelled = True
                call.result.errback(reason())
        return succeed(None)

    def ordinary(self) -> OrdinaryRequests:
        """Return what takes calls for ordinary requests."""

        def allocate(
            storage_index: bytes,
            share_numbers: AbstractSet[int],
            share_bytes: int,
            secrets: UploadSecrets,
        ) -> Deferred[Allocation]:
            return self._note(Call(f"allocate {storage_index[0]}"))

        def write(
            storage_index: bytes,
            share_number: int,
            offset: int,
            data: Sequence[Buffer],
            upload_secret: bytes,
            maybe_done: bool,
        ) -> Deferred[WriteAnswer]:
            assert offset == 0
            again = " again" if maybe_done else ""
            return self._note(Call(f"write {storage_index[0]}/{share_number}{again}"))

        def store(upload: BundledUpload, maybe_done: bool) -> Deferred[Stored]:
            again = " again" if maybe_done else ""
            return self._note(Call(f"store {upload.storage_index[0]}{again}"))

        def was_completed(storage_index: bytes, share_number: int) -> Deferred[WriteAnswer]:
            return self._note(Call(f"was_completed {storage_index[0]}/{share_number}"))

        return OrdinaryRequests(allocate, write, store, was_completed)

    def _note(self, call: Call) -> Deferred[Any]:
        self.made.append(call)
        return call.result


@attrs.frozen
class Parts:
    """The parts of one upload: what whoever called has got."""

    allocation: Deferred[Allocation]
    writes: dict[int, Deferred[WriteAnswer]]
    data: dict[int, bytes]

    @property
    def all(self) -> list[Deferred[Any]]:
        """The allocation and the writes."""
        return [self.allocation, *self.writes.values()]


class BundlesTestCase(SynchronousTestCase):
    """Bundles by themselves: a fake connection, fake ordinary requests, a clock."""

    def setUp(self) -> None:
        self.random = Random(11)
        self.make_bundles()

    def make_bundles(self, max_bytes: int = MAX_BUNDLE_BYTES) -> None:
        """Begin anew with what a server offers."""
        self.clock = Clock()
        self.calls = Calls()
        self.bundles = GbsBundles(
            self.clock,
            GbsRequests(NURL, 60.0),
            GbsAnswers("s0"),
            self.calls.send,
            self.calls.ordinary(),
            max_bytes,
        )

    def tearDown(self) -> None:
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def allocate(
        self, number: int, share_numbers: AbstractSet[int], share_bytes: int = SHARE_BYTES
    ) -> Deferred[Allocation] | None:
        """Allocate shares of an index."""
        return self.bundles.allocate(index(number), share_numbers, share_bytes, SECRETS)

    def write(self, number: int, share_number: int, data: bytes) -> Deferred[WriteAnswer] | None:
        """Write all of a share."""
        return self.bundles.write(index(number), share_number, [data], SECRETS.upload)

    def hold(
        self,
        number: int,
        share_numbers: Iterable[int] = (0,),
        written: Iterable[int] | None = None,
        share_bytes: int = SHARE_BYTES,
    ) -> Parts:
        """Allocate shares of an index, and write all of them, or those that are named."""
        numbers = frozenset(share_numbers)
        allocation = self.allocate(number, numbers, share_bytes)
        assert allocation is not None, f"{number} is not held"
        parts = Parts(allocation, {}, {})
        for each in sorted(numbers if written is None else written):
            parts.data[each] = self.random.randbytes(share_bytes)
            write = self.write(number, each, parts.data[each])
            assert write is not None, f"{number}/{each} is not held"
            parts.writes[each] = write
        return parts

    def turn(self) -> None:
        """The reactor's present turn ends."""
        self.clock.advance(0)

    def send(self, *uploads: Iterable[int]) -> tuple[Call, list[Parts]]:
        """Send a bundle of uploads with these share numbers; the indexes are 1, 2, and so on."""
        parts = [self.hold(number, numbers) for number, numbers in enumerate(uploads, 1)]
        self.turn()
        return self.calls.made[-1], parts

    def check_stored(self, parts: Parts) -> None:
        """All parts that nobody cancelled have ended well."""
        self.assertEqual(self.successResultOf(parts.allocation).already_have, frozenset())
        for write in parts.writes.values():
            self.assertEqual(self.successResultOf(write), WriteAnswer(True))

    def check_cancelled(self, *parts: Deferred[Any]) -> None:
        """These end as what was cancelled does."""
        for each in parts:
            self.failureResultOf(each, CancelledError)


class WholeTests(BundlesTestCase):
    """Calls that allocate shares and write all of them."""

    def store(self, number: int, *share_numbers: int) -> Deferred[Stored]:
        """Store whole shares of an index."""
        shares = {each: self.random.randbytes(SHARE_BYTES) for each in share_numbers}
        waiting = self.bundles.store(index(number), shares, SHARE_BYTES, SECRETS)
        assert waiting is not None
        return waiting

    def test_they_go_with_others(self) -> None:
        """One bundle a turn, whoever is in it."""
        whole = self.store(1, 0, 3)
        parts = self.hold(2)
        self.turn()
        self.assertEqual(self.calls.names, ["bundle 1 2"])
        self.assertEqual(set(self.calls.made[0].uploads[0].shares), {0, 3})
        self.calls.made[0].store()
        self.assertEqual(self.successResultOf(whole), Stored(allocated(0, 3)))
        self.check_stored(parts)

    def test_what_was_there_and_what_failed(self) -> None:
        """A share that is there needs no write; a refusal names its share."""
        whole = self.store(1, 0, 1, 2)
        self.turn()
        allocation = Allocation(frozenset({0}), frozenset({1, 2}))
        self.calls.made[0].settle(BundledAnswer(allocation, {0: 404, 1: 201, 2: 507}))
        result = self.successResultOf(whole)
        self.assertEqual(result.allocation, allocation)
        self.assertEqual({n: type(error) for n, error in result.failed.items()}, {2: NoSpace})

    def test_a_refused_allocation(self) -> None:
        """It fails as the allocation would alone."""
        whole = self.store(1, 0)
        self.turn()
        self.calls.made[0].settle(BundledAnswer(507, {}))
        self.failureResultOf(whole, NoSpace)

    def test_a_repeated_bundle(self) -> None:
        """What the first attempt may have stored is asked for, before it counts as failed."""
        whole = self.store(1, 0, 1)
        self.turn()
        self.calls.made[0].settle(BundledAnswer(allocated(), {0: 404, 1: 404}), repeated=True)
        self.assertEqual(self.calls.names[1:], ["was_completed 1/0"])
        self.calls.made[1].result.callback(WriteAnswer(True))
        self.calls.made[2].result.errback(NoSuchShare("none"))
        result = self.successResultOf(whole)
        self.assertEqual(set(result.failed), {1})

    def test_a_server_that_takes_no_bundles(self) -> None:
        """It is stored by ordinary requests, and the answer is theirs."""
        whole = self.store(1, 0)
        self.turn()
        self.calls.made[0].answer(404)
        self.assertEqual(self.calls.names[1:], ["store 1"])
        self.calls.made[1].result.callback(Stored(allocated(0)))
        self.assertEqual(self.successResultOf(whole), Stored(allocated(0)))

    def test_cancelled(self) -> None:
        """Nothing is sent, or the bundle is taken back, when nobody waits for it."""
        early = self.store(1, 0)
        early.cancel()
        self.turn()
        self.assertEqual(self.calls.names, [])
        late = self.store(1, 0)
        self.turn()
        late.cancel()
        self.assertTrue(self.calls.made[0].cancelled)
        self.check_cancelled(early, late)

    def test_what_is_not_held(self) -> None:
        """Long shares, and an index that is held already."""
        self.assertIsNone(self.bundles.store(index(1), {0: b""}, MAX_SHARE_BYTES + 1, SECRETS))
        self.store(1, 0).addErrback(lambda _: None).cancel()
        self.hold(2)
        self.assertIsNone(
            self.bundles.store(index(2), {1: bytes(SHARE_BYTES)}, SHARE_BYTES, SECRETS)
        )
        self.turn()


class HoldingTests(BundlesTestCase):
    """What is held, and when it leaves."""

    def test_nothing_leaves_before_the_turn_is_over(self) -> None:
        """What is allocated and written within a turn leaves at its end, as one bundle, in order."""
        parts = {number: self.hold(number, (number, 7)) for number in (3, 1, 2)}
        self.assertEqual(self.calls.names, [])
        self.turn()
        self.assertEqual(self.calls.names, ["bundle 3 1 2"])
        self.assertEqual(
            self.calls.made[0].uploads,
            [
                BundledUpload(index(number), SECRETS, SHARE_BYTES, {number, 7}, each.data)
                for number, each in parts.items()
            ],
        )
        for each in parts.values():
            for part in each.all:
                self.assertNoResult(part)
        self.calls.made[0].store()
        for each in parts.values():
            self.check_stored(each)

    def test_the_next_turn_is_another_bundle(self) -> None:
        """Each turn has a bundle of its own, whether the one before is answered or not."""
        for number in (1, 2, 3):
            self.hold(number)
            self.turn()
        self.turn()
        self.assertEqual(self.calls.names, ["bundle 1", "bundle 2", "bundle 3"])

    def test_complete_uploads_leave_at_once(self) -> None:
        """When enough is complete it leaves, and what is not complete stays until the turn is over."""
        self.hold(100, (0, 1), (0,))
        for round_ in range(3):
            size = 0
            while size < SEND_BYTES:
                self.assertEqual(len(self.calls.made), round_)
                number = round_ * 30 + size // 1000
                parts = self.hold(number, (0, 1), share_bytes=500)
                upload = BundledUpload(index(number), SECRETS, 500, {0, 1}, parts.data)
                size += gbs_bundles.upload_bytes(upload)
            self.assertEqual(len(self.calls.made), round_ + 1)
            self.assertNotIn("100", self.calls.names[-1])
            self.calls.made[-1].store()  # else the server would be busy
        rest = self.write(100, 1, bytes(SHARE_BYTES))
        self.assertEqual(len(self.calls.made), 3)
        self.turn()
        self.assertEqual(self.calls.names[3:], ["bundle 100"])
        self.calls.made[3].store()
        assert rest is not None
        self.assertTrue(self.successResultOf(rest).complete)

    def keep_busy(self) -> None:
        """Give the server so many bundles that it is busy."""
        for number in range(200, 200 + BUSY):
            for part in self.hold(number).all:
                part.addErrback(lambda _: None)
            self.turn()
        self.assertEqual(len(self.calls.made), BUSY)

    def test_turns_that_bring_more(self) -> None:
        """A server that has several bundles before it gets what successive turns bring together."""
        self.keep_busy()
        self.hold(1)

        numbers = [2, 3]

        def turn() -> None:  # behind the end of the one before it
            self.assertEqual(len(self.calls.made), BUSY)
            if numbers:
                self.hold(numbers.pop(0))
                self.clock.callLater(0, turn)

        self.clock.callLater(0, turn)
        self.turn()
        self.assertEqual(self.calls.names[BUSY:], ["bundle 1 2 3"])
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.hold(4)
        self.turn()
        self.assertEqual(self.calls.names[BUSY + 1 :], ["bundle 4"])

    def test_answers_end_that(self) -> None:
        """When one of them is answered, or fails, each turn has a bundle of its own again."""
        self.keep_busy()
        self.calls.made[0].store()
        for number in (1, 2):
            for part in self.hold(number).all:
                part.addErrback(lambda _: None)
            self.turn()
            if number == 1:
                self.assertEqual(self.calls.names[BUSY:], ["bundle 1"])
                self.calls.made[1].result.errback(ServerUnreachable("lost", "s0"))
        self.assertEqual(self.calls.names[BUSY:], ["bundle 1", "bundle 2"])

    def test_larger_bundles_for_busy_servers(self) -> None:
        """What is held then leaves when another as long does not fit, or when it has so many shares."""
        self.keep_busy()
        one = gbs_bundles.whole_upload_bytes(1, 16000)
        most = gbs_bundles.MAX_BUNDLE_BYTES // one
        self.assertLess(most, BUSY_SHARES)
        for number in range(most):
            self.assertEqual(len(self.calls.made), BUSY)
            self.hold(number, share_bytes=16000)
        self.assertEqual(len(self.calls.made), BUSY + 1)
        self.assertEqual(len(self.calls.made[-1].uploads), most)
        for more in range(BUSY_SHARES):
            self.assertEqual(len(self.calls.made), BUSY + 1)
            self.hold(100 + more, share_bytes=1)
        self.assertEqual(len(self.calls.made), BUSY + 2)
        self.assertEqual(len(self.calls.made[-1].uploads), BUSY_SHARES)

    def test_a_large_upload_leaves_alone(self) -> None:
        """An upload that is enough by itself does not wait for company."""
        self.hold(1, share_bytes=MAX_SHARE_BYTES)
        self.assertEqual(self.calls.names, ["bundle 1"])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_pieces(self) -> None:
        """A share may come in pieces, in any kind of buffer."""
        self.allocate(1, {4}, 5)
        pieces: list[Buffer] = [b"a", memoryview(b"xbcx")[1:3], b"", bytearray(b"de")]
        self.bundles.write(index(1), 4, pieces, SECRETS.upload)
        self.turn()
        self.assertEqual(self.calls.made[0].uploads[0].shares, {4: b"abcde"})

    def test_an_allocation_without_shares(self) -> None:
        """An allocation that nothing joined leaves by itself, beside the bundle of others."""
        alone = self.hold(1, (0, 1), ())
        self.hold(2)
        self.turn()
        self.assertEqual(sorted(self.calls.names), ["allocate 1", "bundle 2"])
        self.calls.made[self.calls.names.index("allocate 1")].result.callback(allocated(0))
        self.assertEqual(self.successResultOf(alone.allocation), allocated(0))
        self.assertIsNone(self.write(1, 0, bytes(SHARE_BYTES)))

    def test_some_of_the_shares(self) -> None:
        """Shares that come after the turn go as ordinary requests behind their bundle."""
        parts = self.hold(1, (0, 1, 2), (1,))
        self.turn()
        (upload,) = self.calls.made[0].uploads
        self.assertEqual((upload.share_numbers, upload.shares), ({0, 1, 2}, parts.data))
        self.assertIsNone(self.write(1, 0, bytes(SHARE_BYTES)))
        self.calls.made[0].store()
        self.assertEqual(self.successResultOf(parts.allocation), allocated(0, 1, 2))

    def test_flush(self) -> None:
        """What is held leaves when more for one of its indexes is to be sent, and no timer is left."""
        self.bundles.flush(index(1))
        self.hold(1)
        self.hold(2, (0, 1), (0,))
        self.bundles.flush(index(3))
        self.assertEqual(self.calls.names, [])
        self.bundles.flush(index(2))
        self.assertEqual(self.calls.names, ["bundle 1 2"])
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.hold(3)
        self.turn()
        self.assertEqual(self.calls.names[1:], ["bundle 3"])

    def test_allocations_that_are_not_held(self) -> None:
        """Nothing, no shares, large shares, many of them, the same index again: ordinary requests."""
        self.make_bundles(4 * MAX_SHARE_BYTES)
        fine = {0}, MAX_SHARE_BYTES
        for numbers, share_bytes in (
            ({0}, 0),
            (set(), SHARE_BYTES),
            ({0}, MAX_SHARE_BYTES + 1),
            ({0, 1, 2, 3}, MAX_SHARE_BYTES),
            (set(range(MAX_SHARES + 1)), 1),
        ):
            self.assertIsNone(self.allocate(1, numbers, share_bytes), f"{numbers}, {share_bytes}")
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.assertIsNotNone(self.allocate(1, *fine))
        self.assertIsNone(self.allocate(1, *fine))
        self.assertIsNotNone(self.allocate(2, *fine))
        self.turn()
        self.assertEqual(self.calls.names, ["allocate 1", "allocate 2"])

    def test_writes_that_do_not_join(self) -> None:
        """What is not all of a share that was asked for, under its secret, is an ordinary request."""
        share = bytes(SHARE_BYTES)
        parts = self.hold(1, (0, 1), (1,))
        for what, number, data, secret in (
            ("another index", 2, share, SECRETS.upload),
            ("shorter", 1, share[1:], SECRETS.upload),
            ("longer", 1, share + b"x", SECRETS.upload),
            ("another secret", 1, share, OTHERS_SECRETS.upload),
        ):
            self.assertIsNone(self.bundles.write(index(number), 0, [data], secret), what)
        self.assertIsNone(self.write(1, 2, share), "a share that was not asked for")
        self.assertIsNone(self.write(1, 1, share), "a share that is there")
        self.turn()
        (upload,) = self.calls.made[0].uploads
        self.assertEqual(upload.shares, parts.data)

    def test_more_than_a_bundle_may_hold(self) -> None:
        """Uploads, or shares, beyond the longest bundle go in the next one, none twice or not at all."""
        for number in range(MAX_UPLOADS + 30):
            self.hold(number, (0, 1), (0,), share_bytes=1)
        self.turn()
        self.assertEqual(
            [call.indexes for call in self.calls.made],
            [list(range(MAX_UPLOADS)), list(range(MAX_UPLOADS, MAX_UPLOADS + 30))],
        )
        self.make_bundles()
        for number in range(5):
            self.hold(number, range(MAX_SHARES // 2 - number % 2), share_bytes=1)
        self.turn()
        self.assertEqual(self.calls.names, ["bundle 0 1", "bundle 2 3", "bundle 4"])
        self.make_bundles()
        for number in range(9):  # a share of each, and more to be allocated
            self.hold(number, range(MAX_NUMBERS // 4), (0,), share_bytes=1)
        self.turn()
        self.assertEqual(self.calls.names, ["bundle 0 1 2 3", "bundle 4 5 6 7", "bundle 8"])

    def test_the_longest_bundle_of_a_server(self) -> None:
        """No bundle is longer than the server said, or than any may be, whatever is put into it."""
        for max_bytes in (1, 100, 200, 300, 400, 700, 1000, 2000, 5000, 20_000, 10**8):
            self.make_bundles(max_bytes)
            for number in range(60):
                share_numbers = range(self.random.choice((1, 1, 2, 60)))
                largest = min(MAX_SHARE_BYTES, max(1, max_bytes // 4 // len(share_numbers)))
                size = self.random.choice((1, min(largest, 100), largest))
                if self.allocate(number, set(share_numbers), size) is not None:
                    for each in share_numbers:
                        if each == 0 or self.random.random() < 0.9:
                            self.write(number, each, bytes(size))
                    if self.random.random() < 0.2:
                        self.bundles.flush(index(number))
            self.turn()
            for call in self.calls.made:
                if call.request is not None:
                    self.assertLessEqual(call.body_bytes, max_bytes, call.name)
                    call.store()

    def test_a_stingy_server_is_given_several(self) -> None:
        """Uploads that do not fit into one bundle of a server go in several, in their order."""
        self.make_bundles(1500)
        parts = [self.hold(number) for number in range(20)]
        self.turn()
        self.assertEqual([n for call in self.calls.made for n in call.indexes], list(range(20)))
        self.assertGreater(len(self.calls.made), 4)
        self.assertLess(len(self.calls.made), 10)
        for call in self.calls.made:
            call.store()
        for each in parts:
            self.check_stored(each)


class OfferTests(BundlesTestCase):
    """Who is sent bundles: servers that said so, as long as they take them."""

    def test_nothing_was_offered(self) -> None:
        """No bundle goes to a server that has not said that it takes any."""
        self.make_bundles(0)
        self.assertIsNone(self.allocate(1, {0}))
        self.assertIsNone(self.write(1, 0, bytes(SHARE_BYTES)))
        self.bundles.flush(index(1))
        self.assertEqual(self.calls.names, [])

    def test_until_refused(self) -> None:
        """What a response offers counts until a bundle is refused."""
        self.make_bundles(0)
        for _ in range(2):
            self.bundles.heard(response(200, b"", OFFER))
        self.assertEqual(self.bundles.max_bytes, MAX_BUNDLE_BYTES)
        parts = self.hold(1)
        self.turn()
        self.calls.made[0].result.callback((response(404), False))
        self.assertEqual(self.bundles.max_bytes, 0)
        del parts

    def test_offers(self) -> None:
        """Only a number of bytes is an offer."""
        for value, offered in (
            (b"262144", 262144),
            (b"5000", 5000),
            (b"0", 0),
            (b"", 0),
            (b"yes", 0),
            (b"-5", 0),
            (b"1e6", 0),
            (b"\xb2\xb2", 0),
            (b"9999999999", 0),
        ):
            self.make_bundles(0)
            self.bundles.heard(response(200, b"", (b"server", b"x"), (gbs_bundles.HEADER, value)))
            self.assertEqual(self.bundles.max_bytes, offered, f"{value!r}")
        self.make_bundles(0)
        self.bundles.heard(response(200, b"", (b"content-length", b"5000")))
        self.assertEqual(self.bundles.max_bytes, 0)

    def test_a_refusal(self) -> None:
        """A refused bundle's uploads go as ordinary requests, and end as these do."""
        for status in REFUSALS:
            self.make_bundles()
            call, (one, other) = self.send((0, 1), (5,))
            call.answer(status, b"no")
            expected = ["allocate 1", "write 1/0", "write 1/1", "allocate 2", "write 2/5"]
            self.assertEqual(self.calls.names[1:], expected, f"{status}")
            for part in (*one.all, *other.all):
                self.assertNoResult(part)
            error = ConflictingWrite("other bytes", "s0")
            for each, outcome in zip(
                self.calls.made[1:],
                (
                    allocated(0, 1),
                    WriteAnswer(True),
                    error,
                    NoSpace("full", "s0"),
                    WriteAnswer(True),
                ),
                strict=True,
            ):
                if isinstance(outcome, Exception):
                    each.result.errback(outcome)
                else:
                    each.result.callback(outcome)
            self.assertEqual(self.successResultOf(one.allocation), allocated(0, 1))
            self.assertEqual(self.successResultOf(one.writes[0]), WriteAnswer(True))
            self.assertIs(self.failureResultOf(one.writes[1]).value, error)
            self.failureResultOf(other.allocation, NoSpace)
            self.assertEqual(self.successResultOf(other.writes[5]), WriteAnswer(True))

    def test_no_bundle_after_a_refusal(self) -> None:
        """Who has refused a bundle gets no other before another answer offers them again."""
        for status in REFUSALS:
            self.make_bundles()
            call, _ = self.send((0,))
            call.answer(status)
            self.bundles.heard(response(200))
            self.assertIsNone(self.allocate(2, {0}), f"{status}")
            self.bundles.heard(response(200, b"", OFFER))
            self.hold(2)
            self.turn()
            self.assertEqual(self.calls.names[-1], "bundle 2", f"{status}")

    def test_bundles_under_way_when_one_is_refused(self) -> None:
        """Each bundle has its own answer, also behind one that was refused."""
        first, (refused,) = self.send((0,))
        taken = self.hold(2)
        self.turn()
        second = self.calls.made[-1]
        first.answer(404)
        second.store()
        self.check_stored(taken)
        self.assertEqual(self.calls.names[2:], ["allocate 1", "write 1/0"])
        self.assertNoResult(refused.allocation)

    def test_what_is_held_when_a_bundle_is_refused(self) -> None:
        """It goes as ordinary requests: the server has just said that it takes no bundles."""
        for number in (1, 2):
            self.hold(number)
        self.turn()
        held = [self.hold(number) for number in (3, 4)]
        self.calls.made[0].answer(404)
        self.turn()
        self.assertEqual(self.calls.names.count("write 3/0"), 1, f"{self.calls.names}")
        self.assertEqual([name for name in self.calls.names[1:] if "bundle" in name], [])
        for call in self.calls.made[1:]:
            call.result.callback(allocated(0) if "allocate" in call.name else WriteAnswer(True))
        for parts in held:
            self.check_stored(parts)


class AnswerTests(BundlesTestCase):
    """What an answer means for each part."""

    def test_each_upload_has_its_own_end(self) -> None:
        """One upload's refusal is nobody else's, and neither is one share's."""
        call, (first, second, third) = self.send((0,), (0, 1), (0,))
        call.settle(
            BundledAnswer(507, {}),
            BundledAnswer(Allocation(frozenset({0, 9}), frozenset({1})), {0: 404, 1: 201}),
            stored(call.uploads[2]),
        )
        for part in first.all:
            self.failureResultOf(part, NoSpace)
        expected = Allocation(frozenset({0, 9}), frozenset({1}))
        self.assertEqual(self.successResultOf(second.allocation), expected)
        self.failureResultOf(second.writes[0], NoSuchShare)
        self.assertEqual(self.successResultOf(second.writes[1]), WriteAnswer(True))
        self.check_stored(third)
        self.assertEqual(len(self.calls.made), 1)

    def test_a_repeated_bundle_that_had_been_carried_out(self) -> None:
        """That a repeated write finds no upload is no news where the share is in the server's list."""
        for repeated in (True, False):
            self.make_bundles()
            call, (parts,) = self.send((0,))
            there = Allocation(frozenset({0}), frozenset())
            call.settle(BundledAnswer(there, {0: 404}), repeated=repeated)
            self.assertEqual(self.successResultOf(parts.allocation), there)
            if repeated:
                self.assertEqual(self.successResultOf(parts.writes[0]), WriteAnswer(True))
            else:
                self.failureResultOf(parts.writes[0], NoSuchShare)
            self.assertEqual(len(self.calls.made), 1)

    def test_a_repeated_bundle_of_which_nothing_is_known(self) -> None:
        """Where it is not in the list the server is asked, and what is found out is the result."""
        call, (parts,) = self.send((0, 1, 2))
        answer = BundledAnswer(Allocation(frozenset({2}), frozenset({0})), {0: 404, 1: 404, 2: 404})
        call.settle(answer, repeated=True)
        self.assertEqual(self.calls.names[1:], ["was_completed 1/0", "was_completed 1/1"])
        self.assertEqual(self.successResultOf(parts.writes[2]), WriteAnswer(True))
        self.assertNoResult(parts.writes[0])
        self.calls.made[1].result.callback(WriteAnswer(True))
        self.calls.made[2].result.errback(NoSuchShare("none", "s0"))
        self.assertEqual(self.successResultOf(parts.writes[0]), WriteAnswer(True))
        self.failureResultOf(parts.writes[1], NoSuchShare)

    def test_other_refusals_of_a_repeated_bundle(self) -> None:
        """Other statuses mean the same the second time."""
        call, (parts,) = self.send((0, 1, 2))
        call.settle(
            BundledAnswer(Allocation(frozenset({0}), frozenset({1})), {0: 409, 1: 201, 2: 507}),
            repeated=True,
        )
        self.failureResultOf(parts.writes[0], ConflictingWrite)
        self.assertEqual(self.successResultOf(parts.writes[1]), WriteAnswer(True))
        self.failureResultOf(parts.writes[2], NoSpace)
        self.assertEqual(len(self.calls.made), 1)

    def test_nonsense(self) -> None:
        """An answer that makes no sense, in whatever place, is an error for every part."""
        good: Any = [[[], [0, 1], {0: 201, 1: 201}], [[], [0], {0: 201}]]
        bodies = [b"", b"\xff", b"<html>", bytes(gbs_cbor_bodies.MAX_ANSWER_BYTES + 1)]
        bodies += map(
            cbor.dumps,
            (
                {},
                [],
                good[:1],
                [*good, 507],
                [good[0], "507"],
                [good[0], 99],
                [good[0], 600],
                [good[0], True],
                [good[0], [[], [0]]],
                [good[0], [[], [0], {0: 201}, 0]],
                [good[0], [[], [0], {}]],
                [good[0], [[], [0], {1: 201}]],
                [good[0], [[], [0], {0: 201, 1: 201}]],
                [good[0], [[], [0], [201]]],
                [good[0], [[], [0], {0: 1}]],
                [good[0], [[], [0], {0: 201.0}]],
                [good[0], [[], [-1], {0: 201}]],
                [good[0], [["0"], [], {0: 201}]],
                [good[0], [0, [], {0: 201}]],
            ),
        )
        for body in bodies:
            self.make_bundles()
            call, (one, other) = self.send((0, 1), (0,))
            call.answer(200, body)
            for part in (*one.all, *other.all):
                error = self.failureResultOf(part, ServerProtocolError).value
                self.assertEqual((error.server, error.may_have_happened), ("s0", True))
            self.assertEqual(len(self.calls.made), 1)
        call, (one, other) = self.send((0, 1), (0,))
        call.answer(200, cbor.dumps(good))  # it was not for another reason
        self.check_stored(one)
        self.check_stored(other)

    def test_a_bundle_that_fails(self) -> None:
        """What ends the request ends every part of it, with the same error."""
        call, (one, other) = self.send((0, 1), (0,))
        error = ServerUnreachable("it was lost", "s0", True)
        call.result.errback(error)
        for part in (*one.all, *other.all):
            self.assertIs(self.failureResultOf(part).value, error)
        self.assertEqual(len(self.calls.made), 1)
        self.hold(2)
        self.turn()
        self.assertEqual(self.calls.names[1:], ["bundle 2"])


class CancellationTests(BundlesTestCase):
    """Each part can be cancelled by itself, at any time, and no other part notices."""

    def test_a_held_write(self) -> None:
        """A share that is cancelled while it is held is not sent."""
        parts = self.hold(1, (0, 1))
        parts.writes[0].cancel()
        self.turn()
        (upload,) = self.calls.made[0].uploads
        self.assertEqual((upload.share_numbers, list(upload.shares)), ({0, 1}, [1]))
        self.calls.made[0].store()
        self.check_cancelled(parts.writes.pop(0))
        self.check_stored(parts)

    def test_a_held_write_comes_again(self) -> None:
        """In the place of a share that was cancelled another one may join."""
        parts = self.hold(1, (0, 1))
        parts.writes[0].cancel()
        again = self.write(1, 0, b"n" * SHARE_BYTES)
        assert again is not None
        self.turn()
        (upload,) = self.calls.made[0].uploads
        self.assertEqual(upload.shares, {0: b"n" * SHARE_BYTES, 1: parts.data[1]})
        self.calls.made[0].store()
        self.assertEqual(self.successResultOf(again), WriteAnswer(True))
        self.check_cancelled(parts.writes.pop(0))
        self.check_stored(parts)

    def test_the_only_held_write(self) -> None:
        """An allocation whose shares were cancelled is still made."""
        parts = self.hold(1)
        parts.writes[0].cancel()
        self.turn()
        self.assertEqual(self.calls.names, ["allocate 1"])
        self.calls.made[0].result.callback(allocated(0))
        self.check_cancelled(parts.writes.pop(0))
        self.check_stored(parts)

    def test_a_held_allocation(self) -> None:
        """Shares whose allocation nobody waits for are stored all the same."""
        parts = self.hold(1)
        parts.allocation.cancel()
        self.check_cancelled(parts.allocation)
        self.turn()
        self.assertEqual(self.calls.names, ["bundle 1"])
        self.calls.made[0].store()
        self.assertEqual(self.successResultOf(parts.writes[0]), WriteAnswer(True))

    def test_all_of_a_held_upload(self) -> None:
        """Of an upload that nobody waits for nothing is sent; its neighbours are."""
        for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
            self.make_bundles()
            parts, neighbour = self.hold(1, (0, 1)), self.hold(2)
            every = parts.all
            for each in order:
                every[each].cancel()
            self.turn()
            self.assertEqual(self.calls.names, ["bundle 2"])
            self.calls.made[0].store()
            self.check_cancelled(*every)
            self.check_stored(neighbour)

    def test_all_that_is_held(self) -> None:
        """When nobody waits for anything, nothing is sent, and no timer is left."""
        parts = [self.hold(1), self.hold(2, (0, 1), ())]
        for part in (part for each in parts for part in each.all):
            self.assertEqual(len(self.clock.getDelayedCalls()), 1)
            part.cancel()
        self.assertEqual(self.clock.getDelayedCalls(), [])
        self.turn()
        self.assertEqual(self.calls.names, [])
        self.check_cancelled(*parts[0].all, *parts[1].all)
        self.assertIsNone(self.write(1, 0, bytes(SHARE_BYTES)))
        self.hold(1)
        self.turn()
        self.assertEqual(self.calls.names, ["bundle 1"])

    def test_parts_of_a_bundle_under_way(self) -> None:
        """What is cancelled on the way harms nothing else of the bundle."""
        for cancelled in range(5):
            self.make_bundles()
            call, (one, other) = self.send((0, 1), (0,))
            every = one.all + other.all
            every[cancelled].cancel()
            self.assertFalse(call.cancelled)
            call.store()
            self.check_cancelled(every.pop(cancelled))
            for part in every:
                self.successResultOf(part)

    def test_all_of_a_bundle_under_way(self) -> None:
        """With its last part the request is taken back, and no other one."""
        first, (one, other) = self.send((0, 1), (0,))
        neighbour = self.hold(3)
        self.turn()
        held = self.hold(4)
        for part in one.all + other.all:
            self.assertFalse(first.cancelled)
            part.cancel()
        self.assertTrue(first.cancelled)
        self.check_cancelled(*one.all, *other.all)
        self.turn()
        self.assertEqual(self.calls.names, ["bundle 1 2", "bundle 3", "bundle 4"])
        for call, parts in zip(self.calls.made[1:], (neighbour, held), strict=True):
            self.assertFalse(call.cancelled)
            call.store()
            self.check_stored(parts)

    def test_parts_of_a_bundle_that_is_refused(self) -> None:
        """What was cancelled before the refusal is not sent again."""
        call, (one, other) = self.send((0, 1), (0,))
        one.writes[1].cancel()
        other.allocation.cancel()
        other.writes[0].cancel()
        call.answer(404)
        self.assertEqual(self.calls.names[1:], ["allocate 1", "write 1/0"])
        self.check_cancelled(one.writes[1], *other.all)
        self.calls.made[1].result.callback(allocated(0, 1))
        self.calls.made[2].result.callback(WriteAnswer(True))
        self.assertTrue(self.successResultOf(one.writes[0]).complete)

    def test_a_refused_bundle_needs_its_allocations(self) -> None:
        """A share cannot be written without its allocation, whether anybody waits for that or not."""
        call, (parts,) = self.send((0,))
        parts.allocation.cancel()
        self.check_cancelled(parts.allocation)
        call.answer(404)
        self.assertEqual(self.calls.names[1:], ["allocate 1", "write 1/0"])

    def test_requests_in_place_of_a_bundle(self) -> None:
        """Cancelling a part then takes back the request that was made for it, and only that."""
        for cancelled in range(5):
            self.make_bundles()
            call, (one, other) = self.send((0, 1), (0,))
            call.answer(404)
            every, made = one.all + other.all, self.calls.made[1:]
            every[cancelled].cancel()
            expected = [number == cancelled for number in range(5)]
            self.assertEqual([each.cancelled for each in made], expected)
            results: list[Any] = [
                allocated(0, 1),
                WriteAnswer(True),
                WriteAnswer(False, ((5, 6),)),
                allocated(3),
                WriteAnswer(False, ((7, 8),)),
            ]
            for each, result in zip(made, results, strict=True):
                if not each.cancelled:
                    each.result.callback(result)
            self.check_cancelled(every.pop(cancelled))
            results.pop(cancelled)
            self.assertEqual([self.successResultOf(part) for part in every], results)

    def test_a_question_for_a_share(self) -> None:
        """What finds out whether a repeated write has been carried out can be cancelled."""
        call, (parts,) = self.send((0, 1))
        nothing = Allocation(frozenset(), frozenset())
        call.settle(BundledAnswer(nothing, {0: 404, 1: 404}), repeated=True)
        parts.writes[0].cancel()
        self.check_cancelled(parts.writes[0])
        self.assertEqual([each.cancelled for each in self.calls.made[1:]], [True, False])
        self.calls.made[2].result.callback(WriteAnswer(True))
        self.assertEqual(self.successResultOf(parts.writes[1]), WriteAnswer(True))

    def test_no_question_for_what_was_cancelled(self) -> None:
        """Nobody is asked about a share that nobody waits for."""
        call, (parts,) = self.send((0, 1))
        parts.writes[0].cancel()
        self.check_cancelled(parts.writes[0])
        nothing = Allocation(frozenset(), frozenset())
        call.settle(BundledAnswer(nothing, {0: 404, 1: 404}), repeated=True)
        self.assertEqual(self.calls.names[1:], ["was_completed 1/1"])

    def test_cancelling_what_fails_with_it(self) -> None:
        """Who is told that all is given up and cancels the rest meets no error, and every part ends."""
        for share_numbers in ((0,), (0, 1, 2)):
            self.make_bundles()
            first, second = self.hold(1, share_numbers), self.hold(2, share_numbers)
            failures: list[Failure] = []

            def cancel_rest(
                failure: Failure, rest: Sequence[Deferred[Any]], failures: list[Failure] = failures
            ) -> None:
                failures.append(failure)
                for each in rest:
                    each.cancel()

            every = [*first.all, *second.all]
            for number, part in enumerate(every):
                part.addErrback(cancel_rest, every[number + 1 :: 2])
            self.bundles.give_up(lambda: ServerUnreachable("gone", "s0"))
            for part in every:
                self.assertIsNone(self.successResultOf(part))
            self.assertEqual(len(failures), len(every))
            for failure in failures:
                self.assertTrue(failure.check(ServerUnreachable, CancelledError), failure)

    def test_cancelling_from_a_callback(self) -> None:
        """Who hears of its own part may cancel any other, whatever the answer is."""

        def refuse(call: Call) -> None:
            call.answer(404)

        def fail(call: Call) -> None:
            call.result.errback(ServerUnreachable("lost", "s0"))

        def store_again(call: Call) -> None:
            nothing = Allocation(frozenset(), frozenset())
            answers = [BundledAnswer(nothing, dict.fromkeys(u.shares, 404)) for u in call.uploads]
            call.settle(*answers, repeated=True)

        for end in (Call.store, refuse, fail, store_again):
            self.make_bundles()
            call, (one, other) = self.send((0, 1), (0,))
            every = one.all + other.all
            ends: list[Any] = []

            def cancel_all(result: object, every: Any = every, ends: list[Any] = ends) -> None:
                ends.append(result)
                for part in every:
                    part.cancel()

            for part in every:
                part.addBoth(cancel_all)
            end(call)
            for each in self.calls.made[1:]:
                if not each.cancelled:
                    each.result.errback(NoSuchShare("none", "s0"))
            self.assertEqual(len(ends), len(every))
            for cancelled in ends[1:]:
                self.assertIsInstance(cancelled.value, CancelledError)

    def test_any_part_at_any_time(self) -> None:
        """Whatever is cancelled when: the rest ends as it would have, and nothing is left."""
        for seed in range(300):
            self.make_bundles()
            self.try_seed(Random(seed), f"seed {seed}")
            self.assertEqual(self.clock.getDelayedCalls(), [], f"seed {seed}")

    def try_seed(self, random: Random, where: str) -> None:
        uploads: dict[int, Parts] = {}
        cancelled: set[Deferred[Any]] = set()
        conflicts = {f"write {n}/{m}" for n in range(5) for m in range(9) if random.random() < 0.3}

        def cancel_some() -> None:
            share = random.choice((0.0, 0.3, 0.7, 1.0))
            for part in (part for parts in uploads.values() for part in parts.all):
                if not part.called and random.random() < share:
                    part.cancel()
                    cancelled.add(part)

        def answer(call: Call) -> None:
            if call.cancelled:
                pass
            elif call.name.startswith("allocate"):
                call.result.callback(allocated())
            elif call.name in conflicts:
                call.result.errback(ConflictingWrite("other bytes", "s0"))
            else:
                call.result.callback(WriteAnswer(True))

        for number in range(random.randrange(1, 5)):
            numbers = random.sample(range(9), random.randrange(1, 4))
            written = random.sample(numbers, random.randrange(len(numbers) + 1))
            uploads[number] = self.hold(number, numbers, written)
        cancel_some()
        unwanted = {n for n, parts in uploads.items() if cancelled.issuperset(parts.all)}
        self.turn()
        sent = {number for call in self.calls.made for number in call.indexes}
        self.assertEqual(sent, uploads.keys() - unwanted, where)
        cancel_some()
        for call in list(self.calls.made):
            if call.request is None:
                answer(call)
                continue
            parts = [part for number in call.indexes for part in uploads[number].all]
            self.assertEqual(call.cancelled, cancelled.issuperset(parts), where)
            if call.cancelled:
                continue
            if random.random() < 0.5:
                before = len(self.calls.made)
                call.answer(404)
                cancel_some()
                for ordinary in self.calls.made[before:]:
                    answer(ordinary)
                continue
            results = []
            for upload in call.uploads:
                names = {n: f"write {upload.storage_index[0]}/{n}" for n in upload.shares}
                statuses = {n: 409 if name in conflicts else 201 for n, name in names.items()}
                results.append(BundledAnswer(allocated(), statuses))
            call.settle(*results)
        for number, each in uploads.items():
            ends: dict[str, Deferred[Any]] = {f"allocate {number}": each.allocation}
            ends |= {f"write {number}/{n}": write for n, write in each.writes.items()}
            for name, part in ends.items():
                if part in cancelled:
                    self.check_cancelled(part)
                elif name in conflicts:
                    self.failureResultOf(part, ConflictingWrite)
                else:
                    expected = allocated() if part is each.allocation else WriteAnswer(True)
                    self.assertEqual(self.successResultOf(part), expected, where)


class MemoryTests(BundlesTestCase):
    """What has ended is let go of at once: no collector is needed for share data."""

    def setUp(self) -> None:
        super().setUp()
        without_collector(self)

    def check_let_go(self, end: Callable[[Call, list[Parts]], None]) -> None:
        """After such an end of a bundle of two nothing of it is left, though a neighbour is under way."""
        self.make_bundles()
        parts = [self.hold(1, (0, 1)), self.hold(2)]
        uploads = [weakref.ref(held.upload) for held in self.bundles._held.values()]
        self.turn()
        self.hold(3)
        self.turn()
        call = self.calls.made.pop(0)
        request = weakref.ref(call.request)
        end(call, parts)
        for each in parts:
            for part in each.all:
                self.successResultOf(part.addErrback(lambda failure: None))
        del call, parts, each, part
        self.calls.made.clear()
        self.assertEqual([upload() for upload in uploads], [None, None])
        self.assertIsNone(request())

    def test_stored(self) -> None:
        """When all is stored."""
        self.check_let_go(lambda call, parts: call.store())

    def test_refused(self) -> None:
        """When the uploads were refused, each for itself."""

        def end(call: Call, parts: list[Parts]) -> None:
            call.settle(BundledAnswer(allocated(0, 1), {0: 409, 1: 507}), BundledAnswer(500, {}))

        self.check_let_go(end)

    def test_nonsense(self) -> None:
        """When the answer made no sense."""
        self.check_let_go(lambda call, parts: call.answer(200, b"nonsense"))

    def test_failed(self) -> None:
        """When the bundle was lost."""
        self.check_let_go(lambda call, parts: call.result.errback(ServerUnreachable("lost", "s0")))

    def test_cancelled(self) -> None:
        """When everything was cancelled on the way."""

        def end(call: Call, parts: list[Parts]) -> None:
            for part in parts[0].all + parts[1].all:
                part.cancel()

        self.check_let_go(end)

    def test_replaced(self) -> None:
        """When the bundle was refused, and the ordinary requests in its place have ended."""

        def end(call: Call, parts: list[Parts]) -> None:
            before = len(self.calls.made)
            call.answer(404)
            parts[0].writes[1].cancel()
            for each in self.calls.made[before:]:
                if "allocate" in each.name:
                    each.result.callback(allocated(0, 1))
                elif not each.cancelled:
                    each.result.callback(WriteAnswer(True))

        self.check_let_go(end)

    def test_asked(self) -> None:
        """When the server had to be asked what became of a repeated bundle."""

        def end(call: Call, parts: list[Parts]) -> None:
            before = len(self.calls.made)
            nothing = Allocation(frozenset(), frozenset())
            call.settle(
                BundledAnswer(nothing, {0: 404, 1: 404}),
                BundledAnswer(nothing, {0: 404}),
                repeated=True,
            )
            for each in self.calls.made[before:]:
                each.result.callback(WriteAnswer(True))

        self.check_let_go(end)

    def test_cancelled_while_held(self) -> None:
        """When everything was cancelled before it was sent."""
        parts = self.hold(1, (0, 1))
        (upload,) = [weakref.ref(held.upload) for held in self.bundles._held.values()]
        for part in parts.all:
            part.cancel()
        self.check_cancelled(*parts.all)
        del parts, part
        self.assertIsNone(upload())


class ServerTests(SynchronousTestCase):
    """Bundles among all other requests to a server, whose uploads' connection is a fake."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.server, self.calls = self.make_server()

    def tearDown(self) -> None:
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def make_server(self, bundle_bytes: int = MAX_BUNDLE_BYTES) -> tuple[GbsServer, Calls]:
        """Return a server, and what is sent to it."""
        calls = Calls()

        def endpoint() -> Any:
            raise AssertionError("nothing here needs a connection")

        server = GbsServer(IDENTITY, NURL, endpoint, self.clock, bundle_bytes=bundle_bytes)
        self.patch(server._uploads.connection, "request", calls.send)
        self.patch(server._uploads.connection, "close", calls.close)
        return server, calls

    def upload(
        self, server: GbsServer, number: int = 1, share_numbers: Iterable[int] = (0,)
    ) -> list[Deferred[Any]]:
        """Allocate shares of an index and write all of each, as uploads do."""
        data = bytes([number]) * SHARE_BYTES
        numbers = sorted(share_numbers)
        return [
            server.allocate(index(number), set(numbers), len(data), SECRETS),
            *(server.write(index(number), n, 0, [data], SECRETS.upload) for n in numbers),
        ]

    def test_ordinary_requests_flush(self) -> None:
        """Whatever else goes on the uploads' connection for an index sends what is held of it before."""
        secret = SECRETS.upload

        def lease(server: GbsServer) -> Deferred[Any]:
            return server.add_lease(index(1), SECRETS.lease)

        operations: dict[str, Callable[[GbsServer], Deferred[Any]]] = {
            "allocate 1": lambda server: server.allocate(index(1), {1}, SHARE_BYTES, SECRETS),
            "write 1/0": lambda server: server.write(index(1), 0, 0, [b"x"], secret),
            "write 1/1": lambda server: server.write(index(1), 1, 5, [b"x"], secret),
            "abort 1/0": lambda server: server.abort(index(1), 0, secret),
            "shares 1": lambda server: server.list_shares(index(1)),
            "lease 1": lease,
            "share 1/0": lambda server: server.read(index(1), 0, 0, 10),
            "corrupt 1/0": lambda server: server.advise_corrupt_share(index(1), 0, "bad"),
        }
        for name, start in operations.items():
            server, calls = self.make_server()
            self.upload(server)
            self.assertEqual(calls.names, [])
            start(server)
            self.assertEqual(calls.names, ["bundle 1", name])
            self.clock.advance(0)
            self.assertEqual(calls.names, ["bundle 1", name])

    def test_requests_for_other_indexes(self) -> None:
        """They leave what is held, which leaves at the end of the turn as before."""
        operations: dict[str, Callable[[GbsServer], Deferred[Any]]] = {
            "allocate 2": lambda server: server.allocate(index(2), {0}, 1 << 20, SECRETS),
            "write 2/0": lambda server: server.write(index(2), 0, 0, [b"x"], SECRETS.upload),
            "abort 2/0": lambda server: server.abort(index(2), 0, SECRETS.upload),
        }
        for name, start in operations.items():
            server, calls = self.make_server()
            self.upload(server)
            start(server)
            self.assertEqual(calls.names, [name])
            self.clock.advance(0)
            self.assertEqual(calls.names, [name, "bundle 1"])

    def test_what_is_no_matter_for_bundles(self) -> None:
        """Other shares, pieces of them and second thoughts go as they always have, in their order."""
        server, secret, share = self.server, SECRETS.upload, bytes(SHARE_BYTES)
        large = bytes(MAX_SHARE_BYTES + 1)
        server.allocate(index(1), {0}, len(large), SECRETS)
        server.write(index(1), 0, 0, [large], secret)
        server.allocate(index(2), {0}, SHARE_BYTES, SECRETS)
        server.allocate(index(2), {1}, SHARE_BYTES, SECRETS)
        server.write(index(2), 0, 0, [share], secret)
        server.allocate(index(3), {0}, SHARE_BYTES, SECRETS)
        server.write(index(3), 0, 0, [share[:100]], secret)
        server.write(index(3), 0, 100, [share[100:]], secret)
        server.allocate(index(4), {0}, SHARE_BYTES, SECRETS)
        server.write(index(4), 0, 0, [share], OTHERS_SECRETS.upload)
        server.allocate(index(5), {0}, SHARE_BYTES, SECRETS)
        server.write(index(5), 3, 0, [share], secret)
        server.allocate(index(6), set(), 0, SECRETS)
        server.allocate(index(7), {0}, SHARE_BYTES, SECRETS)
        server.write(index(7), 0, 1, [share], secret)
        self.clock.advance(0)
        self.assertEqual(
            self.calls.names,
            [
                *("allocate 1", "write 1/0"),
                *("allocate 2", "allocate 2", "write 2/0"),
                *("allocate 3", "write 3/0", "write 3/0"),
                *("allocate 4", "write 4/0"),
                *("allocate 5", "write 5/3"),
                "allocate 6",
                *("allocate 7", "write 7/0"),
            ],
        )

    def test_an_offer_with_an_allocation(self) -> None:
        """A server that is not known to take bundles says so with the first answer."""
        server, calls = self.make_server(0)
        waiting = self.upload(server)
        self.assertEqual(calls.names, ["allocate 1", "write 1/0"])
        calls.made[0].answer(200, gbs_cbor_bodies.pack_allocation(allocated(0)), OFFER)
        self.assertEqual(self.successResultOf(waiting[0]), allocated(0))
        self.upload(server, 2)
        self.clock.advance(0)
        self.assertEqual(calls.names[2:], ["bundle 2"])

    def test_an_offer_after_a_refusal(self) -> None:
        """The answers to the requests in place of a refused bundle may offer bundles again, or not."""
        for headers, names in (((), ["allocate 2", "write 2/0"]), ((OFFER,), ["bundle 2"])):
            server, calls = self.make_server()
            waiting = self.upload(server)
            self.clock.advance(0)
            calls.made[0].answer(404)
            self.assertEqual(calls.names[1:], ["allocate 1", "write 1/0"])
            calls.made[1].answer(200, gbs_cbor_bodies.pack_allocation(allocated(0)), *headers)
            calls.made[2].answer(201, gbs_cbor_bodies.pack_required(()))
            self.assertEqual(self.successResultOf(waiting[0]), allocated(0))
            self.assertEqual(self.successResultOf(waiting[1]), WriteAnswer(True))
            self.upload(server, 2)
            self.clock.advance(0)
            self.assertEqual(calls.names[3:], names)

    def outcome(self, bundles: bool, allocation: int, write: int) -> list[tuple[Any, ...]]:
        """Return how allocation and write end, with these statuses, in a bundle or by themselves."""
        server, calls = self.make_server(MAX_BUNDLE_BYTES if bundles else 0)
        waiting = self.upload(server, 1, (3,))
        self.clock.advance(0)
        self.assertEqual(len(calls.made), 1 if bundles else 2)
        if not bundles:
            body = gbs_cbor_bodies.pack_allocation(allocated(3)) if allocation == 200 else b""
            calls.made[0].answer(allocation, body)
            calls.made[1].answer(write, gbs_cbor_bodies.pack_required(()) if write == 201 else b"")
        elif allocation == 200:
            calls.made[0].settle(BundledAnswer(allocated(3), {3: write}))
        else:
            calls.made[0].settle(BundledAnswer(allocation, {}))
        ends: list[tuple[Any, ...]] = []
        for each in waiting:
            each.addErrback(lambda failure: failure.value)
            end = self.successResultOf(each)
            if isinstance(end, ServerError):
                ends.append((type(end), str(end), end.server, end.may_have_happened))
            else:
                ends.append((end,))
        return ends

    def test_the_same_ends(self) -> None:
        """A write in a bundle ends as one by itself, whatever the status."""
        for status in (201, 204, 400, 401, 403, 404, 405, 409, 413, 416, 500, 503, 507):
            bundled, apart = self.outcome(True, 200, status), self.outcome(False, 200, status)
            self.assertEqual(bundled, apart, f"{status}")

    def test_the_same_refusals(self) -> None:
        """An allocation that is refused in a bundle fails as one by itself, and its writes with it."""
        for status in (400, 401, 404, 500, 503, 507):
            bundled, apart = self.outcome(True, status, 404), self.outcome(False, status, 404)
            self.assertEqual(bundled[0], apart[0], f"{status}")
            self.assertEqual(bundled[1], bundled[0], f"{status}")

    def test_numbers_that_change_behind_a_call(self) -> None:
        """What is allocated is what was asked for, though it leaves later."""
        numbers = {0, 1}
        self.server.allocate(index(1), numbers, SHARE_BYTES, SECRETS)
        self.server.write(index(1), 0, 0, [bytes(SHARE_BYTES)], SECRETS.upload)
        numbers.symmetric_difference_update({0, 9})
        self.clock.advance(0)
        (upload,) = self.calls.made[0].uploads
        self.assertEqual(upload.share_numbers, {0, 1})

    def test_disconnect(self) -> None:
        """What is held, under way, or asked for in another way by now: all of it ends, nothing is sent."""
        refused, in_flight = self.upload(self.server, 1), self.upload(self.server, 2, (0, 1))
        self.clock.advance(0)
        self.calls.made[0].answer(404)
        self.server._uploads.bundles.heard(response(200, b"", OFFER))
        in_flight += self.upload(self.server, 3)
        self.clock.advance(0)
        held = self.upload(self.server, 4)
        made = len(self.calls.made)
        self.successResultOf(self.server.disconnect())
        for each in refused + in_flight + held:
            error = self.failureResultOf(each, ServerUnreachable).value
            self.assertIn("disconnected", str(error))
        self.clock.advance(10)
        self.assertEqual(len(self.calls.made), made)
        self.assertEqual(
            [call.cancelled for call in self.calls.made], [False] + [True] * (made - 1)
        )
