"""
A bounded amount of something, lent in the order of asking.

Transfers borrow the memory that they will need at most before they start, so that a hundred small
files go side by side, and large ones one behind the other.
"""

from __future__ import annotations

from collections import deque

from twisted.internet.defer import Deferred


class Budget:
    """
    ``total`` units, lent first come, first served.

    Whoever asks for more than there is in all gets all of it.
    """

    def __init__(self, total: int) -> None:
        assert total > 0
        self.total = total
        self.free = total  # how many nobody has borrowed
        self._waiting: deque[tuple[int, Deferred[int]]] = deque()
        self._serving = False

    def borrow(self, units: int) -> Deferred[int]:
        """Return a Deferred that fires with the number of units lent, to be given back once."""
        lent = max(0, min(units, self.total))
        answer: Deferred[int] = Deferred(self._cancelled)
        self._waiting.append((lent, answer))
        self._serve()
        return answer

    def give_back(self, units: int) -> None:
        """Return units that were lent."""
        self.free += units
        assert self.free <= self.total, "more was given back than was lent"
        self._serve()

    def _serve(self) -> None:
        # Whoever is served may give back at once: then the loop goes on, and the stack does not grow.
        if self._serving:
            return
        self._serving = True
        try:
            while self._waiting and self._waiting[0][0] <= self.free:
                units, answer = self._waiting.popleft()
                self.free -= units
                answer.callback(units)
        finally:
            self._serving = False

    def _cancelled(self, answer: Deferred[int]) -> None:
        self._waiting = deque(entry for entry in self._waiting if entry[1] is not answer)
        self._serve()
