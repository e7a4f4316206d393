"""Retry policy and queue for unreachable servers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from twisted.internet.interfaces import IDelayedCall, IReactorTime

from pipegrid.errors import NotEnoughSharesError, UnhappyError

# What of a tree is tried a second time, since servers were out of reach, and when; pure.
#
# Servers go away in the middle of a long run, and come back: a router is restarted, a line fails. What was
# under way then fails, and is kept. There are two cases:
#
# * Something else came through meanwhile: servers are there, and this object had bad luck. It is tried once
#   more at the end.
# * Nothing did: too few servers are in reach for anything. To begin what comes next would lose it as
# well, all
#   of the tree within seconds where connections are refused. So nothing new begins, and after a pause one of
#   those that are kept is tried, again and again, until something comes through. Then the others are tried
#   once more, and the run goes on.
#
# Bounds: of what is kept, ``MOST``; of the pauses, ``WAIT_S`` altogether, or ``FIRST_WAIT_S`` where nothing
# has ever come through. Then all that is kept is given up, and nothing is kept before something comes through
# again.
#
#     out:   next() → what is to be tried again now      take_lost() → what is given up
#     in:    failed(), succeeded(), or ended() of each object of the run

T = TypeVar("T", bound=Hashable)

MOST = 10_000
"""Objects, each some kilobytes with the place that is kept for it."""

WAIT_S = 600.0
FIRST_WAIT_S = 120.0
"""Whoever begins without a network is to be told so; a machine that just wakes up has one soon."""

PAUSES_S = (5.0, 10.0, 20.0, 30.0)
"""Between tries; the last one again and again."""

STRAGGLERS_S = PAUSES_S[0]
"""So long what comes through does not end a wait; a probe that does ends it at any time."""


def wants_servers(error: Exception) -> bool:
    """Whether it failed for servers that were out of reach alone: with these it might have come through."""
    if isinstance(error, UnhappyError):
        return error.absent > 0 and error.reached + error.absent >= error.wanted
    if isinstance(error, NotEnoughSharesError):
        return error.absent > 0 and error.found + error.absent_shares >= error.needed
    return False


class RetryPolicy(Generic[T]):
    """
    The second tries of one run. Times are seconds of one monotonic clock.

    Args:
        most: objects that are kept.
        wait_s: how long servers are waited for, all pauses of the run together.
        first_wait_s: the same, as long as nothing has come through.

    Attributes:
        waiting: nothing new is to begin, as too few servers are in reach.
        given_up: they were waited for in vain, and nothing has come through since.
        next_s: while it waits, when ``next`` has something; while something is tried, that is not known.
    """

    def __init__(
        self, most: int = MOST, wait_s: float = WAIT_S, first_wait_s: float = FIRST_WAIT_S
    ) -> None:
        self.waiting = self.given_up = False
        self.next_s = 0.0
        self._most = most
        self._wait_s = wait_s
        self._first_wait_s = first_wait_s
        self._kept: deque[T] = deque()
        self._lost: list[T] = []
        self._again: set[T] = set()  # under way a second time
        self._probe: T | None = None  # the one that is to tell whether servers are back
        self._pauses = 0
        self._began_s = self._waited_s = 0.0
        self._good_s: float | None = None
        self._back = False

    def __repr__(self) -> str:
        return f"<RetryPolicy: {len(self._kept)} kept, waiting={self.waiting}>"

    @property
    def left_s(self) -> float:
        """How long servers are waited for at most, from the beginning of this wait on."""
        allowed_s = self._first_wait_s if self._good_s is None else self._wait_s
        return max(0.0, allowed_s - self._waited_s)

    @property
    def is_asking(self) -> bool:
        """Whether it waits, and something is tried just now."""
        return self.waiting and self._probe is not None

    def is_probe(self, what: T) -> bool:
        """Whether this is what is to tell whether servers are back."""
        return what == self._probe

    # Facts.

    def succeeded(self, what: T, now_s: float) -> bool:
        """Something came through; returns whether that was a second try."""
        probe = self._probe
        second = what == probe or what in self._again
        self._forget(what)
        self._good_s = now_s
        self.given_up = False
        # What was on its way when servers went may still come, and says nothing of what is asked next.
        if self.waiting and (what == probe or now_s - self._began_s >= STRAGGLERS_S):
            self._end_wait(now_s)
        return second

    def failed(self, what: T, began_s: float, now_s: float) -> bool:
        """
        Something failed for want of servers; returns whether it is kept, else it is lost.

        Args:
            began_s: when this try of it began.
        """
        if what == self._probe:
            self._probe = None
            self._kept.append(what)  # another one may fare better
            self._pause(now_s)
            return True
        others_came = self._good_s is not None and self._good_s > began_s
        second = what in self._again
        self._forget(what)
        if self.given_up or len(self._kept) >= self._most or (second and others_came):
            return False
        self._kept.append(what)
        if not others_came and not self.waiting:
            self._begin_wait(now_s)
            self._pause(now_s)
        return True

    def ended(self, what: T) -> None:
        """Something came to another end."""
        self._forget(what)

    # Moves.

    def next(self, now_s: float, at_end: bool = False) -> T | None:
        """
        Return what is to be tried now; None: nothing.

        Args:
            at_end: nothing else is left to do.
        """
        if not self.waiting and self._kept and at_end and not self._back:
            self._begin_wait(now_s)  # nobody knows how servers are: one is tried first
        if self.waiting:
            return self._next_probe(now_s)
        if not self._kept:
            self._back = False
        elif self._back:
            what = self._kept.popleft()
            self._again.add(what)
            return what
        return None

    def take_lost(self) -> list[T]:
        """Return what is given up since the last time."""
        lost, self._lost = self._lost, []
        return lost

    # Within.

    def _next_probe(self, now_s: float) -> T | None:
        if self._probe is not None:
            return None
        if not self._kept:  # the one that was tried came to an end that says nothing
            self._end_wait(now_s)
        elif now_s - self._began_s >= self.left_s:
            self._end_wait(now_s)
            self._back, self.given_up = False, True
            self._lost.extend(self._kept)
            self._kept.clear()
        elif now_s >= self.next_s:
            self._probe = self._kept.popleft()
        return self._probe

    def _begin_wait(self, now_s: float) -> None:
        self.waiting = True
        self._began_s = self.next_s = now_s
        self._pauses = 0

    def _pause(self, now_s: float) -> None:
        self.next_s = now_s + PAUSES_S[min(self._pauses, len(PAUSES_S) - 1)]
        self._pauses += 1

    def _end_wait(self, now_s: float) -> None:
        self.waiting = False
        self._waited_s += now_s - self._began_s
        self._back = True

    def _forget(self, what: T) -> None:
        self._again.discard(what)
        if what == self._probe:
            self._probe = None


# What of a tree is kept for a second try, with what that takes; which one comes when is ``secondtry``'s.


K = TypeVar("K")


class RetryQueue(Generic[T, K]):
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
        self.tries: RetryPolicy[T] = RetryPolicy()
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
            f"too few servers are reachable; waiting for them, up to {minutes}, and then trying what "
            "failed again"
            if waiting
            else None
        )
