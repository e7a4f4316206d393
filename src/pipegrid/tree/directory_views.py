"""
Directories as gateway sessions see them: cached for a few seconds, including this gateway's own changes.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from twisted.internet.defer import Deferred

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, FileCap, LitCap, MutableCap
from pipegrid.errors import PipegridError
from pipegrid.reactor.deferreds import Waiters
from pipegrid.tree.directory_reading import ENTRY_BYTES, Entry, read_listing
from pipegrid.tree.tree_grid import Grid

FRESH_S = 3.0
"""How long a mutable directory is cached; changes by other clients may be seen this late."""

LISTED_S = 0.5
"""How long a mutable directory is cached for a client that lists it."""

KEPT_BYTES = 24 << 20
"""Maximum memory for all views but the largest: one huge directory must not displace all other views."""

_MOST_SIZES = 10_000
_SIZES_AT_ONCE = 16


@attrs.define(eq=False)
class DirectoryView:
    """
    The cached content of a directory.

    Attributes:
        entries: the entries by name.
        read_at: when reading began, in seconds of the clock.
        memory_bytes: the approximate memory of the entries.
        storage_index: the storage index of the directory.
        stored: the entries as they were read, by their bytes, so that the next read need not parse them
            again.
    """

    entries: dict[str, Entry]
    read_at: float
    memory_bytes: int
    storage_index: bytes | None = None
    stored: dict[bytes, Entry] = attrs.field(factory=dict, repr=False)
    _names: list[str] | None = None

    def after(self, name: str | None) -> Iterator[Entry]:
        """Return the entries after a name, in the order of names; if the name is None, return all."""
        if self._names is None:
            self._names = sorted(self.entries)
        start = 0 if name is None else bisect_right(self._names, name)
        names, entries = self._names, self.entries
        return (entries[each] for each in names[start:] if each in entries)

    def change(self, name: str, entry: Entry | None) -> None:
        """Record the new entry of a name; None: the name was removed."""
        if (name in self.entries) is (entry is None):
            self._names = None
        if entry is None:
            self.entries.pop(name, None)
        else:
            self.entries[name] = entry


@attrs.define(eq=False)
class _Reading:
    """A read of a directory that is running, and changes made in the directory meanwhile."""

    waiters: Waiters[DirectoryView] = attrs.field(factory=Waiters)
    changes: dict[str, Entry | None] = attrs.field(factory=dict)


class DirectoryViews:
    """
    The cached directories that sessions of a gateway use, by their caps.

    Args:
        grid: an open grid.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._views: OrderedDict[DirectoryCap, DirectoryView] = OrderedDict()
        self._reading: dict[DirectoryCap, _Reading] = {}
        self._sizes: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    async def view(self, cap: DirectoryCap, fresh_s: float = FRESH_S) -> DirectoryView:
        """
        Return the view of a directory, which is read again if it is mutable and older than ``fresh_s``.

        Raises:
            DirectoryError: the directory is damaged, or exceeds the limits.
            PipegridError: the directory could not be fetched from the grid.
        """
        known = self._views.get(cap)
        if known is not None:
            can_change = isinstance(cap.file, MutableCap)
            if not can_change or self._grid.clock.seconds() - known.read_at <= fresh_s:
                self._views.move_to_end(cap)
                return known
        reading = self._reading.get(cap) or _Reading()
        waiting = reading.waiters.wait()
        if cap not in self._reading:
            self._reading[cap] = reading
            # The read is not cancelled when a session ends, since other sessions may wait for it.
            Deferred.fromCoroutine(self._read(cap, reading))
        return await waiting

    async def _read(self, cap: DirectoryCap, reading: _Reading) -> None:
        began = self._grid.clock.seconds()
        before = self._views.get(cap)
        stored = {} if before is None else dict(before.stored)
        try:
            listing = await read_listing(self._grid, cap, known=stored)
        except Exception as error:
            self._reading.pop(cap, None)
            reading.waiters.fail(error)
            return
        self._reading.pop(cap, None)
        entries = {entry.name: entry for entry in listing.entries}
        view = DirectoryView(entries, began, listing.memory_bytes, cap.storage_index, stored)
        for name, entry in reading.changes.items():
            view.change(name, entry)
        self._views[cap] = view
        self._views.move_to_end(cap)
        self._shrink()
        reading.waiters.fire(view)

    def _shrink(self) -> None:
        total = sum(view.memory_bytes for view in self._views.values())
        largest = self._largest()
        while total - largest > KEPT_BYTES:
            _, gone = self._views.popitem(last=False)
            total -= gone.memory_bytes
            if gone.memory_bytes == largest:
                largest = self._largest()

    def _largest(self) -> int:
        return max((view.memory_bytes for view in self._views.values()), default=0)

    def changed(self, cap: DirectoryCap, name: str, entry: Entry | None) -> None:
        """
        Record the entry that this gateway has stored under a name of a directory; None: the name was removed.
        """
        index = cap.storage_index
        for other in [each for each, view in self._views.items() if view.storage_index == index]:
            if other != cap:
                del self._views[other]  # a view by another cap may reveal other caps of children
        if cap in self._reading:
            self._reading[cap].changes[name] = entry
        view = self._views.get(cap)
        if view is not None:
            view.change(name, entry)
            view.memory_bytes += ENTRY_BYTES if entry is not None else 0

    def forget(self, cap: DirectoryCap) -> None:
        """Drop a view that may be wrong; the directory is read again when it is used."""
        self._views.pop(cap, None)

    def made(self, cap: DirectoryCap) -> None:
        """Record a directory that this gateway has created, which is empty."""
        now = self._grid.clock.seconds()
        self._views[cap] = DirectoryView({}, now, ENTRY_BYTES, cap.storage_index)
        self._shrink()

    # Caps of mutable files do not contain the file size, so servers must be queried.

    async def size(self, cap: Cap | None) -> int | None:
        """Return the size of a file; None: the size is unknown, or the cap is not that of a file."""
        try:
            return await self.present_size(cap)
        except PipegridError:
            return None  # opening the file will report the failure

    async def present_size(self, cap: Cap | None) -> int | None:
        """
        Return the size of a file; None: the cap is not that of a file.

        Raises:
            PipegridError: no server returned the size.
        """
        if isinstance(cap, (ChkCap, LitCap)):
            return cap.size
        if not isinstance(cap, MutableCap) or cap.access == "verify":
            return None
        known = self._sizes.get(cap.storage_index)
        if known is not None and self._grid.clock.seconds() - known[1] <= FRESH_S:
            return known[0]
        found = await self._grid.size(cap)
        self.sized(cap, found)
        return found

    def sized(self, cap: MutableCap, size: int) -> None:
        """Record the size of a mutable file."""
        self._sizes[cap.storage_index] = size, self._grid.clock.seconds()
        self._sizes.move_to_end(cap.storage_index)
        while len(self._sizes) > _MOST_SIZES:
            self._sizes.popitem(last=False)

    async def learn_sizes(self, entries: list[Entry]) -> None:
        """
        Query and cache the sizes of the mutable files among these entries, at most ``_SIZES_AT_ONCE`` at the
        same time.
        """
        caps = iter([entry.cap for entry in entries if isinstance(entry.cap, MutableCap)])

        async def ask() -> None:
            for cap in caps:
                await self.size(cap)

        running = [Deferred.fromCoroutine(ask()) for _ in range(_SIZES_AT_ONCE)]
        for each in running:
            await each


def entry_of(name: str, cap: FileCap | DirectoryCap, metadata: Mapping[str, Any]) -> Entry:
    """Return the entry that a directory has for a child after it was linked."""
    read_cap = cap.readonly()
    write_cap = cap if cap != read_cap else None
    return Entry(name, read_cap, write_cap, json.dumps(metadata).encode("ascii"))


def described(entry: Entry, changes: Mapping[str, Any]) -> Entry:
    """Return a copy of an entry with some keys of its metadata set."""
    metadata = {**entry.metadata, **changes}
    return entry._replace(metadata_json=json.dumps(metadata).encode("ascii"))
