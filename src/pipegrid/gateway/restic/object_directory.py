"""A directory of a restic repository: its cached list of objects, its changes, and its subdirectories."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from twisted.internet.defer import Deferred

from pipegrid.core.caps import Cap, DirectoryCap
from pipegrid.core.mutable.directory_content_edits import Link, Unlink
from pipegrid.errors import ChildExists, DirectoryError
from pipegrid.reactor.deferreds import Waiters
from pipegrid.tree.directory import Directory
from pipegrid.tree.directory_reading import ENTRY_BYTES, read_listing
from pipegrid.tree.tree_grid import Grid

MEMORY_BYTES = 32 << 20
"""Maximum memory of all cached lists; an entry counts ``ENTRY_BYTES``."""


class ListMemory:
    """
    Bounds the memory of cached directory lists; the least recently used lists are dropped.

    Args:
        limit_bytes: maximum for all lists together.
    """

    def __init__(self, limit_bytes: int = MEMORY_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[ObjectDirectory, int] = OrderedDict()
        self.used_bytes = 0

    def keep(self, directory: ObjectDirectory, entries: int) -> None:
        """
        Record that a directory's list was used and how many entries it has; drop old lists if necessary.
        """
        self.drop(directory)
        self._kept[directory] = size = ENTRY_BYTES * (1 + entries)
        self.used_bytes += size
        while self.used_bytes > self._limit_bytes:
            next(iter(self._kept)).forget()

    def drop(self, directory: ObjectDirectory) -> None:
        """Record that a directory's list was dropped."""
        self.used_bytes -= self._kept.pop(directory, 0)


