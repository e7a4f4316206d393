"""
Letting the reactor breathe: short pieces of work, a few in each of its turns.

A hundred small files handed over at once would be coded in one go, a quarter of a second in which nothing
leaves and no answer is heard. In turns, what has been coded is on its way, and servers work on it, while the
next is.
"""

from __future__ import annotations

from collections import deque

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime


class Turns:
    """
    Admits pieces of work in the order of asking.

    Args:
        per_turn: how many may begin in one turn of the reactor.
    """

    def __init__(self, clock: IReactorTime, per_turn: int) -> None:
        assert per_turn > 0
        self._clock = clock
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[Deferred[None]] = deque()
        self._next_turn: IDelayedCall | None = None

    def begin(self) -> Deferred[None]:
        """Return a Deferred that fires when the work may begin: perhaps at once, else in a later turn."""
        turn: Deferred[None] = Deferred(self._cancelled)
        if self._left and not self._waiting:
            self._left -= 1
            turn.callback(None)
        else:
            self._waiting.append(turn)
            if self._next_turn is None:
                self._next_turn = self._clock.callLater(0, self._turn)
        return turn

    def _turn(self) -> None:
        # Whoever begins when nobody has waited for long may thus wait one turn in vain: that is cheaper
        # than a timer for each beginning.
        self._next_turn = None
        self._left = self._per_turn
        if len(self._waiting) > self._left:
            self._next_turn = self._clock.callLater(0, self._turn)
        while self._waiting and self._left:
            self._left -= 1
            self._waiting.popleft().callback(None)

    def _cancelled(self, turn: Deferred[None]) -> None:
        self._waiting.remove(turn)
        if not self._waiting and self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None
