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

# One timer for all running small files: a timer for each would cost more than the file.

_ROUNDING_S = 1e-6


class Timed(Protocol):
    """
    A put that must be checked at some time.

    Attributes:
        due_s: when, in seconds of the clock. It may move to an earlier time, but not to one before the
            next check that ``Deadlines`` has planned.
    """

    @property
    def due_s(self) -> float:
        """When the put must be checked, in seconds of the clock."""

    def overdue(self) -> None:
        """The time ``due_s`` has come; ``Deadlines``, which calls this, no longer tracks the put."""


class Deadlines:
    """
    Notifies puts that take too long.

    Args:
        look_s: the longest time between two checks.
    """

    def __init__(self, clock: IReactorTime, look_s: float) -> None:
        self._clock = clock
        self._look_s = look_s
        self._puts: dict[Timed, None] = {}
        self._timer: IDelayedCall | None = None

    def add(self, put: Timed) -> None:
        """Call ``put.overdue`` when it is due."""
        self._puts[put] = None
        if self._timer is None:
            self._look()

    def discard(self, put: Timed) -> None:
        """Stop tracking a put that has ended; the timer runs only while there are puts."""
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


# What all puts of one client share, and what each records for later puts.


@attrs.frozen(eq=False)
class PutContext:
    """
    What all puts of one client share.

    Attributes:
        grid: what all transfers share: servers, clock, workers, secrets.
        settings: how long to wait for stragglers and silent servers.
        history: whether shares have been found on servers where no put would place them.
        full: servers without space.
        overdue: notifies small files that take too long.
        say: gets a sentence that the user should know in addition to the result.
    """

    grid: TransferContext
    settings: UploadSettings
    history: PlacementHistory
    full: FullServers
    overdue: Deadlines
    say: Callable[[str], None]
