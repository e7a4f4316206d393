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
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from twisted.internet.defer import Deferred

T = TypeVar("T")


class _Operation:
    """
    One question or change that has no answer yet.

    Attributes:
        number: the share, or None for a question about all of them.
        changes: what kind it is.
        gate: fires when it may be sent; None once that is so.
    """

    __slots__ = ("changes", "gate", "number")

    def __init__(self, number: int | None, changes: bool) -> None:
        self.number = number
        self.changes = changes
        self.gate: Deferred[None] | None = None

    def holds_up(self, other: _Operation) -> bool:
        """Whether anybody could tell if the other one, which came later, were sent at once."""
        if self.changes and other.changes:
            # Both take the uploads' connection; only what is not sent yet can be overtaken.
            return self.gate is not None and self.number == other.number
        if not self.changes and not other.changes:
            return False
        return self.number is None or other.number is None or self.number == other.number


class GbsOrder:
    """What is unanswered, by storage index."""

    def __init__(self) -> None:
        self._indexes: dict[bytes, dict[_Operation, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._indexes.values()))

    def change(
        self, storage_index: bytes, number: int | None, start: Callable[[], Deferred[T]]
    ) -> Deferred[T]:
        """Send a change of a share (None: several), now or behind the questions that might see it."""
        operation = _Operation(number, True)
        return self._submit(storage_index, operation, start)

    def ask(
        self,
        storage_index: bytes,
        number: int | None,
        start: Callable[[], Deferred[T]],
        start_behind: Callable[[], Deferred[T]],
    ) -> Deferred[T]:
        """Send a question now: with ``start``, or with ``start_behind`` on the uploads' connection."""
        operation = _Operation(number, False)
        held_up = self._held_up(storage_index, operation)
        if held_up and all(each.gate is None for each in held_up):
            return start_behind()
        return self._submit(storage_index, operation, start)

    def ask_apart(
        self,
        storage_index: bytes,
        number: int,
        start: Callable[[Callable[[], None]], Deferred[T]],
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

    def _submit(
        self, storage_index: bytes, operation: _Operation, start: Callable[[], Deferred[T]]
    ) -> Deferred[T]:
        result: Deferred[T]
        if self._held_up(storage_index, operation):
            gate: Deferred[None] = Deferred()
            operation.gate = gate
            self._indexes[storage_index][operation] = None
            result = gate.addCallback(lambda _: start())
        else:
            self._indexes.setdefault(storage_index, {})[operation] = None
            result = start()
        return result.addBoth(self._ended, storage_index, operation)

    def _held_up(self, storage_index: bytes, operation: _Operation) -> list[_Operation]:
        pending = self._indexes.get(storage_index)
        return [each for each in pending if each.holds_up(operation)] if pending else []

    def _ended(self, result: T, storage_index: bytes, operation: _Operation) -> T:
        self._end(storage_index, operation)
        return result

    def _end(self, storage_index: bytes, operation: _Operation) -> None:
        pending = self._indexes.get(storage_index)
        if pending is None or operation not in pending:
            return  # it ended before, by the beginning of its answer
        del pending[operation]
        if not pending:
            del self._indexes[storage_index]
            return
        freed = []
        earlier: list[_Operation] = []
        for each in pending:
            if each.gate is not None and not any(one.holds_up(each) for one in earlier):
                freed.append(each.gate)
                each.gate = None
            earlier.append(each)
        for gate in freed:
            if not gate.called:
                gate.callback(None)
