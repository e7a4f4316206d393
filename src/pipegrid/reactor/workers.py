"""
Runs functions in threads, and delivers results in the reactor's thread. A few shared threads do CPU work,
such as hashing, encryption and coding; calls that may wait for another program for ever, such as reading a
pipe, each get their own thread.
"""

from __future__ import annotations

import errno
import os
import select
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from twisted.internet import defer
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorCore, IReactorFromThreads
from twisted.python.failure import Failure

from pipegrid.errors import UsageError
from pipegrid.reactor.deferreds import Waiters
from pipegrid.reactor.process_settings import start_thread

P = ParamSpec("P")
T = TypeVar("T")

NO_THREAD = "it takes a thread, and the system gives no more; see 'ulimit -u'"

BLOCKING_LIMIT = 256
"""The most blocking calls at the same time; each takes a thread and up to four descriptors."""


class BlockingCall:
    """
    The link between a blocking call and the reactor: the call waits through this object in its thread, and
    the reactor cancels the call through it.
    """

    def __init__(self) -> None:
        self._woken, self._wake = os.pipe()
        self._lock = Lock()
        self._given_up = False
        self._undo: list[Callable[[], object]] = []

    def check(self) -> None:
        """Raise CancelledError if the call was cancelled."""
        if self._given_up:
            raise defer.CancelledError

    def wait_readable(self, fd: int) -> None:
        """
        Wait until a descriptor can be read or is at its end; raise CancelledError if the call is cancelled.
        """
        self._wait(fd, select.POLLIN)

    def wait_writable(self, fd: int) -> None:
        """
        Wait until a descriptor can be written or has failed; raise CancelledError if the call is cancelled.
        """
        self._wait(fd, select.POLLOUT)

    def sleep(self, seconds: float) -> None:
        """Wait for some seconds; raise CancelledError if the call is cancelled."""
        self._wait(None, 0, seconds)

    def undo(self, action: Callable[[], object]) -> None:
        """
        Register a function that runs, in the reactor's thread, when the call is cancelled. If the call is
        already cancelled, run the function now, in this thread, and raise CancelledError.
        """
        with self._lock:
            if not self._given_up:
                self._undo.append(action)
                return
        action()
        raise defer.CancelledError

    def _wait(self, fd: int | None, event: int, seconds: float | None = None) -> None:
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        if fd is not None:
            poll.register(fd, event)
        poll.poll(None if seconds is None else 1000 * seconds)
        self.check()

    # Methods for the reactor's thread.

    def give_up(self) -> None:
        """Cancel the call; must be called at most once."""
        with self._lock:
            self._given_up = True
            actions, self._undo = self._undo, []
            os.close(self._wake)
        for action in actions:
            with suppress(Exception):  # it should release something; a failure cannot be handled
                action()

    def ended(self) -> None:
        """Release the descriptors after the thread has ended; called once, in the reactor's thread."""
        os.close(self._woken)
        if not self._given_up:
            os.close(self._wake)


class _Entry:
    """One call, and the Deferred for its result."""

    def __init__(
        self, work: Callable[[BlockingCall], Any], cancel: Callable[[_Entry], None]
    ) -> None:
        self.work = work
        self.call: BlockingCall | None = None
        self.deferred: Deferred[Any] = Deferred(lambda _: cancel(self))


