"""
Tables of states and events: which state follows each state after each event.

A module whose objects have states declares such a table at its top. One method of the objects changes the
state, by asking the table. An event that the table does not allow is an error of this program, and is raised
at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Generic, TypeVar


class Named(Enum):
    """A state or an event; its value is a clause for messages. It is hashed by identity, which is fast."""

    __hash__ = object.__hash__


S = TypeVar("S", bound=Named)
E = TypeVar("E", bound=Named)


class NotInTable(AssertionError):
    """An event happened in a state that does not allow it."""


class Table(Generic[S, E]):
    """
    State transitions of one kind of object.

    Args:
        whose: the name for such an object in errors.
        events: the events, in the order of the columns.
        rows: for each state a row: the state that follows each event, or None if the event cannot happen.
    """

    def __init__(
        self, whose: str, events: Sequence[E], rows: Mapping[S, Sequence[S | None]]
    ) -> None:
        self.whose = whose
        self.events = tuple(events)
        self._moves: dict[S, dict[E, S]] = {}
        for state, row in rows.items():
            if len(row) != len(events):
                raise ValueError(f"the row of {state} has {len(row)} columns of {len(events)}")
            self._moves[state] = {
                event: becomes
                for event, becomes in zip(events, row, strict=True)
                if becomes is not None
            }

    @property
    def states(self) -> tuple[S, ...]:
        """All states, the initial one first."""
        return tuple(self._moves)

    def after(self, state: S, event: E) -> S:
        """
        Return the state that follows ``event`` in ``state``.

        Raises:
            NotInTable: the event cannot happen in this state.
        """
        try:
            return self._moves[state][event]
        except KeyError:
            raise NotInTable(
                f"{self.whose} that {state.value} cannot have that {event.value}"
            ) from None

    def allows(self, state: S, event: E) -> bool:
        """Return whether an event can happen in a state."""
        return event in self._moves[state]
