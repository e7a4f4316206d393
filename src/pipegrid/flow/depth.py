"""
How many small objects are worth being under way at once, by how long each takes.

Pure. A server that makes a request of each share (Tahoe-LAFS's do) takes milliseconds of a processor for it,
and what comes faster stands in a queue there. That queue gains nothing, and costs three things: Twisted
copies all of it for each line of a head; the share of a slow server is given up when it is only behind
others of ours; and what is cut off has more to send again. Bytes do not show it, as a thousand of these
shares fit into any window. So what counts here is time: an object that takes a few times as long as the
quickest one has stood in the queue. Such queues are cut to what goes in that time. Before the first cut the
number grows by one with each object, so that it doubles each round trip; then by a few in each.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from pipegrid.arguments import check_whole

FIRST = 32
"""Before anything is known; doubled in the first round trip, if it takes no longer than that."""

LEAST = 16
"""With fewer, ten servers would have nothing to do while one of them answers."""

PATIENT_S = 1.0
LONG = 3.0
"""
An object has queued if it took longer than the first, which is half of what a put waits for a straggler, and
so many times as long as the quickest. A shorter patience left servers idle where large files went between.
"""

STEP = 4
"""More in each round trip, once the servers' pace is known."""


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
        self._cut_s: float | None = None
        self._earned = 0.0

    def ended(self, began_s: float, now_s: float, under_way: int) -> None:
        """
        One has been stored.

        Args:
            under_way: how many were, with it; a limit that nobody reaches says nothing.
        """
        took_s = now_s - began_s
        self._quickest_s = min(self._quickest_s, took_s)
        long_s = max(PATIENT_S, LONG * self._quickest_s)
        if took_s <= long_s:
            if under_way >= self.limit:
                self._grow()
        elif (
            self._cut_s is None or began_s >= self._cut_s
        ):  # it did not stand in a queue cut already
            self._cut_s = now_s
            self.limit = max(self._least, int(self.limit * max(0.5, long_s / took_s)))

    def _grow(self) -> None:
        self._earned += 1.0 if self._cut_s is None else STEP / self.limit
        whole = int(self._earned)
        self._earned -= whole
        self.limit = min(self._most, self.limit + whole)
