"""Which operations on a server must wait for which, where no connection, or several, keep their order."""

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
        call: gets this operation; returns, or fires with, the result.
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

    def carry_out(self, storage_index: bytes, operation: OrderedCall) -> Deferred[Any]:
        """
        Carry out an operation when all that conflict with it have ended.

        If the result is cancelled, an operation that has not begun is dropped. One that has begun continues
        to its end, and later ones wait for that; it can read ``OrderedCall.wanted``.
        """
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


class _Operation:
    """
    A question without a response, or a change that was not sent yet.

    Attributes:
        number: the share, or None for a question about all shares, or a change of several.
        changes: whether it is a change.
        alone: it uses another connection, without order: it waits for earlier operations, and later ones
            wait for it.
        gate: fires when it may be sent; None once it was.
    """

    __slots__ = ("alone", "changes", "gate", "number")

    def __init__(self, number: int | None, changes: bool, alone: bool = False) -> None:
        self.number = number
        self.changes = changes
        self.alone = alone
        self.gate: Deferred[None] | None = None

    def delays(self, other: _Operation) -> bool:
        """Return whether it could have a visible effect to send ``other``, which came later, at once."""
        if self.alone or other.alone:
            return True
        if self.changes and other.changes:
            # Both use the uploads' connection; only a change that was not sent yet can be overtaken.
            return self.number == other.number
        if not self.changes and not other.changes:
            return False
        return self.number is None or other.number is None or self.number == other.number


class _Index:
    """
    Unanswered operations on one storage index.

    Attributes:
        sent: maps a share (None: several) to the number of its changes that were sent.
        pending: all other operations, in order.
    """

    __slots__ = ("pending", "sent")

    def __init__(self) -> None:
        self.sent: dict[int | None, int] = {}
        self.pending: dict[_Operation, None] = {}

    def changes(self, number: int | None) -> bool:
        """Return whether a question could see changes that were sent."""
        sent = self.sent
        return bool(sent) and (number is None or number in sent or None in sent)

    def send(self, operation: _Operation) -> None:
        """Record that an operation may be sent; a sent change is only counted."""
        operation.gate = None
        if operation.changes:
            self.sent[operation.number] = self.sent.get(operation.number, 0) + 1
            self.pending.pop(operation, None)
        else:
            self.pending[operation] = None

    def end(self, operation: _Operation) -> bool:
        """Record the end of an operation; return False if it had ended before."""
        if operation.changes and operation.gate is None:
            left = self.sent.pop(operation.number) - 1
            if left:
                self.sent[operation.number] = left
            return True
        if operation not in self.pending:
            return False
        del self.pending[operation]
        return True


class GbsOrder:
    """
    Decides which operation waits for which, by storage index.

    On one connection a server carries requests out in order; between two there is no order. Uploads have
    one connection, questions have others, so that a question need not wait for megabytes. The difference
    is visible only if a question and a change concern the same share at the same time:

    * A question after an unanswered change is sent on the uploads' connection, which keeps the order. A
      long response would block that connection, so a question with a long response waits for the change.
    * A change after an unanswered question waits for the response (of a long one: for its beginning).

    Nothing else waits. An allocation has no effect that a question could see, and a write affects only
    its own share and the list of shares. So puts, gets and repairs never wait here: a repair reads other
    shares than it writes.

    A change that was sent is recorded by its connection, which knows the order of outstanding responses;
    here its share is only counted. This class records the changes that were not sent, and the questions.

    ``transport.operation_order`` differs: it carries operations out one after another where no lower
    layer keeps their order. Here connections keep it, and this class only chooses between them.
    """

    def __init__(self) -> None:
        self._indexes: dict[bytes, _Index] = {}

    def __len__(self) -> int:
        return sum(
            len(index.pending) + sum(index.sent.values()) for index in self._indexes.values()
        )

    @property
    def held(self) -> int:
        """Number of changes that were not sent."""
        indexes = self._indexes.values()
        return sum(each.changes for index in indexes for each in index.pending)

    def change(
        self, storage_index: bytes, number: int | None, start: Callable[[], Deferred[T]]
    ) -> Deferred[T]:
        """Send a change of a share (None: several), now or after the questions that could see it."""
        return self._submit(storage_index, _Operation(number, True), start)

    def alone(self, storage_index: bytes, start: Callable[[], Deferred[T]]) -> Deferred[T]:
        """
        Send a change on another connection, after all earlier operations; later ones wait for its end.
        """
        # It stays in ``pending`` until its end, as questions do.
        return self._submit(storage_index, _Operation(None, False, alone=True), start)

    def ask(
        self,
        storage_index: bytes,
        number: int | None,
        start: Callable[[], Deferred[T]],
        start_behind: Callable[[], Deferred[T]],
    ) -> Deferred[T]:
        """Send a question now: with ``start``, or with ``start_behind`` on the uploads' connection."""
        operation = _Operation(number, False)
        index = self._indexes.get(storage_index)
        if (
            index is not None
            and index.changes(number)
            and not any(each.delays(operation) for each in index.pending)
        ):
            return start_behind()
        return self._submit(storage_index, operation, start)

    def ask_apart(
        self, storage_index: bytes, number: int, start: Callable[[Callable[[], None]], Deferred[T]]
    ) -> Deferred[T]:
        """
        Send a question with a long response, now or after the changes that it could see.

        Args:
            start: gets a function to call when the response begins: the question was carried out then,
                and changes may follow.
        """
        operation = _Operation(number, False)
        return self._submit(
            storage_index, operation, lambda: start(lambda: self._end(storage_index, operation))
        )

    def give_up(self, reason: Callable[[], Exception]) -> None:
        """Fail the changes that were not sent."""
        for index in list(self._indexes.values()):
            for operation in list(index.pending):
                gate = operation.gate
                if operation.changes and gate is not None and not gate.called:
                    gate.errback(reason())

    def _submit(
        self, storage_index: bytes, operation: _Operation, start: Callable[[], Deferred[T]]
    ) -> Deferred[T]:
        result: Deferred[T]
        index = self._indexes.get(storage_index)
        if index is None:  # the usual case: there is nothing to wait for
            index = self._indexes[storage_index] = _Index()
            delayed = False
        else:
            delayed = self._is_delayed(index, operation)
        if delayed:
            gate: Deferred[None] = Deferred()
            operation.gate = gate
            index.pending[operation] = None
            result = gate.addCallback(lambda _: start())
        else:
            index.send(operation)
            result = start()
        return result.addBoth(self._ended, storage_index, operation)

    def _is_delayed(self, index: _Index, operation: _Operation) -> bool:
        if not operation.changes and index.changes(operation.number):
            return True
        return any(each.delays(operation) for each in index.pending)

    def _ended(self, result: T, storage_index: bytes, operation: _Operation) -> T:
        self._end(storage_index, operation)
        return result

    def _end(self, storage_index: bytes, operation: _Operation) -> None:
        index = self._indexes.get(storage_index)
        if index is None or not index.end(operation):
            return  # it ended before, when its response began
        if not index.pending:
            if not index.sent:
                del self._indexes[storage_index]
            return
        freed = []
        earlier: list[_Operation] = []
        for each in list(index.pending):
            gate = each.gate
            if gate is not None:
                # Everything that it waits for came earlier: nothing that it could see is sent while it
                # waits.
                seen = not each.changes and index.changes(each.number)
                if not seen and not any(one.delays(each) for one in earlier):
                    freed.append(gate)
                    index.send(each)
            if each in index.pending:
                earlier.append(each)
        for gate in freed:
            if not gate.called:
                gate.callback(None)