class BlockingCalls:
    """
    Runs functions that may wait for ever; may be called only from the reactor's thread.

    When the Deferred of a call is cancelled, or all calls are stopped, the Deferred fails at once, and the
    functions that the call has registered with ``undo`` run. The thread ends as soon as the call uses its
    ``BlockingCall``; a wait for a descriptor is interrupted. A thread that waits inside another object's
    ``read`` or ``write`` cannot be interrupted; the thread ends when that method returns, and its result is
    dropped. Threads are daemons, which do not keep the process alive.

    At most ``BLOCKING_LIMIT`` threads run, including those of cancelled calls; further calls wait in order.
    """

    def __init__(self, reactor: IReactorFromThreads) -> None:
        self._reactor = reactor
        self._threads: set[_Entry] = set()
        self._waiting: deque[_Entry] = deque()

    def __repr__(self) -> str:
        return f"<BlockingCalls: {len(self._threads)} running, {len(self._waiting)} waiting>"

    def run(
        self,
        function: Callable[Concatenate[BlockingCall, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Deferred[T]:
        """
        Run a function; fires with its result. The first argument of the function is its ``BlockingCall``.
        """
        entry = _Entry(lambda call: function(call, *args, **kwargs), self._cancel)
        self._waiting.append(entry)
        self._start_next()
        return entry.deferred

    def stop(self) -> None:
        """Cancel all calls: their Deferreds fail with CancelledError."""
        for entry in [*self._waiting, *self._threads]:
            entry.deferred.cancel()

    def _start_next(self) -> None:
        while self._waiting and len(self._threads) < BLOCKING_LIMIT:
            entry = self._waiting.popleft()
            try:
                self._start(entry)
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
                if isinstance(error, RuntimeError):
                    error = OSError(errno.EAGAIN, NO_THREAD)
                entry.deferred.errback(Failure(error))

    def _start(self, entry: _Entry) -> None:
        call = BlockingCall()
        thread = Thread(
            target=self._serve, args=(entry, call), name="pipegrid-blocking", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            call.ended()
            raise
        entry.call = call
        self._threads.add(entry)

    def _serve(self, entry: _Entry, call: BlockingCall) -> None:
        """Run in a thread: make the call, and pass its result to the reactor."""
        try:
            result = entry.work(call)
        except BaseException:
            result = Failure()
        self._reactor.callFromThread(self._ended, entry, call, result)

    def _ended(self, entry: _Entry, call: BlockingCall, result: object) -> None:
        self._threads.discard(entry)
        call.ended()
        if not entry.deferred.called:
            entry.deferred.callback(result)  # a Failure calls the errbacks
        self._start_next()

    def _cancel(self, entry: _Entry) -> None:
        # The Deferred fails with CancelledError as soon as this returns.
        if entry.call is not None:
            entry.call.give_up()
        elif entry in self._waiting:
            self._waiting.remove(entry)


WORTH_A_THREAD_BYTES = 128 << 10
"""
The least number of bytes for which work that processes each byte once, such as SHA-256, is worth a thread.
Using a thread takes about 35 microseconds on an idle machine; in that time a core with SHA instructions
hashes 64 KiB. For fewer bytes, the thread would cost the reactor more time than the work itself.
"""

WAITING_LIMIT = 1024
"""The most jobs that may wait for a thread: far more than the encoders for ten servers ever need at once."""


class CpuWorkers(Protocol):
    """Runs functions that take much CPU time, possibly in other threads."""

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Deferred[T]:
        """Run a function; fires with its result, or fails with its exception."""

    def run_if_large(
        self, size_bytes: int, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Deferred[T]:
        """
        Run a function as ``run`` does if it processes enough bytes to be worth a thread; otherwise call it at
        once.
        """

    def run_blocking(
        self,
        function: Callable[Concatenate[BlockingCall, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Deferred[T]:
        """Run a function that may wait for another program for ever; see ``BlockingCalls``."""

    def stop(self) -> Deferred[None]:
        """Accept no more jobs, cancel jobs that have not begun, and fire when the running jobs have ended."""


class _Job:
    """One function call and its Deferred. Threads use ``call`` and ``dropped``."""

    def __init__(self, call: Callable[[], Any], cancel: Callable[[_Job], None]) -> None:
        self.call: Callable[[], Any] | None = call
        self.dropped = False
        self.deferred: Deferred[Any] = Deferred(lambda _: cancel(self))


class Workers:
    """
    Runs jobs in its own threads, which start with the first job. For use in the reactor's thread only.

    Threads help only functions that release the GIL for most of their time, as hashlib, pycryptodome and zfec
    do on large buffers, and only with enough work per call: see ``WORTH_A_THREAD_BYTES``. At most ``threads``
    jobs run, as many again are queued so that no thread waits for the reactor, and further jobs wait in
    order. If more than ``waiting_limit`` jobs wait, ``run`` raises an error: the caller should have waited
    for earlier jobs.

    A job that has not begun is dropped when it is cancelled. A running job cannot be interrupted: it
    finishes, and its result is dropped. The job's buffers must not change until ``stop`` has fired, or must
    be owned by the job alone. A function that may wait for another program would block a thread for ever; use
    ``run_blocking`` for it.

    The threads read a ``SimpleQueue``. Twisted's pool passes each job through two locks, a condition and a
    logging context, and takes up to twice as long.
    """

    def __init__(
        self, reactor: IReactorFromThreads, threads: int = 2, waiting_limit: int = WAITING_LIMIT
    ) -> None:
        """
        Args:
            reactor: passes on the results; if it is a real reactor, its shutdown waits for ``stop``.
            threads: how many jobs run at once; more threads than cores gain nothing.

        Raises:
            UsageError: ``threads`` is less than one.
        """
        if threads < 1:
            raise UsageError(f"work cannot be done by {threads} threads; give at least 1")
        self._reactor = reactor
        self._threads = threads
        self._waiting_limit = waiting_limit
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()  # None ends a thread
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
        Run the function in a thread as soon as one is free.

        Raises:
            UsageError: the workers were stopped, or ``waiting_limit`` jobs wait already.

        After a shutdown of the reactor has stopped the workers, new jobs are cancelled at once instead.
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
        """Run the function in a thread if ``size_bytes`` is worth one; otherwise in this thread."""
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
            UsageError: the workers were stopped.
        """
        if self._stopped:
            raise UsageError("these workers have been stopped; make new ones")
        return self._blocking.run(function, *args, **kwargs)

    def stop(self) -> Deferred[None]:
        """
        Cancel the jobs that have not begun, and all blocking calls; fire when all running jobs and their
        threads have ended.

        A further call returns a Deferred that fires at the same time.
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
                self._start_thread()  # may fail: then the existing threads take the job
            job = self._waiting.popleft()
            self._handed_over.add(job)
            if self._started:
                self._queue.put(job)
            else:  # no thread at all: run the job in the reactor's thread
                self._reactor.callFromThread(self._work, job)

    def _start_thread(self) -> None:
        thread = Thread(target=self._serve, name=f"pipegrid-{len(self._started)}")
        if not start_thread(thread):
            return
        if not self._started and IReactorCore.providedBy(self._reactor):
            # Stop the threads at shutdown: idle threads would keep the process alive for ever.
            self._shutdown_trigger = self._reactor.addSystemEventTrigger(
                "before", "shutdown", self._shut_down
            )
        self._started.append(thread)

    def _shut_down(self) -> Deferred[None]:
        self._shutdown_trigger = None  # the trigger is firing now, so it cannot be removed
        self._reactor_stopped = True
        return self.stop()

    def _serve(self) -> None:
        """Run in a thread: run jobs until the queue returns None."""
        while (job := self._queue.get()) is not None:
            self._work(job)
            del job  # release the job's objects before waiting for the next job

    def _work(self, job: _Job) -> None:
        """Run in a thread: run the job, unless it was cancelled."""
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
        # Release the function's buffers before the next job.
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
            # Each thread has passed on its result and is about to wait, so joining takes no time.
            thread.join()
        self._started.clear()
        if self._shutdown_trigger is not None:
            trigger, self._shutdown_trigger = self._shutdown_trigger, None
            if IReactorCore.providedBy(self._reactor):
                self._reactor.removeSystemEventTrigger(trigger)
        self._ended_all.fire(None)
