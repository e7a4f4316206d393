"""Which neighbours of what a program opens it will probably open next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import attrs

MOST_AHEAD = 32
"""Neighbours that are fetched in advance."""

SKIPPED = 4
"""Neighbours that may be left out without ending a sequence."""

_MOST_PLACES = 256


@attrs.define
class _Sequence:
    last: int = -1
    window: int = 0
    fetched_to: int = 0


class AccessOrder:
    """Observes in which order the children of directories are opened."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[Hashable, _Sequence] = OrderedDict()

    def opened(self, place: Hashable, position: int) -> range:
        """
        Return the positions to fetch in advance, after a child of a place was opened.

        Those after the first child of a place are expected from its first use on, two of them; the window
        doubles with each child that was opened in order, and is empty after any other.

        Args:
            place: a directory.
            position: of the child in it.
        """
        found = self._sequences.pop(place, None) or _Sequence()
        self._sequences[place] = found
        while len(self._sequences) > _MOST_PLACES:
            self._sequences.popitem(last=False)
        if position == found.last:
            return range(0)
        if found.last < position <= found.last + 1 + SKIPPED:
            found.window = min(MOST_AHEAD, max(2, 2 * found.window))
        else:
            found.window = found.fetched_to = 0
        start = max(position + 1, found.fetched_to)
        found.last = position
        found.fetched_to = max(start, position + 1 + found.window)
        return range(start, found.fetched_to)
