"""A call that comes later, once, for whoever may want it to come not at all, or anew."""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.interfaces import IDelayedCall, IReactorTime


class Alarm:
    """
    Calls when its time has come, unless it is stopped before; then it can be set again.

    It and its owner keep each other, so it is for owners that are few.
    """

    __slots__ = ("_call", "_clock", "_timer")

    def __init__(self, clock: IReactorTime, call: Callable[[], object]) -> None:
        self._clock = clock
        self._call = call
        self._timer: IDelayedCall | None = None

    @property
    def is_set(self) -> bool:
        """Whether the call is still to come."""
        return self._timer is not None

    def set(self, delay_s: float) -> None:
        """Have the call come after so long, if it is not to come already."""
        if self._timer is None:
            self._timer = self._clock.callLater(delay_s, self._ring)

    def stop(self) -> None:
        """Cancel the call if it is still to come; it can be set again."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _ring(self) -> None:
        self._timer = None
        self._call()
