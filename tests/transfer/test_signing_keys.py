"""Keys that are made ahead: how many, when, and that each is given once."""

from __future__ import annotations

from typing import Any
from unittest import mock

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.core.mutable import keys
from pipegrid.errors import UsageError
from pipegrid.transfer.mutable.mutable_files import AHEAD, QUIET_S, SigningKeys


class SlowWorkers:
    """Makes a key, a number, when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[Deferred[Any]] = []
        self.made = 0
        self.stopped = False

    def run(self, function: object) -> Deferred[Any]:
        """Begin."""
        assert function is keys.generate
        if self.stopped:
            raise UsageError("stopped")
        self.jobs.append(Deferred())
        return self.jobs[-1]

    def end(self) -> None:
        """End the job that was begun first."""
        self.made += 1
        self.jobs.pop(0).callback(self.made)


class SigningKeysTests(SynchronousTestCase):
    """``SigningKeys``."""

    def setUp(self) -> None:
        self.workers = SlowWorkers()
        self.keys = SigningKeys(self.workers)  # type: ignore[arg-type]

    def take(self) -> Deferred[Any]:
        """Ask for a key."""
        return Deferred.fromCoroutine(self.keys.take())

    def test_one_file(self) -> None:
        """Who makes one file has one key made, ahead if that was asked for."""
        self.keys.prepare()
        self.keys.prepare()
        self.assertEqual(len(self.workers.jobs), 1)
        self.workers.end()
        self.assertEqual(self.successResultOf(self.take()), 1)
        self.assertEqual(self.workers.jobs, [])

    def test_several_files(self) -> None:
        """From the second on some are made ahead, one after the other, and no more than that."""
        taken = []
        for _ in range(2):
            self.keys.prepare()
            taken.append(self.take())
            self.workers.end()
        for _ in range(AHEAD):
            self.assertEqual(len(self.workers.jobs), 1)
            self.workers.end()
        self.assertEqual(self.workers.jobs, [])
        taken += [self.take() for _ in range(AHEAD)]
        self.assertEqual(list(map(self.successResultOf, taken)), list(range(1, AHEAD + 3)))
        self.assertEqual(len(self.workers.jobs), 1)

    def test_a_program_that_runs_on(self) -> None:
        """It has more keys, which are made when none was taken for a while, and at once if there is none."""
        clock = Clock()
        self.keys.keep(8, clock)
        self.addCleanup(self.keys.close)
        self.assertEqual(self.workers.jobs, [])
        clock.advance(QUIET_S)
        for _ in range(8):
            self.assertEqual(len(self.workers.jobs), 1)
            self.workers.end()
        self.assertEqual(self.workers.jobs, [])
        taken = [self.take() for _ in range(7)]
        self.assertEqual(self.workers.jobs, [])
        clock.advance(QUIET_S / 2)
        taken.append(self.take())
        self.assertEqual(len(self.workers.jobs), 1)
        taken += [self.take(), self.take()]
        while not all(each.called for each in taken):
            self.workers.end()
        self.assertEqual(len(set(map(self.successResultOf, taken))), 10)
        while self.workers.jobs:
            self.workers.end()
        self.assertLess(len(self.keys._ready), 3)
        clock.advance(QUIET_S)
        while self.workers.jobs:
            self.workers.end()
        self.assertEqual(len(self.keys._ready), 8)
        self.keys.close()
        self.assertEqual(clock.getDelayedCalls(), [])

    def test_taken_while_they_are_made(self) -> None:
        """Each is given once, though several wait."""
        waiting = [self.take() for _ in range(4)]
        while not all(each.called for each in waiting):
            self.workers.end()
        self.assertEqual(len({self.successResultOf(each) for each in waiting}), 4)

    def test_a_program_that_ends(self) -> None:
        """Workers that are stopped make no key ahead, and nobody hears of it."""
        self.keys.prepare()
        first = self.take()
        self.workers.end()
        second = self.take()
        self.workers.stopped = True
        self.workers.end()
        self.assertEqual(list(map(self.successResultOf, (first, second))), [1, 2])

    def test_what_failed_ahead_is_made_again(self) -> None:
        """A key that could not be made ahead is made for whoever asks."""
        self.keys.prepare()
        taken = self.take()
        with mock.patch.object(self.workers, "made", 10):
            self.workers.jobs.pop(0).errback(ValueError("no entropy"))
            self.workers.end()
            self.assertEqual(self.successResultOf(taken), 11)

    def test_who_gives_up_waiting(self) -> None:
        """That ends it, no other key is begun for it, and the one that is made is there for the next."""
        self.keys.prepare()
        waiting = self.take()
        waiting.cancel()
        self.failureResultOf(waiting, CancelledError)
        self.assertEqual(len(self.workers.jobs), 1)
        self.workers.end()
        self.assertEqual(self.successResultOf(self.take()), 1)
        for _ in range(2 * AHEAD):  # more than are kept
            self.keys.prepare()
            self.take().addErrback(lambda _: None).cancel()
        while self.workers.jobs:
            self.workers.end()
        self.assertLessEqual(len(self.keys._ready), AHEAD + 1)  # one was made ahead meanwhile
