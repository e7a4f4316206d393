"""Which file is asked of which mirror next."""

from __future__ import annotations

import random
from collections.abc import Iterable

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.mirror.archive_file import ArchiveFile
from pipegrid.mirror.file_scheduler import MAX_BREAKS, FetchJob, Scheduler


def file(size: int, name: str = "f") -> ArchiveFile:
    """A file of some size."""
    return ArchiveFile(f"{name}{size}", size, "sha256", bytes(32))


class PlanTests(SynchronousTestCase):
    """Facts in, moves out."""

    def make(self, mirrors: int, sizes: Iterable[int]) -> None:
        """Begin anew."""
        self.plan = Scheduler(mirrors)
        for size in sizes:
            self.plan.add(file(size))

    def take(self, mirror: int) -> FetchJob:
        """What a mirror is asked for next, which must be something."""
        job = self.plan.next(mirror)
        assert job is not None
        return job

    def paths(self, mirror: int) -> list[str]:
        """Everything that a mirror is asked for, in that order."""
        found = []
        while job := self.plan.next(mirror):
            found.append(job.wanted.path)
        return found

    def test_largest_first(self) -> None:
        """Equal ones in the order in which they came."""
        self.make(1, [3, 9, 5])
        self.plan.add(file(5, "g"))
        self.assertEqual(self.paths(0), ["f9", "f5", "g5", "f3"])

    def test_done(self) -> None:
        """Files and bytes are counted, and all is over with the last."""
        self.make(2, [3, 9])
        first, second = self.take(0), self.take(1)
        self.assertTrue(self.plan.done(first, 0, 9))
        self.assertFalse(self.plan.is_idle)
        self.assertTrue(self.plan.done(second, 1, 3))
        self.assertTrue(self.plan.is_idle)
        self.assertEqual((self.plan.done_files, self.plan.done_bytes), (2, 12))

    def test_refused_is_for_another(self) -> None:
        """Who refused a file is not asked for it again; when all have, it has failed, with all reasons."""
        self.make(3, [1])
        for mirror in (1, 0, 2):
            job = self.take(mirror)
            self.plan.failed_at(job, mirror, "refused", f"no {mirror}")
            self.assertIsNone(self.plan.next(mirror))
        self.assertEqual(self.plan.failed, [job])
        self.assertEqual(job.reasons, {0: "no 0", 1: "no 1", 2: "no 2"})
        self.assertTrue(self.plan.is_idle)

    def test_broken_is_tried_elsewhere_first(self) -> None:
        """Then again, and not for ever."""
        self.make(2, [1])
        for _ in range(MAX_BREAKS):
            for mirror in (0, 1):
                job = self.take(mirror)
                self.plan.failed_at(job, mirror, "broken", "reset")
                self.assertTrue(self.plan.is_idle or self.plan.waits)
                if mirror == 0:
                    self.assertIsNone(self.plan.next(0))
        self.assertTrue(self.plan.is_idle)
        self.assertEqual(self.plan.failed, [job])
        self.assertEqual(self.plan.retries, 2 * MAX_BREAKS)

    def test_nobody_waits_for_who_rests(self) -> None:
        """While the other mirror rests, one that broke may try again."""
        self.make(2, [1])
        job = self.take(0)
        self.plan.failed_at(job, 0, "broken", "reset")
        self.assertIsNone(self.plan.next(0))
        self.plan.rests(1)
        self.assertIs(self.plan.next(0), job)

    def test_unasked_is_no_failure(self) -> None:
        """It goes back to its place, however often."""
        self.make(1, [1, 2])
        for _ in range(99):
            job = self.take(0)
            self.assertEqual(job.size_bytes, 2)
            self.plan.put_back(job, 0)
        self.assertEqual(self.plan.retries, 0)

    def test_gave_up(self) -> None:
        """What waits is for the others; with the last mirror all has failed."""
        self.make(2, [1, 2])
        self.plan.gave_up(0, "gone")
        self.assertIsNone(self.plan.next(0))
        job = self.take(1)
        self.plan.put_back(job, 1)
        self.plan.gave_up(1, "gone, too")
        self.assertTrue(self.plan.is_idle)
        self.assertEqual([each.reasons for each in self.plan.failed], [{1: "gone, too"}] * 2)

    def test_copies(self) -> None:
        """Two mirrors may be asked; the first counts, and what the other does is no failure."""
        self.make(2, [5])
        job = self.take(0)
        self.assertTrue(self.plan.copy(job, 1))
        self.assertFalse(self.plan.copy(job, 1))
        self.assertTrue(self.plan.done(job, 1, 5))
        self.assertTrue(self.plan.is_idle)
        self.plan.failed_at(job, 0, "broken", "reset")
        self.assertEqual((self.plan.done_files, self.plan.retries), (1, 0))
        self.assertFalse(self.plan.waits)

    def test_one_copy_fails(self) -> None:
        """Then the other is waited for."""
        self.make(2, [5])
        job = self.take(0)
        self.plan.copy(job, 1)
        self.plan.failed_at(job, 0, "refused", "404")
        self.assertFalse(self.plan.waits)
        self.assertTrue(self.plan.done(job, 1, 5))

    def test_any_course_of_events(self) -> None:
        """Each file is done or failed in the end, and failed only if every mirror failed it."""
        for seed in range(200):
            rng = random.Random(seed)
            mirrors = rng.randint(1, 4)
            count = rng.randint(0, 12)
            self.make(mirrors, (rng.randrange(5) for _ in range(count)))
            in_flight: list[tuple[FetchJob, int]] = []
            gone: set[int] = set()
            for _ in range(5000):
                self.plan._check_invariants()
                if self.plan.is_idle:
                    break
                mirror = rng.randrange(mirrors)
                if rng.random() < 0.5:
                    job = None if mirror in gone else self.plan.next(mirror)
                    if job is not None:
                        in_flight.append((job, mirror))
                elif rng.random() < 0.01:
                    mine = [each for each in in_flight if each[1] == mirror]
                    for each in mine:
                        in_flight.remove(each)
                        self.plan.put_back(*each)
                    self.plan.gave_up(mirror, "gone")
                    gone.add(mirror)
                elif in_flight:
                    job, mirror = in_flight.pop(rng.randrange(len(in_flight)))
                    fate = rng.random()
                    if fate < 0.4:
                        self.plan.done(job, mirror, job.size_bytes)
                    elif fate < 0.6:
                        self.plan.put_back(job, mirror)
                    else:
                        kind = rng.choice(("refused", "broken"))
                        self.plan.failed_at(job, mirror, kind, "why")  # type: ignore[arg-type]
            self.assertTrue(self.plan.is_idle, seed)
            self.assertEqual(self.plan.done_files + len(self.plan.failed), count, seed)
            for job in self.plan.failed:
                for mirror in range(mirrors):
                    self.assertTrue(
                        mirror in gone
                        or job.refused_by >> mirror & 1
                        or job.breaks_at(mirror) == MAX_BREAKS,
                        seed,
                    )
