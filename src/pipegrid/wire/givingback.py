"""
Objects at the other end of a Foolscap connection that nobody here needs any more: given back at leisure.

Foolscap says so of each at once, by a call that is answered. The writer of a small share is needed for two
calls, so that every fourth call of many small puts was of this kind, and the server had to take it in between
what somebody waits for. Here they wait until nothing is asked, or are given back by the connection's end.
What the other end keeps for them meanwhile is bounded by ``MAX_UNNEEDED``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from foolscap import eventual
from twisted.internet.interfaces import IDelayedCall

MAX_UNNEEDED = 1024
"""Some 2 kB each at a server of ours; of more the oldest are given back at once."""

LOOK_S = 1.0
"""How often it is looked whether there is time."""

AT_A_TIME = 128
"""Given back at one look: a tenth of a second's work for a server."""


class GivingBack:
    """
    What is to be given back on one connection.

    Args:
        give_back: tells the other end; its arguments are those of ``later``.
        busy: whether somebody waits for the other end.
    """

    def __init__(self, give_back: Callable[[Any, int], None], busy: Callable[[], bool]) -> None:
        self._give_back = give_back
        self._busy = busy
        self._unneeded: deque[tuple[Any, int]] = deque()
        self._timer: IDelayedCall | None = None

    def later(self, tracker: Any, count: int) -> None:
        """An object is not needed any more, which the other end has given us so often."""
        self._unneeded.append((tracker, count))
        if len(self._unneeded) > MAX_UNNEEDED:
            self._give_back(*self._unneeded.popleft())
        self._look_later()

    def stop(self) -> None:
        """The connection is gone, and with it all that was referred to."""
        self._unneeded.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        if self._timer is None and self._unneeded:
            self._timer = eventual.reactor.callLater(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._busy():
            for _ in range(min(AT_A_TIME, len(self._unneeded))):
                self._give_back(*self._unneeded.popleft())
        self._look_later()
