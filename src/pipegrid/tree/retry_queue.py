"""Retry policy and queue for unreachable servers."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater

from pipegrid.errors import NotEnoughSharesError, UnhappyError

# Which objects of a tree are tried again after servers were unreachable, and when; pure.
#
# Servers go away during a long run and come back: a router restarts, a link fails. What is running then
# fails, and is kept. There are two cases:
#
# * Other objects came through meanwhile: servers are reachable, and this object is tried again at the end.
# * None did: too few servers are reachable. To begin further objects would lose the rest of the tree within
#   seconds where connections are refused. So nothing new begins, and after a pause one of the kept objects is
#   tried, again and again, until one comes through. Then the others are tried again, and the run continues.
#
# Bounds: ``MOST`` objects are kept. The pauses last ``WAIT_S`` in total, or ``FIRST_WAIT_S`` if nothing has
# ever come through. After that all kept objects are given up, and none is kept until something comes through
# again.
#
#     out:   next() → what to try again now      take_lost() → what is given up
#     in:    failed(), succeeded(), or ended() of each object of the run

T = TypeVar("T", bound=Hashable)

MOST = 10_000
"""Objects; each takes some kilobytes."""

WAIT_S = 600.0
FIRST_WAIT_S = 120.0
"""
Without a network the user must learn that soon; a machine that has just woken up has one within this time.
"""

PAUSES_S = (5.0, 10.0, 20.0, 30.0)
"""Between attempts; the last one repeats."""

STRAGGLERS_S = PAUSES_S[0]
"""For this long, only a probe that comes through ends a wait; after that, any object does."""


def wants_servers(error: Exception) -> bool:
    """Whether it failed only because servers were unreachable: with them it might have come through."""
    if isinstance(error, UnhappyError):
        return error.absent > 0 and error.reached + error.absent >= error.wanted
    if isinstance(error, NotEnoughSharesError):
        return error.absent > 0 and error.found + error.absent_shares >= error.needed
    return False


SINGLE_PAUSES_S = PAUSES_S[:3]
"""Before each retry of a write that ends a run."""

R = TypeVar("R")


async def with_retries(clock: IReactorTime, start: Callable[[], Awaitable[R]]) -> R:
    """
    Return the result of an operation, which is retried a few times if servers were unreachable.

    Raises:
        PipegridError: it failed for another reason, or in the last retry too.
    """
    for pause_s in SINGLE_PAUSES_S:
        try:
            return await start()
        except (UnhappyError, NotEnoughSharesError) as error:
            if not wants_servers(error):
                raise
        await deferLater(clock, pause_s, lambda: None)
    return await start()


class RetryPolicy(Generic[T]):
    """
    The retries of one run. Times are seconds of one monotonic clock.

    Args:
        most: objects that are kept.

    Attributes:
        waiting: nothing new may begin, as too few servers are reachable.
        given_up: the wait was without effect, and nothing has come through since.
        next_s: while it waits, the time at which ``next`` has something; None while an attempt runs.
    """

    def __init__(self, most: int = MOST) -> None:
        self.waiting = self.given_up = False
        self.next_s = 0.0
        self._most = most
        self._kept: deque[T] = deque()
        self._lost: list[T] = []
        self._again: set[T] = set()  # being tried again
        self._probe: T | None = None  # the one that shows whether servers are back
        self._pauses = 0
        self._began_s = self._waited_s = 0.0
        self._good_s: float | None = None
        self._back = False

    def __repr__(self) -> str:
        return f"<RetryPolicy: {len(self._kept)} kept, waiting={self.waiting}>"

    @property
    def left_s(self) -> float:
        """How long servers are waited for at most, from the beginning of this wait."""
        allowed_s = FIRST_WAIT_S if self._good_s is None else WAIT_S
        return max(0.0, allowed_s - self._waited_s)

    @property
    def is_asking(self) -> bool:
        """Whether it waits and an attempt is running."""
        return self.waiting and self._probe is not None

    def is_probe(self, what: T) -> bool:
        """Whether this attempt shows whether servers are back."""
        return what == self._probe

    # Events.

    def succeeded(self, what: T, now_s: float) -> bool:
        """Something came through; returns whether that was a retry."""
        probe = self._probe
        second = what == probe or what in self._again
        self.ended(what)
        self._good_s = now_s
        self.given_up = False
        # A response to a request sent before the outage says nothing about later requests.
        if self.waiting and (what == probe or now_s - self._began_s >= STRAGGLERS_S):
            self._end_wait(now_s)
        return second

    def failed(self, what: T, began_s: float, now_s: float) -> bool:
        """
        Something failed because servers were unreachable; returns whether it is kept, else it is lost.

        Args:
            began_s: when this attempt began.
        """
        if what == self._probe:
            self._probe = None
            self._kept.append(what)  # another one may succeed
            self._pause(now_s)
            return True
        others_came = self._good_s is not None and self._good_s > began_s
        second = what in self._again
        self.ended(what)
        if self.given_up or len(self._kept) >= self._most or (second and others_came):
            return False
        self._kept.append(what)
        if not others_came and not self.waiting:
            self._begin_wait(now_s)
            self._pause(now_s)
        return True

    def ended(self, what: T) -> None:
        """Something ended in another way."""
        self._again.discard(what)
        if what == self._probe:
            self._probe = None

    # Decisions.

    def next(self, now_s: float, at_end: bool = False) -> T | None:
        """
        Return what to try now; None: nothing.

        Args:
            at_end: nothing else is left to do.
        """
        if not self.waiting and self._kept and at_end and not self._back:
            self._begin_wait(now_s)  # the state of servers is unknown: one is tried first
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
        """Return what was given up since the last call."""
        lost, self._lost = self._lost, []
        return lost

    # Internal.

    def _next_probe(self, now_s: float) -> T | None:
        if self._probe is not None:
            return None
        if not self._kept:  # the attempt ended in a way that says nothing about servers
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


# What is kept of a tree for a retry; ``RetryPolicy`` decides when it is tried.


K = TypeVar("K")


class RetryQueue(Generic[T, K]):
    """
    Keeps something (``K``) for each place (``T``) of a tree.

    Args:
        wake: called when a pause is over, and ``next`` may have something.
        tell: called with a sentence when too few servers are reachable, and with None when the run continues.

    Attributes:
        tries: the policy.
    """

    def __init__(
        self, clock: IReactorTime, wake: Callable[[], None], tell: Callable[[str | None], None]
    ) -> None:
        self.tries: RetryPolicy[T] = RetryPolicy()
        self._clock = clock
        self._wake = wake
        self._notify = tell
        self._kept: dict[T, K] = {}
        self._lost: list[tuple[T, K]] = []
        self._timer: IDelayedCall | None = None
        self._notified = False

    @property
    def has_any(self) -> bool:
        """Whether ``next`` or ``take_lost`` may return something, now or later."""
        return bool(self._kept or self._lost) or self.tries.waiting

    def keeps(self, place: T, kept: K, error: Exception, began_s: float) -> bool:
        """Record that an attempt that began at ``began_s`` has failed; returns whether it is retried."""
        if not (wants_servers(error) and self.tries.failed(place, began_s, self._clock.seconds())):
            return False
        self._kept[place] = kept
        self._notify_wait()
        return True

    def succeeded(self, place: T) -> bool:
        """Something came through; returns whether that was a retry."""
        second = self.tries.succeeded(place, self._clock.seconds())
        self._notify_wait()
        return second

    def ended(self, place: T) -> None:
        """Something ended in another way."""
        self.tries.ended(place)

    def next(self, at_end: bool) -> tuple[T, K] | None:
        """
        Return what to try now; None: nothing.

        Args:
            at_end: nothing else is left to do.
        """
        now_s = self._clock.seconds()
        place = self.tries.next(now_s, at_end)
        self._lost += [(each, self._kept.pop(each)) for each in self.tries.take_lost()]
        if self.tries.waiting and not self.tries.is_asking:
            self.close()
            self._timer = self._clock.callLater(max(0.0, self.tries.next_s - now_s), self._wake)
        self._notify_wait()
        return None if place is None else (place, self._kept.pop(place))

    def take_lost(self) -> list[tuple[T, K]]:
        """Return what is given up because servers stayed unreachable."""
        lost, self._lost = self._lost, []
        return lost

    def close(self) -> None:
        """Cancel the current pause without calling ``wake``; for the end of the run."""
        if self._timer is not None and self._timer.active():
            self._timer.cancel()

    def _notify_wait(self) -> None:
        waiting = self.tries.waiting
        if waiting == self._notified:
            return
        self._notified = waiting
        minutes = f"{self.tries.left_s / 60:.3g} minutes"
        self._notify(
            f"too few servers are reachable; waiting for them, up to {minutes}, and then trying what "
            "failed again"
            if waiting
            else None
        )
