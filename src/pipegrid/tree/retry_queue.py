"""Retries of operations that failed because servers were unreachable: the policy, and a queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater

from pipegrid.errors import NotEnoughSharesError, UnhappyError

# This part decides which objects of a tree are retried after servers were unreachable, and when. It does no
# input or output.
#
# During a long run, servers may become unreachable for a while: a router restarts, or a link fails. The
# running objects then fail, and are kept for a retry. There are two cases:
#
# * Other objects have succeeded meanwhile: servers are reachable, and the failed object is retried at the
#   end.
# * No object has succeeded: too few servers are reachable. If connections are refused, each new object would
#   fail at once, and the rest of the tree would be lost within seconds. So no new object begins. After a
#   pause, one of the kept objects is tried, and again after further pauses, until one succeeds. Then the
#   others are retried, and the run continues.
#
# Limits: at most ``MOST`` objects are kept. The pauses last ``WAIT_S`` in total, or ``FIRST_WAIT_S`` if no
# object has ever succeeded. After that, all kept objects are given up, and none is kept until an object
# succeeds again.
#
#     out:   next() → what to retry now          take_lost() → what is given up
#     in:    failed(), succeeded(), or ended() for each object of the run

T = TypeVar("T", bound=Hashable)

MOST = 10_000
"""The maximum number of kept objects; each takes some kilobytes."""

WAIT_S = 600.0
FIRST_WAIT_S = 120.0
"""
The wait is short if no object has succeeded yet, so that users without a network soon see an error; it
suffices for a machine that has just woken up to get a network.
"""

PAUSES_S = (5.0, 10.0, 20.0, 30.0)
"""The pauses between attempts; the last one is repeated."""

STRAGGLERS_S = PAUSES_S[0]
"""In the first seconds of a wait, only a probe's success ends the wait; after that, any success does."""


def wants_servers(error: Exception) -> bool:
    """
    Return whether an operation failed only because servers were unreachable, so it may succeed when they are
    reachable.
    """
    if isinstance(error, UnhappyError):
        return error.absent > 0 and error.reached + error.absent >= error.wanted
    if isinstance(error, NotEnoughSharesError):
        return error.absent > 0 and error.found + error.absent_shares >= error.needed
    return False


SINGLE_PAUSES_S = PAUSES_S[:3]
"""The pauses before each retry in ``with_retries``."""

R = TypeVar("R")


async def with_retries(clock: IReactorTime, start: Callable[[], Awaitable[R]]) -> R:
    """
    Return the result of an operation, which is retried a few times if servers were unreachable.

    Raises:
        PipegridError: the operation failed for another reason, or the last retry failed too.
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
        most: maximum number of objects that are kept for a retry.

    Attributes:
        waiting: whether the run waits, since too few servers are reachable; meanwhile, no new object must
            begin.
        given_up: whether the last wait ended without success, and no object has succeeded since.
        next_s: during a wait, when ``next`` returns the next probe.
    """

    def __init__(self, most: int = MOST) -> None:
        self.waiting = self.given_up = False
        self.next_s = 0.0
        self._most = most
        self._kept: deque[T] = deque()
        self._lost: list[T] = []
        self._again: set[T] = set()  # objects whose retry is running
        self._probe: T | None = None  # the retry that tests whether servers are reachable
        self._pauses = 0
        self._began_s = self._waited_s = 0.0
        self._good_s: float | None = None
        self._back = False

    def __repr__(self) -> str:
        return f"<RetryPolicy: {len(self._kept)} kept, waiting={self.waiting}>"

    @property
    def left_s(self) -> float:
        """The maximum duration of the present or next wait, counted from its beginning."""
        allowed_s = FIRST_WAIT_S if self._good_s is None else WAIT_S
        return max(0.0, allowed_s - self._waited_s)

    @property
    def is_asking(self) -> bool:
        """Whether the run waits and a probe is running."""
        return self.waiting and self._probe is not None

    def is_probe(self, what: T) -> bool:
        """Return whether this object is the probe: the retry that tests whether servers are reachable."""
        return what == self._probe

    # Events.

    def succeeded(self, what: T, now_s: float) -> bool:
        """Record that an object has succeeded; return whether that was a retry."""
        probe = self._probe
        second = what == probe or what in self._again
        self.ended(what)
        self._good_s = now_s
        self.given_up = False
        # The success of a request from before the outage does not show that servers are reachable.
        if self.waiting and (what == probe or now_s - self._began_s >= STRAGGLERS_S):
            self._end_wait(now_s)
        return second

    def failed(self, what: T, began_s: float, now_s: float) -> bool:
        """
        Record that an object failed because servers were unreachable; return whether it is kept. Otherwise it
        is lost.

        Args:
            began_s: when this attempt began.
        """
        if what == self._probe:
            self._probe = None
            self._kept.append(what)  # at the end: the next probe is another object
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
        """Record that an attempt ended in a way that does not show whether servers are reachable."""
        self._again.discard(what)
        if what == self._probe:
            self._probe = None

    # Decisions.

    def next(self, now_s: float, at_end: bool = False) -> T | None:
        """
        Return the object to retry now; None: there is none.

        Args:
            at_end: whether the run has nothing else left to do.
        """
        if not self.waiting and self._kept and at_end and not self._back:
            self._begin_wait(now_s)  # whether servers are reachable is unknown: probe first
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
        """Return the objects that were given up since the last call."""
        lost, self._lost = self._lost, []
        return lost

    # Internal.

    def _next_probe(self, now_s: float) -> T | None:
        if self._probe is not None:
            return None
        if not self._kept:  # the probe ended for a reason other than servers
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


# This part keeps the data for the retries of a tree; ``RetryPolicy`` decides when they happen.


K = TypeVar("K")


class RetryQueue(Generic[T, K]):
    """
    Keeps the data (``K``) for the retry of each object of a tree, by its place (``T``).

    Args:
        wake: called at the end of a pause, when ``next`` can return a probe.
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
        """Whether objects are kept, so that ``next`` or ``take_lost`` can return something now or later."""
        return bool(self._kept or self._lost) or self.tries.waiting

    def keeps(self, place: T, kept: K, error: Exception, began_s: float) -> bool:
        """Record that an attempt that began at ``began_s`` has failed; return whether it is retried."""
        if not (wants_servers(error) and self.tries.failed(place, began_s, self._clock.seconds())):
            return False
        self._kept[place] = kept
        self._notify_wait()
        return True

    def succeeded(self, place: T) -> bool:
        """Record that an object has succeeded; return whether that was a retry."""
        second = self.tries.succeeded(place, self._clock.seconds())
        self._notify_wait()
        return second

    def ended(self, place: T) -> None:
        """Record that an attempt ended in a way that does not show whether servers are reachable."""
        self.tries.ended(place)

    def next(self, at_end: bool) -> tuple[T, K] | None:
        """
        Return the object to retry now, with its data; None: there is none.

        Args:
            at_end: whether the run has nothing else left to do.
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
        """Return the objects that were given up because servers stayed unreachable."""
        lost, self._lost = self._lost, []
        return lost

    def close(self) -> None:
        """Cancel the current pause, without calling ``wake``; called at the end of the run."""
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
