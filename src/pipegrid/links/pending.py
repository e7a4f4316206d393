"""Calls that are due some time, the next one first: what a clock of one's own keeps."""

from __future__ import annotations

import heapq
from itertools import count

from twisted.internet.base import DelayedCall

_FEW = 64


class PendingCalls:
    """A heap of calls; what an operation costs grows with the logarithm of how many are pending."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, DelayedCall]] = []
        self._numbers = count()
        self._cancelled = 0

    def _push(self, call: DelayedCall) -> None:
        # A call that was moved to an earlier time is here twice; the later entry finds it called.
        heapq.heappush(self._heap, (call.getTime(), next(self._numbers), call))

    def _forget(self, _call: DelayedCall) -> None:
        # Runs while the call still counts as active, so the pruning it asks for is for later ones.
        self._cancelled += 1
        if self._cancelled > _FEW and self._cancelled * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].active()]
            heapq.heapify(self._heap)
            self._cancelled = 0

    def _next(self) -> DelayedCall | None:
        """Return the next call, which is the first in the heap; None if nothing is pending."""
        heap = self._heap
        while heap:
            time_s, _, call = heap[0]
            if not call.active():
                heapq.heappop(heap)
            elif call.getTime() > time_s:
                # Twisted tells nobody when a call is put off.
                heapq.heapreplace(heap, (call.getTime(), next(self._numbers), call))
            else:
                return call
        return None
