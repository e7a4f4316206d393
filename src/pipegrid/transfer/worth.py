"""
Which of several streams bring next to nothing, while others get on.

A server that sends a byte now and then is never silent. Who wants all of its stream waits for years: one such
server among honest ones was enough to keep every verification, and every repair, from ending. So a stream has
to be worth the waiting, too.

A slow line is no server's fault, and all streams share it. So a stream is judged by what others bring: it is
given up if it has had as long as silence may last, and brought on average less than 1000 bytes a second *and*
less than a twentieth of what the fastest stream did at its best. Where there is nobody to compare it with, as
where every server is such a one, it has ten times as long, and then 100 bytes a second are enough.

Its time begins with its first byte, for before that it may wait behind others; and while we hold it back, it
stands still.
"""

from __future__ import annotations

from twisted.internet.interfaces import IReactorTime

from pipegrid.transfer.silence import MOST_TIMES

SLOWEST_BYTES_PER_S = 1000
"""A server wants as much of those who send to it (``server.gbs.timeouts``)."""

SLOWER_TIMES = 20
SLOWEST_OF_ALL_BYTES_PER_S = 100

_LEAST_S = 10.0
"""What came all at once, came in so long: on a slow line what one stream brings at first says little."""


class Streams:
    """
    Those of one operation.

    Args:
        silence_s: how long a server may give no sign of life.

    Attributes:
        best_bytes_per_s: what the fastest has brought at its best.
    """

    def __init__(self, clock: IReactorTime, silence_s: float) -> None:
        self.clock = clock
        self.silence_s = silence_s
        self.best_bytes_per_s = 0.0

    def begin(self) -> StreamWorth:
        """Return what judges one more of them."""
        return StreamWorth(self)


class StreamWorth:
    """
    Whether one stream is worth waiting for.

    Attributes:
        came_bytes: what it has brought.
    """

    def __init__(self, streams: Streams) -> None:
        self.came_bytes = 0
        self._streams = streams
        self._began_s: float | None = None
        self._held_since_s: float | None = None
        self._held_s = 0.0

    def came(self, size: int) -> None:
        """So many bytes more have come."""
        if self._began_s is None:
            self._began_s = self._streams.clock.seconds()
        self.came_bytes += size
        self._streams.best_bytes_per_s = max(self._streams.best_bytes_per_s, self._bytes_per_s())

    def hold(self) -> None:
        """Its time stands still: nothing more is taken for now."""
        self._held_since_s = self._streams.clock.seconds()

    def go_on(self) -> None:
        """Its time goes on: what comes is taken again."""
        if self._held_since_s is not None:
            self._held_s += self._streams.clock.seconds() - self._held_since_s
            self._held_since_s = None

    @property
    def took_s(self) -> float:
        """For how long it could have brought something, from its first byte on."""
        if self._began_s is None:
            return 0.0
        now_s = self._streams.clock.seconds() if self._held_since_s is None else self._held_since_s
        return now_s - self._began_s - self._held_s

    def is_worth(self) -> bool:
        """Return whether it is still waited for, as far as this goes."""
        rate, silence_s = self._bytes_per_s(), self._streams.silence_s
        if self.took_s >= MOST_TIMES * silence_s and rate < SLOWEST_OF_ALL_BYTES_PER_S:
            return False
        slow = rate < min(SLOWEST_BYTES_PER_S, self._streams.best_bytes_per_s / SLOWER_TIMES)
        return self.took_s < silence_s or not slow

    def _bytes_per_s(self) -> float:
        return self.came_bytes / max(_LEAST_S, self.took_s)
