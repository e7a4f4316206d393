"""CPU work in a few threads: hashing, encryption and coding, with results in the reactor's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from twisted.internet import defer
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorCore, IReactorFromThreads
from twisted.python.failure import Failure

from pipegrid.errors import UsageError
from pipegrid.reactor.blocking_calls import BlockingCall, BlockingCalls
from pipegrid.reactor.deferreds import Waiters
from pipegrid.reactor.process_settings import start_thread

P = ParamSpec("P")
T = TypeVar("T")

WORTH_A_THREAD_BYTES = 128 << 10
"""
From this size on a thread is used to process the bytes once, such as for SHA-256. Using a thread takes about
35 microseconds on an idle machine, in which a core with SHA instructions hashes 64 KiB: for less, the
reactor would be busy longer with the thread than with the work.
"""

WAITING_LIMIT = 1024
"""Limit of jobs that wait for a thread: far more than ten servers' encoders ever have at once."""


class CpuWorkers(Protocol):
    """Runs functions that take long, in any thread."""

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """Fire with the function's result, or fail with its exception."""

    def run_if_large(
        self, size_bytes: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Deferred[T]:
        """Run it as ``run`` does if it processes enough bytes for a thread, else at once."""

    def run_blocking(
        self,
        function: Callable[Concatenate[BlockingCall, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Deferred[T]:
        """Run a function that may wait for another program for ever; see ``BlockingCalls``."""

    def stop(self) -> Deferred[None]:
        """Accept no more jobs, cancel those that have not begun, fire when the others have ended."""


class _Job:
    """One function call and its Deferred. Threads use ``call`` and ``dropped``."""

    def __init__(self, call: Callable[[], Any], cancel: Callable[[_Job], None]) -> None:
        self.call: Callable[[], Any] | None = call
        self.dropped = False
        self.deferred: Deferred[Any] = Deferred(lambda _: cancel(self))


class Workers:
    """
    Runs jobs in its own threads, which start with the first job. Call it from the reactor's thread only.

    That pays only for functions that release the GIL for most of their time, as hashlib, pycryptodome and
    zfec do on large buffers, and for enough work at once: see ``WORTH_A_THREAD_BYTES``. At most ``threads``
    jobs run, as many again are queued so that no thread waits for the reactor, and the others wait in
    order. More than ``waiting_limit`` of them is an error of a caller that does not wait.

    A job that has not begun is dropped when it is cancelled. A running one cannot be interrupted: it
    finishes, and its result is dropped. Its buffers must not change until ``stop`` has fired, or must be
    owned by the job alone. A function that may wait for another program would block a thread for ever; use
    ``run_blocking`` for it.

    The threads read a ``SimpleQueue``. Twisted's pool passes each job through two locks, a condition and a
    logging context, and takes up to twice as long.
    """

    def __init__(
        self, reactor: IReactorFromThreads, threads: int = 2, waiting_limit: int = WAITING_LIMIT
    ) -> None:
        """
        Args:
            reactor: passes on the results; if it can shut down, it first waits for ``stop``.
            threads: how many jobs run at once; more than the number of cores gains nothing.

        Raises:
            UsageError: there is not at least one thread.
        """
        if threads < 1:
            raise UsageError(f"work cannot be done by {threads} threads; give at least 1")
        self._reactor = reactor
        self._threads = threads
        self._waiting_limit = waiting_limit
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()  # None: the end of a thread
        self._started: list[Thread] = []
        self._shutdown_trigger: Any = None
        self._waiting: deque[_Job] = deque()
        self._handed_over: set[_Job] = set()
        self._ended_all: Waiters[None] = Waiters()
        self._stopped = self._reactor_stopped = False
        self._blocking = BlockingCalls(reactor)

    def __repr__(self) -> str:
        state = "stopped" if self._stopped else "open"
        return (
            f"<Workers {state}: {self._threads} threads, {len(self._handed_over)} jobs handed over, "
            f"{len(self._waiting)} waiting>"
        )

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """
        Run the function in a thread, when one is free.

        Raises:
            UsageError: stopped, or ``waiting_limit`` jobs wait already.

        After the reactor has stopped the workers, jobs are cancelled, as are those that have not begun.
        """
        if self._reactor_stopped:
            return defer.fail(defer.CancelledError())
        if self._stopped:
            raise UsageError("these workers have been stopped; make new ones")
        if len(self._waiting) >= self._waiting_limit:
            raise UsageError(
                f"{self._waiting_limit} jobs wait for a thread already; wait for results in between"
            )
        job = _Job(lambda: function(*args, **kwargs), self._cancel)
        self._waiting.append(job)
        self._hand_over()
        return job.deferred

    def run_if_large(
        self, size_bytes: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Deferred[T]:
        """Run the function in a thread if ``size_bytes`` is enough for one, else in this thread."""
        if size_bytes < WORTH_A_THREAD_BYTES:
            return defer.execute(function, *args, **kwargs)
        return self.run(function, *args, **kwargs)

    def run_blocking(
        self,
        function: Callable[Concatenate[BlockingCall, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Deferred[T]:
        """
        Run a function that may wait for another program, in a separate thread.

        Raises:
            UsageError: stopped.
        """
        if self._stopped:
            raise UsageError("these workers have been stopped; make new ones")
        return self._blocking.run(function, *args, **kwargs)

    def stop(self) -> Deferred[None]:
        """
        Cancel the jobs that have not begun, and all blocking calls; fire when all others and their threads
        have ended.

        A second call waits for the same end.
        """
        self._stopped = True
        self._blocking.stop()
        while self._waiting:
            self._waiting[0].deferred.cancel()
        stopped = self._ended_all.wait()
        for job in self._handed_over:
            job.dropped = True
        self._end_if_idle()
        return stopped

    def _hand_over(self) -> None:
        while self._waiting and len(self._handed_over) < 2 * self._threads:
            if len(self._started) < min(self._threads, len(self._handed_over) + 1):
                self._start_thread()  # if the system has no more, the existing ones do it
            job = self._waiting.popleft()
            self._handed_over.add(job)
            if self._started:
                self._queue.put(job)
            else:  # slower, but it never waits for ever
                self._reactor.callFromThread(self._work, job)

    def _start_thread(self) -> None:
        thread = Thread(target=self._serve, name=f"pipegrid-{len(self._started)}")
        if not start_thread(thread):
            return
        if not self._started and IReactorCore.providedBy(self._reactor):
            # Idle threads would keep the process alive for ever.
            self._shutdown_trigger = self._reactor.addSystemEventTrigger(
                "before", "shutdown", self._shut_down
            )
        self._started.append(thread)

    def _shut_down(self) -> Deferred[None]:
        self._shutdown_trigger = None  # it is being fired, and so cannot be removed
        self._reactor_stopped = True
        return self.stop()

    def _serve(self) -> None:
        """In a thread: run jobs until None."""
        while (job := self._queue.get()) is not None:
            self._work(job)
            del job  # release what it holds while there is nothing to do

    def _work(self, job: _Job) -> None:
        """In a thread: run the job, unless it was cancelled."""
        result: object
        call, job.call = job.call, None
        assert call is not None
        if job.dropped:
            result = Failure(defer.CancelledError())
        else:
            try:
                result = call()
            except BaseException:
                result = Failure()
        # The function's buffers must not live until the next job.
        del call
        self._reactor.callFromThread(self._ended, job, result)

    def _ended(self, job: _Job, result: object) -> None:
        self._handed_over.remove(job)
        self._hand_over()
        if not job.deferred.called:
            job.deferred.callback(result)  # a Failure calls the errbacks
        self._end_if_idle()

    def _cancel(self, job: _Job) -> None:
        # The Deferred fails with CancelledError as soon as this returns.
        job.dropped = True
        if job in self._waiting:
            self._waiting.remove(job)

    def _end_if_idle(self) -> None:
        if not self._stopped or self._handed_over:
            return
        for _ in self._started:
            self._queue.put(None)
        for thread in self._started:
            # Each has passed on its result and is about to wait, so joining takes no time.
            thread.join()
        self._started.clear()
        if self._shutdown_trigger is not None:
            trigger, self._shutdown_trigger = self._shutdown_trigger, None
            if IReactorCore.providedBy(self._reactor):
                self._reactor.removeSystemEventTrigger(trigger)
        self._ended_all.fire(None)
