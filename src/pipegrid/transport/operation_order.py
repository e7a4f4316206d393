"""
Which operations on a server must wait for which. ``Ordering`` is for transports that keep no order,
``GbsOrder`` for several connections that keep an order each.
"""

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
        share_number: the share that the call concerns, or None for all shares of the storage index.
        changes: whether the call changes anything.
        wanted: False once the caller has cancelled the call or has its result.
        call: the function to call with this object; returns the result, or a Deferred.
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
        """Return whether the order of the two calls can make a difference; ``other`` came first."""
        numbers = (self.share_number, other.share_number)
        together = None in numbers or numbers[0] == numbers[1]
        return together and (self.changes or other.changes)


class Ordering:
    """
    Carries out operations on many storage indexes, in order for each storage index.

    The contract requires that operations on one storage index are carried out in the order of the calls. They
    need not run one after another: the order of two writes to different shares has no effect, and both should
    become durable in one group. So an operation waits only for earlier operations that conflict with it:
    those that concern the same share, unless both only read.

    Waiting operations form a graph, not a queue: each operation has the number of operations that it waits
    for, and a list of the operations that wait for it. Searching for conflicts examines the pending
    operations of the storage index; the callers' windows bound their number.
    """

    def __init__(self) -> None:
        self._pending: dict[bytes, dict[OrderedCall, None]] = {}
        self._ready: deque[tuple[bytes, OrderedCall]] = deque()
        self._draining = False
        self._idle: Waiters[None] = Waiters()

    def carry_out(self, storage_index: bytes, operation: OrderedCall) -> Deferred[Any]:
        """
        Carry out an operation when all earlier operations that conflict with it have ended.

        If the caller cancels the result, an operation that has not begun is dropped. An operation that has
        begun continues to its end, and later operations wait for that end; the operation can read
        ``OrderedCall.wanted``.
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
        Cancel all operations; fires when those that had begun have ended.

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
        # A loop, not recursion: the end of an operation may start the next one, and a thousand calls would
        # nest too deep.
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
            return  # no caller waits for the result or failure
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
    A question that is not answered, or a change that is not sent yet.

    Attributes:
        number: the number of the share, or None for a question about all shares or a change of several.
        changes: whether the operation is a change.
        alone: the operation uses another connection, which has no common order with the uploads' connection;
            so it waits for earlier operations, and later ones wait for it.
        gate: fires when the operation may be sent; None if it is sent.
    """

    __slots__ = ("alone", "changes", "gate", "number")

    def __init__(self, number: int | None, changes: bool, alone: bool = False) -> None:
        self.number = number
        self.changes = changes
        self.alone = alone
        self.gate: Deferred[None] | None = None

    def delays(self, other: _Operation) -> bool:
        """
        Return whether sending ``other``, which came later, before this operation could have a visible effect.
        """
        if self.alone or other.alone:
            return True
        if self.changes and other.changes:
            # Both changes use the uploads' connection. If this change was sent, ``other`` cannot overtake it.
            return self.number == other.number
        if not self.changes and not other.changes:
            return False
        return self.number is None or other.number is None or self.number == other.number


class _Index:
    """
    Unanswered operations on one storage index.

    Attributes:
        sent: for each share number (None: several shares), how many of its changes were sent and are
            unanswered.
        pending: all other operations, in order.
    """

    __slots__ = ("pending", "sent")

    def __init__(self) -> None:
        self.sent: dict[int | None, int] = {}
        self.pending: dict[_Operation, None] = {}

    def changes(self, number: int | None) -> bool:
        """Return whether a question about this share (None: all shares) could see changes that were sent."""
        sent = self.sent
        return bool(sent) and (number is None or number in sent or None in sent)

    def send(self, operation: _Operation) -> None:
        """Record that an operation may be sent; of a change, only the number is kept."""
        operation.gate = None
        if operation.changes:
            self.sent[operation.number] = self.sent.get(operation.number, 0) + 1
            self.pending.pop(operation, None)
        else:
            self.pending[operation] = None

    def end(self, operation: _Operation) -> bool:
        """Record the end of an operation; return False if its end was recorded before."""
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

    On one connection, a server carries requests out in order; between two connections there is no order.
    Uploads have one connection, questions have others, so that a question need not wait for megabytes. The
    difference is visible only if a question and a change concern the same share at the same time:

    * A question after an unanswered change is sent on the uploads' connection, which keeps the order. A
      long response would block that connection, so a question with a long response waits for the change.
    * A change after an unanswered question waits for the response. If the response is long, the change waits
      only for its beginning.

    Nothing else waits, except with ``alone``. An allocation has no effect that a question could see, and a
    write affects only its own share and the list of shares. So puts, gets and repairs never wait here: a
    repair writes other shares than it reads.

    The connection records a sent change, since it knows the order of outstanding responses; this class only
    counts the sent changes of each share. It records questions, and changes that are not sent yet.

    ``Ordering`` differs: it carries out operations where no lower layer keeps their order. Here the
    connections keep the order, and this class only chooses between them.
    """

    def __init__(self) -> None:
        self._indexes: dict[bytes, _Index] = {}

    def __len__(self) -> int:
        return sum(
            len(index.pending) + sum(index.sent.values()) for index in self._indexes.values()
        )

    @property
    def held(self) -> int:
        """Number of changes that wait and are not sent yet."""
        indexes = self._indexes.values()
        return sum(each.changes for index in indexes for each in index.pending)

    def change(
        self, storage_index: bytes, number: int | None, start: Callable[[], Deferred[T]]
    ) -> Deferred[T]:
        """
        Send a change of a share (None: several shares), now or after the questions that could see the change.
        """
        return self._submit(storage_index, _Operation(number, True), start)

    def alone(self, storage_index: bytes, start: Callable[[], Deferred[T]]) -> Deferred[T]:
        """
        Send a change on another connection, after all earlier operations; later operations wait for its end.
        """
        # ``changes`` is False so that the operation stays in ``pending`` until its end, as questions do.
        return self._submit(storage_index, _Operation(None, False, alone=True), start)

    def ask(
        self,
        storage_index: bytes,
        number: int | None,
        start: Callable[[], Deferred[T]],
        start_behind: Callable[[], Deferred[T]],
    ) -> Deferred[T]:
        """
        Send a question: on the uploads' connection by ``start_behind`` if it could see a sent change, else by
        ``start``.
        """
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
        Send a question with a long response, now or after the changes that the question could see.

        Args:
            start: sends the question. Its argument is a function to call when the response begins: the
                question has been carried out then, and changes may follow.
        """
        operation = _Operation(number, False)
        return self._submit(
            storage_index, operation, lambda: start(lambda: self._end(storage_index, operation))
        )

    def give_up(self, reason: Callable[[], Exception]) -> None:
        """Fail the changes that wait and are not sent yet."""
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
        if index is None:  # the usual case: nothing to wait for
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
            return  # its end was recorded when its response began
        if not index.pending:
            if not index.sent:
                del self._indexes[storage_index]
            return
        freed = []
        earlier: list[_Operation] = []
        for each in list(index.pending):
            gate = each.gate
            if gate is not None:
                # Looking at earlier operations is enough: an operation waits only for those, and no change
                # that a waiting question could see is sent before it.
                seen = not each.changes and index.changes(each.number)
                if not seen and not any(one.delays(each) for one in earlier):
                    freed.append(gate)
                    index.send(each)
            if each in index.pending:
                earlier.append(each)
        for gate in freed:
            if not gate.called:
                gate.callback(None)
