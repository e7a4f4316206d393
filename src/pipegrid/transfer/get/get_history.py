"""
What the gets of a client record for later gets: the bandwidth of the link, and whether shares are on the
expected servers.

Pure: the caller reports starts, ends, bytes and times, in seconds.
"""

from __future__ import annotations

from collections import deque

MANY = 8
"""
A download that begins while at least this many others run leaves out the queries for lists, if most earlier
guesses were right. With fewer running downloads, each new one asks for lists, so that wrong guesses are
noticed.
"""

RIGHT_TIMES = 4
"""Lists are left out if at most one guess in this many is wrong: they double a small file's requests."""

_REMEMBERED = 16

_SAMPLES = 8
MIN_SAMPLE_BYTES = 64 << 10
"""Minimum size of a sample; a smaller one measures round trips rather than bandwidth."""


class LinkEstimate:
    """
    The bandwidth and round-trip time of the link that all downloads of a client share.

    To read a file of one segment, a download can request one whole share more than needed, so that one slow
    server has no effect. But the extra share takes as long as any other share, and on a narrow link that is
    far longer than the round trip that a later hedge costs. So a download requests the whole extra share only
    if its transfer takes no longer than a round trip.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_SAMPLES)
        self._answers_s: deque[float] = deque(maxlen=8 * _SAMPLES)

    def note_response(self, elapsed_s: float) -> None:
        """Record the response time of a small request."""
        self._answers_s.append(elapsed_s)

    def note_bytes(self, size_bytes: int, elapsed_s: float) -> None:
        """Record how many bytes all servers together have sent within ``elapsed_s``."""
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
        """Return how many seconds the transfer of this number of bytes takes; 0 if nothing is known."""
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

    A download also asks the expected servers for their lists of shares: if a server was guessed wrong, the
    lists arrive with its refusal, and no round trip is lost. If all guesses are right, the requests for lists
    were wasted, and they are half of all requests for a small file. For a single file that is acceptable.
    When many files are downloaded the servers' time counts, so the lists are left out while most guesses are
    right; a wrong guess then costs the file one round trip. If more than one in ``RIGHT_TIMES`` guesses is
    wrong, later downloads ask for lists again.

    Attributes:
        trees: number of trees that are being fetched. The files of a tree count as many even while few
            downloads run because the disk is slower than the servers.
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
        """Record that a download has begun; the caller must call ``ended`` once for it."""
        self._running += 1

    def ended(self) -> None:
        """Record that a download has ended, with or without success."""
        self._running -= 1

    def found(self, right: bool) -> None:
        """Record whether all shares of a file were on the expected servers."""
        self._right.append(right)


class GetHistory:
    """What a client has recorded during its gets."""

    __slots__ = ("guesses", "line")

    def __init__(
        self,
    ) -> None:
        self.line: LinkEstimate = LinkEstimate()
        self.guesses: Guesses = Guesses()
