"""
How long an upload waits, and for whom: silence, grace, and who is slow.

Pure: what the ways of its shares look like goes in, with the time; out comes how long to wait at most, and
which of them have cost the others too much. ``upload`` does the waiting and the dropping.

Nothing waits for the slowest server without need. While segments go by, a way without room holds up those
that have some: what it costs them is held against it, and when that is more than the grace, and its server
is slower than the others and not only on a line that all share, its share is taken back. At the end, when
happiness holds, stragglers have as long again. A server is given up when for ``silence_s`` it acknowledged
nothing here, and no byte came from it or went to it (``silence``).

Times are seconds of the reactor's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from pipegrid.transfer.peers import last_activity_s
from pipegrid.transfer.settings import UploadSettings

SLOW = 2.0
"""A server is slow if its answers take so many times as long as those of most others."""

TICK_S = 0.01
"""No shorter waits: what is left of a patience may be less than the clock can tell."""

_ROUNDING_S = 1e-6
"""Waits that make up a grace may add up to so much less than it."""


class SendingShare(Protocol):
    """
    What the policy reads of a share that is being uploaded.

    Attributes:
        last_activity: when the server last acknowledged anything of it, or began to have to.
        stalled_s: how long it has kept others waiting, so far; kept here.
    """

    last_activity: float
    stalled_s: float

    @property
    def peer_activity(self) -> float:
        """When bytes last went to its server or came from it, for any transfer."""

    @property
    def waiting(self) -> bool:
        """Whether an answer of the server that matters is outstanding."""

    @property
    def has_room(self) -> bool:
        """Whether it would take more now."""

    @property
    def blocked(self) -> bool:
        """Whether it would take nothing now, and wants more."""

    @property
    def pace_s(self) -> float:
        """How many seconds an answer takes."""


W = TypeVar("W", bound=SendingShare)


def until_silence(ways: Iterable[SendingShare], now: float, silence_s: float) -> float:
    """Return how long until the first server has been silent for too long; ``silence_s`` if none owes."""
    owing = [way for way in ways if way.waiting]
    left_s = min((way.last_activity for way in owing), default=now) + silence_s - now
    if left_s <= 0:  # only then are servers asked, since this is looked at after every event
        signs = (last_activity_s(way.last_activity, way.peer_activity, silence_s) for way in owing)
        left_s = min(signs) + silence_s - now
    return left_s


def is_silent(way: SendingShare, now: float, silence_s: float) -> bool:
    """Return whether the server owes an answer, and has given no sign of life for too long."""
    if now < way.last_activity + silence_s or not way.waiting:
        return False
    return now >= last_activity_s(way.last_activity, way.peer_activity, silence_s) + silence_s


class StragglerPolicy(Generic[W]):
    """
    The patience of one upload.

    Args:
        started_s: when it began, which decides how long the grace is.
        happy_since_s: since when happiness has held, if it did before.
    """

    def __init__(
        self,
        settings: UploadSettings,
        started_s: float,
        happy_since_s: float | None = None,
    ) -> None:
        self._settings = settings
        self._started_s = started_s
        self._happy_since_s = happy_since_s
        self._blocked: list[W] = []
        self._wait_began_s = started_s
        self._others_wait = False

    def window_wait_s(
        self, now: float, ways: Sequence[W], can_spare: Callable[[W], bool]
    ) -> float | None:
        """
        Return how long to wait, at most, for room everywhere; None: it is there.

        ``charge_wait`` is to be told when that wait is over, however it ended.

        Args:
            can_spare: whether happiness holds without the share of a way.
        """
        self._blocked = [way for way in ways if way.blocked]
        if not self._blocked:
            return None
        self._wait_began_s = now
        self._others_wait = any(way.has_room for way in ways)
        patience_s = until_silence(ways, now, self._settings.silence_s)
        if self._others_wait:
            grace_s = self._settings.grace(now - self._started_s)
            left = [grace_s - way.stalled_s for way in self._blocked if can_spare(way)]
            patience_s = min([patience_s, *left])
        return max(TICK_S, patience_s)

    def charge_wait(self, now: float, ways: Sequence[W]) -> list[W]:
        """
        Hold against ways what they have cost the others.

        Returns those that are to be dropped, if they can be spared: their grace is over, and they are slow.
        """
        if not self._others_wait:
            return []
        grace_s = self._settings.grace(self._wait_began_s - self._started_s)
        dropped: list[W] = []
        for way in self._blocked:
            if not way.blocked:
                continue
            way.stalled_s += now - self._wait_began_s
            if way.stalled_s >= grace_s - _ROUNDING_S:
                if is_slow(way, ways):
                    dropped.append(way)
                else:
                    way.stalled_s = 0.0
        return dropped

    def final_wait_s(self, now: float, ways: Sequence[W], is_enough: bool) -> float | None:
        """
        Return how long to wait, at most, when all is sent; None: stragglers have had their grace.

        Args:
            is_enough: whether what is stored will do.
        """
        patience_s = until_silence(ways, now, self._settings.silence_s)
        if not is_enough:
            return patience_s
        if self._happy_since_s is None:
            self._happy_since_s = now
        grace_s = self._settings.grace(self._happy_since_s - self._started_s)
        left_s = self._happy_since_s + grace_s - now
        return None if left_s <= 0 else min(patience_s, left_s)


def is_slow(way: W, ways: Iterable[W]) -> bool:
    """
    Return whether a server keeps the others waiting, and not the line that all of them share.

    On a full line now this way is held up and now that, and all answers take equally long.
    """
    others = [one.pace_s for one in ways if one is not way]
    return bool(others) and way.pace_s > SLOW * _median(others)


def _median(values: list[float]) -> float:
    """Return what half of them are below; ``statistics`` brings decimals and fractions with it."""
    ordered, middle = sorted(values), len(values) // 2
    return (ordered[middle] + ordered[~middle]) / 2
