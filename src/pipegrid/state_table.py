"""
Tables of states and events: what may follow what, and nothing else may.

Who lives through states writes its table down at the head of a module, one line a state and one column an
event, and changes its state in one routine, which asks the table. What the table does not have cannot
happen: that is an error in this program, and is raised before anything else goes wrong because of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Generic, TypeVar


class Named(Enum):
    """A state or an event; its value is a clause for people. Looked up as quickly as any object is."""

    __hash__ = object.__hash__


S = TypeVar("S", bound=Named)
E = TypeVar("E", bound=Named)


class NotInTable(AssertionError):
    """An event in a state in which there is none."""


class Table(Generic[S, E]):
    """
    Args:
        whose: for errors.
        events: the columns.
        rows: for each state what it becomes with each of them; None: that cannot happen in it.
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
        """All of them, the first one first."""
        return tuple(self._moves)

    def after(self, state: S, event: E) -> S:
        """
        Return what a state becomes with an event.

        Raises:
            NotInTable: that cannot happen.
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
