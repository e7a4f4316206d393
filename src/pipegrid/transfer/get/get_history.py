"""
What the gets of a client record for later gets: the bandwidth of the link, and whether shares are on the
expected servers.

Pure: the caller reports starts, ends, bytes and times, in seconds.
"""

from __future__ import annotations

from collections import deque

MANY = 8
"""
While this many downloads run, a further one may leave out the lists. The first ones always ask for lists,
so that wrong guesses are noticed.
"""

RIGHT_TIMES = 4
"""
Of that many guesses one may be wrong: asking for lists, and reading as if they might be needed, costs a small
file several times as much as the bytes.
"""

_REMEMBERED = 16

_SAMPLES = 8
MIN_SAMPLE_BYTES = 64 << 10
"""A smaller sample measures round trips rather than bandwidth."""


class LinkEstimate:
    """
    The bandwidth and round-trip time of the link that all downloads of a client share.

    A file of one segment can be read with one whole share too many, so that one slow server has no
    effect. But the extra share takes as long as any other, and on a narrow link that is far more than the
    round trip that a later hedge costs. So the extra share is read whole only if its bytes cost no more
    than a round trip.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_SAMPLES)
        self._answers_s: deque[float] = deque(maxlen=8 * _SAMPLES)

    def note_response(self, elapsed_s: float) -> None:
        """Record the response time of a small request."""
        self._answers_s.append(elapsed_s)

    def note_bytes(self, size_bytes: int, elapsed_s: float) -> None:
        """Record how many bytes have arrived within some time, from all servers."""
        if size_bytes >= MIN_SAMPLE_BYTES and elapsed_s > 0:
            self._rates.append(size_bytes / elapsed_s)

    @property
    def bytes_per_s(self) -> float | None:
        """The best recent rate, or None if nothing is known."""
        return max(self._rates, default=None)

    @property
    def rtt_s(self) -> float | None:
        """The shortest recent response time, or None if nothing is known."""
        return min(self._answers_s, default=None)

    def time_s(self, size_bytes: int) -> float:
        """Return how long this number of bytes takes; 0 if nothing is known."""
        rate = self.bytes_per_s
        return size_bytes / rate if rate else 0.0

    def is_narrow_for(self, size_bytes: int) -> bool:
        """Return whether this number of bytes is known to take longer than a round trip."""
        rate, rtt_s = self.bytes_per_s, self.rtt_s
        return rate is not None and rtt_s is not None and size_bytes > rate * rtt_s


class NotAsExpected(Exception):
    """A share of a small file is missing, damaged or late, so a download must ask for lists."""


class Guesses:
    """
    Whether the downloads of a client have found shares on the expected servers.

    A download also asks the servers of the expected shares for their lists: if a guess is wrong, the
    lists arrive with the refusals, and no round trip is lost. If the guess is right these requests were
    wasted, and they are half of all requests for a small file. For a single file that is acceptable. When
    many files are downloaded the servers' time counts, so the lists are left out while most guesses are
    right; a wrong guess costs its own file a round trip. If more than one in ``RIGHT_TIMES`` is wrong, later
    files ask for lists again.

    Attributes:
        trees: the number of trees that are being fetched: their files are many, even while few are running
            since the disk is slower than the servers.
    """

    def __init__(self) -> None:
        self.trees = 0
        self._running = 0
        self._right: deque[bool] = deque(maxlen=_REMEMBERED)

    def __repr__(self) -> str:
        return f"<Guesses {sum(self._right)} of {len(self._right)} right, {self._running} running>"

    @property
    def needs_lists(self) -> bool:
        """Whether a download that begins now should also ask for lists."""
        right, are_few = self._right, self._running < MANY and not self.trees
        return are_few or not right or right.count(False) * RIGHT_TIMES > len(right)

    def began(self) -> None:
        """Record that a download has begun; the caller must call ``ended`` once."""
        self._running += 1

    def ended(self) -> None:
        """Record that a download has ended, with or without success."""
        self._running -= 1

    def found(self, right: bool) -> None:
        """Record whether all shares of a file were on the expected servers."""
        self._right.append(right)


class GetHistory:
    """What a client has recorded from its gets."""

    __slots__ = ("guesses", "line")

    def __init__(
        self,
    ) -> None:
        self.line: LinkEstimate = LinkEstimate()
        self.guesses: Guesses = Guesses()
