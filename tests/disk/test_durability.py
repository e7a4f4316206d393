"""What is on the disk before a share is acknowledged, and when groups are formed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk import durability
from pipegrid.disk import file_system_calls as disk_calls
from pipegrid.disk.durability import Commit, Committable, Disk, Policy
from pipegrid.disk.group_commit import (
    BEGIN_BYTES,
    COMPANY_SHARES,
    MAX_BEGINNING,
    GroupCommit,
    Grouping,
)
from pipegrid.errors import NoSpace, NoSuchShare, ServerRefused, UsageError
from pipegrid.testing.grid import InlineWorkers
from tests.storage.support import SECRETS, SI, StoreTestCase


class FakeShare:
    """A complete share that records what is done to it."""

    def __init__(self, name: str, log: list[str], share_bytes: int = 1) -> None:
        self.name = name
        self.log = log
        self.share_bytes = share_bytes
        self.opened = 0
        self.resumed = False
        self.gone = self.stored = False
        self.descriptor = 0
        self.device = 0
        self.failure: Exception | None = None

    def sync(self) -> None:
        self.log.append(f"sync {self.name}")

    def publish(self) -> tuple[str, ...]:
        if self.failure is not None:
            raise self.failure
        self.log.append(f"publish {self.name}")
        return (f"dir {self.name}",)

    def discard(self) -> None:
        self.log.append(f"discard {self.name}")


class FakeDisk(Disk):
    """Records calls; each may be told to fail."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.one_call = False
        self.fail_data: OSError | None = None
        self.fail_names: OSError | None = None

    @property
    def has_one_call(self) -> bool:
        return self.one_call

    def sync_data(self, shares: Sequence[Committable]) -> None:
        self.log.append("sync data")
        if self.fail_data:
            raise self.fail_data

    def sync_names(self, directories: Mapping[str, int]) -> None:
        self.log.append(f"sync names {', '.join(directories)}")
        if self.fail_names:
            raise self.fail_names

    def sync_directories(self, directories: Iterable[str]) -> None:
        self.log.append(f"sync directories {', '.join(directories)}")


class SlowWorkers:
    """Runs each call when told to."""

    def __init__(self) -> None:
        self.queue: list[tuple[Deferred[Any], Callable[[], Any]]] = []

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Deferred[Any]:
        waiting: Deferred[Any] = Deferred()
        self.queue.append((waiting, lambda: function(*args, **kwargs)))
        return waiting

    def step(self) -> None:
        """Commit one group: data, then names."""
        for _ in range(2):
            waiting, call = self.queue.pop(0)
            waiting.callback(call())


class GroupingTests(SynchronousTestCase):
    """When a group closes, in virtual time."""

    def test_thin_traffic_waits_a_little(self) -> None:
        """The first waits for company, no longer than the linger, whoever else comes."""
        grouping = Grouping[str](linger_s=0.003)
        self.assertIsNone(grouping.wait_s(0))
        grouping.add("a", 1, 10.0)
        grouping.add("b", 1, 10.002)
        self.assertEqual(grouping.take(10.002), [])
        self.assertAlmostEqual(grouping.wait_s(10.002) or 0, 0.001)
        self.assertEqual(grouping.take(10.003), ["a", "b"])
        self.assertIsNone(grouping.wait_s(11))

    def test_under_load_the_next_group_follows_at_once(self) -> None:
        """What gathered while a group was running goes when it has finished, not before."""
        grouping = Grouping[str](linger_s=0.003)
        grouping.add("a", 1, 0)
        self.assertEqual(grouping.take(1), ["a"])
        grouping.add("b", 1, 1)
        grouping.add("c", 1, 1)
        self.assertEqual(grouping.take(99), [])
        self.assertEqual(len(grouping), 2)
        grouping.finished()
        self.assertEqual(grouping.take(1), ["b", "c"])
        grouping.finished()
        grouping.add("d", 1, 2)
        self.assertEqual(grouping.take(2), [])

    def test_a_group_is_bounded(self) -> None:
        """So many things, or so many bytes, close a group at once; the others are the next."""
        grouping = Grouping[int](linger_s=1, max_items=3)
        for item in range(5):
            grouping.add(item, 1, 0)
        self.assertEqual(grouping.take(0), [0, 1, 2])
        grouping.finished()
        self.assertEqual(grouping.take(0), [3, 4])
        grouping = Grouping[int](linger_s=1, max_bytes=10)
        for item, size in enumerate((4, 4, 4, 100)):
            grouping.add(item, size, 0)
        self.assertEqual(grouping.take(0), [0, 1, 2])
        grouping.finished()
        self.assertEqual(grouping.take(0), [3])

    def test_nothing_hurries_without_anybody(self) -> None:
        """Hurrying nobody does not close the group of whoever comes later."""
        grouping = Grouping[str]()
        grouping.hurry()
        grouping.add("a", 1, 0)
        self.assertEqual(grouping.take(0), [])


