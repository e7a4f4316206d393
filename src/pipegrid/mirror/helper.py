"""A thread beside one that must not wait: it does jobs, and the other learns of their ends when it likes."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any


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
        """Do nothing: every job was done when it was given."""


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
