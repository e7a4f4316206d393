"""
One file of a tree on its way to its place, or found to be there.
"""

from __future__ import annotations

import os
from typing import Literal

import attrs

from pipegrid.core.caps import Cap, LitCap
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.progress import Progress
from pipegrid.tree import target
from pipegrid.tree.downloading import FetchesFiles
from pipegrid.tree.incoming import IncomingDirectory
from pipegrid.tree.metadata import Kept
from pipegrid.tree.walk import TreePath

SMALL_BYTES = 1 << 20
"""Files up to this are held in memory whole."""

How = Literal["fetched", "present"]


@attrs.frozen(eq=False)
class WantedFile:
    """
    A file that is to come.

    Attributes:
        path: names from the root of the tree.
        size: None if nobody knows before it is read.
        parent: the local directory.
        place: where it goes.
        standing: what stood there when it was met.
        kept: what its entry says.
    """

    path: TreePath
    cap: Cap
    size: int | None
    parent: IncomingDirectory
    place: str
    standing: target.Presence
    kept: Kept

    @property
    def is_small(self) -> bool:
        """Whether it is held in memory whole."""
        return self.size is not None and self.size <= SMALL_BYTES


class FileFetcher:
    """
    Fetches files.

    Args:
        workers: for what takes as long as the disk does.
        force: replace what differs.
    """

    def __init__(self, grid: FetchesFiles, workers: CpuWorkers, force: bool) -> None:
        self._grid = grid
        self._workers = workers
        self._force = force

    async def fetch(self, file: WantedFile, progress: Progress | None) -> tuple[How, int]:
        """
        Have it there; returns how it came, and its size.

        Args:
            progress: of a large one, called with bytes that have come and their sum.

        Raises:
            PipegridError, OSError: it is not there.
        """
        home, cap, size = file.parent.there, file.cap, file.size
        home.check()  # before bytes are fetched for nothing
        if file.standing in ("same", "perhaps"):
            if await self._is_same(file):
                target.restore_mode_and_time(home, file.place, file.kept)
                return "present", size or 0
            if not self._force:
                raise target.in_the_way(file.place)
        replace = file.standing != "missing"
        if file.is_small:
            data = cap.data if isinstance(cap, LitCap) else await self._grid.read(cap)
            write = target.write_whole
            await self._workers.run(write, home, file.place, data, replace, file.kept)
            return "fetched", size or 0
        target.room_for(os.path.dirname(file.place), size or 0)
        part = target.TreePart(home, file.place, replace, file.kept)
        try:
            result = await self._grid.get(cap, part, progress=progress)
            # ``Grid.get`` publishes parts that it has opened, and those it is given.
            if not part.closed:
                await self._workers.run(part.publish)
        finally:
            part.leave()  # and keep what is in it for another time
        return "fetched", result.size

    async def _is_same(self, file: WantedFile) -> bool:
        home, cap = file.parent.there, file.cap
        if isinstance(cap, LitCap):
            return target.holds(home, file.place, cap.data)
        there = target.FileThere(home, file.place)
        try:
            await self._grid.get(cap, there)
        except target.Differs:
            return False
        finally:
            there.close()
        return True
