"""
Which shares serve a range: the first k of the ring, and helpers in the place of those that are slow.

The first k of the ring are the favourites, and are asked for everything at once. The others are asked for a
probe. When a helper has given its probe while a favourite lags behind, it is asked for the rest. If one
favourite lags and two helpers are there, they divide its work: the first part of the segments from one of
them, the others from the other. So what the round trip until they begin has cost is caught up with where
servers have lines of their own; and where one line is shared it is never idle anyway. Whoever is only a
little late is waited for: bytes come in bursts, and to replace a server that is not slow costs the line.

Pure: looks at readers, and says what to ask of whom.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

_TOLERANCE = 0.125
"""By how much of the time that a helper's probe has taken a favourite may be late."""


class Runner(Protocol):
    """What is known of a share that takes part."""

    @property
    def share_number(self) -> int:
        """The number of the share, 0 to 255, which tells the runners of a race apart."""

    @property
    def received_bytes(self) -> int:
        """What it has given so far."""

    @property
    def waiting(self) -> bool:
        """Whether something was asked that it has not given."""


class Race:
    """
    The race for one range.

    Args:
        started: when it began.
        patience_s: how long a favourite that lags is waited for at least: on a narrow line even what comes
            evenly comes in bursts.

    Attributes:
        open: until it is known which shares are fast enough.
        parts: share number to the segments [first, end) that it is asked for; all, if it is not here.
        due: when to look again whatever happens, or None.
    """

    def __init__(self, started: float, patience_s: float = 0.0) -> None:
        self.open = True
        self.parts: dict[int, tuple[int, int]] = {}
        self.due: float | None = None
        self._started = started
        self._patience_s = patience_s
        self._helping: set[int] = set()

    def helps(self, share_number: int) -> bool:
        """Return whether a share that is no favourite is asked for more than a probe."""
        return share_number in self._helping

    def look(
        self,
        now: float,
        favourites: Sequence[Runner],
        others: Sequence[Runner],
        segments: tuple[int, int],
        most_segments: int,
    ) -> None:
        """
        Call helpers if favourites lag.

        Args:
            segments: [first, end) of what is left.
            most_segments: how many the first of two helpers may have for its part: the second one's
                blocks have to be held until that part has come.
        """
        fastest = max((runner.received_bytes for runner in others), default=0)
        lagging = sum(2 * runner.received_bytes < fastest for runner in favourites)
        if lagging > 1:
            self.parts.clear()  # who shares a favourite's work now has one for itself
        if not lagging or self._helping or all(runner.waiting for runner in others):
            self.due = None
            return
        if self.due is None:
            self.due = now + max(self._patience_s, _TOLERANCE * (now - self._started))
        if now < self.due:
            return
        self.due = None
        helpers = [runner.share_number for runner in others if 2 * runner.received_bytes >= fastest]
        self._helping.update(helpers)
        first, end = segments
        if lagging == 1 and len(helpers) > 1 and end - first > 1:
            # Of more than two, the others have lost.
            middle = first + max(1, min((end - first) // 2, most_segments))
            self.parts = {helpers[0]: (middle, end), helpers[1]: (first, middle)}
            self._helping = set(self.parts)

    def closed(self, share_number: int) -> None:
        """A share takes part no more; whoever had divided work with it has it all."""
        self._helping.discard(share_number)
        if share_number in self.parts:
            self.parts.clear()

    def end(self, numbers: Iterable[int]) -> set[int]:
        """
        End the race: these shares have made the first segment. Return those that go on.
        """
        self.open = False
        self.due = None
        winners = set(numbers)
        dividing = winners & self.parts.keys()
        if len(dividing) > 1:
            self.parts.clear()  # together they are one share, and these shares have to be k
        return winners | set(self.parts) if dividing else winners

    def reopen(self) -> None:
        """Somebody falters: more shares take part, each for all that is left."""
        self.open = True
        self.due = None
        self.parts.clear()

    def done(self, next_segment: int) -> list[int]:
        """Return the shares that have given their part, when this is the next segment to come."""
        return [number for number, (_, end) in self.parts.items() if end <= next_segment]