class Growing:
    """A share that is being written."""

    def __init__(self) -> None:
        self.unsent_bytes = 0
        self.begun = 0

    def begin_writing(self) -> None:
        self.begun += 1


class EarlyWritingTests(SynchronousTestCase):
    """The disk begins with large shares before they are complete."""

    def setUp(self) -> None:
        self.workers = SlowWorkers()

    def write(self, share: Growing, count: int, policy: Policy = "batch") -> GroupCommit:
        """Write to a share; return what was told of it."""
        durability = GroupCommit(self.workers, Clock(), policy, FakeDisk([]))
        share.unsent_bytes += count
        durability.written(share)
        return durability

    def test_in_parts_and_in_a_thread(self) -> None:
        """Not for every few bytes, and one call at a time for each share."""
        share = Growing()
        durability = self.write(share, BEGIN_BYTES - 1)
        self.assertEqual(self.workers.queue, [])
        share.unsent_bytes += 1
        durability.written(share)
        [(waiting, call)] = self.workers.queue
        self.assertEqual((share.unsent_bytes, share.begun), (0, 0))
        share.unsent_bytes = 2 * BEGIN_BYTES
        durability.written(share)
        self.assertEqual(len(self.workers.queue), 1)
        waiting.callback(call())
        self.assertEqual(share.begun, 1)
        durability.written(share)
        self.assertEqual(len(self.workers.queue), 2)

    def test_threads_are_bounded(self) -> None:
        """However many shares grow on a disk that hangs."""
        durability = self.write(Growing(), 0)
        for _ in range(3 * MAX_BEGINNING):
            share = Growing()
            share.unsent_bytes = BEGIN_BYTES
            durability.written(share)
        self.assertEqual(len(self.workers.queue), MAX_BEGINNING)

    def test_where_nothing_is_synced_nothing_hurries(self) -> None:
        """Policy ``none`` leaves the writing to the kernel."""
        self.write(Growing(), BEGIN_BYTES, "none")
        self.assertEqual(self.workers.queue, [])


