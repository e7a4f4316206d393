"""
How many bytes may pass: so many a second in the long run, a few more at once.

Pure: times go in. What passes is counted afterwards, so the bucket may owe: nothing passes until that is made
up for. A clock that jumps back lets nothing pass sooner or later than it should by more than the jump; one
that jumps ahead fills the bucket, once.
"""

from __future__ import annotations


class TokenBucket:
    """
    One direction of a line.

    Args:
        bytes_per_s: more than 0. burst_bytes: that may pass at once when nothing has passed for long; by
        default those of a quarter of a
            second.
    """

    def __init__(self, bytes_per_s: float, burst_bytes: float | None = None) -> None:
        assert bytes_per_s > 0
        self.bytes_per_s = bytes_per_s
        self._burst_bytes = max(1.0, bytes_per_s / 4 if burst_bytes is None else burst_bytes)
        self._left = self._burst_bytes
        self._at_s: float | None = None

    def __repr__(self) -> str:
        return f"<TokenBucket of {self.bytes_per_s:g} bytes a second, {self._left:g} left>"

    def take(self, now_s: float, size: int) -> None:
        """Take ``size`` bytes that pass now, also more than are left: ``wait_s`` makes up for them."""
        self._fill(now_s)
        self._left -= size

    def wait_s(self, now_s: float) -> float:
        """Return how long until the next bytes may pass; 0 if they may now."""
        self._fill(now_s)
        return 0.0 if self._left > 0 else (1 - self._left) / self.bytes_per_s

    def _fill(self, now_s: float) -> None:
        passed_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._at_s = now_s
        self._left = min(self._burst_bytes, self._left + passed_s * self.bytes_per_s)
