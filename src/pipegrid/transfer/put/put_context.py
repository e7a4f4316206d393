"""State shared by the puts of one client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from pipegrid.transfer.peers import TransferContext
from pipegrid.transfer.put.allocation import FullServers
from pipegrid.transfer.put.placement_history import PlacementHistory
from pipegrid.transfer.settings import UploadSettings

# One timer for all small files that are under way, since a timer for each would cost more than the file.

_ROUNDING_S = 1e-6


class Timed(Protocol):
    """
    What somebody has to look after at some time.

    Attributes:
        due_s: when, by the clock; it may come nearer, but never within the time after which it is looked at.
    """

    @property
    def due_s(self) -> float:
        """When it has to be looked after, in seconds of the clock."""

    def overdue(self) -> None:
        """The time ``due_s`` has come; called by ``Deadlines``, which has forgotten it then."""


class Deadlines:
    """
    Tells puts that take too long.

    Args:
        look_s: so often it is looked at them, at least.
    """

    def __init__(self, clock: IReactorTime, look_s: float) -> None:
        self._clock = clock
        self._look_s = look_s
        self._puts: dict[Timed, None] = {}
        self._timer: IDelayedCall | None = None

    def add(self, put: Timed) -> None:
        """Tell this one when it is its time."""
        self._puts[put] = None
        if self._timer is None:
            self._look()

    def discard(self, put: Timed) -> None:
        """Look after this put no more, as it has ended; without any, no timer runs."""
        self._puts.pop(put, None)
        if not self._puts and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        now = self._clock.seconds()
        late = [put for put in self._puts if put.due_s - now <= _ROUNDING_S]
        for put in late:
            self._puts.pop(put, None)
            put.overdue()
        if self._puts and self._timer is None:
            left_s = min(put.due_s for put in self._puts) - now
            self._timer = self._clock.callLater(min(left_s, self._look_s), self._look)


# What all puts of one client work with, and what each leaves for those after it.


@attrs.frozen(eq=False)
class PutContext:
    """
    The means of puts.

    Attributes:
        grid: those of all transfers: servers, clock, workers, secrets.
        settings: how long stragglers, and silent servers, are waited for.
        elsewhere: whether files have been found where nobody would put them.
        full: servers that have no room.
        overdue: looks after small files that take too long.
        say: told, in a sentence, what the user should know beside the outcome.
    """

    grid: TransferContext
    settings: UploadSettings
    elsewhere: PlacementHistory
    full: FullServers
    overdue: Deadlines
    say: Callable[[str], None]