class BehindTests(SynchronousTestCase):
    """Groups one behind the other, in no hurry: one call for the names of one and the data of the next."""

    def setUp(self) -> None:
        self.log: list[str] = []
        self.disk = FakeDisk(self.log)
        self.disk.one_call = True

    def two(self, policy: Policy) -> tuple[Commit, Commit, Sequence[FakeShare]]:
        """Publish one group, and make one."""
        shares = [FakeShare(name, self.log) for name in "ab"]
        first, second = (Commit([share], policy, self.disk) for share in shares)
        first.sync_data()
        first.publish()
        self.log.clear()
        return first, second, shares

    def test_one_call(self) -> None:
        """The names have one, and no second one."""
        first, second, _ = self.two("batch")
        second.sync_data(first)
        self.assertEqual(self.log, ["sync data"])
        self.assertEqual((first.outcomes, second._remaining() != []), ([None], True))

    def test_where_one_is_not_enough(self) -> None:
        """Each its own, names first: they wait longest."""
        first, second, _ = self.two("strict")
        second.sync_data(first)
        self.assertEqual(self.log, ["sync directories dir a", "sync b"])
        self.disk.one_call = False
        first, second, _ = self.two("batch")
        second.sync_data(first)
        self.assertEqual(self.log, ["sync names dir a", "sync data"])
        self.disk.one_call = True
        first, second, shares = self.two("batch")
        shares[1].device = 7
        second.sync_data(first)
        self.assertEqual(self.log, ["sync names dir a", "sync data"])

    def test_nothing_to_be_behind(self) -> None:
        """A group that was given up meanwhile makes no call; the names have theirs all the same."""
        first, second, shares = self.two("batch")
        shares[1].gone = True
        second.sync_data(first)
        self.assertEqual(self.log, ["sync names dir a"])
        self.assertEqual(first.outcomes, [None])

    def test_a_call_that_fails(self) -> None:
        """It was for both: nobody says of either that it is stored; what had no name is discarded."""
        first, second, _ = self.two("batch")
        self.disk.fail_data = OSError(errno.ENOSPC, "broken")
        second.sync_data(first)
        self.assertEqual(self.log, ["sync data", "discard b"])
        for each in (first, second):
            self.assertIsInstance(each.outcomes[0], NoSpace)