class ObjectDirectory:
    """
    One directory of a repository.

    An object in the cached list counts as present until the directory is read again, since the object's name
    is the hash of its content. To find an object that the list does not contain, the directory is read again.
    Concurrent changes become one publish (``transfer.mutable.write_queue``).

    Attributes:
        cap: write cap of the directory.
    """

    def __init__(self, grid: Grid, cap: DirectoryCap, memory: ListMemory) -> None:
        self.cap = cap
        self._grid = grid
        self._memory = memory
        self._directory = Directory(grid, cap)
        self._children: dict[str, Cap] | None = None
        self._read_s = -math.inf
        self._changes = 0
        self._waiters: Waiters[Mapping[str, Cap]] = Waiters()
        self._served: Waiters[Mapping[str, Cap]] | None = None
        self._began_s = -math.inf
        self._wanted = self._reads = False
        self._subdirectories: dict[Cap, ObjectDirectory] = {}
        self._making: dict[str, Waiters[ObjectDirectory]] = {}

    # Reading.

    def read(self) -> Deferred[Mapping[str, Cap]]:
        """
        Fire with the directory's current content on the grid: caps by name.

        Calls during a read share one further read.
        """
        waiting = self._waiters.wait()
        self._wanted = True
        if not self._reads:
            self._reads = True
            Deferred.fromCoroutine(self._read_while_wanted())
        return waiting

    async def _read_while_wanted(self) -> None:
        try:
            while self._wanted:
                waiters, self._waiters, self._wanted = self._waiters, Waiters(), False
                self._served, self._began_s = waiters, self._grid.clock.seconds()
                try:
                    children = await self._read()
                except Exception as error:  # each caller handles the error
                    waiters.fail(error)
                else:
                    waiters.fire(children)
        finally:
            self._reads = False
            self._served = None

    async def read_since(self, age_s: float) -> Mapping[str, Cap]:
        """Return the content, at most ``age_s`` seconds old, with all changes that this gateway made."""
        since_s = self._grid.clock.seconds() - age_s
        if self._children is not None and self._read_s >= since_s:
            return self._children
        if self._served is not None and self._began_s >= since_s:
            return await self._served.wait()
        return await self.read()

    async def _read(self) -> Mapping[str, Cap]:
        changes = self._changes
        listing = await read_listing(self._grid, self.cap)
        children = {each.name: each.best for each in listing.entries if each.best is not None}
        if changes == self._changes:  # otherwise a change has made the list out of date
            self._keep(children)
            self._read_s = self._began_s
        return children

    def _keep(self, children: dict[str, Cap]) -> None:
        self._children = children
        self._memory.keep(self, len(children))

    def forget(self) -> None:
        """Drop the cached list; the next use of the list reads it again."""
        self._children = None
        self._memory.drop(self)

    async def find(self, name: str) -> Cap | None:
        """
        Return the cap that has this name in the cached list or, if the list does not contain the name, on the
        grid; None if neither has the name.
        """
        known = self.known(name)
        return (await self.read()).get(name) if known is None else known

    def known(self, name: str) -> Cap | None:
        """
        Return the cap that has this name in the cached list; None: the list lacks the name, or no list is
        cached.
        """
        if self._children is None:
            return None
        self._memory.keep(self, len(self._children))
        return self._children.get(name)

    # Changing.

    def look_ahead(self) -> Deferred[None]:
        """Fetch in advance what the next change of the directory needs; see ``Grid.look_ahead``."""
        return self._grid.look_ahead(self.cap)

    async def link(self, name: str, cap: Cap, *, replace: bool = True) -> None:
        """
        Link an object; return when the changed directory is stored.

        Raises:
            ChildExists: the directory on the grid has an object of this name already, and ``replace`` is
                false.
            PipegridError: see ``Directory.change``.
        """
        if self.known(name) == cap:
            return
        try:
            await self._directory.change([Link(name, cap, replace=replace)])
        except ChildExists:
            self.forget()
            raise
        self._changed(name, cap)

    async def unlink(self, name: str) -> None:
        """Unlink an object, if it exists; return when the changed directory is stored."""
        try:
            await self._directory.change([Unlink(name, must_exist=False)])
        finally:
            self._changed(name, None)  # even after an error: perhaps the object was unlinked

    def _changed(self, name: str, cap: Cap | None) -> None:
        self._changes += 1
        if self._children is None:
            return
        if cap is None:
            self._children.pop(name, None)
        else:
            self._children[name] = cap
        self._memory.keep(self, len(self._children))

    # Subdirectories.

    async def subdirectory(self, name: str) -> ObjectDirectory | None:
        """
        Return the subdirectory of this name; None if it does not exist.

        Raises:
            DirectoryError: the name belongs to an object that is not a directory.
            PipegridError: the grid failed.
        """
        if name in self._making:
            return await self._making[name].wait()
        cap = await self.find(name)
        return None if cap is None else self.opened(name, cap)

    async def made_subdirectory(self, name: str) -> ObjectDirectory:
        """
        Return the subdirectory of this name; create it if it does not exist. Raises as ``subdirectory``.
        """
        if self._children is not None and self.known(name) is None:
            return await self._make(name)  # returns an existing one if the list is out of date
        return await self.subdirectory(name) or await self._make(name)

    def opened(self, name: str, cap: Cap) -> ObjectDirectory:
        """
        Return the subdirectory that has this name and cap.

        Raises:
            DirectoryError: this is not the cap of a directory.
        """
        if not isinstance(cap, DirectoryCap):
            raise DirectoryError(
                f"'{name}' in a repository of restic is not a directory; rename it, or remove it"
            )
        if cap not in self._subdirectories:
            self._subdirectories[cap] = ObjectDirectory(self._grid, cap, self._memory)
        return self._subdirectories[cap]

    def _make(self, name: str) -> Deferred[ObjectDirectory]:
        """Create a subdirectory once, even if several requests wait for it, or some of them are cancelled."""
        waiters = self._making.get(name)
        if waiters is not None:
            return waiters.wait()
        waiters = self._making[name] = Waiters()
        waiting = waiters.wait()

        def ended(result: Any) -> None:
            del self._making[name]
            if isinstance(result, ObjectDirectory):
                waiters.fire(result)
            else:
                waiters.fail(result.value)

        Deferred.fromCoroutine(self._made(name)).addBoth(ended)
        return waiting

    async def _made(self, name: str) -> ObjectDirectory:
        made = await self._grid.create_directory()
        try:
            await self.link(name, made.cap, replace=False)
        except ChildExists:  # another client has created it meanwhile
            cap = await self.find(name)
            if cap is None:
                raise
            return self.opened(name, cap)
        opened = self.opened(name, made.cap)
        opened._keep({})
        return opened
