"""Deferreds, timers and wake-ups: gathering, time limits, cancellation, and sets of pending requests."""

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

# Starting work, and waiting for several Deferreds without leaving any running.

P = ParamSpec("P")
T = TypeVar("T")


def notify_deferred(function: Callable[..., Any]) -> None:
    """Make ``help`` show that a coroutine function returns a Deferred."""
    result = function.__annotations__["return"]
    function.__annotations__["return"] = f"Deferred[{result}]"


def as_deferred(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Deferred[T]]:
    """Make a coroutine function start when it is called, and return a Deferred that can be cancelled."""
    notify_deferred(function)

    @wraps(function)
    def begin(*arguments: P.args, **options: P.kwargs) -> Deferred[T]:
        return Deferred.fromCoroutine(function(*arguments, **options))

    return begin


def start_cancellable(work: Coroutine[Any, Any, T], clock: IReactorTime) -> Deferred[T]:
    """
    Start a coroutine, and return a Deferred that can also be cancelled by functions that the coroutine
    calls.

    While the coroutine runs, it does not wait for a Deferred, so Twisted would ignore the cancellation: a
    progress callback could not cancel. So it is cancelled right after; if the coroutine ends before that,
    it counts as cancelled.

    What was cancelled gives its memory back at once: its error keeps no traceback, and so no variables.
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
            # The error and the variables refer to each other, and to all segments that are in memory. The
            # frames are not cleared: that would end coroutines that have caught the error and go on.
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
    Return all results, in order.

    The first failure, or a cancellation, cancels all the others, unlike Twisted's ``gatherResults``, and is
    not wrapped.
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
    """Run all steps, ``at_once`` of them at a time; a failure or cancellation cancels them all."""
    semaphore = DeferredSemaphore(at_once)

    def start(step: Callable[[], Coroutine[Any, Any, None]]) -> Deferred[None]:
        return Deferred.fromCoroutine(step())

    await gather([semaphore.run(start, step) for step in steps])


class Waiters(Generic[T]):
    """The Deferreds that wait for one event; a cancelled one is removed."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[Deferred[T]] = []

    def wait(self) -> Deferred[T]:
        """Fire at the next event."""
        waiting: Deferred[T] = Deferred(self._forget)
        self._waiting.append(waiting)
        return waiting

    def fire(self, result: T) -> None:
        """Fire all waiting Deferreds with ``result``, and remove them."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.called:  # an earlier callback may have cancelled it
                each.callback(result)

    def fail(self, error: Exception) -> None:
        """Fail all waiting Deferreds with ``error``, and remove them."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.called:
                each.errback(error)

    def _forget(self, waiting: Deferred[T]) -> None:
        if waiting in self._waiting:  # else it is about to fire
            self._waiting.remove(waiting)


# Time limits.


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


# Engines are loops that examine their whole state, act, and then wait. Each change of the state calls
# ``fire``; no event is lost between examining and waiting, and there is never more than one waiter and one
# timer. The waiter does not run inside ``fire``, but from the reactor right after, since the caller may be
# in the middle of something that the waiter wants to end. Several events at once wake it once.


class Wakeup:
    """
    Lets one coroutine wait for "something has changed".

    Args:
        clock: wakes the waiter, at once or when its time is over.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._pending = False
        self._waiter: Deferred[None] | None = None
        self._timer: IDelayedCall | None = None

    def fire(self, _result: object = None) -> None:
        """Wake the waiter soon, or let the next ``wait`` return at once. Can be used as a callback."""
        if not self._pending:
            self._pending = True
            if self._waiter is not None:
                self._set_timer(0)

    def wait(self, timeout_s: float | None = None) -> Deferred[None]:
        """
        Return a Deferred that fires after the next ``fire`` since the last wait, or when the time is over.
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
    Calls a function once after a delay, unless it is stopped before; then it can be set again.

    It and its owner refer to each other, so it is meant for few owners.
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
        """Cancel the call if it is pending; it can be set again."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def _ring(self) -> None:
        self._timer = None
        self._call()


# Calls from another thread than the reactor's would corrupt its state.


def check_own_thread(what: str) -> None:
    """
    Do nothing in the reactor's thread, or while no reactor has run yet.

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
    The pending requests of a loop, which is woken when one of them ends.

    Attributes:
        running: the subject of each request that has not ended.
        changed: wakes the loop; may also be fired by others.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self.running: dict[Deferred[None], W] = {}
        self.changed = Wakeup(clock)
        self._bug: Failure | None = None

    def start(self, request: Coroutine[Any, Any, None], about: W) -> None:
        """Start a request, which handles all its expected errors."""
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
        """Wait until something has changed; raises the unexpected error of a request."""
        await self.changed.wait(timeout_s)
        if self._bug is not None:
            self._bug.raiseException()

    def cancel(self) -> None:
        """Cancel all requests that are pending."""
        for running in list(self.running):
            running.cancel()


# One timer for all running transfers of small files: a timer for each would cost more than the file.

_ROUNDING_S = 1e-6


class Timed(Protocol):
    """
    A transfer that must be checked at some time.

    Attributes:
        due_s: when, or an earlier time, in seconds of the clock. It may move to an earlier time, but not to
            one before the next check that ``Deadlines`` has planned.
    """

    @property
    def due_s(self) -> float:
        """When the transfer must be checked, in seconds of the clock."""

    def overdue(self) -> None:
        """
        The time ``due_s`` has come; ``Deadlines``, which calls this, no longer tracks the transfer unless
        that adds itself again.
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
        """Call ``transfer.overdue`` when it is due."""
        self._tracked[transfer] = None
        if self._timer is None and not self._notifying:
            self._look()

    def discard(self, transfer: Timed) -> None:
        """Stop tracking a transfer that has ended; the timer runs only while there are any."""
        self._tracked.pop(transfer, None)
        if not self._tracked and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, again: bool = False) -> None:
        """
        Notify the transfers that are late.

        Timers run before sockets are read. After a long turn of the reactor all servers seem silent, so what
        they have sent is read first, and only transfers that are late ``again`` are notified.
        """
        self._timer = None
        now = self._clock.seconds()
        due = {transfer: transfer.due_s for transfer in self._tracked}  # asks servers, so only once
        late = [transfer for transfer, due_s in due.items() if due_s - now <= _ROUNDING_S]
        if late and not again:
            self._timer = self._clock.callLater(0, self._look, True)
            return
        self._notifying = True
        try:
            for transfer in late:
                if self._tracked.pop(transfer, self) is not self:  # it may have ended meanwhile
                    del due[transfer]
                    transfer.overdue()
        finally:
            self._notifying = False
        if self._tracked and self._timer is None:
            due |= {each: each.due_s for each in self._tracked if each not in due}
            left_s = min(due[each] for each in self._tracked) - now
            self._timer = self._clock.callLater(max(0.0, min(left_s, self._look_s)), self._look)


# A hundred small files given at once would be coded in one turn: a quarter of a second in which nothing is
# sent and no answer is read. With a limit per turn, servers work on the first files while the next ones are
# coded.


class PerTurnLimit:
    """
    Starts pieces of work in the order of asking.

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
        # Work that starts after an idle time may thus wait one turn without need: that is cheaper than a
        # timer for each start.
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
