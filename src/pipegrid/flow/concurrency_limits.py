"""Limits on concurrent work: how many small objects are stored at once, and how much memory is used."""

from __future__ import annotations

from collections import deque
from enum import IntEnum

from twisted.internet.defer import Deferred

from pipegrid.argument_checks import check_whole

# A server that needs a request per share, as Tahoe-LAFS's do, takes milliseconds of CPU for each, and
# further requests wait in a queue there. A longer queue gains nothing and has three costs: Twisted copies
# all of it for each header line; the share of a server is given up as too slow although it only waits for
# our other requests; and a lost connection has more to send again. The window does not prevent this, since
# thousands of these shares fit into it. So the number follows the time that objects take: where they
# usually take a few times as long as the quickest did, they queue, and the limit shrinks. Before the first
# such cut the limit grows by one with each object, so that it doubles each round trip; after that by a few
# in each. Times are seconds of one monotonic clock.

INITIAL_LIMIT = 64
"""The initial limit; doubled in the first round trip unless that takes longer than usual."""

FEW = 4
"""
The limit while a cheaper protocol to the servers is being set up, so that it leaves time and bandwidth for
that.
"""

MANY = 128
"""
From this many small objects on, a cheaper protocol is set up: importing Foolscap takes a quarter of a
second, as long as ten servers on two cores need for ten of them.
"""

MINIMUM_LIMIT = 16
"""The smallest limit; with fewer, ten servers would be idle while one of them answers."""

QUEUED_S = 1.5
QUEUED_FACTOR = 3.0
"""
Objects queue if they take longer than ``QUEUED_S``, which is less than the time that a put waits for
a straggler, and this many times as long as the quickest. Shorter times left servers idle when large files
were sent in between.
"""

SAMPLE_WEIGHT = 1 / 16
"""The weight of a new sample, so that one object that waited for a large one does not change the result."""

STEP = 4
"""How much the limit grows in each round trip after the first cut."""


class SmallFileCapacity(IntEnum):
    """How many small objects a server accepts at once, the fewest first."""

    FEW = 0
    """A cheaper protocol to it is being set up, and requests would delay that."""

    COUNTED = 1
    """Each object costs it separate requests."""

    ANY = 2
    """Many objects go in one message."""


class ConcurrencyLimit:
    """
    A limit on concurrent objects that adapts to the time they take.

    Args:
        most: the largest limit.

    Attributes:
        limit: how many may be in flight now.
    """

    def __init__(self, most: int) -> None:
        """
        Raises:
            UsageError: most is less than 1.
        """
        self._most = check_whole(most, "the number of objects in flight", least=1)
        self._least = min(MINIMUM_LIMIT, most)
        self.limit = min(INITIAL_LIMIT, most)
        self._quickest_s = float("inf")
        self._usual_s = 0.0
        self._cut_s: float | None = None
        self._earned = 0.0

    def has_slot(self, in_flight: int, capacity: SmallFileCapacity) -> bool:
        """Return whether one more may be in flight."""
        limit = min(FEW, self.limit) if capacity is SmallFileCapacity.FEW else self.limit
        return capacity is SmallFileCapacity.ANY or in_flight < limit

    def ended(self, began_s: float, now_s: float, in_flight: int) -> None:
        """
        Record that an object has been stored.

        Args:
            in_flight: how many were in flight, including this one; a limit that is not reached cannot be
                judged.
        """
        if self._cut_s is not None and began_s < self._cut_s:
            return  # it waited in a queue that has been cut since
        took_s = now_s - began_s
        self._quickest_s = min(self._quickest_s, took_s)
        self._usual_s += (took_s - self._usual_s) * (SAMPLE_WEIGHT if self._usual_s else 1.0)
        long_s = max(QUEUED_S, QUEUED_FACTOR * self._quickest_s)
        if self._usual_s > long_s:
            self._cut_s = now_s
            self.limit = max(self._least, int(self.limit * max(0.5, 0.8 * long_s / self._usual_s)))
            self._usual_s = 0.8 * long_s
        elif in_flight >= self.limit:
            self._earned += 1.0 if self._cut_s is None else STEP / self.limit
            whole = int(self._earned)
            self._earned -= whole
            self.limit = min(self._most, self.limit + whole)


# Transfers borrow the memory that they will need at most before they start, so that a hundred small files
# are transferred at the same time, and large ones one after another.


class Budget:
    """
    ``total`` units, lent first come, first served.

    A request for more than the total gets the total.
    """

    def __init__(self, total: int) -> None:
        assert total > 0
        self.total = total
        self.free = total  # units that are not lent
        self._waiting: deque[tuple[int, Deferred[int]]] = deque()
        self._serving = False

    def lend(self, units: int) -> int | None:
        """Return the number of units lent, to be given back once; None if ``borrow`` has to wait for them."""
        lent = max(0, min(units, self.total))
        if self._waiting or lent > self.free:
            return None
        self.free -= lent
        return lent

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
        # A borrower may give back at once: then the outer loop continues, so that the stack does not grow.
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
