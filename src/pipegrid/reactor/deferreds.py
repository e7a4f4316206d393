"""Deferreds and timers: gather, timeout, wake-up, request set."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from threading import get_ident
from types import CoroutineType
from typing import Any, Generic, ParamSpec, TypeVar, cast

from twisted.internet.defer import (
    CancelledError,
    Deferred,
    DeferredList,
    DeferredSemaphore,
    FirstError,
    gatherResults,
)
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python import threadable
from twisted.python.failure import Failure

from pipegrid.errors import UsageError

# Beginning things that take time, and waiting for several at once, leaving none behind.

P = ParamSpec("P")
T = TypeVar("T")


def tell_deferred(function: Callable[..., Any]) -> None:
    """Have ``help`` say of a coroutine function that a Deferred comes of it, as callers will see it."""
    result = function.__annotations__["return"]
    function.__annotations__["return"] = f"Deferred[{result}]"


def as_deferred(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Deferred[T]]:
    """Have a coroutine begin when it is called: what is returned is a Deferred, which can be cancelled."""
    tell_deferred(function)

    @wraps(function)
    def begin(*arguments: P.args, **options: P.kwargs) -> Deferred[T]:
        return Deferred.fromCoroutine(function(*arguments, **options))

    return begin


def start_cancellable(work: Coroutine[Any, Any, T], clock: IReactorTime) -> Deferred[T]:
    """
    Begin a coroutine, and return a Deferred that can be cancelled by what the coroutine itself calls, too.

    A coroutine that runs at this moment waits for nothing that could be cancelled, so that Twisted's Deferred
    would drop it without a word: a progress callback could not give up. It is done right after; if the
    coroutine has nothing left to wait for, and ends before that, it counts as cancelled all the same.
    """
    running = Deferred.fromCoroutine(work)
    cancel = running.cancel
    soon: list[IDelayedCall] = []

    def cancel_now_or_soon() -> None:
        if not cast("CoroutineType[Any, Any, T]", work).cr_running:
            cancel()
        elif not soon:
            soon.append(clock.callLater(0, cancel))

    def ended(result: Any) -> Any:
        del running.__dict__["cancel"]  # which holds it: nothing is left to the collector
        if not soon or not soon[0].active():
            return result
        soon[0].cancel()
        return result if isinstance(result, Failure) else Failure(CancelledError())

    running.cancel = cancel_now_or_soon  # type: ignore[method-assign]
    running.addBoth(ended)
    return running


async def gather(running: Sequence[Deferred[T]]) -> list[T]:
    """
    Return all results, in order.

    The first failure, or being cancelled, cancels all the others, which Twisted's ``gatherResults``
    leaves running, and comes out as it is, which there comes wrapped.
    """
    try:
        return list(await gatherResults(running, consumeErrors=True))
    except Exception as error:
        for other in running:
            other.addErrback(lambda _failure: None)
            other.cancel()
        if isinstance(error, FirstError):
            error.subFailure.raiseException()
        raise


async def all_ended(waiting: Sequence[Deferred[Any]]) -> list[Any]:
    """Wait for all, and raise the first failure when all have ended."""
    outcomes = await DeferredList(waiting, consumeErrors=True)
    for good, result in outcomes:
        if not good:
            result.raiseException()
    return [result for _, result in outcomes]


async def few_at_a_time(
    at_once: int, steps: Sequence[Callable[[], Coroutine[Any, Any, None]]]
) -> None:
    """Take all steps, so many of them at once; a failure or cancellation ends them all."""
    gate = DeferredSemaphore(at_once)

    def start(step: Callable[[], Coroutine[Any, Any, None]]) -> Deferred[None]:
        return Deferred.fromCoroutine(step())

    await gather([gate.run(start, step) for step in steps])


class Waiters(Generic[T]):
    """All who wait for one event; who gives up waiting is forgotten."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[Deferred[T]] = []

    def wait(self) -> Deferred[T]:
        """Fire with the event that comes next."""
        waiting: Deferred[T] = Deferred(self._forget)
        self._waiting.append(waiting)
        return waiting

    def fire(self, result: T) -> None:
        """The event has come: all who wait now get ``result``, and are forgotten."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.called:  # who was told before may have had it give up
                each.callback(result)

    def fail(self, error: Exception) -> None:
        """The event will not come: all who wait now get ``error``, and are forgotten."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.called:
                each.errback(error)

    def _forget(self, waiting: Deferred[T]) -> None:
        if waiting in self._waiting:  # else it is about to be told
            self._waiting.remove(waiting)


