"""
How long a download waits, and for what: pure arithmetic over times that it is told.

Two clocks run side by side. When no segment has been finished for ``hedge_s``, the download looks
whether some servers lag behind the others; when nothing at all has come for ``silence_s``, whoever
owes something is given up.
"""

from __future__ import annotations


class Patience:
    """
    The patience of one download.

    Args:
        hedge_s, silence_s: see the module.
        now: when the download began, on the caller's clock, in seconds.
    """

    def __init__(self, hedge_s: float, silence_s: float, now: float) -> None:
        self._hedge_s = hedge_s
        self._silence_s = silence_s
        self._last_event = now
        self._last_progress = now

    # Facts.

    def something_came(self, now: float) -> None:
        """Some server has sent something."""
        self._last_event = now

    def segment_finished(self, now: float) -> None:
        """The file has grown."""
        self._last_progress = now

    def own_fault(self, now: float) -> None:
        """It is we who keep the servers waiting: the reader's time does not count."""
        self._last_event = self._last_progress = now

    def hedged(self) -> None:
        """One more share joins; a slow line is no reason to load it more and more."""
        self._hedge_s *= 2

    # Decisions.

    def wait_s(self, now: float) -> float:
        """Return how long to wait for the next event."""
        return max(0.0, min(self._hedge_at, self._silent_at) - now)

    def is_hedge_due(self, now: float) -> bool:
        """Return whether to look for servers that lag; the next time is a whole period later."""
        if now < self._hedge_at:
            return False
        self._last_progress = now
        return True

    def is_silence_over(self, now: float) -> bool:
        """Return whether to give up those who owe something; the others get a whole period more."""
        if now < self._silent_at:
            return False
        self._last_event = now
        return True

    @property
    def _hedge_at(self) -> float:
        return self._last_progress + self._hedge_s

    @property
    def _silent_at(self) -> float:
        return self._last_event + self._silence_s