class PolicyTests(SynchronousTestCase):
    """The order of calls to the disk."""

    def setUp(self) -> None:
        self.log: list[str] = []
        self.disk = FakeDisk(self.log)
        self.clock = Clock()
        self.shares = [FakeShare(name, self.log) for name in "abc"]

    def durability(self, policy: Policy, workers: Any = None) -> GroupCommit:
        return GroupCommit(workers or InlineWorkers(), self.clock, policy, self.disk)

    def commit_all(self, durability: GroupCommit) -> list[Deferred[None]]:
        def acknowledge(_: None, number: int) -> None:
            self.log.append(f"acknowledge {number}")

        waiting = [durability.commit(share) for share in self.shares]
        return [d.addCallback(acknowledge, number) for number, d in enumerate(waiting)]

    def test_workers_that_take_no_more(self) -> None:
        """They stop with the reactor, amid a group: who waits for the next one is told."""

        class Stopped(SlowWorkers):
            def run(self, *arguments: Any, **options: Any) -> Deferred[Any]:
                if stopped:
                    raise UsageError("these workers have been stopped")
                return super().run(*arguments, **options)

        stopped: list[bool] = []
        workers = Stopped()
        durability = self.durability("batch", workers)
        first = durability.commit(self.shares[0])
        self.clock.advance(1)
        second = durability.commit(self.shares[1])
        stopped.append(True)
        waiting, call = workers.queue.pop()
        waiting.callback(call())  # its names cannot be synced any more either
        self.failureResultOf(first)
        self.failureResultOf(second)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_none(self) -> None:
        """Renamed and acknowledged, with no sync."""
        for waiting in self.commit_all(self.durability("none")):
            self.successResultOf(waiting)
        acknowledged = [f"acknowledge {n}" for n in range(3)]
        self.assertEqual(self.log, [*self.published(), *acknowledged])

    def published(self) -> list[str]:
        return [f"publish {name}" for name in "abc"]

    def test_strict(self) -> None:
        """Each by itself: data, rename, directories, acknowledgement."""
        self.shares = self.shares[:1]
        [waiting] = self.commit_all(self.durability("strict"))
        self.successResultOf(waiting)
        steps = ["sync a", "publish a", "sync directories dir a", "acknowledge 0"]
        self.assertEqual(self.log, steps)

    def test_batch(self) -> None:
        """Data of all, renames of all, names of all, and only then acknowledgements."""
        waiting = self.commit_all(self.durability("batch"))
        self.assertEqual(self.log, [])
        self.clock.advance(0.01)
        self.assertEqual(
            self.log,
            [
                "sync data",
                *self.published(),
                "sync names dir a, dir b, dir c",
                "acknowledge 0",
                "acknowledge 1",
                "acknowledge 2",
            ],
        )
        self.assertEqual([self.successResultOf(d) for d in waiting], [None] * 3)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_many_at_once(self) -> None:
        """Shares that one call brings are company enough: no timer, and the next group is behind them."""
        workers = SlowWorkers()
        durability = self.durability("batch", workers)
        many = [FakeShare(str(number), self.log) for number in range(COMPANY_SHARES)]
        ended: list[object] = []
        durability.commit_each(many[:-1], lambda share, outcome: ended.append(outcome))
        self.assertEqual((len(workers.queue), len(self.clock.getDelayedCalls())), (0, 1))
        self.clock.advance(1)
        durability.commit_each(self.shares, lambda share, outcome: ended.append(outcome))
        while workers.queue:
            waiting, call = workers.queue.pop()
            waiting.callback(call())
        self.assertEqual(ended, [None] * (len(many) - 1 + len(self.shares)))
        again = [FakeShare(str(number), self.log) for number in range(COMPANY_SHARES)]
        durability.commit_each(again, lambda share, outcome: ended.append(outcome))
        self.assertEqual((len(workers.queue), self.clock.getDelayedCalls()), (1, []))

    def test_data_that_cannot_be_synced(self) -> None:
        """Every waiter of the group is told; nothing was renamed, and the uploads are discarded."""
        for number, error in ((errno.EIO, ServerRefused), (errno.ENOSPC, NoSpace)):
            self.log.clear()
            self.disk.fail_data = OSError(number, "broken")
            waiting = self.commit_all(self.durability("batch"))
            self.clock.advance(0.01)
            for deferred in waiting:
                self.failureResultOf(deferred, error)
            self.assertEqual(self.log, ["sync data", "discard a", "discard b", "discard c"])

    def test_names_that_cannot_be_synced(self) -> None:
        """The shares stand, but nobody is told that they are stored."""
        self.disk.fail_names = OSError(errno.EIO, "broken")
        waiting = self.commit_all(self.durability("batch"))
        self.clock.advance(0.01)
        for deferred in waiting:
            self.failureResultOf(deferred, ServerRefused)
        self.assertNotIn("discard a", self.log)

    def test_one_failure_is_not_the_groups(self) -> None:
        """A share that cannot be renamed, or was given up, does not harm the others."""
        self.shares[0].failure = NoSuchShare("gone; begin it again")
        self.shares[1].gone = True
        waiting = self.commit_all(self.durability("batch"))
        self.clock.advance(0.01)
        self.failureResultOf(waiting[0], NoSuchShare)
        self.failureResultOf(waiting[1], NoSuchShare)
        self.successResultOf(waiting[2])
        self.assertIn("publish c", self.log)
        self.assertNotIn("publish b", self.log)

    def test_groups_follow_each_other(self) -> None:
        """While a group is committed the next one gathers, and starts when that one has finished."""
        workers = SlowWorkers()
        durability = self.durability("batch", workers)
        first = durability.commit(self.shares[0])
        self.clock.advance(0.01)
        others = [durability.commit(share) for share in self.shares[1:]]
        self.clock.advance(1)
        self.assertEqual(len(workers.queue), 1)
        workers.step()
        self.successResultOf(first)
        self.assertEqual(len(workers.queue), 1)
        workers.step()
        for waiting in others:
            self.successResultOf(waiting)
        self.assertEqual(self.log.count("sync data"), 2)

    def test_waiters_may_leave_or_join(self) -> None:
        """A waiter that cancels leaves the commit to go on; another one may join it."""
        workers = SlowWorkers()
        durability = self.durability("batch", workers)
        first = durability.commit(self.shares[0])
        second = durability.commit(self.shares[0])
        first.cancel()
        self.failureResultOf(first, CancelledError)
        self.clock.advance(0.01)
        workers.step()
        self.successResultOf(second)
        self.assertEqual(self.log.count("publish a"), 1)

    def test_what_others_have_committed(self) -> None:
        """Who has the same upload, and is later, is told the same; what failed is no share for anybody."""
        policies: tuple[Policy, ...] = ("none", "batch", "strict")
        for policy in policies:
            durability = self.durability(policy)
            share, failing = FakeShare("a", self.log), FakeShare("b", self.log)
            failing.failure = NoSpace("full")
            first = durability.commit(share), durability.commit(failing)
            self.clock.advance(1)
            self.successResultOf(first[0])
            self.failureResultOf(first[1], NoSpace)
            share.gone = failing.gone = True
            self.log.clear()
            second = durability.commit(share), durability.commit(failing)
            self.successResultOf(second[0])
            self.clock.advance(1)
            self.failureResultOf(second[1], NoSuchShare)
            self.assertEqual(self.log, [])

    def test_flush(self) -> None:
        """Flushing does not wait for company, and fires when all is done; at once if nothing is."""
        workers = SlowWorkers()
        durability = self.durability("batch", workers)
        self.assertIsNone(self.successResultOf(durability.flush()))
        waiting = durability.commit(self.shares[0])
        flushed = durability.flush()
        given_up = durability.flush()
        given_up.cancel()
        self.failureResultOf(given_up, CancelledError)
        self.assertNoResult(flushed)
        workers.step()
        self.successResultOf(waiting)
        self.assertIsNone(self.successResultOf(flushed))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_workers_that_fail(self) -> None:
        """If the workers themselves fail, every waiter is told."""
        workers = SlowWorkers()
        waiting = self.commit_all(self.durability("strict", workers))
        for deferred, _ in workers.queue:
            deferred.errback(ServerRefused("the server is going down; use another one"))
        for failing in waiting:
            self.failureResultOf(failing, ServerRefused)


