"""
Helpers for Deferreds: gathering, cancellation, time limits, timers, wake-ups, and sets of pending requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from threading import get_ident
from types import CoroutineType
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

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

# Starting coroutines, and waiting for several Deferreds so that none is left running.

P = ParamSpec("P")
T = TypeVar("T")


def notify_deferred(function: Callable[..., Any]) -> None:
    """Make ``help`` show that a coroutine function returns a Deferred."""
    result = function.__annotations__["return"]
    function.__annotations__["return"] = f"Deferred[{result}]"


def as_deferred(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Deferred[T]]:
    """
    Make a coroutine function start as soon as it is called, and return a Deferred that can be cancelled.
    """
    notify_deferred(function)

    @wraps(function)
    def begin(*arguments: P.args, **options: P.kwargs) -> Deferred[T]:
        return Deferred.fromCoroutine(function(*arguments, **options))

    return begin


def start_cancellable(work: Coroutine[Any, Any, T], clock: IReactorTime) -> Deferred[T]:
    """
    Start a coroutine; return a Deferred that can be cancelled even by functions that the coroutine calls.

    While the coroutine executes, it does not wait for a Deferred, so Twisted would ignore a cancellation: a
    progress callback could not cancel the operation. So the coroutine is cancelled in the next turn of the
    reactor; if it ends earlier, it still counts as cancelled.

    A cancelled coroutine releases its memory at once: its error keeps no traceback, and so no variables.
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
        del running.__dict__["cancel"]  # avoids a reference cycle
        if isinstance(result, Failure) and result.check(CancelledError):
            # The error and the variables refer to each other, and the variables to all segments in memory.
            # The frames are not cleared: clearing would end coroutines that have caught the error and
            # continue.
            result.cleanFailure()
        if not soon or not soon[0].active():
            return result
        soon[0].cancel()
        return result if isinstance(result, Failure) else Failure(CancelledError())

    running.cancel = cancel_now_or_soon  # type: ignore[method-assign]
    running.addBoth(ended)
    return running


async def gather(running: Sequence[Deferred[T]]) -> list[T]:
    """
    Return the results of all Deferreds, in order.

    The first failure, or a cancellation, cancels all other Deferreds, unlike in Twisted's ``gatherResults``;
    the failure is not wrapped.
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
    """
    Wait until all Deferreds have ended; return all results, or raise the failure that comes first in the
    list.
    """
    outcomes = await DeferredList(waiting, consumeErrors=True)
    for good, result in outcomes:
        if not good:
            result.raiseException()
    return [result for _, result in outcomes]


async def few_at_a_time(
    at_once: int, steps: Sequence[Callable[[], Coroutine[Any, Any, None]]]
) -> None:
    """Run all steps, at most ``at_once`` at the same time; a failure or cancellation cancels all steps."""
    semaphore = DeferredSemaphore(at_once)

    def start(step: Callable[[], Coroutine[Any, Any, None]]) -> Deferred[None]:
        return Deferred.fromCoroutine(step())

    await gather([semaphore.run(start, step) for step in steps])


class Waiters(Generic[T]):
    """The Deferreds that wait for one event; a cancelled Deferred is removed."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[Deferred[T]] = []

    def wait(self) -> Deferred[T]:
        """Return a Deferred that fires at the next event."""
        waiting: Deferred[T] = Deferred(self._forget)
        self._waiting.append(waiting)
        return waiting

    def fire(self, result: T) -> None:
        """Fire all waiting Deferreds with ``result``, and remove them."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.called:  # an earlier callback may have cancelled this Deferred
                each.callback(result)

    def fail(self, error: Exception) -> None:
        """Fail all waiting Deferreds with ``error``, and remove them."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.called:
                each.errback(error)

    def _forget(self, waiting: Deferred[T]) -> None:
        if waiting in self._waiting:  # otherwise the Deferred is about to fire
            self._waiting.remove(waiting)


# Time limits.