# Waiting for something, but not for ever.


async def timeout_or(event: Deferred[Any], timeout_s: float, clock: IReactorTime) -> bool:
    """
    Wait until an event happens, or the time is over; returns whether it happened.

    The event is cancelled when the time is over.
    """
    over = False

    def give_up() -> None:
        nonlocal over
        over = True
        event.cancel()

    timer = clock.callLater(timeout_s, give_up)
    try:
        await event
    except CancelledError:
        if not over:
            raise
        return False
    finally:
        if timer.active():
            timer.cancel()
    return True


# One thing to wait for: "something changed, look again".
#
# Engines here are loops that look at their whole state, act, and then wait. Whatever may change the state
# calls ``fire``; no event is lost between looking and waiting, and there is never more than one
# waiter and one timer.
#
# The waiter never runs inside ``fire``, but from the reactor right after: whoever fires may be in the middle
# of something that the waiter wants to end. A burst of events wakes it once.


class Wakeup:
    """
    A waiting place for one coroutine.

    Args:
        clock: wakes the waiter, at once or when its time is over.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._pending = False
        self._waiter: Deferred[None] | None = None
        self._timer: IDelayedCall | None = None

    def fire(self, _result: object = None) -> None:
        """Wake the waiter soon, or let the next ``wait`` return at once. Fit to be a callback."""
        if not self._pending:
            self._pending = True
            if self._waiter is not None:
                self._set_timer(0)

    def wait(self, timeout_s: float | None = None) -> Deferred[None]:
        """Return a Deferred that fires after the next ``fire`` since the last wait, or in time."""
        assert self._waiter is None, "only one coroutine may wait here"
        waiter: Deferred[None] = Deferred(self._cancelled)
        if self._pending:
            self._pending = False
            waiter.callback(None)
            return waiter
        self._waiter = waiter
        if timeout_s is not None:
            self._set_timer(max(0.0, timeout_s))
        return waiter

    def _wake(self) -> None:
        self._timer = None
        self._pending = False
        waiter, self._waiter = self._waiter, None
        assert waiter is not None
        waiter.callback(None)

    def _cancelled(self, _waiter: Deferred[None]) -> None:
        self._waiter = None
        self._stop_timer()

    def _set_timer(self, delay_s: float) -> None:
        self._stop_timer()
        self._timer = self._clock.callLater(delay_s, self._wake)

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None and timer.active():
            timer.cancel()


# A call that comes later, once, for whoever may want it to come not at all, or anew.


class Timer:
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


# Calls from another thread than the reactor's: they would spoil what is under way there.


def check_own_thread(what: str) -> None:
    """
    Do nothing in the reactor's own thread, or while no reactor has run yet.

    Args:
        what: it belongs to the reactor, in words.

    Raises:
        UsageError: this is another thread.
    """
    own: Any = threadable.ioThread
    if own is not None and own != get_ident():
        raise UsageError(
            f"{what} can be called from the reactor's own thread only; from another one go through "
            "reactor.callFromThread or twisted.internet.threads.blockingCallFromThread"
        )


# Requests that are under way for one loop, which is woken whenever one of them ends.

W = TypeVar("W")


class RequestSet(Generic[W]):
    """
    What a loop has asked for, and waits for.

    Attributes:
        running: of each request that has not ended, what it is about.
        changed: wakes the loop; also to be fired by others.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self.running: dict[Deferred[None], W] = {}
        self.changed = Wakeup(clock)
        self._bug: Failure | None = None

    def start(self, request: Coroutine[Any, Any, None], about: W) -> None:
        """Begin a request; it deals with whatever can go wrong on its way."""
        running = Deferred.fromCoroutine(request)
        if not running.called:
            self.running[running] = about
        running.addBoth(self._ended, running)

    def _ended(self, result: Failure | None, running: Deferred[None]) -> None:
        self.running.pop(running, None)
        if isinstance(result, Failure) and not result.check(CancelledError):
            self._bug = self._bug or result
        self.changed.fire()

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait until something has changed; raises what no request should have raised."""
        await self.changed.wait(timeout_s)
        if self._bug is not None:
            self._bug.raiseException()

    def cancel(self) -> None:
        """Give up all that is under way."""
        for running in list(self.running):
            running.cancel()
