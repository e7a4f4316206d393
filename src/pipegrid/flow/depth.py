"""
How many small objects are worth being under way at once, by how long each takes.

Pure. A server that makes a request of each share (Tahoe-LAFS's do) takes milliseconds of a processor for it,
and what comes faster stands in a queue there. That queue gains nothing, and costs three things: Twisted
copies all of it for each line of a head; the share of a slow server is given up when it is only behind
others of ours; and what is cut off has more to send again. Bytes do not show it, as a thousand of these
shares fit into any window. So what counts here is time: where objects usually take a few times as long as
the quickest one did, they stand in queues, and fewer are sent. Before the first such cut the number grows by
one with each object, so that it doubles each round trip; then by a few in each.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from enum import IntEnum

from pipegrid.arguments import check_whole

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


class Appetite(IntEnum):
    """How many small objects a server bears, the fewest first."""

    FEW = 0
    """It is about to take them in a way that costs it less; what is sent now stands in the way of that."""

    COUNTED = 1
    """Each costs it requests of its own."""

    ANY = 2
    """Many go in one message."""


class Depth:
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
        self._most = check_whole(most, "the number of objects under way", least=1)
        self._least = min(LEAST, most)
        self.limit = min(FIRST, most)
        self._quickest_s = float("inf")
        self._usual_s = 0.0
        self._cut_s: float | None = None
        self._earned = 0.0

    def allows(self, under_way: int, appetite: Appetite) -> bool:
        """Return whether one more may be under way."""
        limit = min(FEW, self.limit) if appetite is Appetite.FEW else self.limit
        return appetite is Appetite.ANY or under_way < limit

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
