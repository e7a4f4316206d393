"""
How much room the disk of a storage directory has, asked for no more often than it may matter.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from pipegrid.disk import files as disk

_PLENTY_BYTES = 1 << 30


class Room:
    """
    The room below one directory.

    Args:
        path: of the directory that holds shares.
        clock: seconds since 1970.
        free: room on the disk of a path, or None if unknown.
    """

    def __init__(
        self, path: str, clock: Callable[[], float], free: Callable[[str], int | None]
    ) -> None:
        self._path = path
        self._clock = clock
        self._free = free
        self._plenty_at, self._plenty_bytes = -1, 0  # what was free, and in which second

    def free_bytes(self) -> int | None:
        """
        Return what is free now, or None if it cannot be told.

        Raises:
            ServerRefused: the storage directory is no directory.
        """
        try:
            return self._free(self._path)
        except OSError as error:
            what = f"use the storage directory {os.path.dirname(self._path)!r}"
            raise disk.disk_error(error, what) from error

    def missing_bytes(
        self, wanted: int, allocated: int, promised: Callable[[], int], fresh: bool = False
    ) -> int:
        """
        Return how much room is missing; 0 if none, or nobody knows.

        Looks at every upload only if it might not be so.

        Args:
            wanted: bytes, what has to stay free included.
            allocated: lengths of unfinished uploads, however much of them has arrived.
            promised: how much of them is still to come; asked for if it matters.
            fresh: ask the disk in any case; else once a second, where there is plenty.
        """
        needed = wanted + allocated
        second = int(self._clock())
        if not fresh and second == self._plenty_at and self._plenty_bytes > needed + _PLENTY_BYTES:
            return 0
        free = self.free_bytes()
        self._plenty_at, self._plenty_bytes = second, free or 0
        if free is None or free >= needed:
            return 0
        return max(0, wanted + promised() - free)
