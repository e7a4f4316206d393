"""
What past downloads have shown of the client's own line, and what a race may cost on it.

A file of one segment can be raced for with whole shares: then a slow server is not felt at all. But the
share too many takes as long to come as any other, and where the line is narrow that is far more than the
round trip that calling a helper later costs. So it is asked for whole only where its bytes cost no more.

Pure: told of bytes and times, in seconds.
"""

from __future__ import annotations

from collections import deque

_SAMPLES = 8
MIN_SAMPLE_BYTES = 64 << 10
"""Less tells of round trips, and nothing of the line."""


class ClientLine:
    """The line that all downloads of a client share."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=_SAMPLES)
        self._answers_s: deque[float] = deque(maxlen=8 * _SAMPLES)

    def note_answer(self, elapsed_s: float) -> None:
        """A small question was answered."""
        self._answers_s.append(elapsed_s)

    def note_bytes(self, size_bytes: int, elapsed_s: float) -> None:
        """So much has come in one go, over all servers."""
        if size_bytes >= MIN_SAMPLE_BYTES and elapsed_s > 0:
            self._rates.append(size_bytes / elapsed_s)

    @property
    def bytes_per_s(self) -> float | None:
        """The best that was seen lately, or None if nothing is known."""
        return max(self._rates, default=None)

    @property
    def rtt_s(self) -> float | None:
        """The shortest answer lately, or None if nothing is known."""
        return min(self._answers_s, default=None)

    def time_s(self, size_bytes: int) -> float:
        """Return how long so many bytes take; 0 if nothing is known."""
        rate = self.bytes_per_s
        return size_bytes / rate if rate else 0.0

    def is_narrow_for(self, size_bytes: int) -> bool:
        """Whether so many bytes are known to take longer than a round trip."""
        rate, rtt_s = self.bytes_per_s, self.rtt_s
        return rate is not None and rtt_s is not None and size_bytes > rate * rtt_s
