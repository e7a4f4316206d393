"""Calls that concern one slot, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk.durability import Policy
from pipegrid.disk.group_commit import GroupCommit
from pipegrid.server.gbs.read_test_write_requests import SlotQueue


class LateWorkers:
    """Runs what it was given when it is told to."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def run(self, function: Any, /, *args: Any, **kwargs: Any) -> Deferred[Any]:
        """Keep it for later."""
        outcome: Deferred[Any] = Deferred()

        def work() -> None:
            try:
                outcome.callback(function(*args, **kwargs))
            except Exception:
                outcome.errback()

        self.waiting.append(work)
        return outcome


class SlotQueueTests(SynchronousTestCase):
    """What runs when."""

    def make(self, policy: Policy = "batch") -> SlotQueue:
        """Return a queue; what happens is noted in ``self.done``."""
        self.done: list[str] = []
        self.workers = LateWorkers()
        return SlotQueue(GroupCommit(self.workers, Clock(), policy))

    def test_reads_wait_for_writes_of_their_slot_only(self) -> None:
        """A read comes after the writes before it, and before those behind; other slots do not wait."""
        queue = self.make()
        for name in ("write 1", "write 2"):
            queue.write(b"slot", self.done.append, name)
        queue.read(b"slot", self.done.append, "read")
        queue.write(b"slot", self.done.append, "write 3")
        queue.read(b"other", self.done.append, "other")
        self.assertEqual(self.done, ["other"])
        self.assertEqual(len(self.workers.waiting), 1)
        self.workers.waiting.pop()()
        self.workers.waiting.pop()()
        self.assertEqual(self.done, ["other", "write 1", "write 2", "read"])
        self.workers.waiting.pop()()
        self.assertEqual(self.done[-1], "write 3")
        self.assertEqual(repr(queue), "<SlotQueue, 0 slots busy>")

    def test_results_and_errors_come_back(self) -> None:
        """Each call gives what its function returned or raised; an error stops nobody else."""
        queue = self.make()
        bad = queue.write(b"slot", int, "no number")
        good = queue.write(b"slot", int, "5")
        also = queue.read(b"slot", int, "neither")
        while self.workers.waiting:
            self.workers.waiting.pop()()
        self.failureResultOf(bad, ValueError)
        self.assertEqual(self.successResultOf(good), 5)
        self.failureResultOf(also, ValueError)

    def test_cancelling_only_gives_up_waiting(self) -> None:
        """What was cancelled happens all the same, and what waits behind it too."""
        queue = self.make()
        first = queue.write(b"slot", self.done.append, "first")
        second = queue.write(b"slot", self.done.append, "second")
        first.cancel()
        second.cancel()
        for each in (first, second):
            self.failureResultOf(each, CancelledError)
        while self.workers.waiting:
            self.workers.waiting.pop()()
        self.assertEqual(self.done, ["first", "second"])

    def test_nothing_waits_without_durability(self) -> None:
        """If nothing is synced no thread is needed."""
        queue = self.make("none")
        self.assertFalse(queue.durable)
        self.successResultOf(queue.write(b"slot", self.done.append, "write"))
        self.assertEqual(self.done, ["write"])
        self.assertEqual(self.workers.waiting, [])

    def test_many_calls_do_not_nest(self) -> None:
        """A thousand reads behind a write do not use up the stack."""
        queue = self.make()
        queue.write(b"slot", self.done.append, "write")
        for _ in range(3000):
            queue.read(b"slot", self.done.append, "read")
        self.workers.waiting.pop()()
        self.assertEqual(len(self.done), 3001)