class DiskTests(StoreTestCase):
    """The calls themselves, on real files."""

    def uploads(self, *numbers: int) -> list[Any]:
        self.store.allocate(SI, set(numbers), 4, SECRETS)
        found = [self.store.upload(SI, number, SECRETS.upload) for number in numbers]
        for upload in found:
            upload.write(0, [b"abcd"])
        return found

    def recording(self, with_syncfs: bool) -> tuple[Disk, list[str]]:
        log: list[str] = []
        disk = Disk()
        syncfs = (lambda fd: log.append(f"syncfs {fd}")) if with_syncfs else None
        disk.__dict__["_syncfs"] = syncfs
        self.patch(
            os, "fsync", lambda fd: log.append(f"fsync {os.readlink(f'/proc/self/fd/{fd}')}")
        )
        return disk, log

    def test_one_sync_for_all(self) -> None:
        """One call syncs the data, on the descriptor opened first, and one the names."""
        disk, log = self.recording(with_syncfs=True)
        uploads = self.uploads(3, 1, 2)
        oldest = min(uploads, key=lambda upload: upload.opened)
        expected = f"syncfs {oldest.descriptor}"
        self.assertEqual(durability.commit_group(uploads, "batch", disk), [None] * 3)
        self.assertEqual(log[0], expected)
        self.assertEqual([entry.split()[0] for entry in log], ["syncfs", "syncfs"])
        self.assertEqual(self.store.list_shares(SI), {1, 2, 3})

    def test_a_resumed_upload_is_synced_besides(self) -> None:
        """What was written through another descriptor gets an fsync of its own."""
        disk, log = self.recording(with_syncfs=True)
        self.store.allocate(SI, {0}, 4, SECRETS)
        self.store.upload(SI, 0, SECRETS.upload).write(0, [b"ab"])
        self.store.release()
        upload = self.store.upload(SI, 0, SECRETS.upload)
        upload.write(2, [b"cd"])
        self.assertEqual(durability.commit_group([upload], "batch", disk), [None])
        self.assertEqual([entry.split()[0] for entry in log], ["syncfs", "fsync", "syncfs"])
        self.assertTrue(log[1].endswith("/incoming/" + str(self.incoming(0)).split("incoming/")[1]))

    def test_without_syncfs_everything_is_synced_by_itself(self) -> None:
        """Every file before any rename, and each directory that changed after all of them."""
        disk, log = self.recording(with_syncfs=False)
        uploads = self.uploads(0, 1)
        self.assertEqual(durability.commit_group(uploads, "batch", disk), [None, None])
        root = os.path.realpath(self.root)
        paths = [entry.removeprefix(f"fsync {root}/") for entry in log]
        self.assertEqual([path.split("/")[1] for path in paths[:2]], ["incoming", "incoming"])
        self.assertEqual([path.count("/") for path in paths[2:]], [2, 1, 0])

    def test_strict_syncs_new_parents_too(self) -> None:
        """The directory of a new index is synced together with those that name it."""
        disk, log = self.recording(with_syncfs=True)
        [upload] = self.uploads(0)
        durability.commit_group([upload], "strict", disk)
        self.assertEqual([entry.split()[0] for entry in log], ["fsync"] * 4)
        log.clear()
        [upload] = self.uploads(1)
        durability.commit_group([upload], "strict", disk)
        self.assertEqual([entry.split()[0] for entry in log], ["fsync"] * 2)

    def test_an_upload_begins_with_what_is_there(self) -> None:
        """The real call, on an open upload; one whose file is closed has nothing to begin with."""
        [upload] = self.uploads(0)
        begun: list[int] = []
        self.patch(disk_calls, "_sync_file_range", lambda: lambda fd, *_: begun.append(fd))
        upload.begin_writing()
        self.assertEqual(begun, [upload.descriptor])
        upload.discard()
        upload.begin_writing()
        self.assertEqual(len(begun), 1)

    def test_a_file_is_not_closed_while_the_disk_begins(self) -> None:
        """The kernel would keep its lock, and the upload could not be taken up again: "not found"."""
        store = self.store
        self.assertEqual(store.allocate(SI, {7}, 100_000, SECRETS).allocated, {7})
        upload = store.upload(SI, 7, SECRETS.upload)
        upload.write(0, [bytes(50_000)])
        closed: list[bool] = []
        self.patch(
            disk_calls, "_sync_file_range", lambda: lambda fd, *_: closed.append(upload.suspend())
        )
        upload.begin_writing()
        self.assertEqual((closed, upload.is_open), ([False], True))
        self.assertEqual((upload.suspend(), upload.is_open), (True, False))

    def test_beginning_never_fails(self) -> None:
        """Not with a descriptor that is closed, and not where there is no such call."""
        disk_calls.begin_writing(-1)
        self.patch(disk_calls, "_sync_file_range", lambda: None)
        disk_calls.begin_writing(0)

    def test_the_real_calls(self) -> None:
        """Every policy works on this machine's disk."""
        for number, policy in enumerate(("none", "batch", "strict")):
            uploads = self.uploads(number)
            outcome = durability.commit_group(uploads, policy, Disk())  # type: ignore[arg-type]
            self.assertEqual(outcome, [None])
            self.assertEqual(self.get(number), b"abcd")

    def test_syncfs_is_trusted_only_where_it_reports_errors(self) -> None:
        """Linux before 5.8, and other systems, sync file by file."""
        for system, release in (("Linux", "5.7.19"), ("Linux", "4.19"), ("Darwin", "23.1.0")):
            uname = os.uname_result((system, "node", release, "version", "machine"))
            self.patch(os, "uname", lambda uname=uname: uname)
            self.assertIsNone(durability.load_syncfs())

    def test_syncfs_reports_errors(self) -> None:
        """A call that fails raises with the system's number."""
        syncfs = durability.load_syncfs()
        if syncfs is not None:
            error = self.assertRaises(OSError, syncfs, -1)
            self.assertEqual(error.errno, errno.EBADF)
