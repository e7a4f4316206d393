"""
What every implementation of ``transport.interface.StorageServer`` has to do: one suite for all of them.

To use it, mix ``StorageServerContract`` into a test case that says how servers are made, how
to wait for a Deferred, and what the implementation cannot do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IConsumer
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.core.hashes import Buffer
from pipegrid.errors import (
    ConflictingWrite,
    NoSuchShare,
    ServerRefused,
    ServerUnreachable,
    WrongSecret,
)
from pipegrid.transport.interface import StorageServer
from pipegrid.wire.storage_messages import (
    Allocation,
    LeaseSecrets,
    ServerIdentity,
    Stored,
    UploadSecrets,
    WriteAnswer,
)
from tests.transport.slot_contract import SlotContract

if TYPE_CHECKING:
    from twisted.trial.unittest import SynchronousTestCase

    class Mixin(SynchronousTestCase):
        """What a mixin may count on."""
else:
    Mixin = object  # so that trial does not take the suite itself for a test case

T = TypeVar("T")

SI = bytes(range(16))
OTHER_SI = bytes(range(1, 17))
SECRETS = UploadSecrets(LeaseSecrets(b"r" * 32, b"c" * 32), b"u" * 32)
OTHERS_SECRETS = UploadSecrets(LeaseSecrets(b"R" * 32, b"C" * 32), b"U" * 32)
IDENTITY = ServerIdentity("v0-test", "test server", b"p" * 32, b"l" * 20)


@implementer(IConsumer)
class Consumer:
    """Takes bytes, and after each piece does what a test wants."""

    def __init__(self, after_write: Callable[[Consumer], None] = lambda consumer: None) -> None:
        self.pieces: list[bytes] = []
        self.producer: Any = None
        self.registrations = 0
        self._after_write = after_write

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """Only push producers, one at a time."""
        assert streaming
        assert self.producer is None
        self.producer = producer
        self.registrations += 1

    def unregisterProducer(self) -> None:
        """The producer has ended."""
        assert self.producer is not None
        self.producer = None

    def write(self, data: bytes) -> None:
        """Bytes come only between registration and its end."""
        assert self.producer is not None
        self.pieces.append(bytes(data))
        self._after_write(self)

    @property
    def data(self) -> bytes:
        """All that came."""
        return b"".join(self.pieces)


class StorageServerContract(SlotContract):
    """
    The suite, to be mixed into a ``SynchronousTestCase``.

    Subclasses override ``make_server``, perhaps ``resolve`` and ``settle``, and the constants.

    A test starts with one server whose storage is empty and has room for ``ROOM_BYTES`` at least.
    """

    STREAM_BYTES = 3 << 20
    """Long enough that a paused stream of it does not fit in buffers on the way."""

    PAUSED_BYTES = 1 << 20
    """What may still come after a pause."""

    RESUMES = True
    """
    Whether an unfinished upload outlives its connection. Where the protocol cannot do that, it has to end:
    nothing of it is left to write to, or in the way of the next one.
    """

    FULL_SERVER = True
    """Whether ``make_server(capacity_bytes=...)`` works."""

    def make_server(self, capacity_bytes: int | None = None) -> StorageServer:
        """
        Return a new server object, without a connection of its own yet, on the storage of this test.

        Args:
            capacity_bytes: room for shares, if the test needs it bounded.
        """
        raise NotImplementedError

    def resolve(self, waiting: Deferred[T]) -> T:
        """Let everything go on until the Deferred has fired, and return or raise its result."""
        self.settle()
        return self.successResultOf(self._raised(waiting))()

    def settle(self) -> None:
        """Let everything go on until nothing more happens."""

    def setUp(self) -> None:
        self.server = self.make_server()

    def tearDown(self) -> None:
        self.resolve(self.server.disconnect())

    @staticmethod
    def _raised(waiting: Deferred[T]) -> Deferred[Callable[[], T]]:
        def fail(failure: Any) -> Callable[[], T]:
            return lambda: failure.raiseException()

        return waiting.addCallbacks(lambda result: lambda: result, fail)

    def put(self, number: int, data: bytes, secrets: UploadSecrets = SECRETS) -> None:
        """Store a share."""
        self.resolve(self.server.allocate(SI, {number}, len(data), secrets))
        result = self.resolve(self.server.write(SI, number, 0, [data], secrets.upload))
        self.assertEqual(result, WriteAnswer(True, ()))

    def get(self, number: int) -> bytes:
        """Read a share of less than a megabyte."""
        return self.resolve(self.server.read(SI, number, 0, 1 << 20))

    def fails(self, error: type[Exception], waiting: Deferred[Any]) -> Exception:
        """Expect an error of exactly this class."""
        with self.assertRaises(error) as caught:
            self.resolve(waiting)
        found: Exception = caught.exception
        self.assertIs(type(found), error)
        return found

    # Who it is.

    def test_shares_are_stored_whole(self) -> None:
        """One call allocates and writes; what is there already is said, and is no failure."""
        first = {1: b"one" * 20, 3: b"two" * 20}
        stored = self.resolve(self.server.store_whole(SI, first, 60, SECRETS))
        self.assertEqual(stored, Stored(Allocation(frozenset(), frozenset({1, 3})), {}))
        self.assertEqual((self.get(1), self.get(3)), (first[1], first[3]))
        both = {3: b"two" * 20, 4: b"new" * 20}
        stored = self.resolve(self.server.store_whole(SI, both, 60, SECRETS))
        self.assertEqual(stored, Stored(Allocation(frozenset({1, 3}), frozenset({4})), {}))
        self.assertEqual(self.resolve(self.server.list_shares(SI)), {1, 3, 4})

    def test_one_share_is_stored_whole(self) -> None:
        """As nearly all are; a second time it is there, and somebody else's upload is left alone."""

        def store(index: bytes, number: int) -> Stored:
            shares = {number: bytes([number]) * 60}
            return self.resolve(self.server.store_whole(index, shares, 60, SECRETS))

        none: frozenset[int] = frozenset()
        for index in (SI, OTHER_SI):
            self.assertEqual(store(index, 1), Stored(Allocation(none, frozenset({1})), {}))
        self.assertEqual(store(SI, 1), Stored(Allocation(frozenset({1}), none), {}))
        self.assertEqual(store(SI, 2), Stored(Allocation(frozenset({1}), frozenset({2})), {}))
        self.resolve(self.server.allocate(SI, {3}, 60, OTHERS_SECRETS))
        stored = store(SI, 3)
        self.assertEqual(stored.allocation, Allocation(frozenset({1, 2}), none))
        self.assertEqual(set(stored.failed), {3})
        self.assertEqual((self.get(1), self.get(2)), (b"\1" * 60, b"\2" * 60))
        self.assertEqual(self.resolve(self.server.list_shares(SI)), {1, 2})

    def test_whole_shares_of_another_upload(self) -> None:
        """A share that somebody else is uploading is refused, and the others are stored."""
        self.resolve(self.server.allocate(SI, {1}, 60, OTHERS_SECRETS))
        shares = {1: b"one" * 20, 2: b"two" * 20}
        stored = self.resolve(self.server.store_whole(SI, shares, 60, SECRETS))
        self.assertEqual(stored.allocation, Allocation(frozenset(), frozenset({2})))
        self.assertEqual(set(stored.failed), {1})
        self.assertEqual(self.resolve(self.server.list_shares(SI)), {2})

    def test_identity_is_known_without_asking(self) -> None:
        """The identity is there at once, with a permutation seed and 20 bytes for secrets."""
        identity = self.server.identity
        self.assertEqual(len(identity.lease_seed), 20)
        self.assertTrue(identity.permutation_seed)

    def test_version_tells_room(self) -> None:
        """The version says that a share of some size is welcome, and what software answers."""
        version = self.resolve(self.server.version())
        self.assertGreater(version.max_share_bytes, 0)
        self.assertTrue(version.application)

    # Allocation and writing.

    def test_allocate_grants_what_is_free(self) -> None:
        """On an empty server every number asked for is allocated; none is there."""
        answer = self.resolve(self.server.allocate(SI, {0, 7, 255}, 10, SECRETS))
        self.assertEqual(answer, Allocation(frozenset(), frozenset({0, 7, 255})))

    def test_a_share_is_visible_only_when_complete(self) -> None:
        """Until its last byte an upload is neither listed nor read; then it is both."""
        self.resolve(self.server.allocate(SI, {3}, 6, SECRETS))
        result = self.resolve(self.server.write(SI, 3, 0, [b"ab", b"c"], SECRETS.upload))
        self.assertEqual(result, WriteAnswer(False, ((3, 6),)))
        self.assertEqual(self.resolve(self.server.list_shares(SI)), frozenset())
        self.fails(NoSuchShare, self.server.read(SI, 3, 0, 1))
        result = self.resolve(self.server.write(SI, 3, 3, [b"def"], SECRETS.upload))
        self.assertEqual(result, WriteAnswer(True, ()))
        self.assertEqual(self.resolve(self.server.list_shares(SI)), frozenset({3}))
        self.assertEqual(self.get(3), b"abcdef")

    def test_nothing_waits_for_answers(self) -> None:
        """Allocation, writes, list and read may be sent at once, and are carried out in order."""
        server = self.server
        waiting: list[Deferred[Any]] = [
            server.allocate(SI, {0, 1}, 6, SECRETS),
            server.write(SI, 0, 0, [b"abc"], SECRETS.upload),
            server.write(SI, 1, 0, [b"uvwxyz"], SECRETS.upload),
            server.write(SI, 0, 3, [b"def"], SECRETS.upload),
            server.list_shares(SI),
            server.read(SI, 0, 0, 10),
            server.allocate(SI, {0, 2}, 6, OTHERS_SECRETS),
        ]
        results = [self.resolve(d) for d in waiting]
        self.assertEqual(results[0].allocated, {0, 1})
        self.assertEqual([r.complete for r in results[1:4]], [False, True, True])
        self.assertEqual(results[4], {0, 1})
        self.assertEqual(results[5], b"abcdef")
        self.assertEqual(results[6], Allocation(frozenset({0, 1}), frozenset({2})))

    def test_a_write_behind_a_refusal_harms_nothing(self) -> None:
        """A write sent behind an allocation that is refused fails; the share stays as it is."""
        self.put(0, b"first")
        answer = self.server.allocate(SI, {0}, 5, OTHERS_SECRETS)
        write = self.server.write(SI, 0, 0, [b"other"], OTHERS_SECRETS.upload)
        self.assertEqual(self.resolve(answer), Allocation(frozenset({0}), frozenset()))
        self.fails(NoSuchShare, write)
        self.assertEqual(self.get(0), b"first")

    def test_already_have_lists_all_shares(self) -> None:
        """Complete shares that were not asked for are reported, too; no numbers ask just for that."""
        self.put(1, b"one")
        self.put(9, b"nine")
        answer = self.resolve(self.server.allocate(SI, {2}, 4, SECRETS))
        self.assertEqual(answer, Allocation(frozenset({1, 9}), frozenset({2})))
        answer = self.resolve(self.server.allocate(SI, set(), 0, SECRETS))
        self.assertEqual(answer, Allocation(frozenset({1, 9}), frozenset()))

    def test_indexes_are_apart(self) -> None:
        """Shares of one index say nothing about another."""
        self.put(0, b"x")
        self.assertEqual(self.resolve(self.server.list_shares(OTHER_SI)), frozenset())
        answer = self.resolve(self.server.allocate(OTHER_SI, {0}, 1, SECRETS))
        self.assertEqual(answer, Allocation(frozenset(), frozenset({0})))

    def test_any_order_overlap_and_repetition(self) -> None:
        """Pieces in any order, equal overlaps and repeated writes make the share all the same."""
        self.resolve(self.server.allocate(SI, {0}, 10, SECRETS))
        for offset, data in ((6, b"ghi"), (2, b"cd"), (2, b"cd"), (1, b"bcdef"), (7, b"hij")):
            result = self.resolve(self.server.write(SI, 0, offset, [data], SECRETS.upload))
            self.assertFalse(result.complete)
        self.assertEqual(result.required, ((0, 1),))
        pieces: list[Buffer] = [memoryview(b"xab")[1:2], b"", bytearray(b"bc")]
        result = self.resolve(self.server.write(SI, 0, 0, pieces, SECRETS.upload))
        self.assertTrue(result.complete)
        self.assertEqual(self.get(0), b"abcdefghij")

    def test_many_small_writes_in_flight(self) -> None:
        """A share may be sent in a hundred writes at once."""
        data = bytes(range(100))
        waiting: list[Deferred[Any]] = [self.server.allocate(SI, {0}, 100, SECRETS)]
        waiting += [
            self.server.write(SI, 0, at, [data[at : at + 1]], SECRETS.upload) for at in range(100)
        ]
        results = [self.resolve(d) for d in waiting]
        self.assertEqual([r.complete for r in results[1:]], [False] * 99 + [True])
        self.assertEqual(self.get(0), data)

    def test_a_large_write(self) -> None:
        """A megabyte in large pieces arrives as it was."""
        data = bytes(range(256)) * 4096
        view = memoryview(data)
        pieces = [view[:300_000], view[300_000:300_001], view[300_001:]]
        self.resolve(self.server.allocate(SI, {0}, len(data), SECRETS))
        result = self.resolve(self.server.write(SI, 0, 0, pieces, SECRETS.upload))
        self.assertTrue(result.complete)
        self.assertEqual(self.get(0), data)

    def test_a_write_that_may_be_let_go_of(self) -> None:
        """Whether or not a transport lets go of it, it says so once at most, later, and it arrives."""
        data = bytes(range(256)) * 4096
        told: list[int] = []
        self.resolve(self.server.allocate(SI, {0}, len(data), SECRETS))
        write = self.server.write(
            SI, 0, 0, [data[:-1]], SECRETS.upload, release=lambda: told.append(1)
        )
        self.assertEqual(told, [], "not from within the call")
        self.resolve(write)
        self.assertLess(len(told), 2)
        rest = self.server.write(SI, 0, len(data) - 1, [data[-1:]], SECRETS.upload, again=True)
        self.assertTrue(self.resolve(rest).complete)
        self.assertEqual(self.get(0), data)

    def test_answers_tell_what_was_there_before(self) -> None:
        """The first write on a new connection hears of all that the share has, or it has nothing else."""
        self.resolve(self.server.allocate(SI, {0}, 10, SECRETS))
        for offset, data in ((0, b"abc"), (5, b"fg")):
            self.resolve(self.server.write(SI, 0, offset, [data], SECRETS.upload))
        self.resolve(self.server.disconnect())
        self.server = self.make_server()
        self.resolve(self.server.allocate(SI, {0}, 10, SECRETS))
        result = self.resolve(self.server.write(SI, 0, 2, [b"cd"], SECRETS.upload))
        if not self.RESUMES:
            self.assertEqual(result, WriteAnswer(False, ((0, 2), (4, 10))))
            return
        self.assertEqual(result, WriteAnswer(False, ((4, 5), (7, 10))))
        self.resolve(self.server.write(SI, 0, 4, [b"e"], SECRETS.upload))
        result = self.resolve(self.server.write(SI, 0, 7, [b"hij"], SECRETS.upload))
        self.assertEqual(result, WriteAnswer(True))
        self.assertEqual(self.get(0), b"abcdefghij")

    def test_resumption_on_a_new_connection(self) -> None:
        """An unfinished upload goes on with the same secret, whatever allocate says of it."""
        self.resolve(self.server.allocate(SI, {0, 1}, 6, SECRETS))
        self.resolve(self.server.write(SI, 0, 0, [b"abc"], SECRETS.upload))
        self.resolve(self.server.disconnect())
        self.server = self.make_server()
        if not self.RESUMES:
            self.fails(NoSuchShare, self.server.write(SI, 0, 3, [b"def"], SECRETS.upload))
            answer = self.server.allocate(SI, {0, 1}, 6, SECRETS)
            self.assertEqual(self.resolve(answer), Allocation(frozenset(), frozenset({0, 1})))
            result = self.resolve(self.server.write(SI, 0, 0, [b"uvwxyz"], SECRETS.upload))
            self.assertTrue(result.complete)
            self.assertEqual(self.get(0), b"uvwxyz")
            return
        answer = self.server.allocate(SI, {0, 1}, 6, SECRETS)
        write = self.server.write(SI, 0, 3, [b"def"], SECRETS.upload)
        self.assertEqual(self.resolve(answer).already_have, frozenset())
        self.assertEqual(self.resolve(write), WriteAnswer(True, ()))
        self.assertEqual(self.get(0), b"abcdef")
        result = self.resolve(self.server.write(SI, 1, 0, [b"uvwxyz"], SECRETS.upload))
        self.assertTrue(result.complete)

    def test_a_write_without_upload(self) -> None:
        """What was never allocated, or is complete, cannot be written."""
        self.fails(NoSuchShare, self.server.write(SI, 0, 0, [b"x"], SECRETS.upload))
        self.put(0, b"x")
        self.fails(NoSuchShare, self.server.write(SI, 0, 0, [b"x"], SECRETS.upload))
        self.fails(NoSuchShare, self.server.write(SI, 1, 0, [b"x"], SECRETS.upload))

    def test_a_wrong_secret(self) -> None:
        """Another secret may neither write nor abort an upload, nor take it by allocating."""
        self.resolve(self.server.allocate(SI, {0}, 3, SECRETS))
        answer = self.resolve(self.server.allocate(SI, {0}, 3, OTHERS_SECRETS))
        self.assertEqual(answer, Allocation(frozenset(), frozenset()))
        self.fails(WrongSecret, self.server.write(SI, 0, 0, [b"x"], OTHERS_SECRETS.upload))
        self.fails(WrongSecret, self.server.abort(SI, 0, OTHERS_SECRETS.upload))
        self.resolve(self.server.write(SI, 0, 0, [b"abc"], SECRETS.upload))
        self.assertEqual(self.get(0), b"abc")

    def test_a_conflicting_write(self) -> None:
        """Other bytes where some are already are refused, and the upload stays open."""
        self.resolve(self.server.allocate(SI, {0}, 6, SECRETS))
        self.resolve(self.server.write(SI, 0, 2, [b"cd"], SECRETS.upload))
        error = self.fails(ConflictingWrite, self.server.write(SI, 0, 0, [b"abXX"], SECRETS.upload))
        self.assertEqual(getattr(error, "server", None), self.server.identity.nickname)
        result = self.resolve(self.server.write(SI, 0, 0, [b"abcdef"], SECRETS.upload))
        self.assertTrue(result.complete)
        self.assertEqual(self.get(0), b"abcdef")

    def test_a_write_out_of_range(self) -> None:
        """A write past the allocated end is refused, and the upload stays open."""
        self.resolve(self.server.allocate(SI, {0}, 4, SECRETS))
        self.fails(ServerRefused, self.server.write(SI, 0, 2, [b"cde"], SECRETS.upload))
        self.fails(ServerRefused, self.server.write(SI, 0, 4, [b"e"], SECRETS.upload))
        result = self.resolve(self.server.write(SI, 0, 0, [b"abcd"], SECRETS.upload))
        self.assertTrue(result.complete)

    def test_abort(self) -> None:
        """An aborted upload is gone: it cannot be written, and the number is free for others."""
        self.resolve(self.server.allocate(SI, {0}, 3, SECRETS))
        self.resolve(self.server.write(SI, 0, 0, [b"a"], SECRETS.upload))
        self.assertIsNone(self.resolve(self.server.abort(SI, 0, SECRETS.upload)))
        self.fails(NoSuchShare, self.server.write(SI, 0, 1, [b"b"], SECRETS.upload))
        answer = self.resolve(self.server.allocate(SI, {0}, 5, OTHERS_SECRETS))
        self.assertEqual(answer.allocated, {0})

    def test_nothing_to_abort(self) -> None:
        """Neither what was never begun nor what is complete can be aborted."""
        self.fails(NoSuchShare, self.server.abort(SI, 0, SECRETS.upload))
        self.put(0, b"abc")
        self.fails(NoSuchShare, self.server.abort(SI, 0, SECRETS.upload))
        self.assertEqual(self.get(0), b"abc")

    def test_no_room(self) -> None:
        """A share for which there is no room is in neither set; a smaller one is welcome."""
        if not self.FULL_SERVER:
            return
        self.server = self.make_server(capacity_bytes=1000)
        answer = self.resolve(self.server.allocate(SI, {0}, 1001, SECRETS))
        self.assertEqual(answer, Allocation(frozenset(), frozenset()))
        self.fails(NoSuchShare, self.server.write(SI, 0, 0, [b"x"], SECRETS.upload))
        answer = self.resolve(self.server.allocate(SI, {0, 1, 2}, 400, SECRETS))
        self.assertEqual(len(answer.allocated), 2)
        version = self.resolve(self.server.version())
        self.assertLess(version.max_share_bytes, 1001)

    # Reading.

    def test_reads_are_cut_at_the_end(self) -> None:
        """Reading past the end gives fewer bytes, or none."""
        self.put(0, b"0123456789")
        for offset, length, expected in (
            (0, 10, b"0123456789"),
            (3, 4, b"3456"),
            (8, 5, b"89"),
            (10, 1, b""),
            (1000, 1000, b""),
        ):
            data = self.resolve(self.server.read(SI, 0, offset, length))
            self.assertEqual(data, expected, f"{length} bytes at {offset}")

    def test_no_such_share(self) -> None:
        """Every question about a share that is not there says so; an empty list is an answer."""
        self.assertEqual(self.resolve(self.server.list_shares(SI)), frozenset())
        for number in (0, 1):
            self.fails(NoSuchShare, self.server.read(SI, number, 0, 1))
            self.fails(NoSuchShare, self.server.advise_corrupt_share(SI, number, "bad"))
            consumer = Consumer()
            self.fails(NoSuchShare, self.server.stream(SI, number, 0, 1, consumer))
            self.assertEqual(consumer.registrations, 0)
            if number == 0:
                self.fails(NoSuchShare, self.server.add_lease(SI, SECRETS.lease))
                self.resolve(self.server.allocate(SI, {1}, 3, SECRETS))

    def test_stream(self) -> None:
        """A stream delivers all bytes in order, between registration and its end."""
        data = bytes(range(256)) * 4096
        self.put(0, data)
        consumer = Consumer()
        count = self.resolve(self.server.stream(SI, 0, 10, len(data) - 20, consumer))
        self.assertEqual(count, len(data) - 20)
        self.assertEqual(consumer.data, data[10:-10])
        self.assertEqual((consumer.registrations, consumer.producer), (1, None))

    def test_a_stream_is_cut_at_the_end(self) -> None:
        """A stream past the end delivers what there is, which may be nothing."""
        self.put(0, b"0123456789")
        for offset, expected in ((6, b"6789"), (10, b""), (99, b"")):
            consumer = Consumer()
            count = self.resolve(self.server.stream(SI, 0, offset, 50, consumer))
            self.assertEqual((count, consumer.data), (len(expected), expected))
            self.assertIsNone(consumer.producer)

    def test_a_paused_stream_stops_within_bounds(self) -> None:
        """After a pause only so many bytes come, and after resuming the others."""
        data = bytes(range(256)) * (self.STREAM_BYTES // 256)
        self.put(0, data)
        consumer = Consumer(lambda c: c.producer.pauseProducing())
        waiting = self.server.stream(SI, 0, 0, len(data), consumer)
        self.settle()
        self.assertTrue(consumer.data)
        while len(consumer.data) < len(data):
            before = len(consumer.data)
            self.settle()
            self.assertEqual(len(consumer.data), before)
            self.assertNoResult(waiting)
            consumer.producer.resumeProducing()
            self.settle()
            self.assertGreater(len(consumer.data), before)
            self.assertLessEqual(len(consumer.data) - before, self.PAUSED_BYTES)
        if consumer.producer is not None:
            consumer.producer.resumeProducing()
        self.assertEqual(self.resolve(waiting), len(data))
        self.assertEqual(consumer.data, data)

    def test_a_cancelled_stream_stops(self) -> None:
        """Cancelling a stream ends it for the consumer, too, and the server goes on."""
        data = bytes(self.STREAM_BYTES)
        self.put(0, data)
        consumer = Consumer(lambda c: c.producer.pauseProducing())
        waiting = self.server.stream(SI, 0, 0, len(data), consumer)
        self.settle()
        waiting.cancel()
        self.fails(CancelledError, waiting)
        self.settle()
        self.assertIsNone(consumer.producer)
        self.assertLess(len(consumer.data), len(data))
        self.assertEqual(self.resolve(self.server.list_shares(SI)), {0})

    def test_a_consumer_may_stop_a_stream(self) -> None:
        """A consumer that wants no more stops the stream, which then fails."""
        self.put(0, bytes(self.STREAM_BYTES))
        consumer = Consumer(lambda c: c.producer.stopProducing())
        waiting = self.server.stream(SI, 0, 0, self.STREAM_BYTES, consumer)
        with self.assertRaises(Exception):  # noqa: B017 - which error is the transport's affair
            self.resolve(waiting)
        self.assertIsNone(consumer.producer)
        self.assertEqual(len(consumer.pieces), 1)

    # Leases and complaints.

    def test_leases(self) -> None:
        """A lease can be added to shares that are there, again and again, by several owners."""
        self.put(0, b"abc")
        for lease in (SECRETS.lease, OTHERS_SECRETS.lease, SECRETS.lease):
            self.assertIsNone(self.resolve(self.server.add_lease(SI, lease)))
        self.assertEqual(self.get(0), b"abc")

    def test_complaints(self) -> None:
        """A complaint about a share is taken, and changes nothing about the share."""
        self.put(0, b"abc")
        complaint = self.server.advise_corrupt_share(SI, 0, "a block's hash is wrong: é")
        self.assertIsNone(self.resolve(complaint))
        self.assertEqual(self.get(0), b"abc")

    # Cancellation and disconnection.

    def test_cancelling_harms_no_other_request(self) -> None:
        """Of requests in flight, each can be cancelled without harm to those before and behind."""
        for cancelled in range(6):
            index = bytes([cancelled]) * 16
            server = self.server
            waiting: list[Deferred[Any]] = [
                server.allocate(index, {0, 1}, 4, SECRETS),
                server.list_shares(index),
                server.write(index, 1, 0, [b"wx"], SECRETS.upload),
                server.list_shares(OTHER_SI),
                server.write(index, 0, 0, [b"abcd"], SECRETS.upload),
                server.read(index, 0, 0, 4),
            ]
            waiting[cancelled].addErrback(lambda failure: failure.trap(CancelledError))
            waiting[cancelled].cancel()
            if cancelled in (0, 4):  # the others need what may not have happened
                waiting[2].addErrback(lambda failure: failure.trap(NoSuchShare))
                waiting[4].addErrback(lambda failure: failure.trap(NoSuchShare))
                waiting[5].addErrback(lambda failure: failure.trap(NoSuchShare))
            results = [self.resolve(d) for d in waiting]
            if cancelled != 3:
                self.assertEqual(results[3], frozenset())
            if cancelled in (1, 2, 3):
                self.assertEqual(results[5], b"abcd")
            # What was cancelled can be repeated.
            self.resolve(server.allocate(index, {0, 1}, 4, SECRETS))
            if 0 not in self.resolve(server.list_shares(index)):
                self.resolve(server.write(index, 0, 0, [b"abcd"], SECRETS.upload))
            self.assertEqual(self.resolve(server.read(index, 0, 0, 4)), b"abcd")

    def test_disconnect_leaves_nothing(self) -> None:
        """After disconnect every unanswered request has ended, and a new server object works."""
        self.put(0, b"abc")
        waiting: list[Deferred[Any]] = [
            self.server.list_shares(SI),
            self.server.read(SI, 0, 0, 3),
            self.server.stream(SI, 0, 0, 3, Consumer(lambda c: c.producer.pauseProducing())),
        ]
        ends: list[Any] = []
        for deferred in waiting:
            deferred.addBoth(ends.append)
        self.resolve(self.server.disconnect())
        self.assertEqual(len(ends), len(waiting))
        for end in ends:
            if isinstance(end, Failure):  # nobody cancelled it: it must not look as if
                self.assertIsInstance(end.value, ServerUnreachable)
        self.server = self.make_server()
        self.assertEqual(self.get(0), b"abc")
