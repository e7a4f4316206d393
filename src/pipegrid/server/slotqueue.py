"""
Calling ``Slots`` without blocking the reactor, and in order.

What syncs is called in a thread, since it waits for the disk. What only reads takes less than the way to a
thread and back, and is called here; but it would wait for the slot's lock if a thread had that. So
calls that concern one slot wait for each other. That also gives them the order in which they came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from twisted.internet.defer import Deferred, execute

from pipegrid.disk.durability import Durability

P = ParamSpec("P")
T = TypeVar("T")

_Start = Callable[[], Deferred[Any]]


class SlotQueue:
    """
    Runs what concerns one slot one after the other, in the order of the calls.

    Both protocols' faces share one, since who writes over one may read over the other. How many calls wait is
    bounded by whoever calls: a connection has but a few unanswered requests.

    Attributes:
        durable: whether the policy wants what was written synced; hand it on to ``Slots``.
    """

    def __init__(self, durability: Durability) -> None:
        self.durable = durability.policy != "none"
        self._durability = durability
        self._busy: dict[bytes, deque[_Start]] = {}

    def __repr__(self) -> str:
        return f"<SlotQueue, {len(self._busy)} slots busy>"

    def write(
        self, storage_index: bytes, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Deferred[T]:
        """Call a function that syncs, in a thread if it has to; fires with what it returns."""
        return self._call(storage_index, lambda: self._durability.run(function, *args, **kwargs))

    def read(
        self, storage_index: bytes, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Deferred[T]:
        """Call a function that only reads, here; at once unless writes to this slot are under way."""
        return self._call(storage_index, lambda: execute(function, *args, **kwargs))

    def _call(self, storage_index: bytes, start: Callable[[], Deferred[T]]) -> Deferred[T]:
        # Cancelling gives up waiting for the outcome; what was asked for happens all the same.
        outcome: Deferred[T] = Deferred()

        def start_and_tell() -> Deferred[Any]:
            def tell(result: Any) -> None:
                if not outcome.called:
                    outcome.callback(result)

            return start().addBoth(tell)

        if storage_index in self._busy:
            self._busy[storage_index].append(start_and_tell)
        else:
            self._busy[storage_index] = deque([start_and_tell])
            self._run(storage_index)
        return outcome

    def _run(self, storage_index: bytes) -> None:
        """Run what waits, until something takes its time."""
        waiting = self._busy[storage_index]
        while waiting:
            running = waiting.popleft()()
            if not running.called:
                running.addCallback(lambda _: self._run(storage_index))
                return
        del self._busy[storage_index]
