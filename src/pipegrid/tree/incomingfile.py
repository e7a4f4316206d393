"""
One file of a tree on its way to its place, or found to be there.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Literal

import attrs
from twisted.internet.task import deferLater

from pipegrid.core.caps import Cap, LitCap
from pipegrid.disk.partfile import PartInUse, TargetExists
from pipegrid.disk.partname import part_path
from pipegrid.errors import SinkError
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.progress import Progress
from pipegrid.tree import target
from pipegrid.tree.downloading import FetchesFiles
from pipegrid.tree.incoming import IncomingDirectory
from pipegrid.tree.metadata import Kept
from pipegrid.tree.walk import TreePath

SMALL_BYTES = 1 << 20
"""Files up to this are held in memory whole."""

LOOK_S = 0.1
WAIT_S = 60.0
"""When nothing has come for so long into a file that another process writes, the wait ends."""

MAX_LOOKS = 5
"""At a file that comes while it is fetched, each time anew."""

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


class OtherWriter:
    """
    Waits for another process that writes to the same file, while that goes on.

    Args:
        grid: whose clock tells the time.
    """

    def __init__(self, grid: FetchesFiles, file: WantedFile) -> None:
        self._clock = grid.clock
        self._place = file.place
        self._seen: tuple[int, ...] = ()
        self._changed_s = self._clock.seconds()
        self._looks = 0

    async def wait(self, error: SinkError) -> None:
        """
        Wait a little.

        Raises:
            SinkError: this one; nothing has changed for ``WAIT_S``.
        """
        if isinstance(error, TargetExists):  # it has just been completed, or is another file
            self._looks += 1
            if self._looks > MAX_LOOKS:
                raise error
            return
        seen: tuple[int, ...] = ()
        with suppress(OSError):
            found = os.lstat(part_path(self._place))
            seen = (found.st_ino, found.st_size, found.st_mtime_ns)
        now_s = self._clock.seconds()
        if seen != self._seen:
            self._seen, self._changed_s = seen, now_s
        elif now_s - self._changed_s > WAIT_S:
            raise error
        await deferLater(self._clock, LOOK_S, lambda: None)


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

    async def fetch(self, file: WantedFile, progress: Progress | None) -> tuple[How, int, str]:
        """
        Have it there; returns how it came, its size, and what of its mode and time could not be set.

        A file to which another process writes is waited for, as long as that goes on.

        Args:
            progress: of a large one, called with bytes that have come and their sum.

        Raises:
            PipegridError, OSError: it is not there.
        """
        other = OtherWriter(self._grid, file)
        while True:
            outcome = await self._attempt(file, progress, other)
            if not isinstance(outcome, WantedFile):
                return outcome
            file = outcome

    async def _attempt(
        self, file: WantedFile, progress: Progress | None, other: OtherWriter
    ) -> tuple[How, int, str] | WantedFile:
        """Do so, or return the file as it is met after another process has written to it."""
        try:
            return await self._fetch(file, progress)
        except (PartInUse, TargetExists) as error:
            await other.wait(error)
            home, place = file.parent.there, file.place
            standing = target.standing(home, place, file.size, file.kept)
            if standing == "same":
                not_kept = target.restore_mode_and_time(home, place, file.kept)
                return "present", file.size or 0, not_kept
            replaces = self._force and target.may_be_replaced(home, place)
            if standing == "other" and not replaces:
                raise target.in_the_way(place) from error
            return attrs.evolve(file, standing=standing)

    async def _fetch(self, file: WantedFile, progress: Progress | None) -> tuple[How, int, str]:
        """
        Have it there, unless another process is about to.

        Raises:
            PipegridError, OSError: it is not there.
        """
        home, cap, size = file.parent.there, file.cap, file.size
        home.check()  # before bytes are fetched for nothing
        if file.standing in ("same", "perhaps"):
            if await self._is_same(file):
                not_kept = target.restore_mode_and_time(home, file.place, file.kept)
                return "present", size or 0, not_kept
            if not self._force:
                raise target.in_the_way(file.place)
        replace = file.standing != "missing"
        if file.is_small:
            data = cap.data if isinstance(cap, LitCap) else await self._grid.read(cap)
            write = target.write_whole
            not_kept = await self._workers.run(write, home, file.place, data, replace, file.kept)
            return "fetched", size or 0, not_kept
        target.room_for(os.path.dirname(file.place), size or 0)
        part = target.TreePart(home, file.place, replace, file.kept)
        try:
            result = await self._grid.get(cap, part, progress=progress)
            # ``Grid.get`` publishes parts that it has opened, and those it is given.
            if not part.closed:
                await self._workers.run(part.publish)
        finally:
            part.leave()  # and keep what is in it for another time
        return "fetched", result.size, part.not_kept

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
