"""
Decide how long an upload waits for servers: when a server is silent, when its grace is over, and which server
is slow.

Pure: ``Upload`` waits and drops share uploads. Times are seconds of the reactor's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from pipegrid.transfer.settings import UploadSettings
from pipegrid.transfer.time_limits import last_activity_s

SLOW = 2.0
"""A server is slow if its responses take more than this many times as long as the median of the others."""

TICK_S = 0.01
"""Minimum length of a wait in seconds: a clock perhaps cannot resolve a shorter one."""

_ROUNDING_S = 1e-6
"""Tolerance in seconds: the waits that make up a grace may add up to this much less than the grace."""


class SendingShare(Protocol):
    """
    The attributes of a share upload that the policy reads.

    Attributes:
        last_activity: when the server last acknowledged anything of the share, or when the oldest unanswered
            request was sent.
        stalled_s: how many seconds the share has delayed others so far; the policy updates it.
    """

    last_activity: float
    stalled_s: float

    @property
    def peer_activity(self) -> float:
        """When bytes last went to the server or came from it, for any transfer."""

    @property
    def waiting(self) -> bool:
        """Whether a response is outstanding that matters for the share's state."""

    @property
    def has_space(self) -> bool:
        """Whether the share upload can take more data now."""

    @property
    def blocked(self) -> bool:
        """Whether the share upload can take no data now, but needs more."""

    @property
    def pace_s(self) -> float:
        """Seconds that a response takes."""


W = TypeVar("W", bound=SendingShare)


def until_silence(uploads: Iterable[SendingShare], now: float, silence_s: float) -> float:
    """
    Return how many seconds remain until some server has been silent for ``silence_s``; ``silence_s`` if no
    response is outstanding.
    """
    pending = [upload for upload in uploads if upload.waiting]
    left_s = min((upload.last_activity for upload in pending), default=now) + silence_s - now
    # Read ``peer_activity`` only if needed: it is slower to read, and this function runs after every event.
    if left_s <= 0:
        activity_s = (
            last_activity_s(upload.last_activity, upload.peer_activity, silence_s)
            for upload in pending
        )
        left_s = min(activity_s) + silence_s - now
    return left_s


def is_silent(upload: SendingShare, now: float, silence_s: float) -> bool:
    """
    Return whether a response is outstanding and the server's last activity was at least ``silence_s`` ago.
    """
    if now < upload.last_activity + silence_s or not upload.waiting:
        return False
    return now >= last_activity_s(upload.last_activity, upload.peer_activity, silence_s) + silence_s


class StragglerPolicy(Generic[W]):
    """
    Decides how long one upload waits, and which share uploads it drops.

    While segments are sent, a blocked share upload delays the share uploads that can take more. The time of
    this delay is added to the ``stalled_s`` of the blocked share upload. A share upload is dropped when its
    ``stalled_s`` exceeds the grace, happiness can spare it, and its server is slower than the others, so that
    a shared link cannot be the cause. When everything is sent and happiness holds, stragglers get one more
    grace. A server is given up if for ``silence_s`` it acknowledged nothing to this upload and no byte went
    to it or came from it.

    Args:
        started_s: when the upload began; the grace depends on this time.
        happy_since_s: since when happiness has held; None: it does not hold yet.
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
        self, now: float, uploads: Sequence[W], can_drop: Callable[[W], bool]
    ) -> float | None:
        """
        Return how many seconds to wait, at most, until every share upload can take more; None if every one
        can now.

        The caller must call ``charge_wait`` after the wait, however it ended.

        Args:
            can_drop: returns whether happiness holds without a share upload.
        """
        self._blocked = [upload for upload in uploads if upload.blocked]
        if not self._blocked:
            return None
        self._wait_began_s = now
        self._others_wait = any(upload.has_space for upload in uploads)
        wait_s = until_silence(uploads, now, self._settings.silence_s)
        if self._others_wait:
            grace_s = self._settings.grace(now - self._started_s)
            left = [grace_s - upload.stalled_s for upload in self._blocked if can_drop(upload)]
            wait_s = min([wait_s, *left])
        return max(TICK_S, wait_s)

    def charge_wait(self, now: float, uploads: Sequence[W]) -> list[W]:
        """
        Add the time of the wait to the ``stalled_s`` of the share uploads that caused it.

        Return the share uploads to drop if happiness can spare them: those whose grace is over and whose
        server is slow.
        """
        if not self._others_wait:
            return []
        grace_s = self._settings.grace(self._wait_began_s - self._started_s)
        dropped: list[W] = []
        for upload in self._blocked:
            if not upload.blocked:
                continue
            upload.stalled_s += now - self._wait_began_s
            if upload.stalled_s >= grace_s - _ROUNDING_S:
                if is_slow(upload, uploads):
                    dropped.append(upload)
                else:
                    upload.stalled_s = 0.0
        return dropped

    def final_wait_s(self, now: float, uploads: Sequence[W], is_enough: bool) -> float | None:
        """
        Return how many seconds to wait, at most, once everything is sent; None if the grace of stragglers is
        over.

        Args:
            is_enough: whether happiness holds with the shares that are stored.
        """
        wait_s = until_silence(uploads, now, self._settings.silence_s)
        if not is_enough:
            return wait_s
        if self._happy_since_s is None:
            self._happy_since_s = now
        grace_s = self._settings.grace(self._happy_since_s - self._started_s)
        left_s = self._happy_since_s + grace_s - now
        return None if left_s <= 0 else min(wait_s, left_s)


def is_slow(upload: W, uploads: Iterable[W]) -> bool:
    """
    Return whether this upload's server is slow, and not the link that all servers share.

    On a saturated link a different share upload is delayed at each moment, and all responses take equally
    long.
    """
    others = [one.pace_s for one in uploads if one is not upload]
    return bool(others) and upload.pace_s > SLOW * _median(others)


def _median(values: list[float]) -> float:
    """Return the median; importing ``statistics`` would also import ``decimal`` and ``fractions``."""
    ordered, middle = sorted(values), len(values) // 2
    return (ordered[middle] + ordered[~middle]) / 2
