"""What pipegrid.reactor.workers promises, with real threads and a reactor that the test turns."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from twisted.internet import defer
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorCore, IReactorFromThreads
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import directlyProvides

from pipegrid.errors import UsageError
from pipegrid.reactor.workers import WORTH_A_THREAD_BYTES, CpuWorkers, Workers
from pipegrid.testing.grid import InlineWorkers

PATIENCE_S = 30.0  # how long a broken test waits; a sound one does not wait


class Turnable:
    """A reactor that runs what threads hand to it when the test says so."""

    def __init__(self) -> None:
        self.calls: queue.Queue[Callable[[], object]] = queue.Queue()
        self.shutdown: list[Callable[[], object]] = []
        directlyProvides(self, IReactorFromThreads, IReactorCore)

    def callFromThread(self, f: Callable[..., object], *args: object, **kw: object) -> None:
        self.calls.put(lambda: f(*args, **kw))

    def addSystemEventTrigger(self, phase: str, event: str, f: Callable[[], object]) -> Any:
        assert (phase, event) == ("before", "shutdown")
        self.shutdown.append(f)
        return f

    def removeSystemEventTrigger(self, trigger: Any) -> None:
        self.shutdown.remove(trigger)

    def turn_until(self, deferred: Deferred[Any]) -> None:
        while not deferred.called:
            self.calls.get(timeout=PATIENCE_S)()


def pool_threads() -> set[threading.Thread]:
    """All threads that belong to workers."""
    return {t for t in threading.enumerate() if "pipegrid" in t.name}


class WorkersTests(SynchronousTestCase):
    """Jobs run in threads, in order, and leave nothing behind."""

    def setUp(self) -> None:
        self.reactor = Turnable()
        self.workers: Workers = Workers(self.reactor, threads=1)  # type: ignore[arg-type]
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.ran: list[str] = []
        self.addCleanup(self.finish)

    def finish(self) -> None:
        self.gate.set()
        self.reactor.turn_until(self.workers.stop())
        self.assertEqual(pool_threads(), set())

    def test_no_more_threads(self) -> None:
        """Work is done by those there are; without any, by the reactor's: it ends in any case."""

        def refuse(*_: object) -> None:
            raise RuntimeError("can't start new thread")

        self.patch(threading.Thread, "start", refuse)
        running = self.workers.run(lambda: 7)
        self.reactor.turn_until(running)
        self.assertEqual(self.successResultOf(running), 7)

    def block(self) -> str:
        self.begun.set()
        assert self.gate.wait(PATIENCE_S)
        self.ran.append("blocked")
        return "done"

    def note(self, name: str) -> None:
        self.ran.append(name)

    def test_runs_in_another_thread(self) -> None:
        """The function runs elsewhere, its result arrives through the reactor."""
        job = self.workers.run(threading.get_ident)
        self.reactor.turn_until(job)
        self.assertNotEqual(self.successResultOf(job), threading.get_ident())

    def test_no_thread_before_the_first_job(self) -> None:
        """Workers that are never used cost nothing."""
        self.assertEqual(pool_threads(), set())
        self.assertEqual(self.reactor.shutdown, [])

    def test_failures_arrive(self) -> None:
        """What the function raises fails the Deferred."""
        job = self.workers.run(int, "x")
        self.reactor.turn_until(job)
        self.failureResultOf(job, ValueError)

    def test_jobs_run_in_order(self) -> None:
        """With one thread, first come is first served."""
        jobs = [self.workers.run(self.note, str(number)) for number in range(20)]
        self.reactor.turn_until(jobs[-1])
        self.assertEqual(self.ran, [str(number) for number in range(20)])

    def test_a_waiting_job_is_dropped_when_cancelled(self) -> None:
        """Whether it waits here or in the pool, it never runs."""
        running = self.workers.run(self.block)
        jobs = [self.workers.run(self.note, str(number)) for number in range(4)]
        for number in (0, 2):
            jobs[number].cancel()
            self.failureResultOf(jobs[number], defer.CancelledError)
        self.gate.set()
        self.reactor.turn_until(jobs[-1])
        self.assertEqual(self.ran, ["blocked", "1", "3"])
        self.successResultOf(running)

    def test_a_running_job_finishes_and_its_result_is_discarded(self) -> None:
        """Cancelling stops the waiting at once; the thread goes on to its end."""
        running = self.workers.run(self.block)
        self.assertTrue(self.begun.wait(PATIENCE_S))
        running.cancel()
        self.failureResultOf(running, defer.CancelledError)
        self.gate.set()
        self.reactor.turn_until(self.workers.run(self.note, "next"))
        self.assertEqual(self.ran, ["blocked", "next"])

    def test_too_many_waiting_jobs_are_refused(self) -> None:
        """The queue is bounded; a caller that waits for its results never meets the bound."""
        self.workers = Workers(self.reactor, threads=1, waiting_limit=3)  # type: ignore[arg-type]
        running = self.workers.run(self.block)
        jobs = [self.workers.run(self.note, str(number)) for number in range(4)]
        with self.assertRaisesRegex(UsageError, "3 jobs wait"):
            self.workers.run(self.note, "one too many")
        self.gate.set()
        self.reactor.turn_until(jobs[-1])
        self.successResultOf(running)

    def test_stop_waits_for_running_jobs_and_drops_the_others(self) -> None:
        """The running job still delivers; no thread is left."""
        running = self.workers.run(self.block)
        self.assertTrue(self.begun.wait(PATIENCE_S))
        jobs = [self.workers.run(self.note, str(number)) for number in range(4)]
        stopped = self.workers.stop()
        self.assertNoResult(stopped)
        self.gate.set()
        self.reactor.turn_until(stopped)
        self.assertEqual(self.successResultOf(running), "done")
        for job in jobs:
            self.failureResultOf(job, defer.CancelledError)
        self.assertEqual(self.ran, ["blocked"])
        self.assertEqual(pool_threads(), set())
        self.assertEqual(self.reactor.shutdown, [])
        with self.assertRaises(UsageError):
            self.workers.run(self.note, "late")

    def test_the_reactor_stops_them_when_it_shuts_down(self) -> None:
        """Forgotten workers do not keep the process alive."""
        job = self.workers.run(self.note, "a")
        self.reactor.turn_until(job)
        (trigger,) = self.reactor.shutdown
        stopped = trigger()
        assert isinstance(stopped, Deferred)
        self.successResultOf(stopped)
        self.assertEqual(pool_threads(), set())

    def test_what_comes_when_the_reactor_has_stopped_them(self) -> None:
        """It is cancelled, as is what waited: whoever goes on has done nothing wrong."""
        waiting: list[Deferred[Any]] = [self.workers.run(self.block)]
        self.assertTrue(self.begun.wait(PATIENCE_S))
        waiting += [self.workers.run(self.note, "waits") for _ in range(4)]
        (trigger,) = self.reactor.shutdown
        stopped = trigger()
        assert isinstance(stopped, Deferred)
        late = self.workers.run(self.note, "late")
        self.gate.set()
        self.reactor.turn_until(stopped)
        self.successResultOf(waiting[0])
        for job in (*waiting[1:], late):
            self.failureResultOf(job, defer.CancelledError)
        self.assertEqual(self.ran, ["blocked"])

    def test_small_work_stays_here(self) -> None:
        """Below the threshold the function runs at once, in this thread."""
        here = self.workers.run_if_large(WORTH_A_THREAD_BYTES - 1, threading.get_ident)
        self.assertEqual(self.successResultOf(here), threading.get_ident())
        there = self.workers.run_if_large(WORTH_A_THREAD_BYTES, threading.get_ident)
        self.reactor.turn_until(there)
        self.assertNotEqual(self.successResultOf(there), threading.get_ident())

    def test_no_threads_is_refused(self) -> None:
        """Nobody would ever do the work."""
        with self.assertRaises(UsageError):
            Workers(self.reactor, threads=0)  # type: ignore[arg-type]


class InlineWorkersTests(SynchronousTestCase):
    """The same, here and now."""

    def test_runs_at_once(self) -> None:
        """Results and failures are there when run returns."""
        workers: CpuWorkers = InlineWorkers()
        self.assertEqual(self.successResultOf(workers.run(int, "7")), 7)
        self.failureResultOf(workers.run(int, "x"), ValueError)
        self.assertEqual(self.successResultOf(workers.run_if_large(1 << 20, int, "7")), 7)

    def test_takes_nothing_after_stop(self) -> None:
        """Stopped is stopped, as with threads."""
        workers = InlineWorkers()
        self.successResultOf(workers.stop())
        with self.assertRaises(UsageError):
            workers.run(int, "7")
