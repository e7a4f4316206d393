"""The contract's order of operations, kept over several connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from twisted.internet.defer import Deferred

T = TypeVar("T")


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
