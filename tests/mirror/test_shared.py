"""A sprint by several processes: as many files as by one, whatever becomes of the others."""

from __future__ import annotations

import os
import signal
from hashlib import sha256
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mirror import fetch_run
from pipegrid.mirror.archive_file import ArchiveFile, MirrorError
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.fetch_run import FILE_BYTES, MirrorRun, WorkerProcesses, parts_of
from pipegrid.mirror.file_scheduler import Report, Scheduler, Tally
from pipegrid.mirror.local_check import VerifyPolicy
from pipegrid.mirror.mirror_urls import parse_url
from tests.children import children
from tests.mirror.test_sprint import Server, SprintCase, ok


def hang(pipe: int, on_sigterm: signal.Handlers = signal.SIG_DFL) -> None:
    """Wait for ever; nobody's handlers are inherited."""
    signal.signal(signal.SIGTERM, on_sigterm)
    while True:
        os.read(pipe, 1)


def some(sizes: list[int]) -> list[ArchiveFile]:
    """Files of these sizes."""
    return [
        ArchiveFile(f"f{number}", size, "sha256", bytes(32)) for number, size in enumerate(sizes)
    ]


class PartsTests(SynchronousTestCase):
    """Dealing files."""

    def test_as_long(self) -> None:
        """No part costs much more than another, and none lacks a file."""
        files = some([10_000_000, *[4_000_000] * 5, *[100] * 500])
        parts = parts_of(files, 3)
        found = [each for part in parts for each in part]
        self.assertEqual(sorted(map(repr, found)), sorted(map(repr, files)))
        costs = [sum((each.size or 0) + FILE_BYTES for each in part) for part in parts]
        self.assertLess(max(costs) - min(costs), 2_000_000)

    def test_few(self) -> None:
        """A process more for a handful of files is none."""
        self.assertEqual(len(parts_of(some([1] * 63), 4)), 1)
        self.assertEqual(len(parts_of(some([1] * 128), 4)), 2)
        self.assertEqual(parts_of([], 4), [[]])


