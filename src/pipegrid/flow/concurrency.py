"""Concurrency limits: memory, per reactor turn, adaptive."""

from __future__ import annotations

from collections import deque
from enum import IntEnum

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from pipegrid.arguments import check_whole

# How many small objects are worth being under way at once, by how long each takes.
#
# Pure. A server that makes a request of each share (Tahoe-LAFS's do) takes milliseconds of a processor
# for it, and what comes faster stands in a queue there. That queue gains nothing, and costs three things:
# Twisted copies all of it for each line of a head; the share of a slow server is given up when it is only
# behind others of ours; and what is cut off has more to send again. Bytes do not show it, as a thousand
# of these shares fit into any window. So what counts here is time: where objects usually take a few times
# as long as the quickest one did, they stand in queues, and fewer are sent. Before the first such cut the
# number grows by one with each object, so that it doubles each round trip; then by a few in each.
#
# Times are seconds of one monotonic clock.

FIRST = 64
"""Before anything is known; doubled in the first round trip, if it takes no longer than that."""

FEW = 4
"""While a better way to the servers is being made: so that time is told, and nothing stands in its way."""

MANY = 128
"""
Small objects that are worth another way: to import Foolscap takes a quarter of a second, as long as ten
servers on two cores need for ten of them.
"""

LEAST = 16
"""With fewer, ten servers would have nothing to do while one of them answers."""

PATIENT_S = 1.5
LONG = 3.0
"""
Objects queue if they take longer than the first, which is less than a put waits for a straggler, and so many
times as long as the quickest. A shorter patience left servers idle where large files went between.
"""

SMOOTHED = 1 / 16
"""One object that stood behind a large one does not speak for the others."""

STEP = 4
"""More in each round trip, once the servers' pace is known."""


class SmallFileCapacity(IntEnum):
    """How many small objects a server bears, the fewest first."""

    FEW = 0
    """It is about to take them in a way that costs it less; what is sent now stands in the way of that."""

    COUNTED = 1
    """Each costs it requests of its own."""

    ANY = 2
    """Many go in one message."""


class ConcurrencyLimit:
    """
    A number of objects that follows what they take.

    Args:
        most: the bound.

    Attributes:
        limit: so many may be under way now.
    """

    def __init__(self, most: int) -> None:
        """
        Raises:
            UsageError: most is less than 1.
        """
        self._most = check_whole(most, "the number of objects in flight", least=1)
        self._least = min(LEAST, most)
        self.limit = min(FIRST, most)
        self._quickest_s = float("inf")
        self._usual_s = 0.0
        self._cut_s: float | None = None
        self._earned = 0.0

    def has_slot(self, under_way: int, appetite: SmallFileCapacity) -> bool:
        """Return whether one more may be under way."""
        limit = min(FEW, self.limit) if appetite is SmallFileCapacity.FEW else self.limit
        return appetite is SmallFileCapacity.ANY or under_way < limit

    def ended(self, began_s: float, now_s: float, under_way: int) -> None:
        """
        One has been stored.

        Args:
            under_way: how many were, with it; a limit that nobody reaches says nothing.
        """
        if self._cut_s is not None and began_s < self._cut_s:
            return  # it stood in a queue that was cut since
        took_s = now_s - began_s
        self._quickest_s = min(self._quickest_s, took_s)
        self._usual_s += (took_s - self._usual_s) * (SMOOTHED if self._usual_s else 1.0)
        long_s = max(PATIENT_S, LONG * self._quickest_s)
        if self._usual_s > long_s:
            self._cut_s = now_s
            self.limit = max(self._least, int(self.limit * max(0.5, 0.8 * long_s / self._usual_s)))
            self._usual_s = 0.8 * long_s
        elif under_way >= self.limit:
            self._grow()

    def _grow(self) -> None:
        self._earned += 1.0 if self._cut_s is None else STEP / self.limit
        whole = int(self._earned)
        self._earned -= whole
        self.limit = min(self._most, self.limit + whole)


# A bounded amount of something, lent in the order of asking.
#
# Transfers borrow the memory that they will need at most before they start, so that a hundred small
# files go side by side, and large ones one behind the other.


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
        assert self.free <= self.total, "more was released than was taken"
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


# Letting the reactor breathe: short pieces of work, a few in each of its turns.
#
# A hundred small files handed over at once would be coded in one go, a quarter of a second in which nothing
# leaves and no answer is heard. In turns, what has been coded is on its way, and servers work on it,
# while the next is.


class PerTurnLimit:
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
