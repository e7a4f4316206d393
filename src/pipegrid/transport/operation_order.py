"""Which operations on a server must wait for which, if no connection keeps their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred, maybeDeferred
from twisted.python.failure import Failure

from pipegrid.reactor.deferreds import Waiters

T = TypeVar("T")


class OrderedCall:
    """
    One call, from its submission to its end.

    Attributes:
        share_number: the share that it concerns, or None for all shares of the index.
        changes: whether it changes anything.
        wanted: False once its caller has cancelled it.
    """

    def __init__(
        self, share_number: int | None, changes: bool, call: Callable[[OrderedCall], Any]
    ) -> None:
        self.share_number = share_number
        self.changes = changes
        self.wanted = True
        self.call = call
        self.started = False
        self.waits_for = 0
        self.followers: list[OrderedCall] = []
        self.result: Deferred[Any] = Deferred()

    def conflicts(self, other: OrderedCall) -> bool:
        """Return whether the order of the two can make a difference; ``other`` came first."""
        numbers = (self.share_number, other.share_number)
        together = None in numbers or numbers[0] == numbers[1]
        return together and (self.changes or other.changes)


class Ordering:
    """
    Carries out operations on many storage indexes, each in its order.

    The contract wants operations on one storage index carried out in the order of the calls. They need
    not run one after another: the order of two writes to different shares has no effect, and both should
    become durable in one group. So an operation waits only for earlier ones that conflict with it: those
    that concern the same share, unless both only read.

    Waiting operations form a graph, not a queue: each has the number of operations that it waits for, and
    a list of those that wait for it. Searching for conflicts examines the pending operations of the
    index; the callers' windows bound these.
    """

    def __init__(self) -> None:
        self._pending: dict[bytes, dict[OrderedCall, None]] = {}
        self._ready: deque[tuple[bytes, OrderedCall]] = deque()
        self._draining = False
        self._idle: Waiters[None] = Waiters()

    def submit(
        self,
        storage_index: bytes,
        share_number: int | None,
        changes: bool,
        call: Callable[[OrderedCall], Deferred[T] | T],
    ) -> Deferred[T]:
        """
        Carry out a call when all calls that conflict with it have ended.

        If the result is cancelled, a call that has not begun is dropped. One that has begun continues to
        its end, and later ones wait for that; it can read ``OrderedCall.wanted``.

        Args:
            call: gets its operation; returns, or fires with, the result.
        """
        return self.carry_out(storage_index, OrderedCall(share_number, changes, call))

    def carry_out(self, storage_index: bytes, operation: OrderedCall) -> Deferred[Any]:
        """Carry out an operation that decides by itself which operations conflict with it."""
        operation.result = Deferred(
            lambda _: self._give_up(storage_index, operation, CancelledError())
        )
        pending = self._pending.setdefault(storage_index, {})
        for earlier in pending:
            if operation.conflicts(earlier):
                operation.waits_for += 1
                earlier.followers.append(operation)
        pending[operation] = None
        if not operation.waits_for:
            self._start([(storage_index, operation)])
        return operation.result

    def give_up_all(self, reason: Callable[[], Exception]) -> Deferred[None]:
        """
        Cancel everything; fires when the operations that had begun have ended.

        Args:
            reason: returns the error for each operation.
        """
        for storage_index, operations in list(self._pending.items()):
            for operation in list(operations):
                if operation.wanted:
                    self._give_up(storage_index, operation, reason())
        gone = self._idle.wait()
        self._look_idle()
        return gone

    def _give_up(self, storage_index: bytes, operation: OrderedCall, reason: Exception) -> None:
        operation.wanted = False
        operation.result.errback(reason)
        if not operation.started:
            self._end(storage_index, operation)

    def _start(self, operations: Iterable[tuple[bytes, OrderedCall]]) -> None:
        # A loop, since each end may start the next operation, and a thousand ends would nest too deep.
        self._ready.extend(operations)
        if self._draining:
            return
        self._draining = True
        try:
            while self._ready:
                storage_index, operation = self._ready.popleft()
                if operation.wanted:
                    operation.started = True
                    done = maybeDeferred(operation.call, operation)
                    done.addBoth(self._ended, storage_index, operation)
        finally:
            self._draining = False

    def _ended(self, result: object, storage_index: bytes, operation: OrderedCall) -> None:
        self._end(storage_index, operation)
        if not operation.wanted:
            return  # no caller is left to receive a result or failure
        operation.wanted = False
        if isinstance(result, Failure):
            operation.result.errback(result)
        else:
            operation.result.callback(result)

    def _end(self, storage_index: bytes, operation: OrderedCall) -> None:
        pending = self._pending[storage_index]
        del pending[operation]
        if not pending:
            del self._pending[storage_index]
        ready = []
        for follower in operation.followers:
            follower.waits_for -= 1
            if not follower.waits_for and follower.wanted:
                ready.append((storage_index, follower))
        self._start(ready)
        self._look_idle()

    def _look_idle(self) -> None:
        if not self._pending:
            self._idle.fire(None)
