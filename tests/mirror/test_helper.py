"""``mirror.helper``: who does a job that may wait."""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import sha256
from queue import SimpleQueue
from threading import get_ident
from typing import Any
from unittest.mock import patch

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk.commit import Disk
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.helper import QUICK_S, Either
from pipegrid.mirror.plan import Plan
from pipegrid.mirror.sprint import store
from pipegrid.mirror.wanted import MirrorError, Wanted


class EitherTests(SynchronousTestCase):
    """With a clock of their own."""

    def setUp(self) -> None:
        self.now_s = 0.0
        self.done: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.woken: list[None] = []
        self.either = Either(self.done, lambda: self.woken.append(None), lambda: self.now_s)
        self.addCleanup(self.either.stop)

    def do(self, took_s: float, error: Exception | None = None) -> bool:
        """Have a job done that takes so long; returns whether it was done in this thread."""
        results: list[Any] = []

        def job() -> int:
            self.now_s += took_s
            if error is not None:
                raise error
            return get_ident()

        self.either.run(job, results.append)
        if not results:
            self.done.get()()
        [result] = results
        if error is not None:
            self.assertIs(result, error)
            return False
        return bool(result == get_ident())

    def test_jobs_that_turn_out_not_to_wait(self) -> None:
        """Two quick ones, and the next is done at once; after a slow one it takes two again."""
        quick_s, slow_s = QUICK_S / 2, QUICK_S * 2
        took = [quick_s, slow_s, quick_s, quick_s, quick_s, slow_s, quick_s, quick_s, quick_s]
        self.assertEqual(
            [self.do(each) for each in took],
            [False, False, False, False, True, True, False, False, True],
        )

    def test_what_is_raised(self) -> None:
        """It is told, whoever did the job."""
        for _ in range(4):
            self.do(0.0, OSError(5, "broken"))
        self.assertTrue(self.do(0.0))


class AtOnceTests(SynchronousTestCase):
    """A sprint's store, on a file system that has nothing to wait for."""

    def setUp(self) -> None:
        self.dest = self.mktemp()
        self.destination = Destination(self.dest)
        self.addCleanup(self.destination.close)
        self.plan = Plan(1)
        self.stored: list[str] = []
        self.synced: list[bool] = []
        self.broken = False
        self.patch(Disk, "sync_data", lambda *_: self.sync())
        self.patch(Disk, "sync_names", lambda *_: self.sync())
        self.patch(store, "MAX_GROUP_FILES", 3)
        self.store = store.SprintStore(
            self.destination,
            "batch",
            False,
            lambda errand, *_: self.stored.append(errand.wanted.path),
            lambda *_: self.fail("nothing is wrong with it"),
            lambda: None,
        )
        self.addCleanup(self.store.close)

    def sync(self) -> None:
        """Note whether the sprint itself does it."""
        if self.broken:
            raise OSError(28, "no space")
        self.synced.append(get_ident() == self.ident)

    def put(self, count: int) -> None:
        """Store so many files more, with what a sprint does between them."""
        self.ident = get_ident()
        for _ in range(count):
            data = b"%d" % len(self.plan._waiting) + os.urandom(8)
            self.plan.add(Wanted(f"a/{data.hex()}", len(data), "sha256", sha256(data).digest()))
            errand = self.plan.next(0)
            assert errand is not None
            self.assertIsNone(self.store.whole(errand, 0, memoryview(data)))
            self.store.work(False)

    def finish(self) -> None:
        """Wait for what is under way."""
        while self.store.is_busy:
            if self.store._syncing is not None:
                self.store._done.get()()
            self.store.work(True)

    def test_order(self) -> None:
        """Each group is synced before it counts, and again for its names; then nobody is handed anything."""
        with patch("pipegrid.mirror.helper.QUICK_S", 1e9):
            self.put(3)
            self.finish()
            self.assertEqual((self.synced, len(self.stored)), ([False, False], 3))
            self.put(2)
            self.assertEqual((len(self.synced), len(self.stored)), (2, 3))
            self.put(1)
            self.assertEqual((self.synced[2:], len(self.stored)), ([True, True], 6))
            self.assertEqual(len(os.listdir(f"{self.dest}/a")), 6)
            self.put(1)
            self.finish()
            self.assertEqual((len(self.synced), len(self.stored)), (6, 7))

    def test_a_disk_that_is_full(self) -> None:
        """It is said as if a thread had found out, and nothing counts."""
        with patch("pipegrid.mirror.helper.QUICK_S", 1e9):
            self.put(3)
            self.finish()
            self.broken = True
            error = self.assertRaises(MirrorError, self.put, 3)
        self.assertIn("the disk is full", str(error))
        self.assertEqual(len(self.stored), 3)
        self.assertEqual(len(os.listdir(f"{self.dest}/a")), 3)
