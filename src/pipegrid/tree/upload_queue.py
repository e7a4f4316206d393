"""
What of the upload of a tree is under way, and what waits to begin.

Bounds: of what is under way, ``MAX_OBJECTS`` and ``MAX_BYTES`` of plaintext that is not acknowledged; a
large file counts as half of the bytes at most, so that two of them leave room for nobody, and one for small
ones. Where each share is a request of its own, fewer objects are stored at once, by how long they take
(``flow.concurrency_limits``). What coding takes is bounded by the grid. A batch of the walk comes when there
is room for anything, and is taken whole; what the grid's ``Limits`` allow no more begins later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import attrs
from twisted.internet.defer import Deferred

from pipegrid.flow.concurrency_limits import MANY, ConcurrencyLimit, SmallFileCapacity
from pipegrid.transfer.put.put_many import SMALL_BYTES
from pipegrid.transfer.settings import Limits

P = TypeVar("P")
"""What a piece of work is for; hashable."""

MAX_OBJECTS = 256
MAX_BYTES = 8 << 20
"""As for many files that are stored at once: at 3-of-10 this fills a line of 2 Gbit/s at 100 ms."""

UNDECIDED_S = 0.25
SOME = 8
"""
So long no more than some are stored before many, or all, are known: connections take as long to be made, and
a walk less for as many. With four, ten servers on two cores had done with them before all of a thousand files
were met, of which ten had changed.
"""

_HELD_PART = 4
"""Of the memory that may be taken so much is for plaintext; the rest is for what it is coded to."""


@attrs.define(eq=False)
class _Work(Generic[P]):
    """
    One object that is to be stored, or checked.

    Attributes:
        stores: it is to be stored.
        began_s: when it began.
    """

    place: P
    coroutine: Coroutine[Any, Any, None]
    size: int
    stores: bool
    began_s: float = 0.0


class UploadQueue(Generic[P]):
    """
    The pieces of work of one upload, by what each is for.

    Args:
        ended: called with what came of one, a ``Failure`` or None, when its room is free again.
        limits: of the grid; those of the module hold as well.
        seconds: tells the time.
        small_file_capacity: how many small files the servers bear.
        expect: told how many small ones are about to be stored, where they are many.

    Attributes:
        held: nothing begins but what is to begin at once.
    """

    def __init__(
        self,
        ended: Callable[[Any], None],
        limits: Limits,
        seconds: Callable[[], float],
        small_file_capacity: Callable[[], SmallFileCapacity],
        expect: Callable[[int], None] = lambda objects: None,
    ) -> None:
        self._tell_ended = ended
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
        """Whether anything more may come."""
        return len(self._weights) < self._most_objects and self.weight_bytes < self._most_bytes

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, or waits to begin."""
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
        Take in a piece of work; it begins now, or when the limits allow.

        Args:
            size: bytes of plaintext.
            stores: it is to store something; else it looks whether something is stored.
            at_once: it begins before others, and also while they are held.
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
        """Nothing more comes but what follows from what has come."""
        self._all_met = True
        self._begin_more()

    def weigh(self, place: P, left: int) -> bool:
        """So many bytes of it are not acknowledged; returns whether it is under way at all."""
        if place not in self._weights:
            return False
        weight = min(left, self._most_bytes // 2)
        self.weight_bytes += weight - self._weights[place]
        self._weights[place] = weight
        return True

    def forget_waiting(self) -> list[Deferred[Any]]:
        """Let nothing more begin; returns what runs."""
        while self._later:
            self._later.pop().coroutine.close()
        return list(self.running.values())

    def _begin_more(self) -> None:
        if self._beginning:
            return  # something ended at once
        self._beginning = True
        while self._later and self._may_begin(self._later[0]):
            self._start(self._later.popleft())
        self._beginning = False

    def hold(self, held: bool) -> None:
        """Let nothing begin but what is to begin at once; or let it again."""
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
        # Questions are many to a message, whatever the server.
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
        """Whether it is not known yet if there are many."""
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
        self._tell_ended(outcome)
