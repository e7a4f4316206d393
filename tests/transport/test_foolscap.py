"""A real Foolscap client and server, joined in memory: the contract, and what it costs in round trips."""

from __future__ import annotations

import gc
from typing import Any

import attrs
from foolscap.tokens import NegotiationError
from twisted.internet.defer import Deferred, fail
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import (
    NoSuchShare,
    ServerProtocolError,
    ServerRefused,
    ServerTimeout,
    ServerUnreachable,
    UsageError,
)
from pipegrid.server.foolscap import remote_objects as storage_foolscap
from pipegrid.server.foolscap.remote_objects import BucketReader
from pipegrid.transport.interface import StorageServer
from pipegrid.wire.storage_messages import WriteAnswer
from tests.scratch import scratch_path
from tests.transport.contract import (
    OTHER_SI,
    OTHERS_SECRETS,
    SECRETS,
    SI,
    Consumer,
    StorageServerContract,
)
from tests.transport.foolscap_world import FoolscapWorld


class FoolscapContractTests(StorageServerContract, SynchronousTestCase):
    """The contract, with answers that come at once."""

    RESUMES = False
    PAUSED_BYTES = 64 * 1024
    LATENCY_S = 0.0

    def setUp(self) -> None:
        self.world = FoolscapWorld(self, scratch_path(self), self.LATENCY_S)
        super().setUp()

    def make_server(self, capacity_bytes: int | None = None) -> StorageServer:
        self.world.free_bytes = capacity_bytes or 1 << 40
        return self.world.connect()

    def settle(self) -> None:
        self.world.settle()


class SlowFoolscapContractTests(FoolscapContractTests):
    """The contract, at a distance."""

    LATENCY_S = 0.05


class RoundTripTests(SynchronousTestCase):
    """What operations cost, in round trips of 0.1 seconds, with the connection up."""

    def setUp(self) -> None:
        self.world = FoolscapWorld(self, scratch_path(self), 0.05)
        self.server = self.world.connect()
        self.server.version()
        self.world.settle()

    def round_trips(self, *waiting: Deferred[Any]) -> float:
        """Return how long it takes until all of them have fired."""
        left = list(waiting)
        began_s = self.world.clock.seconds()
        ended = began_s
        while any(not each.called for each in left):
            self.world.clock.advance(0.005)
            ended = self.world.clock.seconds()
            self.assertLess(ended, began_s + 10)
        for each in left:
            each.addErrback(lambda failure: self.fail(str(failure)))
        return round((ended - began_s) / 0.1, 1)

    def test_signs_of_life(self) -> None:
        """Each answer is one, whoever asked."""
        self.world.clock.advance(100)
        asked_s = self.world.clock.seconds()
        self.assertLess(self.server.last_activity_s, asked_s - 90)
        self.server.list_shares(SI)
        self.world.settle()
        self.assertGreater(self.server.last_activity_s, asked_s + 0.09)

    def test_a_put_is_two(self) -> None:
        """Allocation, then seven writes and the close, is two round trips."""
        data = bytes(range(70))
        calls: list[Deferred[Any]] = [self.server.allocate(SI, {3}, 70, SECRETS)]
        calls += [
            self.server.write(SI, 3, at, [data[at : at + 10]], SECRETS.upload)
            for at in range(0, 70, 10)
        ]
        self.assertLessEqual(self.round_trips(*calls), 2.3)
        self.assertEqual(self.successResultOf(calls[-1]), WriteAnswer(True))

    def test_a_small_file_in_one_move_is_two(self) -> None:
        """Its shares need no more than an allocation and a write would."""
        shares = {3: b"whole", 4: b"other"}
        self.assertLessEqual(self.round_trips(self.server.store_whole(SI, shares, 5, SECRETS)), 2.3)

    def test_a_close_that_waits_is_a_third(self) -> None:
        """Where a share is closed only when its bytes are acknowledged."""
        self.world.settings = attrs.evolve(self.world.settings, close_behind=False)
        self.server = self.world.connect()
        self.server.version()
        self.world.settle()
        trips = self.round_trips(self.server.store_whole(SI, {3: b"whole"}, 5, SECRETS))
        self.assertTrue(2.9 <= trips <= 3.3, trips)
        reading = self.server.read(SI, 3, 0, 5)
        self.world.settle()
        self.assertEqual(self.successResultOf(reading), b"whole")

    def test_a_get_is_two_then_one(self) -> None:
        """A list with a read behind it is two round trips; once the share is known a read is one."""
        self.server.allocate(SI, {3}, 5, SECRETS)
        self.server.write(SI, 3, 0, [b"bytes"], SECRETS.upload)
        self.world.settle()
        listing, reading = self.server.list_shares(SI), self.server.read(SI, 3, 0, 5)
        self.assertLessEqual(self.round_trips(listing, reading), 2.2)
        self.assertEqual(self.successResultOf(reading), b"bytes")
        self.assertLessEqual(self.round_trips(self.server.read(SI, 3, 1, 2)), 1.1)

    def test_leases_and_complaints(self) -> None:
        """A lease is one round trip, although whether there are shares has to be asked."""
        self.server.allocate(SI, {3}, 5, SECRETS)
        self.server.write(SI, 3, 0, [b"bytes"], SECRETS.upload)
        self.world.settle()
        self.assertLessEqual(self.round_trips(self.server.add_lease(SI, SECRETS.lease)), 1.1)

    def test_a_stream_is_pipelined(self) -> None:
        """Half a megabyte, read in eight pieces, is two round trips."""
        data = bytes(range(256)) * 2048
        self.server.allocate(SI, {0}, len(data), SECRETS)
        self.server.write(SI, 0, 0, [data], SECRETS.upload)
        self.world.settle()
        consumer = Consumer()
        stream = self.server.stream(SI, 0, 0, len(data), consumer)
        self.assertLessEqual(self.round_trips(stream), 2.3)
        self.assertEqual(consumer.data, data)