class SharedTests(SprintCase):
    """Whole ones."""

    def shared(self, *servers: Server, jobs: int = 3) -> tuple[MirrorRun, bool]:
        """Run one; returns it, and whether that was all."""
        self.patch(fetch_run, "WORTHWHILE_FILES", 1)
        before = children()
        destination = Destination(str(self.dest))
        try:
            work = MirrorRun(destination, [parse_url(each.url) for each in servers], VerifyPolicy())
            entries = [
                (path, len(data), {"sha256": sha256(data).digest()})
                for path, data in self.files.items()
            ]
            done = work.run_on_epoll(entries, "batch", 4, jobs=jobs)
            if done:
                work.finish()
        finally:
            destination.close()
        work.sum_up()
        work.plan._check_invariants()
        self.assertEqual(children() - before, set())  # nobody is left
        return work, done

    def test_all_of_it(self) -> None:
        """All is there, asked for once, by several processes, and counted as if by one."""
        server = self.server()
        pids = self.mktemp()
        begin = WorkerProcesses._work

        def work(helpers: WorkerProcesses, files: list[ArchiveFile], is_orphan: object) -> object:
            with open(pids, "a") as file:
                file.write(f"{os.getpid()} {len(files)}\n")
            return begin(helpers, files, is_orphan)  # type: ignore[arg-type]

        self.patch(WorkerProcesses, "_work", work)
        found, done = self.shared(server)
        self.assertTrue(done)
        self.assertEqual(self.found(), self.files)
        self.assertEqual(sorted(server.asked), sorted(self.files))
        lines = [line.split() for line in Path(pids).read_text().splitlines()]
        self.assertEqual(len({pid for pid, _ in lines} | {str(os.getpid())}), 3)
        report = found.report
        self.assertEqual((report.fetched_files, report.retries), (len(self.files), 0))
        tally = report.tallies[0]
        self.assertEqual(tally.received_bytes, sum(map(len, self.files.values())))
        self.assertEqual((tally.files, tally.connections), (len(self.files), 3))  # 4 // 3 each

    def test_refused(self) -> None:
        """What no mirror has, has failed, whichever process asked; the others' files are there."""
        server = self.server()
        gone = set(sorted(self.files)[::7])
        no = b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\ngone"
        server.answer = lambda path, _: no if path in gone else ok(self.files[path])
        work, done = self.shared(server)
        self.assertTrue(done)
        self.assertEqual(set(self.found()), set(self.files) - gone)
        self.assertEqual(work.report.failed_files, len(gone))
        self.assertEqual({path for path, _ in work.report.failed}, gone)
        self.assertIn("it answers 404", work.report.failed[0][1])

    def test_one_dies(self) -> None:
        """The part of a process that ends without a word waits for others; what it had done is done."""
        server = self.server()
        real = fetch_run._result

        def die(*arguments: object) -> object:
            os.kill(os.getpid(), 9)
            return real(*arguments)  # type: ignore[arg-type]

        self.patch(fetch_run, "_result", die)
        work, done = self.shared(server)
        self.assertTrue(done)
        self.assertEqual(self.found(), self.files)
        self.assertEqual(work.report.fetched_files, len(self.files))

    def test_one_dies_early(self) -> None:
        """One that did nothing leaves all to be done."""
        server = self.server()
        self.patch(Destination, "forked", lambda _: os.kill(os.getpid(), 9))
        work, done = self.shared(server, jobs=2)
        self.assertFalse(done)
        left = {each.wanted.path for each in work.plan.waiting()}
        self.assertEqual(set(self.found()), set(self.files) - left)
        self.assertGreater(len(left), 10)

    def test_full_disk(self) -> None:
        """What ends one process ends all of it, with its sentence; and the others are gone."""

        def run_on_epoll(*_: object) -> None:
            raise MirrorError("the disk is full")

        destination = Destination(str(self.dest))
        self.addCleanup(destination.close)
        helpers = WorkerProcesses(destination, Report([Tally("x")]), run_on_epoll, lambda: False)
        helpers.start(some([1, 2]))
        helpers.start(some([3]))
        error = self.assertRaises(MirrorError, helpers.join, Scheduler(1))
        self.assertEqual(str(error), "the disk is full")

    def told_to_stop(self, on_sigterm: signal.Handlers) -> None:
        """Begin, and be told to stop."""
        hanging, other = os.pipe()
        us = os.getpid()
        destination = Destination(str(self.dest))
        self.addCleanup(destination.close)
        helpers = WorkerProcesses(
            destination,
            Report(),
            lambda *_: hang(hanging, on_sigterm),
            lambda: os.getpid() == us,
        )
        helpers.start(some([1]))
        plan = Scheduler(0)
        helpers.join(plan)
        os.close(hanging)
        os.close(other)
        self.assertEqual(plan.done_files, 0)
        self.assertTrue(plan.waits)

    def test_told_to_stop(self) -> None:
        """Whoever waits for others tells them to stop; what they had not done, waits."""
        self.told_to_stop(signal.SIG_DFL)

    def test_those_that_do_not_stop(self) -> None:
        """They are not waited for long."""
        self.patch(fetch_run, "END_S", 0.2)
        self.told_to_stop(signal.SIG_IGN)

    def test_stopped(self) -> None:
        """Who is told to stop leaves no process behind, not even one that does not listen."""
        before = children()
        hanging, other = os.pipe()
        destination = Destination(str(self.dest))
        self.addCleanup(destination.close)
        helpers = WorkerProcesses(destination, Report(), lambda *_: hang(hanging), lambda: True)
        helpers.start(some([1]))
        helpers.stop()
        os.close(hanging)
        os.close(other)
        self.assertEqual(children() - before, set())
