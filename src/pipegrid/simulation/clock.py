"""
Clocks for virtual time: a fast ``Clock``, and the view of it that one host has.

Twisted's own ``Clock`` sorts all pending calls at every insertion and after every call it runs, which
makes a simulation with n timers cost n for each event (a thousand idle connections have a thousand
time-outs pending). It also jumps to the end of an ``advance`` before it runs what was due on the way.
``HeapClock`` does neither.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from twisted.internet.base import DelayedCall
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import Clock, Cooperator
from zope.interface import implementer

from pipegrid.links.pending import PendingCalls

_FEW = 64


class HeapClock(PendingCalls, Clock):
    """
    A ``Clock`` whose cost per call grows with the logarithm of the calls that are pending.

    Calls run at their own time, as ``seconds()`` has it, and in order of insertion among equals.
    """

    def callLater(
        self, delay: float, callable: Callable[..., object], *args: object, **kw: object
    ) -> IDelayedCall:
        """Schedule a call, as ``IReactorTime`` has it."""
        assert delay >= 0, f"{delay} is not a time from now"
        call = DelayedCall(
            self.rightNow + delay, callable, args, kw, self._forget, self._push, self.seconds
        )
        self._push(call)
        return call

    @property
    def calls(self) -> list[DelayedCall]:  # type: ignore[override]
        """All pending calls, the next one first."""
        pending = {id(entry[2]): entry for entry in self._heap if entry[2].active()}
        ordered = sorted((call.getTime(), number, call) for _, number, call in pending.values())
        return [call for _, _, call in ordered]

    def getDelayedCalls(self) -> Sequence[IDelayedCall]:
        """All pending calls, the next one first."""
        return self.calls

    def next_time(self) -> float | None:
        """The time of the next call, or None if nothing is pending."""
        return None if self._next() is None else self._heap[0][0]

    def step(self) -> bool:
        """Go to the next call and run it; False if nothing is pending."""
        time_s = self.next_time()
        if time_s is None:
            return False
        call = heapq.heappop(self._heap)[2]
        self.rightNow = max(self.rightNow, time_s)
        call.called = 1
        call.func(*call.args, **call.kw)
        return True

    def advance(self, amount: float) -> None:
        """Let ``amount`` seconds pass, running every call at its time."""
        end_s = self.rightNow + amount
        while (time_s := self.next_time()) is not None and time_s <= end_s:
            self.step()
        self.rightNow = max(self.rightNow, end_s)


@implementer(IReactorTime)
class HostClock:
    """
    The clock as one host sees it: a crash takes all its timers.

    Whatever runs on a simulated host gets this as its reactor, so that no timer of a program that has
    crashed ever goes off.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._calls: list[IDelayedCall] = []
        self._prune_at = _FEW

    def seconds(self) -> float:
        return self._clock.seconds()

    def callLater(
        self, delay: float, callable: Callable[..., object], *args: object, **kw: object
    ) -> IDelayedCall:
        """Schedule a call that a crash of this host forgets."""
        call = self._clock.callLater(delay, callable, *args, **kw)
        self._calls.append(call)
        if len(self._calls) > self._prune_at:
            self._calls = [call for call in self._calls if call.active()]
            self._prune_at = max(_FEW, 2 * len(self._calls))
        return call

    def getDelayedCalls(self) -> Sequence[IDelayedCall]:
        """The pending calls of this host."""
        return [call for call in self._calls if call.active()]

    def crash(self) -> None:
        """
        Forget every pending call.

        Objects of the program that has crashed are still there, and when Python collects them some tidy up:
        they may cancel what they scheduled, as they would have done alive, and find nothing strange.
        """
        for call in self.getDelayedCalls():
            call.cancel()
            call.cancel = _nothing  # type: ignore[method-assign]
        self._calls = []


def _nothing() -> None:
    """A timer of the dead is cancelled already."""


def cooperator(clock: IReactorTime) -> Cooperator:
    """
    Return a Cooperator that takes one step per turn of ``clock``, and none of real time.

    Twisted's global one runs on the real reactor, for as many steps as fit in 10 real ms. Twisted Web
    gives it every pull producer and, unless told otherwise, every ``FileBodyProducer``. In a test:
    ``self.patch(twisted.internet.task, "_theCooperator", cooperator(clock))``.
    """
    return Cooperator(
        terminationPredicateFactory=lambda: lambda: True,
        scheduler=lambda call: clock.callLater(0, call),
    )