class FailureTests(SynchronousTestCase):
    """When the server, or the way to it, fails."""

    def setUp(self) -> None:
        self.world = FoolscapWorld(self, scratch_path(self), 0.05)
        self.server = self.world.connect()

    def begin(self) -> None:
        """Have an upload of six bytes of share 0 unfinished."""
        self.server.allocate(SI, {0}, 6, SECRETS)
        self.server.write(SI, 0, 0, [b"abc"], SECRETS.upload)
        self.world.settle()

    def test_it_says_whether_it_is_connected(self) -> None:
        """Also when it is lost while nobody waits for an answer, which nothing else would tell."""
        self.assertFalse(self.server.is_connected)
        for wires in (1, 2):
            self.server.version()
            self.world.settle()
            self.assertTrue(self.server.is_connected)
            self.world.connector.wires[-1].loseConnection()
            self.world.settle()
            self.assertFalse(self.server.is_connected)
            self.assertEqual(len(self.world.connector.wires), wires)

    def test_a_lost_connection_ends_uploads(self) -> None:
        """What is unanswered fails, the upload is gone at both ends, and the next call connects anew."""
        self.begin()
        waiting = self.server.write(SI, 0, 3, [b"d"], SECRETS.upload)
        self.world.connector.wires[-1].loseConnection()
        self.world.settle()
        error = self.failureResultOf(waiting, ServerUnreachable).value
        self.assertTrue(getattr(error, "may_have_happened", False))
        self.assertEqual(self.world.store.upload_count, 0)
        write = self.server.write(SI, 0, 3, [b"def"], SECRETS.upload)
        self.world.settle()
        self.failureResultOf(write, NoSuchShare)
        version = self.server.version()
        self.world.settle()
        self.assertIn("pipegrid", self.successResultOf(version).application)
        self.assertEqual(len(self.world.connector.wires), 2)

    def test_a_share_that_went_away_and_came_back(self) -> None:
        """What was known of it is not believed longer than it works: neither by a read nor by a stream."""
        removals = 0

        class OldReader(BucketReader):
            """As Tahoe-LAFS's: when the share is gone its error says nothing of shares."""

            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                self.removals = removals

            def remote_read(self, offset: int, length: int) -> bytes:
                if self.removals < removals:
                    raise FileNotFoundError(2, "No such file or directory")
                return super().remote_read(offset, length)

        self.patch(storage_foolscap, "BucketReader", OldReader)
        other = self.world.connect()
        for fetch in (self.fetch_read, self.fetch_stream):
            for text in (b"first", b"again"):
                other.allocate(SI, {0}, 5, SECRETS)
                other.write(SI, 0, 0, [text], SECRETS.upload)
                self.world.settle()
                self.assertEqual(fetch(), text)
                (share,) = self.world.root.glob("shares/??/*/0")
                share.unlink()
                removals += 1
                if text == b"first":
                    self.assertIsNone(fetch())
        self.flushLoggedErrors(FileNotFoundError)

    def test_a_share_that_cannot_be_read(self) -> None:
        """The server says so, is asked where it is once more, and its second answer counts."""
        self.begin()
        self.server.write(SI, 0, 3, [b"def"], SECRETS.upload)
        self.world.settle()
        (share,) = self.world.root.glob("shares/??/*/0")
        share.unlink()
        share.mkdir()
        for started in (self.server.read(SI, 0, 0, 6), self.server.stream(SI, 0, 0, 6, Consumer())):
            self.world.settle()
            self.failureResultOf(started, ServerRefused)

    def fetch_read(self) -> bytes | None:
        """Return what is read of share 0, or None if there is none."""
        reading = self.server.read(SI, 0, 0, 5)
        self.world.settle()
        return self.found(reading)

    def fetch_stream(self) -> bytes | None:
        """The same, by a stream."""
        consumer = Consumer()
        streaming = self.server.stream(SI, 0, 0, 5, consumer)
        self.world.settle()
        self.assertIsNone(consumer.producer)
        return None if self.found(streaming) is None else consumer.data

    def found(self, fetched: Deferred[Any]) -> bytes | None:
        """Return what came, or None if there is no such share."""
        fetched.addErrback(lambda failure: failure.trap(NoSuchShare) and None)
        result: bytes | None = self.successResultOf(fetched)
        return result

    def test_a_silent_server(self) -> None:
        """A server that owes an answer for a minute is given up, and asked anew on a new connection."""
        self.begin()
        self.world.connector.wires[-1].silent = True
        waiting = self.server.list_shares(SI)
        self.world.clock.advance(59)
        self.assertNoResult(waiting)
        self.world.clock.advance(2)
        self.world.settle()
        self.failureResultOf(waiting, ServerTimeout)
        self.world.settle()
        again = self.server.list_shares(SI)
        self.world.settle()
        self.assertEqual(self.successResultOf(again), frozenset())

    def test_no_connection(self) -> None:
        """Whoever waits for a connection that fails, or takes too long, is told."""
        self.world.connector.results = [fail(NegotiationError("wrong key")), Deferred()]
        waiting = [self.server.list_shares(SI), self.server.version()]
        for each in waiting[:1]:
            error = self.failureResultOf(each, ServerUnreachable).value
            self.assertIn("wrong key", str(error))
        self.world.clock.advance(16)
        self.failureResultOf(waiting[1], ServerUnreachable)

    def test_a_server_that_does_not_get_ready(self) -> None:
        """It is not waited for for ever, and the sentence says how long it was."""
        self.world.connector.results.append(Deferred())
        waiting = self.server.list_shares(SI)
        self.world.clock.advance(1000)
        error = self.failureResultOf(waiting, ServerUnreachable).value
        limit_s = self.world.settings.connect_timeout_s
        self.assertIn(f"over Foolscap: it was not usable after {limit_s:g} s; is it", str(error))

    def test_a_wrong_secret_in_the_address(self) -> None:
        """A server that does not know the fURL's secret refuses."""
        self.world.tub.unregisterReference(self.world.storage)
        waiting = self.server.version()
        self.world.settle()
        error = self.failureResultOf(waiting, ServerRefused).value
        self.assertIn("fURL", str(error))

    def test_nonsense(self) -> None:
        """Answers that are no answers name the server and are not to be trusted."""
        self.patch(self.world.storage, "remote_get_version", lambda: {b"x": 1, b"y": [2]})
        self.patch(
            self.world.storage,
            "remote_allocate_buckets",
            lambda *args, **named: (set(), {9: self.world.storage}),
        )
        waiting = [self.server.allocate(SI, {0}, 6, SECRETS)]
        self.world.settle()
        error = self.failureResultOf(waiting[0], ServerRefused, ServerProtocolError).value
        self.assertEqual(getattr(error, "server", None), self.server.identity.nickname)

    def test_a_server_of_a_version_to_come(self) -> None:
        """A server that names no protocol of ours is none to be used, and the sentence says what may help."""
        later = {b"http://allmydata.org/tahoe/protocols/storage/v9": {b"sizes": 7}}
        self.patch(self.world.storage, "remote_get_version", lambda: later)
        asking = self.server.version()
        self.world.settle()
        error = self.failureResultOf(asking, ServerProtocolError).value
        self.assertIn("a newer PipeGrid may know them", str(error))

    def test_a_failed_write_is_not_closed(self) -> None:
        """If the disk fails a write, the close right behind it does not make a damaged share visible."""
        self.server.allocate(SI, {0}, 6, SECRETS)
        self.world.settle()
        upload = next(iter(self.world.store._unfinished._uploads.values()))
        good = upload.write

        def failing(offset: int, pieces: Any) -> None:
            upload.write = good  # type: ignore[method-assign]
            raise ServerRefused("the disk is on fire in /secret/path")

        upload.write = failing  # type: ignore[method-assign,assignment]
        first = self.server.write(SI, 0, 0, [b"abc"], SECRETS.upload)
        last = self.server.write(SI, 0, 3, [b"def"], SECRETS.upload)
        self.world.settle()
        error = self.failureResultOf(first, ServerRefused).value
        self.assertNotIn("secret", str(error))
        self.failureResultOf(last, ServerRefused)
        listing = self.server.list_shares(SI)
        self.world.settle()
        self.assertEqual(self.successResultOf(listing), frozenset())
        self.assertEqual(self.world.store.upload_count, 0)

    def test_a_write_that_fails_is_never_closed(self) -> None:
        """Where a close waits for it; and its upload is in nobody's way."""
        self.world.settings = attrs.evolve(self.world.settings, close_behind=False)
        self.server = self.world.connect()
        closes: list[object] = []

        def refuse(writer: object, offset: int, data: bytes) -> None:
            raise ServerRefused("the disk is full")

        # As Tahoe-LAFS's server does it: what was written last does not keep it from closing.
        self.patch(storage_foolscap.BucketWriter, "remote_write", refuse)
        self.patch(storage_foolscap.BucketWriter, "remote_close", closes.append)
        storing = self.server.store_whole(SI, {0: b"abcdef"}, 6, SECRETS)
        self.world.settle()
        self.assertEqual(self.successResultOf(storing).failed.keys(), {0})
        self.assertEqual((closes, self.world.store.upload_count), ([], 0))

    def test_overlapping_writes_wait_for_their_answers(self) -> None:
        """Where writes overlap, one that conflicts keeps the share open, not damaged."""
        self.begin()
        bad = self.server.write(SI, 0, 2, [b"Xdef"], SECRETS.upload)
        self.world.settle()
        self.failureResultOf(bad)
        listing = self.server.list_shares(SI)
        good = self.server.write(SI, 0, 3, [b"def"], SECRETS.upload)
        self.world.settle()
        self.assertEqual(self.successResultOf(listing), frozenset())
        self.assertTrue(self.successResultOf(good).complete)

    def test_an_empty_write(self) -> None:
        """A write without bytes is refused at once."""
        self.failureResultOf(self.server.write(SI, 0, 0, [b""], SECRETS.upload), UsageError)

    def test_after_disconnect(self) -> None:
        """A server object that was disconnected says so, and leaves no timer."""
        self.begin()
        waiting = self.server.write(SI, 0, 3, [b"def"], SECRETS.upload)
        gone = self.server.disconnect()
        self.world.settle()
        self.successResultOf(gone)
        self.failureResultOf(waiting)
        self.failureResultOf(self.server.version(), ServerUnreachable)
        self.assertEqual(self.world.clock.getDelayedCalls(), [])

    def test_references_end_quietly(self) -> None:
        """References that are being given back when their connection ends leave no errors in the log."""
        self.world.settings = attrs.evolve(self.world.settings, max_indexes=1)
        server = self.world.connect()
        for index in (SI, OTHER_SI):
            server.allocate(index, {0}, 6, SECRETS)
            server.write(index, 0, 0, [b"abcdef"], SECRETS.upload)
        server.list_shares(SI)
        self.world.settle()
        pushing_out = server.list_shares(OTHER_SI)
        while not pushing_out.called:
            self.world.clock.advance(0.01)
        self.world.clock.pump([0.0] * 5)  # now the first reference is on its way back
        gone = server.disconnect()
        self.world.settle()
        self.successResultOf(gone)
        gc.collect()
        self.assertEqual(self.flushLoggedErrors(), [])

    def test_uploads_of_others_are_left_alone(self) -> None:
        """A connection that ends takes only its own uploads with it."""
        self.begin()
        other = self.world.connect()
        other.allocate(OTHER_SI, {0}, 6, OTHERS_SECRETS)
        self.world.settle()
        self.assertEqual(self.world.store.upload_count, 2)
        other.disconnect()
        self.world.settle()
        self.assertEqual(self.world.store.upload_count, 1)
        done = self.server.write(SI, 0, 3, [b"def"], SECRETS.upload)
        self.world.settle()
        self.assertTrue(self.successResultOf(done).complete)
