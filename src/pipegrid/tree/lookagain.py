"""
Objects of a tree that could not be repaired for want of servers: they are looked after once more, at the end.

When is ``secondtry``'s decision: at once, if others came through meanwhile; else when servers are back.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Generic, TypeVar

from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.errors import NotEnoughSharesError, UnhappyError
from pipegrid.reactor.together import Waiters
from pipegrid.transfer.results import CheckResult, RepairResult
from pipegrid.transfer.upkeep.upkeep import OnOutcome, UpkeepOutcome
from pipegrid.tree.later import KeptForLater
from pipegrid.tree.secondtry import MOST, wants_servers

T = TypeVar("T")

_SOMETHING_ELSE = -1


def lacking(outcome: UpkeepOutcome) -> Exception | None:
    """Return the error that says so, if servers that were out of reach may be all that was wanting."""
    if isinstance(outcome, Failure):
        error = outcome.value
        return error if isinstance(error, Exception) and wants_servers(error) else None
    if isinstance(outcome, CheckResult) and outcome.unreachable and not outcome.recoverable:
        found, needed = len(outcome.good_shares), outcome.required_shares
        absent = len(outcome.unreachable)
        return NotEnoughSharesError("", found, needed, absent, outcome.total_shares)
    if isinstance(outcome, RepairResult) and not outcome.whole:
        absent = len({*outcome.absent, *outcome.after.unreachable})
        return UnhappyError("", 0, 0, absent) if absent else None
    return None


class SecondLooks(Generic[T]):
    """
    Those at the objects of one run.

    Args:
        waiting: told a sentence when too few servers are in reach, and None when the run goes on.

    Attributes:
        helped: objects that came through at a second try.
    """

    def __init__(self, clock: IReactorTime, waiting: Callable[[str | None], None]) -> None:
        self.helped = 0
        self._clock = clock
        self._woken: Waiters[None] = Waiters()
        self._kept: list[tuple[T, UpkeepOutcome, Exception]] = []
        self._later: KeptForLater[int, tuple[T, UpkeepOutcome]] = KeptForLater(
            clock, lambda: self._woken.fire(None), waiting
        )

    def keeps(self, what: T, outcome: UpkeepOutcome) -> bool:
        """Something came of an object; returns whether it is looked after once more."""
        error = lacking(outcome)
        if error is None:
            self._later.succeeded(_SOMETHING_ELSE)
        elif len(self._kept) < MOST:
            self._kept.append((what, outcome, error))
            return True
        return False

    async def take(
        self,
        look: Callable[[T, OnOutcome], Awaitable[None]],
        finished: Callable[[], Awaitable[None]],
        tell: Callable[[T, UpkeepOutcome], None],
    ) -> None:
        """
        Take them now.

        Args:
            look: begins to look after an object once more.
            finished: returns when all that was begun has ended.
            tell: told what came of each in the end.
        """
        for number, (what, outcome, error) in enumerate(self._kept):
            if not self._later.keeps(number, (what, outcome), error, -math.inf):
                tell(what, outcome)
        self._kept.clear()
        under_way = 0

        def told(number: int, what: T, began_s: float, outcome: UpkeepOutcome) -> None:
            nonlocal under_way
            under_way -= 1
            error = lacking(outcome)
            if error is None:
                self.helped += self._later.succeeded(number)
            elif self._later.keeps(number, (what, outcome), error, began_s):
                return
            tell(what, outcome)

        try:
            while True:
                again = self._later.next(at_end=not under_way)
                for _, lost in self._later.take_lost():
                    tell(*lost)
                if again is not None:
                    number, (what, _) = again
                    under_way += 1
                    await look(what, partial(told, number, what, self._clock.seconds()))
                elif under_way:
                    await finished()
                elif self._later.has_any:
                    await self._woken.wait()
                else:
                    return
        finally:
            self._later.close()
