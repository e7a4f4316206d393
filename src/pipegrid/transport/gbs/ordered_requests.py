"""
The contract's order, kept over several connections.

On one connection a server carries requests out in order; between two there is no order. Uploads have one
connection, questions have others, so that a question need not stand behind megabytes. That shows only
where a question and a change are about the same share at the same time:

* a question behind an unanswered change takes the uploads' connection, which keeps them in order; a long
  answer does not belong there, so what asks for one waits for the change;
* a change behind an unanswered question waits for the answer (of a long one: for its beginning).

Nothing else waits. An allocation changes nothing that a question could see, a write nothing but its own
share and the list of all. So a put, or a get, or a repair that does both, never waits here: it reads
other shares than it writes.

**One book.** A change that was sent stands in the book of the connection that it was sent on, which knows in
which order answers are owed. Here it is only counted: how many changes of which share are unanswered. What
stands here is what has not been sent, and the questions.

``transport.operation_order`` is another thing: it carries operations out one behind the other where
nothing beneath keeps them in order. Here connections do, and there is only to choose between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from twisted.internet.defer import Deferred

T = TypeVar("T")


class _Operation:
    """
    A question that has no answer yet, or a change that has not been sent.

    Attributes:
        number: the share, or None for a question about all of them, or a change of several.
        changes: what kind it is.
        alone: it goes another way than all else, where nothing keeps order: it waits, and is waited for.
        gate: fires when it may be sent; None once that is so.
    """

    __slots__ = ("alone", "changes", "gate", "number")

    def __init__(self, number: int | None, changes: bool, alone: bool = False) -> None:
        self.number = number
        self.changes = changes
        self.alone = alone
        self.gate: Deferred[None] | None = None

    def holds_up(self, other: _Operation) -> bool:
        """Whether anybody could tell if the other one, which came later, were sent at once."""
        if self.alone or other.alone:
            return True
        if self.changes and other.changes:
            # Both take the uploads' connection; only what is not sent yet can be overtaken.
            return self.number == other.number
        if not self.changes and not other.changes:
            return False
        return self.number is None or other.number is None or self.number == other.number


class _Index:
    """
    What is unanswered of one storage index.

    Attributes:
        sent: how many changes were sent, by the share (None: several).
        pending: all else, in order.
    """

    __slots__ = ("pending", "sent")

    def __init__(self) -> None:
        self.sent: dict[int | None, int] = {}
        self.pending: dict[_Operation, None] = {}

    def changes(self, number: int | None) -> bool:
        """Whether changes that were sent might be seen by a question."""
        sent = self.sent
        return bool(sent) and (number is None or number in sent or None in sent)

    def send(self, operation: _Operation) -> None:
        """It may be sent; a change is no longer kept here."""
        operation.gate = None
        if operation.changes:
            self.sent[operation.number] = self.sent.get(operation.number, 0) + 1
            self.pending.pop(operation, None)
        else:
            self.pending[operation] = None

    def end(self, operation: _Operation) -> bool:
        """It has ended; returns False if that is not news."""
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
    """What must wait for what, by storage index."""

    def __init__(self) -> None:
        self._indexes: dict[bytes, _Index] = {}

    def __len__(self) -> int:
        return sum(
            len(index.pending) + sum(index.sent.values()) for index in self._indexes.values()
        )

    @property
    def held(self) -> int:
        """How many changes have not been sent."""
        indexes = self._indexes.values()
        return sum(each.changes for index in indexes for each in index.pending)

    def change(
        self, storage_index: bytes, number: int | None, start: Callable[[], Deferred[T]]
    ) -> Deferred[T]:
        """Send a change of a share (None: several), now or behind the questions that might see it."""
        return self._submit(storage_index, _Operation(number, True), start)

    def alone(self, storage_index: bytes, start: Callable[[], Deferred[T]]) -> Deferred[T]:
        """Make a change that goes another way, behind all before it; what follows waits for its end."""
        # It stays in this book until its end, as questions do.
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
            and not any(each.holds_up(operation) for each in index.pending)
        ):
            return start_behind()
        return self._submit(storage_index, operation, start)

    def ask_apart(
        self, storage_index: bytes, number: int, start: Callable[[Callable[[], None]], Deferred[T]]
    ) -> Deferred[T]:
        """
        Send a question with a long answer, now or behind the end of changes that it might see.

        Args:
            start: is given a function to call when the answer begins: the question has then been
                carried out, and changes may follow.
        """
        operation = _Operation(number, False)
        return self._submit(
            storage_index, operation, lambda: start(lambda: self._end(storage_index, operation))
        )

    def give_up(self, reason: Callable[[], Exception]) -> None:
        """Fail the changes that have not been sent."""
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
        if index is None:  # as mostly: there is nothing to hold it up
            index = self._indexes[storage_index] = _Index()
            held_up = False
        else:
            held_up = self._is_held_up(index, operation)
        if held_up:
            gate: Deferred[None] = Deferred()
            operation.gate = gate
            index.pending[operation] = None
            result = gate.addCallback(lambda _: start())
        else:
            index.send(operation)
            result = start()
        return result.addBoth(self._ended, storage_index, operation)

    def _is_held_up(self, index: _Index, operation: _Operation) -> bool:
        if not operation.changes and index.changes(operation.number):
            return True
        return any(each.holds_up(operation) for each in index.pending)

    def _ended(self, result: T, storage_index: bytes, operation: _Operation) -> T:
        self._end(storage_index, operation)
        return result

    def _end(self, storage_index: bytes, operation: _Operation) -> None:
        index = self._indexes.get(storage_index)
        if index is None or not index.end(operation):
            return  # it ended before, by the beginning of its answer
        if not index.pending:
            if not index.sent:
                del self._indexes[storage_index]
            return
        freed = []
        earlier: list[_Operation] = []
        for each in list(index.pending):
            gate = each.gate
            if gate is not None:
                # Whatever it waits for came before it: nothing that it could see is sent while it waits.
                seen = not each.changes and index.changes(each.number)
                if not seen and not any(one.holds_up(each) for one in earlier):
                    freed.append(gate)
                    index.send(each)
            if each in index.pending:
                earlier.append(each)
        for gate in freed:
            if not gate.called:
                gate.callback(None)
