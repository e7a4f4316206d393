"""
All repositories: directories below the directory of the client's alias ``restic``.

``private/aliases`` has its write cap, and ``pipegrid ls restic:`` lists the repositories. Creating the first
repository creates it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from twisted.internet.defer import DeferredLock

from pipegrid.core.caps import Cap, DirectoryCap, parse_cap
from pipegrid.errors import UsageError
from pipegrid.gateway.restic.object_directory import ListMemory, ObjectDirectory
from pipegrid.gateway.restic.repository import Repository, SmallObjects
from pipegrid.reactor.deferreds import gather
from pipegrid.tree.aliases import add_alias, read_aliases
from pipegrid.tree.directory import check_writable
from pipegrid.tree.tree_grid import Grid

ALIAS = "restic"
MAX_OPEN = 64
"""Repositories that are kept open."""


class Repositories:
    """
    All repositories of a client.

    Args:
        directory: the client's.
    """

    def __init__(self, grid: Grid, directory: Path) -> None:
        self._grid = grid
        self._path = directory
        self._memory = ListMemory()
        self._root: ObjectDirectory | None = None
        self._small = SmallObjects(grid)
        self._open: OrderedDict[Cap, Repository] = OrderedDict()
        self._making = DeferredLock()

    async def open(self, folders: Sequence[str], *, fresh: bool = False) -> Repository | None:
        """
        Return a repository; None if there is none.

        Args:
            fresh: read again what other clients may have changed, and read in advance what restic needs next.

        Raises:
            UsageError, CapError: the alias is not that of a directory that can be changed.
            PipegridError: the grid failed.
        """
        root = self._find_root()
        if root is None:
            return None
        if fresh:
            way = _known_way(root, folders)
            if len(way) > len(folders):
                self._opened(way[-1]).look_ahead()
            await gather([each.read() for each in way])
        here: ObjectDirectory | None = root
        for name in folders:
            if here is None:
                return None
            here = await here.subdirectory(name)
        return None if here is None else self._opened(here)

    async def make(self, folders: Sequence[str]) -> None:
        """
        Create a repository, if it does not exist.

        Raises: as ``open``; SinkError: the alias cannot be written.
        """
        root = self._find_root() or await self._make_root()
        here: ObjectDirectory | None = root
        for name in folders:
            assert here is not None
            await here.read()
            here = await here.subdirectory(name, make=True)
        assert here is not None
        await self._opened(here).make_directories()

    def _opened(self, directory: ObjectDirectory) -> Repository:
        if directory.cap not in self._open:
            self._open[directory.cap] = Repository(self._grid, directory, self._small)
        self._open.move_to_end(directory.cap)
        while len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)
        return self._open[directory.cap]

    def _find_root(self) -> ObjectDirectory | None:
        text = read_aliases(self._path).get(ALIAS)
        if text is None:
            return None
        cap = parse_cap(text)
        if self._root is None or self._root.cap != cap:
            check_writable(cap, f"the directory of the alias '{ALIAS}'")
            assert isinstance(cap, DirectoryCap)
            self._root = ObjectDirectory(self._grid, cap, self._memory)
        return self._root

    async def _make_root(self) -> ObjectDirectory:
        await self._making.acquire()
        try:
            found = self._find_root()
            if found is None:
                made = await self._grid.create_directory()
                try:
                    add_alias(self._path, ALIAS, str(made.cap))
                except UsageError:  # another process was faster
                    if self._find_root() is None:
                        raise
                found = self._find_root()
            assert found is not None
            return found
        finally:
            self._making.release()


def _known_way(root: ObjectDirectory, folders: Sequence[str]) -> list[ObjectDirectory]:
    """Return the directories that lead to a repository, and its own, as far as they are known."""
    way = [root]
    for name in folders:
        cap = way[-1].known(name)
        if not isinstance(cap, DirectoryCap):
            break
        way.append(way[-1].opened(name, cap))
    return way
