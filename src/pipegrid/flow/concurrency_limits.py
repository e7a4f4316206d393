"""
Limits on concurrent work: how many small objects are stored at the same time, and how much memory transfers
use.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum

from twisted.internet.defer import Deferred

from pipegrid.argument_checks import check_whole

# A server that needs a request for each share, as Tahoe-LAFS's do, takes milliseconds of CPU time for a
# request, and further requests wait in a queue at the server. A longer queue gains nothing and has three
# costs: Twisted copies the whole queue for each header line; a share upload is given up as too slow although
# it only waits for our other requests; and after a lost connection more must be sent again. The window does
# not prevent a long queue, since thousands of these shares fit into a window. So the limit follows the time
# that objects take: if objects usually take several times as long as the quickest object did, they queue, and
# the limit shrinks. Before the limit shrinks for the first time, it grows by one with each stored object, and
# so doubles in each round trip; after that it grows by ``STEP`` in each round trip. Times are seconds of one
# monotonic clock.

INITIAL_LIMIT = 64
"""The initial limit, or ``most`` if less; it doubles in the first round trip unless objects queue."""

FEW = 4
"""The limit while a cheaper protocol is set up, low enough to leave time and bandwidth for the setup."""

MANY = 128
"""
The number of small objects from which on a cheaper protocol is set up: importing Foolscap takes a quarter of
a second, as long as ten servers on two cores need for ten objects.
"""

MINIMUM_LIMIT = 16
"""The smallest limit; with a smaller one, ten servers would be idle while one server answers."""

QUEUED_S = 1.5
QUEUED_FACTOR = 3.0
"""
Objects count as queued if they take longer than ``QUEUED_S`` and than ``QUEUED_FACTOR`` times the quickest
object. ``QUEUED_S`` is less than the time that a put waits for a straggler; shorter times left servers idle
when large files were sent in between.
"""

SAMPLE_WEIGHT = 1 / 16
"""Weight of a new sample, so low that one object that waited for a large one hardly changes the average."""

STEP = 4
"""How much the limit grows in each round trip after it has shrunk for the first time."""


class SmallFileCapacity(IntEnum):
    """How many small objects a server accepts at the same time, from fewest to most."""

    FEW = 0
    """A cheaper protocol to the server is being set up, and requests would delay the setup."""

    COUNTED = 1
    """Each object costs the server separate requests."""

    ANY = 2
    """Many objects are sent in one message."""


class ConcurrencyLimit:
    """
    A limit on concurrent objects that adapts to the time they take.

    Args:
        most: the largest limit.

    Attributes:
        limit: how many objects may be in flight now.
    """

    def __init__(self, most: int) -> None:
        """
        Raises:
            UsageError: ``most`` is less than 1.
        """
        self._most = check_whole(most, "the number of objects in flight", least=1)
        self._least = min(MINIMUM_LIMIT, most)
        self.limit = min(INITIAL_LIMIT, most)
        self._quickest_s = float("inf")
        self._usual_s = 0.0
        self._cut_s: float | None = None
        self._earned = 0.0

    def has_slot(self, in_flight: int, capacity: SmallFileCapacity) -> bool:
        """Return whether one more object may be in flight."""
        limit = min(FEW, self.limit) if capacity is SmallFileCapacity.FEW else self.limit
        return capacity is SmallFileCapacity.ANY or in_flight < limit

    def ended(self, began_s: float, now_s: float, in_flight: int) -> None:
        """
        Record that an object has been stored.

        Args:
            in_flight: how many objects were in flight, including this one; the limit grows only if they reach
                it.
        """
        if self._cut_s is not None and began_s < self._cut_s:
            return  # it waited in a queue that is shorter now
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


# Before they start, transfers borrow the most memory that they may need. So a hundred small files are
# transferred at the same time, and large ones one after another.


class Budget:
    """
    A budget of ``total`` units, such as bytes of memory, lent first come, first served.

    A request for more than the total gets the total.
    """

    def __init__(self, total: int) -> None:
        assert total > 0
        self.total = total
        self.free = total  # units that are not lent
        self._waiting: deque[tuple[int, Deferred[int]]] = deque()
        self._serving = False

    def lend(self, units: int) -> int | None:
        """
        Return the number of units lent, which must be given back once, or None if ``borrow`` would have to
        wait.
        """
        lent = max(0, min(units, self.total))
        if self._waiting or lent > self.free:
            return None
        self.free -= lent
        return lent

    def borrow(self, units: int) -> Deferred[int]:
        """Return a Deferred that fires with the number of units lent, which must be given back once."""
        lent = max(0, min(units, self.total))
        answer: Deferred[int] = Deferred(self._cancelled)
        self._waiting.append((lent, answer))
        self._serve()
        return answer

    def give_back(self, units: int) -> None:
        """Give back units that were lent."""
        self.free += units
        assert self.free <= self.total, "more was released than was taken"
        self._serve()

    def _serve(self) -> None:
        # A borrower may give units back in its callback; then the outer loop goes on, and the stack does not
        # grow.
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
