"""A thread beside one that must not wait: it does jobs, and the other learns of their ends when it likes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

QUICK_S = 0.003
"""What it takes two threads at most, beside a busy network, to agree whose turn it is, there and back."""

QUICK_JOBS = 2
"""So many have to be quick before one is done at once: data, and the names."""


class Helper:
    """A thread that does jobs in their order, and tells the caller's of their ends."""

    def __init__(self, done: SimpleQueue[Callable[[], None]], wake: Callable[[], None]) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None], bool] | None]
        self._jobs = SimpleQueue()
        self._done = done
        self._wake = wake
        self._thread: Thread | None = None

    def run(self, job: Callable[[], Any], ended: Callable[[Any], None], wakes: bool = True) -> None:
        """
        Do a job; ``ended`` is called in the caller's thread, with what it returned or raised.

        Args:
            wakes: the caller shall learn of it at once, and not only when it looks anyhow.
        """
        if self._thread is None:
            self._thread = Thread(target=self._work, name="mirror", daemon=True)
            self._thread.start()
        self._jobs.put((job, ended, wakes))

    def _work(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, ended, wakes = entry
            self._done.put(_Ended(ended, _outcome(job)))
            del entry, job, ended
            if wakes:
                self._wake()

    def stop(self) -> None:
        """Wait until all jobs are done."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None


class AtOnce:
    """Does jobs in the caller's thread, for where a thread beside it would only cost."""

    def run(self, job: Callable[[], Any], ended: Callable[[Any], None], wakes: bool = True) -> None:
        """Do a job, and call ``ended`` with what it returned or raised."""
        ended(_outcome(job))

    def stop(self) -> None:
        """Nothing is under way."""


class Either:
    """
    A thread for jobs that wait, until they turn out not to: then they are done in the caller's.

    To sync files is a wait for a disk, or takes microseconds if they are in memory; nobody says which.
    Handing over, and back, each time wants the interpreter of a thread that has all else to do: syncing
    the thousand files of a small clone in memory so cost up to a tenth of its time. One slow job, and all are
    the thread's again.
    """

    def __init__(
        self,
        done: SimpleQueue[Callable[[], None]],
        wake: Callable[[], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._helper = Helper(done, wake)
        self._at_once = AtOnce()
        self._now = now
        self._took_s: deque[float] = deque([float("inf")] * QUICK_JOBS, QUICK_JOBS)

    def run(self, job: Callable[[], Any], ended: Callable[[Any], None], wakes: bool = True) -> None:
        """Do a job, one at a time; ``ended`` as ``Helper`` calls it, perhaps before this returns."""

        def timed() -> Any:
            began_s = self._now()
            try:
                return job()
            finally:
                self._took_s.append(self._now() - began_s)

        doer = self._at_once if max(self._took_s) <= QUICK_S else self._helper
        doer.run(timed, ended, wakes)

    def stop(self) -> None:
        """Wait until all jobs are done."""
        self._helper.stop()


def _outcome(job: Callable[[], Any]) -> Any:
    try:
        return job()
    except BaseException as error:
        return error


class _Ended:
    __slots__ = ("_ended", "_result")

    def __init__(self, ended: Callable[[Any], None], result: Any) -> None:
        self._ended = ended
        self._result = result

    def __call__(self) -> None:
        self._ended(self._result)