async def timeout_or(event: Deferred[Any], timeout_s: float, clock: IReactorTime) -> bool:
    """
    Wait until an event happens or the time limit passes; return whether the event happened.

    The Deferred of the event is cancelled at the time limit.
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


# Engines are loops that examine their whole state, act, and then wait. Each change of the state calls
# ``fire``. No event is lost between examining and waiting, and at most one waiter and one timer exist. The
# reactor resumes the waiter soon after ``fire``, not within the call, since the caller of ``fire`` may be in
# the middle of something that the waiter wants to end. Several events in one turn wake the waiter once.


class Wakeup:
    """
    Lets one coroutine wait until its state has changed.

    Args:
        clock: wakes the waiter, in the next turn or when its time limit has passed.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._pending = False
        self._waiter: Deferred[None] | None = None
        self._timer: IDelayedCall | None = None

    def fire(self, _result: object = None) -> None:
        """
        Wake the waiter soon; without a waiter, the next ``wait`` returns at once. Can be used as a callback.
        """
        if not self._pending:
            self._pending = True
            if self._waiter is not None:
                self._set_timer(0)

    def wait(self, timeout_s: float | None = None) -> Deferred[None]:
        """
        Return a Deferred that fires soon after ``fire`` is called, or when the time limit has passed. It
        fires at once if ``fire`` was called since the preceding wait ended.
        """
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


class Timer:
    """
    Calls a function once after a delay, unless the timer is stopped; afterwards it can be set again.

    The timer and its owner refer to each other, so it is meant for objects of which few exist.
    """

    __slots__ = ("_call", "_clock", "_timer")

    def __init__(self, clock: IReactorTime, call: Callable[[], object]) -> None:
        self._clock = clock
        self._call = call
        self._timer: IDelayedCall | None = None

    @property
    def is_set(self) -> bool:
        """Whether the call is pending."""
        return self._timer is not None

    def set(self, delay_s: float) -> None:
        """Schedule the call, unless it is pending."""
        if self._timer is None:
            self._timer = self._clock.callLater(delay_s, self._ring)

    def stop(self) -> None:
        """Cancel the call if it is pending; the timer can be set again."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _ring(self) -> None:
        self._timer = None
        self._call()


# Calls from a thread other than the reactor's would corrupt the state of objects such as a grid.


def check_own_thread(what: str) -> None:
    """
    Check that this is the reactor's thread; accept any thread while no reactor has run yet.

    Args:
        what: names the object in the error.

    Raises:
        UsageError: this is another thread.
    """
    own: Any = threadable.ioThread
    if own is not None and own != get_ident():
        raise UsageError(
            f"{what} can be called from the reactor's own thread only; from another one go through "
            "reactor.callFromThread or twisted.internet.threads.blockingCallFromThread"
        )


W = TypeVar("W")


class RequestSet(Generic[W]):
    """
    The pending requests of a loop, which is woken when a request ends.

    Attributes:
        running: the subject of each request that has not ended.
        changed: wakes the loop; other code may fire it, too.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self.running: dict[Deferred[None], W] = {}
        self.changed = Wakeup(clock)
        self._bug: Failure | None = None

    def start(self, request: Coroutine[Any, Any, None], about: W) -> None:
        """Start a request; its coroutine must handle all expected errors."""
        running = Deferred.fromCoroutine(request)
        if not running.called:
            self.running[running] = about
        running.addBoth(self._ended, running)

    def _ended(self, result: Failure | None, running: Deferred[None]) -> None:
        self.running.pop(running, None)
        if isinstance(result, Failure):
            if result.check(CancelledError):
                result.cleanFailure()  # see ``start_cancellable``
            else:
                self._bug = self._bug or result
        self.changed.fire()

    async def wait(self, timeout_s: float | None = None) -> None:
        """
        Wait until something has changed or the time limit has passed; raise the unexpected error of a
        request, if any.
        """
        await self.changed.wait(timeout_s)
        if self._bug is not None:
            self._bug.raiseException()

    def cancel(self) -> None:
        for running in list(self.running):
            running.cancel()


