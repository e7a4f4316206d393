"""The queue of an upload: its running and waiting jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from twisted.internet.defer import Deferred

from pipegrid.flow.concurrency_limits import MANY, ConcurrencyLimit, SmallFileCapacity
from pipegrid.transfer.put.put_many import MAX_BYTES, SMALL_BYTES
from pipegrid.transfer.settings import Limits

P = TypeVar("P")
"""The object of a job, as a hashable key."""

MAX_OBJECTS = 256

UNDECIDED_S = 0.25
SOME = 8
"""
The maximum number of objects that are stored at the same time, until it is known whether there are many small
files. Connecting to servers and ending the walk take as long with eight as with one. In a test with four, ten
servers on two cores stored all ten changed files before the walk had met the thousand unchanged ones.
"""

_HELD_PART = 4
"""Plaintext may take one part in this many of the allowed memory; the rest is for encoded data."""


class _Work(Generic[P]):
    """
    One job: storing or checking an object.

    Attributes:
        stores: whether the job stores the object; otherwise it only checks it.
        began_s: when the job began, in seconds of ``UploadQueue``'s clock.
    """

    __slots__ = ("began_s", "coroutine", "place", "size", "stores")

    def __init__(
        self,
        place: P,
        coroutine: Coroutine[Any, Any, None],
        size: int,
        stores: bool,
        began_s: float = 0.0,
    ) -> None:
        self.place = place
        self.coroutine = coroutine
        self.size = size
        self.stores = stores
        self.began_s = began_s


class UploadQueue(Generic[P]):
    """
    The jobs of one upload, by their objects.

    At most ``MAX_OBJECTS`` objects and ``MAX_BYTES`` of unacknowledged plaintext are in progress. A large
    file counts as at most half of these bytes, so two large files fill the queue, and one leaves space for
    small files. If servers need one request per share, fewer objects are stored at the same time, depending
    on how long storing an object takes (``flow.concurrency_limits``). The grid limits the memory for
    encoding. A batch of the walk is requested when another job may begin, and all its jobs are added; jobs
    that exceed the grid's ``Limits`` begin later.

    Args:
        ended: called with the outcome of a job, a ``Failure`` or None, when its space is free again.
        limits: the limits of the grid, in addition to those of this module.
        seconds: returns the time in seconds of a monotonic clock.
        small_file_capacity: returns how many small files the servers accept at the same time.
        expect: called with the number of small files that will be stored soon, if they are many.

    Attributes:
        held: whether only jobs with ``at_once`` may begin.
    """

    def __init__(
        self,
        ended: Callable[[Any], None],
        limits: Limits,
        seconds: Callable[[], float],
        small_file_capacity: Callable[[], SmallFileCapacity],
        expect: Callable[[int], None] = lambda objects: None,
    ) -> None:
        self._report_ended = ended
        self._seconds = seconds
        self._small_file_capacity = small_file_capacity
        self._expect = expect
        self._met_small = 0
        self._all_met = False
        self._first_s: float | None = None
        self._jobs = limits.jobs
        self._most_objects = min(MAX_OBJECTS, limits.jobs or MAX_OBJECTS)
        held = limits.memory_bytes
        self._most_bytes = MAX_BYTES if held is None else min(MAX_BYTES, held // _HELD_PART)
        self.held = self._beginning = False
        self._later: deque[_Work[P]] = deque()
        self._depth = ConcurrencyLimit(self._most_objects)
        self._storing = 0
        self._weights: dict[P, int] = {}
        self.running: dict[P, Deferred[None]] = {}
        self.weight_bytes = 0

    @property
    def has_space(self) -> bool:
        """Whether another job may be added."""
        return len(self._weights) < self._most_objects and self.weight_bytes < self._most_bytes

    @property
    def is_idle(self) -> bool:
        """Whether no job is running or waiting."""
        return not self._weights

    def begin(
        self,
        size: int,
        coroutine: Coroutine[Any, Any, None],
        place: P,
        stores: bool = True,
        at_once: bool = False,
    ) -> None:
        """
        Add a job; it begins now, or when the limits allow it.

        Args:
            size: bytes of plaintext.
            stores: whether the job stores an object; otherwise it only checks one.
            at_once: whether the job begins now, even if others are held or the limits are reached.
        """
        assert place not in self._weights
        self._weights[place] = 0
        self.weigh(place, size)
        work = _Work(place, coroutine, size, stores)
        if at_once:
            self._start(work)
            return
        self._later.append(work)
        if stores and size <= SMALL_BYTES:
            self._met_small += 1
            if self._met_small % MANY == 0:
                self._expect(MANY)
        self._begin_more()

    def all_met(self) -> None:
        """Record that the walk has ended; jobs are added only as a result of earlier ones."""
        self._all_met = True
        self._begin_more()

    def weigh(self, place: P, left: int) -> bool:
        """Record how many bytes of a job are not acknowledged yet; return whether the job is in the queue."""
        if place not in self._weights:
            return False
        weight = min(left, self._most_bytes // 2)
        self.weight_bytes += weight - self._weights[place]
        self._weights[place] = weight
        return True

    def forget_waiting(self) -> list[Deferred[Any]]:
        """Drop the waiting jobs; return the Deferreds of the running ones."""
        while self._later:
            self._later.pop().coroutine.close()
        return list(self.running.values())

    def _begin_more(self) -> None:
        if self._beginning:
            return  # a job that has just ended calls this again
        self._beginning = True
        while self._later and self._may_begin(self._later[0]):
            self._start(self._later.popleft())
        self._beginning = False

    def hold(self, held: bool) -> None:
        """If ``held``, let only jobs with ``at_once`` begin; otherwise, let all jobs begin again."""
        if held != self.held:
            self.held = held
            self._begin_more()

    def _start(self, work: _Work[P]) -> None:
        self._storing += work.stores
        work.began_s = self._seconds()
        running = Deferred.fromCoroutine(work.coroutine)
        if not running.called:
            self.running[work.place] = running
        running.addBoth(self._ended, work)

    def _may_begin(self, work: _Work[P]) -> bool:
        if self.held or (self._jobs is not None and len(self.running) >= self._jobs):
            return False
        # Checks are not limited here, since one request to a server carries many checks.
        if not work.stores:
            return True
        small_file_capacity = self._small_file_capacity()
        if (
            small_file_capacity is SmallFileCapacity.COUNTED
            and self._is_undecided()
            and self._storing >= SOME
        ):
            return False
        return self._depth.has_slot(self._storing, small_file_capacity)

    def _is_undecided(self) -> bool:
        """Return whether it is still unknown whether there are many small files."""
        if self._all_met or self._met_small >= MANY:
            return False
        now_s = self._seconds()
        if self._first_s is None:
            self._first_s = now_s
        return now_s < self._first_s + UNDECIDED_S

    def _ended(self, outcome: Any, work: _Work[P]) -> None:
        place = work.place
        self.weigh(place, 0)
        del self._weights[place]
        if self.running.pop(place, None) is not None and work.stores and work.size <= SMALL_BYTES:
            self._depth.ended(work.began_s, self._seconds(), self._storing)
        self._storing -= work.stores
        self._begin_more()
        self._report_ended(outcome)
