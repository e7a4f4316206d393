"""One connection's turn: whether it may carry out requests now, or stands in line for that."""

from __future__ import annotations

from typing import Generic

from pipegrid.server.gbs.states import TURN, Taking, TurnState
from pipegrid.server.turns import FairTurns, M


class TurnTaking(Generic[M]):
    """
    Of one connection.

    Args:
        turns: whose turn it is, of all connections.
        member: the connection.
    """

    __slots__ = ("_member", "_turns", "state")

    def __init__(self, turns: FairTurns[M], member: M) -> None:
        self._turns = turns
        self._member = member
        self.state = TurnState.NOT_WANTED

    def _move(self, taking: Taking) -> None:
        self.state = TURN.after(self.state, taking)

    def may_go_on(self) -> bool:
        """Whether it may carry out requests now; else it is in line, and has its turn later."""
        if self.state is TurnState.HAS:
            if not self._turns.over:
                return True
        elif self.state is not TurnState.NOT_WANTED:
            return False
        elif self._turns.may_have(self._member):
            self._move(Taking.IS_GIVEN)
            return True
        self.stand_in_line()
        return False

    def stand_in_line(self) -> None:
        """Have a turn later, if it does not wait for one already."""
        before = self.state
        self._move(Taking.STANDS_IN_LINE)
        if before is not self.state:
            self._turns.wait(self._member)

    def is_given(self) -> None:
        """It has come to the head of the line."""
        self._move(Taking.IS_GIVEN)

    def is_over(self) -> None:
        """It does nothing any more for now; of what it did, if it was its turn, account is kept."""
        if self.state is TurnState.HAS or self.state is TurnState.WAITS_AGAIN:
            self._move(Taking.IS_OVER)
            self._turns.end(self._member)
