"""Whole trees on their way to a grid in virtual time."""

from __future__ import annotations

import errno
import os
import shutil
from random import Random
from typing import Any

from twisted.internet.defer import Deferred, fail
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.caps import Cap, DirectoryCap, LitCap
from pipegrid.core.packed_directory import unpack_immutable
from pipegrid.errors import GridError, SourceError
from pipegrid.flow import concurrency_limits as depths
from pipegrid.transfer.put import put_many
from pipegrid.transfer.settings import Limits
from pipegrid.transport.gbs.bundles import GbsBundles
from pipegrid.tree import upload_queue
from pipegrid.tree.file_metadata import restored
from pipegrid.tree.tree_upload import TreeReports, TreeResult, tree_upload
from pipegrid.tree.upload_store import GridFiles
from tests.scratch import scratch_directory
from tests.simulation.grid_budgets import warm_up
from tests.simulation.grid_world import Client, GridWorld

RTT = 0.1


class TreeUploadTests(SynchronousTestCase):
    """What is stored, and in how many round trips."""

    def setUp(self) -> None:
        self.root = scratch_directory()
        self.addCleanup(shutil.rmtree, self.root, True)
        self.world = GridWorld(latency_s=RTT / 2)
        self.addCleanup(self.world.close)
        self.client: Client = self.world.client()
        warm_up(self.world, self.client)
        self.left_out: list[tuple[str, str]] = []

    def write(self, path: str, content: bytes) -> None:
        """Make a file."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)

    def put(self, **options: Any) -> TreeResult:
        """Store the directory."""
        return self.world.run(self.start(**options))

    def start(self, **options: Any) -> Deferred[TreeResult]:
        """Begin to."""
        reports = TreeReports(lambda path, why: self.left_out.append((path, why)))
        upload = tree_upload(self.client.grid, self.root, reports=reports, **options)
        return Deferred.fromCoroutine(upload.run())

    def contents(self, cap: Cap) -> Any:
        """Fetch a tree: names and contents."""
        if isinstance(cap, DirectoryCap):
            return {each.name: self.contents(each.cap) for each in self.entries(cap)}
        assert not isinstance(cap, LitCap) or cap.data is not None
        return self.world.run(self.client.grid.read(cap))

    def entries(self, cap: DirectoryCap) -> Any:
        """Fetch one directory."""
        return unpack_immutable(self.world.run(self.client.grid.read(cap.file)))

    def test_a_report_that_fails(self) -> None:
        """What the caller's functions raise ends the upload, and comes out as it is."""
        self.write("a/small", b"s" * 3000)
        self.write("b", b"b" * 2000)
        self.write("bad", b"bad")
        really_read = os.pread

        def failing(fd: int, length: int, offset: int) -> bytes:
            if os.readlink(f"/proc/self/fd/{fd}").endswith("/bad"):
                raise OSError(errno.EIO, "no")
            return really_read(fd, length, offset)

        self.patch(os, "pread", failing)

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        for reports in (TreeReports(progress=broken), TreeReports(left_out=broken)):
            upload = tree_upload(self.client.grid, self.root, reports=reports)
            running = Deferred.fromCoroutine(upload.run())
            self.world.clock.pump([RTT] * 30)
            self.failureResultOf(running, ZeroDivisionError)
        self.assertEqual(self.client.grid._running, set())

    def test_a_tree(self) -> None:
        """Everything is there, with what brings it back."""
        random = Random(1)
        small, large = random.randbytes(1000), random.randbytes(3 << 20)
        self.write("a/small", small)
        self.write("a/large", large)
        self.write("literal", b"literal")
        (self.root / "a/empty").mkdir()
        os.symlink("../literal", self.root / "a/link")
        os.utime(self.root / "a/small", ns=(5, 1_700_000_000_123_456_789))
        (self.root / "a/small").chmod(0o751)
        result = self.put()
        self.assertEqual(self.left_out, [])
        self.assertEqual(
            self.contents(result.cap),
            {
                "a": {"empty": {}, "large": large, "link": b"../literal", "small": small},
                "literal": b"literal",
            },
        )
        a = {
            each.name: restored(each.metadata)
            for each in self.entries(self.entries(result.cap)[0].cap)
        }
        self.assertEqual((a["small"].mode, a["small"].mtime_ns), (0o751, 1_700_000_000_123_456_789))
        self.assertEqual(a["link"].link, b"../literal")
        counts = result.counts
        self.assertEqual((counts.files, counts.directories, counts.links), (3, 3, 1))
        self.assertEqual((counts.sent_files, counts.sent_directories), (2, 2))
        self.assertEqual(counts.already_stored, 0)
        self.assertEqual(self.put().counts.already_stored, 4)
        self.assertEqual(self.world.leaks(), [])

    def test_how_far_a_large_file_has_come(self) -> None:
        """It is told while the file goes, and taken back when the counts have it."""
        size = 3 << 20
        self.write("large", Random(2).randbytes(size))
        self.write("small", b"x" * 1000)
        told: list[tuple[int, int]] = []
        reports = TreeReports(sending=lambda counts, more: told.append((counts.sent_bytes, more)))
        upload = tree_upload(self.client.grid, self.root, reports=reports)
        result = self.world.run(Deferred.fromCoroutine(upload.run()))
        *on_its_way, taken_back = [more for _, more in told]
        self.assertGreater(min(on_its_way), 0)
        self.assertEqual((sum(on_its_way), taken_back), (size, -size))
        self.assertLess(told[-1][0], size)
        self.assertGreater(result.counts.sent_bytes, size)

    def test_the_same_tree_has_the_same_cap(self) -> None:
        """Wherever it lies, and whenever its inodes were made."""
        self.write("d/a", b"x" * 100)
        os.utime(self.root / "d/a", ns=(1, 10**18))
        os.utime(self.root / "d", ns=(1, 10**18))
        first = self.put()
        copy = scratch_directory()
        self.addCleanup(shutil.rmtree, copy, True)
        shutil.copytree(self.root / "d", copy / "d")
        self.root = copy
        self.assertEqual(self.put().cap, first.cap)

    def test_depth_twenty(self) -> None:
        """One file in each of twenty directories within one another takes at most two round trips."""
        random = Random(2)
        for depth in range(20):
            self.write("d/" * depth + "file", random.randbytes(500))
        result = self.put()
        self.assertLessEqual(result.elapsed_s, 1.1 * RTT)
        self.assertEqual(result.counts.sent_directories, 20)

    def test_a_hundred_directories(self) -> None:
        """A thousand files in a hundred directories: round trips by what may be under way at once."""
        random = Random(3)
        for n in range(1000):
            self.write(f"d{n // 10}/f{n}", random.randbytes(300))
        result = self.put()
        self.assertEqual(result.counts.sent_files, 1000)
        self.assertLessEqual(result.elapsed_s, 5.1 * RTT)

    def test_what_is_under_way_is_bounded(self) -> None:
        """By number and by bytes, give or take a batch."""
        random = Random(4)
        for n in range(600):
            self.write(f"s{n:03}", random.randbytes(100))
        for n in range(60):
            self.write(f"z{n:02}", random.randbytes(900_000))
        most = [0, 0]
        begin = upload_queue.UploadQueue.begin

        def counting(in_flight: upload_queue.UploadQueue[Any], *args: Any) -> None:
            begin(in_flight, *args)
            most[0] = max(most[0], len(in_flight.running))
            most[1] = max(most[1], in_flight.weight_bytes)

        self.patch(upload_queue.UploadQueue, "begin", counting)
        self.put()
        self.assertGreaterEqual(most[0], upload_queue.MAX_OBJECTS // 2)
        self.assertLessEqual(most[0], upload_queue.MAX_OBJECTS + 128)
        self.assertGreaterEqual(most[1], put_many.MAX_BYTES // 2)
        self.assertLessEqual(most[1], put_many.MAX_BYTES + (2 << 20))

    def most_running(self) -> list[int]:
        """Return where the most that is under way of a tree will stand."""
        most = [0, 0]
        begin = upload_queue.UploadQueue._begin_more

        def counting(in_flight: upload_queue.UploadQueue[Any]) -> None:
            begin(in_flight)
            most[0] = max(most[0], len(in_flight.running))
            most[1] = max(most[1], in_flight.weight_bytes)

        self.patch(upload_queue.UploadQueue, "_begin_more", counting)
        return most

    def test_jobs(self) -> None:
        """So many objects are stored at once, and no more; all are stored."""
        random = Random(5)
        for n in range(60):
            self.write(f"d{n // 10}/s{n:03}", random.randbytes(100))
        self.client.grid._limits = Limits(jobs=3)
        most = self.most_running()
        self.assertEqual(self.put().counts.sent_files, 60)
        self.assertEqual(most[0], 3)

    def test_memory(self) -> None:
        """A quarter of the memory is for plaintext that is under way."""
        random = Random(6)
        for n in range(60):
            self.write(f"z{n:02}", random.randbytes(300_000))
        self.client.grid._limits = Limits(memory_bytes=16 << 20)
        most = self.most_running()
        self.assertEqual(self.put().counts.sent_files, 60)
        self.assertGreater(most[1], 2 << 20)
        self.assertLessEqual(most[1], (4 << 20) + (2 << 20))  # and a batch of the walk

    def test_servers_that_take_one_request_a_share(self) -> None:
        """Fewer files are stored at once while each waits for the others; all of them are stored."""
        random = Random(7)
        for n in range(400):
            self.write(f"s{n:03}", random.randbytes(100))
        for peer in self.client.grid._peers:
            peer.server._uploads.bundles.max_bytes = 0  # type: ignore[attr-defined]
        self.patch(GbsBundles, "heard", lambda *_: None)
        self.patch(depths, "QUEUED_S", 0.5 * RTT)
        self.patch(depths, "QUEUED_FACTOR", 0.5)  # so that even one round trip is too long
        most = self.most_running()
        self.assertEqual(self.put().counts.sent_files, 400)
        self.assertEqual(most[0], depths.INITIAL_LIMIT)
        self.assertEqual(self.left_out, [])

    def test_what_cannot_be_read(self) -> None:
        """Is named; what has no content is skipped; all else is stored."""
        self.write("good", b"g" * 100)
        self.write("bad", b"b" * 100)
        os.mkfifo(self.root / "pipe")
        real = os.open

        def refusing(path: Any, *args: Any, **options: Any) -> int:
            if path == "bad":
                raise PermissionError(13, "Permission denied", path)
            return real(path, *args, **options)

        self.patch(os, "open", refusing)
        result = self.put()
        self.assertEqual(self.contents(result.cap), {"good": b"g" * 100})
        self.assertEqual([path for path, _ in self.left_out], ["bad"])
        self.assertEqual((result.counts.left_out, result.counts.skipped), (1, 1))

    def test_a_large_file_that_changes(self) -> None:
        """Is left out of a tree that is otherwise whole, though its directory may have left already."""
        self.write("d/large", bytes(5 << 20))
        self.write("d/small", b"s" * 100)
        put = GridFiles.put

        def late(store: GridFiles, source: Any, *args: Any) -> Any:
            if not isinstance(source, bytes):
                with open(self.root / "d/large", "r+b") as file:
                    file.write(b"more")
            return put(store, source, *args)

        self.patch(GridFiles, "put", late)
        result = self.put()
        self.assertEqual(self.contents(result.cap), {"d": {"small": b"s" * 100}})
        ((path, why),) = self.left_out
        self.assertEqual(path, "d/large")
        self.assertIn("changed while it was read", why)
        counts = result.counts
        self.assertEqual(
            (counts.files, counts.bytes, counts.directories, counts.left_out), (1, 100, 2, 1)
        )

    def test_a_directory_that_cannot_be_stored(self) -> None:
        """Is not counted as stored, and neither is what is in it, or left out of it before."""
        self.write("d/e/large", bytes(5 << 20))
        self.write("d/e/f/small", b"s" * 100)
        (self.root / "d/e/link").symlink_to("large")
        self.write("good", b"g" * 100)
        put = GridFiles.put

        def refusing(store: GridFiles, source: Any, *args: Any) -> Any:
            if not isinstance(source, bytes):
                with open(self.root / "d/e/large", "r+b") as file:
                    file.write(b"more")
            elif b"small" in source or b"link" in source:
                return fail(GridError("no room"))
            return put(store, source, *args)

        self.patch(GridFiles, "put", refusing)
        result = self.put()
        counts = result.counts
        self.assertEqual(
            (counts.files, counts.bytes, counts.directories, counts.links), (1, 100, 2, 0)
        )
        self.assertEqual(self.contents(result.cap), {"d": {}, "good": b"g" * 100})

    def test_a_grid_that_takes_nothing(self) -> None:
        """Ends it, and not with a sentence for each of many files."""
        for server in self.world.servers:
            server.space_bytes = 0
        for n in range(50):
            self.write(f"{n}", b"x" * 100 + b"%d" % n)
        self.failureResultOf(self.settle(self.start()), GridError)
        self.assertLess(len(self.left_out), 20)
        self.assertEqual(self.world.leaks(), [])

    def settle(self, running: Deferred[Any]) -> Deferred[Any]:
        """Let time pass until it has ended."""
        self.world.clock.advance(0)
        for _ in range(100_000):
            if running.called:
                break
            self.world.clock.advance(0.05)
        return running

    def test_cancelled(self) -> None:
        """Nothing is left of it."""
        for n in range(300):
            self.write(f"{n}", b"x" * 1000 + b"%d" % n)
        running = self.start()
        self.world.clock.advance(0.06)
        running.cancel()
        self.failureResultOf(self.settle(running))
        self.assertEqual(self.world.leaks(), [])

    def test_no_such_directory(self) -> None:
        """A sentence."""
        shutil.rmtree(self.root)
        error = self.failureResultOf(self.settle(self.start()), SourceError).value
        self.assertEqual(str(error), f"cannot read {self.root}: No such file or directory")

    def test_names(self) -> None:
        """Those that are no text, or not composed, are kept exactly; of two that look the same both."""
        root = os.fsencode(self.root)
        names = [b"caf\xe9", "caf\ufffd".encode(), "e\u0301".encode(), "\u00e9".encode()]
        for name in names:
            with open(os.path.join(root, name), "wb") as file:
                file.write(name)
        found = self.entries(self.put().cap)
        self.assertEqual(len(found), 4)
        for each in found:
            exact = restored(each.metadata).name or each.name.encode()
            self.assertEqual(exact, self.world.run(self.client.grid.read(each.cap)))
        self.assertEqual(
            {restored(each.metadata).name or each.name.encode() for each in found}, set(names)
        )