# One timer serves all running transfers of small files: a timer for each would cost more than the transfer.

_ROUNDING_S = 1e-6


class Timed(Protocol):
    """
    A transfer that must be checked at a certain time.

    Attributes:
        due_s: the time of the check, or an earlier time, in seconds of the clock. It may change, but must
            never become earlier than the next check that ``Deadlines`` has planned.
    """

    @property
    def due_s(self) -> float:
        """When the transfer must be checked, in seconds of the clock."""

    def overdue(self) -> None:
        """
        Handle that the time ``due_s`` has come. ``Deadlines``, the caller, has already stopped tracking the
        transfer; it may add itself again.
        """


class Deadlines:
    """
    Notifies transfers that take too long.

    Args:
        look_s: the longest time between two checks.
    """

    def __init__(self, clock: IReactorTime, look_s: float) -> None:
        self._clock = clock
        self._look_s = look_s
        self._tracked: dict[Timed, None] = {}
        self._timer: IDelayedCall | None = None
        self._notifying = False

    def add(self, transfer: Timed) -> None:
        """Call ``transfer.overdue`` when the time ``transfer.due_s`` has come."""
        self._tracked[transfer] = None
        if self._timer is None and not self._notifying:
            self._look()

    def discard(self, transfer: Timed) -> None:
        """Stop tracking a transfer that has ended; the timer runs only while transfers are tracked."""
        self._tracked.pop(transfer, None)
        if not self._tracked and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, again: bool = False) -> None:
        """
        Notify the transfers that are late.

        A reactor runs timers before it reads sockets. After a long turn of the reactor all servers seem
        silent, so sockets are read first, and only transfers that are still late (``again``) are notified.
        """
        self._timer = None
        now = self._clock.seconds()
        # ``due_s`` looks up every server's last activity, so it is read once.
        due = {transfer: transfer.due_s for transfer in self._tracked}
        late = [transfer for transfer, due_s in due.items() if due_s - now <= _ROUNDING_S]
        if late and not again:
            self._timer = self._clock.callLater(0, self._look, True)
            return
        self._notifying = True
        try:
            for transfer in late:
                if self._tracked.pop(transfer, self) is not self:  # has not ended meanwhile
                    del due[transfer]
                    transfer.overdue()
        finally:
            self._notifying = False
        if self._tracked and self._timer is None:
            due |= {each: each.due_s for each in self._tracked if each not in due}
            left_s = min(due[each] for each in self._tracked) - now
            self._timer = self._clock.callLater(max(0.0, min(left_s, self._look_s)), self._look)


# A hundred small files that are put at the same time would all be encoded in one turn: for a quarter of a
# second nothing would be sent and no answer read. With a limit per turn, servers work on the first files
# while the next files are encoded.


class PerTurnLimit:
    """
    Starts pieces of work in the order in which they asked to begin.

    Args:
        per_turn: how many may start in one turn of the reactor.
    """

    def __init__(self, clock: IReactorTime, per_turn: int) -> None:
        assert per_turn > 0
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[Deferred[None]] = deque()
        self._next_turn = Timer(clock, self._turn)

    def begin(self) -> Deferred[None]:
        """Return a Deferred that fires when the work may start: at once, or in a later turn."""
        turn: Deferred[None] = Deferred(self._cancelled)
        if self._left and not self._waiting:
            self._left -= 1
            turn.callback(None)
        else:
            self._waiting.append(turn)
            self._next_turn.set(0)
        return turn

    def _turn(self) -> None:
        # The budget is reset only here, so work that starts after an idle time may wait one turn without
        # need: that is cheaper than a timer for each start.
        self._left = self._per_turn
        if len(self._waiting) > self._left:
            self._next_turn.set(0)
        while self._waiting and self._left:
            self._left -= 1
            self._waiting.popleft().callback(None)

    def _cancelled(self, turn: Deferred[None]) -> None:
        self._waiting.remove(turn)
        if not self._waiting:
            self._next_turn.stop()
