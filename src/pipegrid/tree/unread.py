"""
Directories of a tree that could not be read for want of servers: they are read once more, at the end of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from typing import Any

from twisted.internet.interfaces import IReactorTime

from pipegrid.reactor.together import Waiters
from pipegrid.tree.incoming import Unread
from pipegrid.tree.later import KeptForLater
from pipegrid.tree.secondtry import MOST, wants_servers
from pipegrid.tree.walk import TreePath


class UnreadDirectories:
    """
    Those of one tree.

    Args:
        woken: fired when a pause is over.
        waiting: see ``KeptForLater``.

    Attributes:
        is_reading: the end has come, and they are read.
    """

    def __init__(
        self, clock: IReactorTime, woken: Waiters[None], waiting: Callable[[str | None], None]
    ) -> None:
        self.is_reading = False
        self._woken = woken
        self._unread: list[Unread] = []
        self._path: TreePath | None = None
        self._later: KeptForLater[TreePath, Unread] = KeptForLater(
            clock, lambda: woken.fire(None), waiting
        )

    def keeps(self, one: Unread) -> bool:
        """A directory could not be read; returns whether that is tried again."""
        met = one.met
        if self.is_reading:
            return met.path == self._path and self._keeps(one)
        if not wants_servers(met.error) or len(self._unread) >= MOST:
            return False
        self._unread.append(one)
        return True

    def is_read(self, path: TreePath) -> bool:
        """A directory was read; returns whether that was at a second try."""
        return path == self._path and self._later.succeeded(path)

    async def read(
        self,
        walk: Callable[[Unread], Coroutine[Any, Any, bool]],
        give_up: Callable[[Unread], None],
    ) -> None:
        """
        Read them now.

        Args:
            walk: through one, with all that is in it; returns whether the next may follow.
            give_up: told of those that are given up.
        """
        self.is_reading = True
        for each in self._unread:
            self._keeps(each)
        try:
            while True:
                again = self._later.next(at_end=True)
                for _, lost in self._later.take_lost():
                    give_up(lost)
                if again is not None:
                    self._path = again[0]
                    if not await walk(again[1]):
                        return
                    self._later.ended(again[0])
                elif self._later.tries.waiting:
                    await self._woken.wait()
                else:
                    return
        finally:
            self._later.close()

    def _keeps(self, one: Unread) -> bool:
        # Nobody knows when its reading began: other things may have come meanwhile.
        return self._later.keeps(one.met.path, one, one.met.error, -math.inf)
