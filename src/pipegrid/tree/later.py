"""
What of a tree is kept for a second try, with what that takes; which one comes when is ``secondtry``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from pipegrid.tree.secondtry import SecondTries, wants_servers

T = TypeVar("T", bound=Hashable)
K = TypeVar("K")


class KeptForLater(Generic[T, K]):
    """
    Keeps something (``K``) for each place (``T``) of a tree.

    Args:
        wake: called when a pause is over, and ``next`` may have something.
        tell: told a sentence when too few servers are in reach, and None when the run goes on.

    Attributes:
        tries: decides.
    """

    def __init__(
        self, clock: IReactorTime, wake: Callable[[], None], tell: Callable[[str | None], None]
    ) -> None:
        self.tries: SecondTries[T] = SecondTries()
        self._clock = clock
        self._wake = wake
        self._tell = tell
        self._kept: dict[T, K] = {}
        self._lost: list[tuple[T, K]] = []
        self._timer: IDelayedCall | None = None
        self._told = False

    @property
    def has_any(self) -> bool:
        """Whether there is anything that ``next`` or ``take_lost`` may return, now or later."""
        return bool(self._kept or self._lost) or self.tries.waiting

    def keeps(self, place: T, kept: K, error: Exception, began_s: float) -> bool:
        """Something failed in a try that began then; returns whether it is tried again."""
        if not wants_servers(error):
            return False
        if not self.tries.failed(place, began_s, self._clock.seconds()):
            return False
        self._kept[place] = kept
        self._tell_wait()
        return True

    def succeeded(self, place: T) -> bool:
        """Something came through; returns whether that was a second try."""
        second = self.tries.succeeded(place, self._clock.seconds())
        self._tell_wait()
        return second

    def ended(self, place: T) -> None:
        """Something came to another end."""
        self.tries.ended(place)

    def next(self, at_end: bool) -> tuple[T, K] | None:
        """
        Return what is to be tried now; None: nothing.

        Args:
            at_end: nothing else is left to do.
        """
        place = self.tries.next(self._clock.seconds(), at_end)
        self._lost += [(each, self._kept.pop(each)) for each in self.tries.take_lost()]
        if self.tries.waiting and not self.tries.is_asking:
            self._wake_at(self.tries.next_s)
        self._tell_wait()
        return None if place is None else (place, self._kept.pop(place))

    def take_lost(self) -> list[tuple[T, K]]:
        """Return what is given up, as servers were waited for in vain."""
        lost, self._lost = self._lost, []
        return lost

    def close(self) -> None:
        """Let the pause, if there is one, end without waking anybody; for the end of the run."""
        if self._timer is not None and self._timer.active():
            self._timer.cancel()

    def _wake_at(self, when_s: float) -> None:
        self.close()
        self._timer = self._clock.callLater(max(0.0, when_s - self._clock.seconds()), self._wake)

    def _tell_wait(self) -> None:
        waiting = self.tries.waiting
        if waiting == self._told:
            return
        self._told = waiting
        minutes = f"{self.tries.left_s / 60:.3g} minutes"
        self._tell(
            "too few servers are in reach; they are waited for, up to "
            f"{minutes}, and then what has failed is tried once more"
            if waiting
            else None
        )
