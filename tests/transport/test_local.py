"""The server in this process: the contract, with each policy, and what is its own."""

from __future__ import annotations

import errno
import gc
import os
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from unittest import mock

from twisted.internet.defer import CancelledError, Deferred, execute
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk.durability import Disk, Policy
from pipegrid.disk.group_commit import GroupCommit, ThreadRunner
from pipegrid.errors import NoSpace, NoSuchShare, ServerRefused, ServerUnreachable
from pipegrid.storage.share_store import ShareStore
from pipegrid.testing.grid import InlineWorkers
from pipegrid.transport.interface import StorageServer
from pipegrid.transport.local_server import STREAM_CHUNK_BYTES, LocalServer
from pipegrid.wire.storage_messages import Allocation, Stored
from tests.transport.contract import (
    IDENTITY,
    OTHER_SI,
    OTHERS_SECRETS,
    SECRETS,
    SI,
    Consumer,
    Mixin,
    StorageServerContract,
)

P = ParamSpec("P")
T = TypeVar("T")


class NoDisk(Disk):
    """Pretends that everything is durable."""

    def __init__(self) -> None:
        self.__dict__["_syncfs"] = lambda fd: None

    def sync_directories(self, directories: Iterable[str]) -> None:
        """Take a short cut."""


class QueueWorkers:
    """Runs calls when told to, in their order, as threads that are slow would."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """Queue a call; one that is cancelled runs all the same, as in a thread."""
        waiting: Deferred[T] = Deferred()
        self.queue.append(lambda: self._finish(waiting, execute(function, *args, **kwargs)))
        return waiting

    def run_all(self) -> None:
        """Run what is queued, and what that queues."""
        while self.queue:
            self.queue.pop(0)()

    @staticmethod
    def _finish(waiting: Deferred[T], outcome: Deferred[T]) -> None:
        if waiting.called:
            outcome.addErrback(lambda _: None)
        else:
            outcome.chainDeferred(waiting)


class LocalMixin(Mixin):
    """A test with a storage directory, a clock and workers."""

    policy: Policy = "batch"
    inline_bytes = 64 * 1024

    def setUp(self) -> None:
        self.root = Path(self.mktemp())
        self.clock = Clock()
        self.workers = self.make_workers()
        super().setUp()

    def make_workers(self) -> ThreadRunner:
        """Return what runs blocking calls."""
        return InlineWorkers()

    def make_server(self, capacity_bytes: int | None = None) -> StorageServer:
        """Open the directory anew, as a new process would."""
        store = ShareStore(
            self.root, clock=lambda: 1_700_000_000.0, free_bytes=lambda path: capacity_bytes
        )
        self.addCleanup(store.close)
        durability = GroupCommit(self.workers, self.clock, self.policy, NoDisk())
        return LocalServer(store, IDENTITY, self.workers, durability, self.inline_bytes)

    def settle(self) -> None:
        """Let timers and workers come to rest."""
        self.clock.pump([0.01] * 5)


class BatchContractTests(LocalMixin, StorageServerContract, SynchronousTestCase):
    """The contract, with shares committed in groups."""

    PAUSED_BYTES = STREAM_CHUNK_BYTES


class NoneContractTests(BatchContractTests):
    """The contract, with shares that are visible at once."""

    policy = "none"


class StrictContractTests(BatchContractTests):
    """The contract, with each share synced by itself."""

    policy = "strict"


class ThreadedContractTests(BatchContractTests):
    """The contract, with nothing done at once: every read and write goes through a slow worker."""

    inline_bytes = -1

    def make_workers(self) -> ThreadRunner:
        self.slow = QueueWorkers()
        return self.slow

    def settle(self) -> None:
        for _ in range(300):
            self.clock.advance(0.01)
            self.slow.run_all()


class LocalServerTests(LocalMixin, SynchronousTestCase):
    """What only this server does."""

    inline_bytes = 8

    def setUp(self) -> None:
        super().setUp()
        server = self.make_server()
        assert isinstance(server, LocalServer)
        self.server = server

    def make_workers(self) -> ThreadRunner:
        self.slow = QueueWorkers()
        return self.slow

    def finish(self) -> None:
        """Let everything end."""
        for _ in range(10):
            self.slow.run_all()
            self.clock.advance(0.01)

    def allocate(self, numbers: set[int], share_bytes: int) -> None:
        answer = self.successResultOf(self.server.allocate(SI, numbers, share_bytes, SECRETS))
        self.assertEqual(answer.allocated, numbers)

    def test_different_shares_become_durable_together(self) -> None:
        """Completing writes to several shares of one index end up in one group."""
        self.allocate({0, 1, 2}, 4)
        writes = [self.server.write(SI, n, 0, [b"abcd"], SECRETS.upload) for n in range(3)]
        listing = self.server.list_shares(SI)
        self.clock.advance(0.01)
        self.assertEqual(len(self.slow.queue), 1)
        self.assertNoResult(listing)
        self.finish()
        self.assertTrue(all(self.successResultOf(d).complete for d in writes))
        self.assertEqual(self.successResultOf(listing), {0, 1, 2})

    def test_a_cancelled_write_counts_for_nothing(self) -> None:
        """
        What a thread writes after its write was cancelled, from buffers that may mean something
        else by then, is not taken for share data.
        """
        self.allocate({0}, 20)
        buffer = bytearray(b"0123456789")
        write = self.server.write(SI, 0, 0, [buffer], SECRETS.upload)
        write.cancel()
        self.failureResultOf(write, CancelledError)
        buffer[:] = b"XXXXXXXXXX"
        again = self.server.write(SI, 0, 0, [b"01234567890123456789"], SECRETS.upload)
        self.finish()
        self.assertTrue(self.successResultOf(again).complete)
        reading = self.server.read(SI, 0, 0, 20)
        self.finish()
        self.assertEqual(self.successResultOf(reading), b"01234567890123456789")

    def test_a_request_waits_for_a_cancelled_one_that_runs(self) -> None:
        """Giving up waiting does not let later requests overtake what is still being done."""
        self.allocate({0}, 10)
        write = self.server.write(SI, 0, 0, [b"0123456789"], SECRETS.upload)
        abort = self.server.abort(SI, 0, SECRETS.upload)
        write.cancel()
        self.failureResultOf(write, CancelledError)
        self.assertNoResult(abort)
        self.finish()
        self.successResultOf(abort)

    def test_disconnect_waits_for_threads(self) -> None:
        """Disconnecting gives up what is unanswered, and fires when no thread is busy any more."""
        self.allocate({0}, 10)
        write = self.server.write(SI, 0, 0, [b"0123456789"], SECRETS.upload)
        queued = self.server.list_shares(SI)
        gone = self.server.disconnect()
        self.failureResultOf(write, ServerUnreachable)
        self.failureResultOf(queued, ServerUnreachable)
        self.assertNoResult(gone)
        self.finish()
        self.assertIsNone(self.successResultOf(gone))

    def test_disconnect_leaves_uploads_to_others(self) -> None:
        """After disconnecting, another process may go on with what was begun."""
        self.allocate({0}, 10)
        self.successResultOf(self.server.write(SI, 0, 0, [b"01234"], SECRETS.upload))
        self.successResultOf(self.server.disconnect())
        other = self.make_server()
        write = other.write(SI, 0, 5, [b"56789"], SECRETS.upload)
        self.finish()
        self.assertTrue(self.successResultOf(write).complete)

    def test_a_full_disk(self) -> None:
        """ENOSPC is NoSpace, names the server, and the upload can go on."""
        self.allocate({0}, 4)

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "full")

        patch = self.patch(os, "pwritev", full)
        write = self.server.write(SI, 0, 0, [b"abcd"], SECRETS.upload)
        error = self.failureResultOf(write, NoSpace).value
        self.assertEqual(error.server, IDENTITY.nickname)
        patch.restore()
        write = self.server.write(SI, 0, 0, [b"abcd"], SECRETS.upload)
        self.finish()
        self.assertTrue(self.successResultOf(write).complete)

    def test_a_disk_that_fails_to_sync(self) -> None:
        """If the group cannot be made durable, nobody is told "stored", and the upload is gone."""
        self.allocate({0, 1}, 4)

        def broken(fd: int) -> None:
            raise OSError(errno.EIO, "broken")

        disk = self.server._durability._disk
        assert disk is not None
        disk.__dict__["_syncfs"] = broken
        writes = [self.server.write(SI, n, 0, [b"abcd"], SECRETS.upload) for n in (0, 1)]
        self.finish()
        for write in writes:
            error = self.failureResultOf(write, ServerRefused).value
            self.assertEqual(error.server, IDENTITY.nickname)
        self.assertEqual(self.successResultOf(self.server.list_shares(SI)), frozenset())
        write = self.server.write(SI, 0, 0, [b"abcd"], SECRETS.upload)
        self.failureResultOf(write, NoSuchShare)

    def test_a_whole_share(self) -> None:
        """It has no name before it is durable, and none if it cannot be; that is told in the result."""
        for index in (SI, OTHER_SI):  # the first of all goes the long way, which makes directories
            before = {path for path in self.root.rglob("*") if path.is_file()}
            storing = self.server.store_whole(index, {1: b"abcd"}, 4, SECRETS)
            meanwhile = {path for path in self.root.rglob("*") if path.is_file()}
            self.finish()
            self.assertEqual(self.successResultOf(storing).failed, {})
        self.assertEqual((meanwhile, len(before)), (before, 1))
        disk = self.server._durability._disk
        assert disk is not None
        disk.__dict__["_syncfs"] = mock.Mock(side_effect=OSError(errno.EIO, "broken"))
        storing = self.server.store_whole(bytes(16), {1: b"abcd"}, 4, SECRETS)
        self.finish()
        stored_not = self.successResultOf(storing)
        error = stored_not.failed[1]
        self.assertIsInstance(error, ServerRefused)
        self.assertEqual(error.server, IDENTITY.nickname)
        self.assertEqual(self.server.store.list_shares(bytes(16)), frozenset())
        self.assertEqual(self.server.store.upload_count, 0)

    def test_no_whole_share_where_each_file_is_synced(self) -> None:
        """Of a file without a name ``fsync`` would promise nothing on btrfs."""
        self.server._durability.policy = "strict"
        with mock.patch.object(self.server.store, "take_whole", side_effect=AssertionError):
            storing = self.server.store_whole(SI, {1: b"abcd"}, 4, SECRETS)
        self.finish()
        self.assertEqual(self.successResultOf(storing).failed, {})

    def test_an_allocation_that_fails_behind_a_whole_share(self) -> None:
        """The call fails as the allocation does, and what had been taken is given up."""
        self.server.store_whole(OTHER_SI, {1: b"abcd"}, 4, SECRETS)  # makes directories
        self.finish()
        store, real = self.server.store, self.server.store.take_whole
        refusal = ServerRefused("the disk failed")
        with (
            mock.patch.object(store, "allocate", side_effect=refusal),
            mock.patch.object(
                store, "take_whole", lambda *call: real(*call) if call[1] == 1 else None
            ),
        ):
            storing = self.server.store_whole(SI, {1: b"abcd", 2: b"efgh"}, 4, SECRETS)
            self.assertIs(self.failureResultOf(storing, ServerRefused).value, refusal)
        self.assertEqual(refusal.server, IDENTITY.nickname)
        self.assertEqual(store.upload_count, 0)
        with mock.patch.object(
            store, "take_whole", lambda *call: real(*call) if call[1] == 1 else None
        ):
            storing = self.server.store_whole(SI, {1: b"abcd", 2: b"efgh"}, 4, SECRETS)
            self.finish()
        numbers = frozenset({1, 2})
        stored = Stored(Allocation(frozenset(), numbers), {})
        self.assertEqual(self.successResultOf(storing), stored)
        self.assertEqual(store.list_shares(SI), numbers)

    def test_a_whole_share_that_goes_the_long_way(self) -> None:
        """What is wrong with it, or with the disk, is told as of a write."""
        self.allocate({1}, 6)
        full = OSError(errno.ENOSPC, "full")
        with mock.patch("os.pwritev", side_effect=full):
            storing = self.server.store_whole(SI, {2: b"abcd"}, 4, SECRETS)
        stored = self.successResultOf(storing)
        self.assertIsInstance(stored.failed[2], NoSpace)
        self.assertEqual(stored.failed[2].server, IDENTITY.nickname)
        shorter = self.successResultOf(self.server.store_whole(SI, {1: b"abcd"}, 4, SECRETS))
        self.assertEqual(shorter, Stored(Allocation(frozenset(), frozenset()), {}))
        self.assertEqual(self.server.store.upload(SI, 1, SECRETS.upload).required(), ((4, 6),))

    def test_a_read_only_disk(self) -> None:
        """A directory that cannot be written refuses uploads with the reason."""

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(errno.EROFS, "read-only")

        self.patch(os, "makedirs", refuse)
        self.patch(os, "mkdir", refuse)
        allocation = self.server.allocate(SI, {0}, 4, SECRETS)
        error = self.failureResultOf(allocation, ServerRefused).value
        self.assertIn("Read-only", str(error))
        self.assertEqual(error.server, IDENTITY.nickname)

    def test_writing_twice_while_being_committed(self) -> None:
        """A completing write that is repeated before its commit waits for the same commit or fails."""
        self.allocate({0}, 4)
        first = self.server.write(SI, 0, 0, [b"abcd"], SECRETS.upload)
        second = self.server.write(SI, 0, 0, [b"abcd"], SECRETS.upload)
        self.finish()
        self.assertTrue(self.successResultOf(first).complete)
        self.failureResultOf(second, NoSuchShare)

    def test_a_long_queue_does_not_nest(self) -> None:
        """Thousands of requests that wait for one are carried out in a loop, not in each other."""
        self.allocate({0}, 4)
        self.server.write(SI, 0, 0, [b"abcd"], SECRETS.upload)
        waiting = [self.server.list_shares(SI) for _ in range(3000)]
        self.finish()
        self.assertEqual(self.successResultOf(waiting[-1]), {0})

    def test_a_consumer_that_pauses_while_a_thread_reads(self) -> None:
        """The chunk that a thread brings after a pause is held back until the resumption."""
        size = 2 * STREAM_CHUNK_BYTES
        self.allocate({0}, size)
        self.server.write(SI, 0, 0, [bytes(size)], SECRETS.upload)
        self.finish()
        consumer = Consumer()
        stream = self.server.stream(SI, 0, 0, size, consumer)
        consumer.producer.pauseProducing()
        self.finish()
        self.assertEqual(consumer.pieces, [])
        consumer.producer.resumeProducing()
        self.finish()
        self.assertEqual(self.successResultOf(stream), size)

    def test_a_paused_stream_that_is_cancelled_holds_nothing(self) -> None:
        """The chunk that it held back is released at once, without the collector."""
        size = 2 * STREAM_CHUNK_BYTES
        self.allocate({0}, size)
        self.server.write(SI, 0, 0, [bytes(size)], SECRETS.upload)
        self.finish()
        collecting = gc.isenabled()
        gc.disable()
        self.addCleanup(gc.enable if collecting else gc.disable)
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        for _ in range(3):
            consumer = Consumer()
            stream = self.server.stream(SI, 0, 0, size, consumer)
            consumer.producer.pauseProducing()
            self.finish()
            self.assertGreaterEqual(tracemalloc.get_traced_memory()[0], STREAM_CHUNK_BYTES)
            stream.cancel()
            self.failureResultOf(stream, CancelledError)
            self.assertLess(tracemalloc.get_traced_memory()[0], STREAM_CHUNK_BYTES // 2)

    def test_others_uploads_are_none_of_ours(self) -> None:
        """Two servers on one store exclude each other's uploads by their secrets alone."""
        self.allocate({0}, 4)
        twin = LocalServer(self.server.store, IDENTITY, self.workers, self.server._durability)
        answer = self.successResultOf(twin.allocate(SI, {0}, 4, OTHERS_SECRETS))
        self.assertEqual(answer.allocated, frozenset())

    def test_its_repr_names_it(self) -> None:
        """Its repr shows its name and its directory."""
        self.assertIn(IDENTITY.nickname, repr(self.server))
        self.assertIn(str(self.root), repr(self.server))
