"""
A walk through several states of one tree at the same time, such as all runs of a backup.

A directory is visited once for all states, with every version of it that the states have. So a directory that
did not change is read only once, and of a changed directory only the entries that differ are parsed.
Directories are read in advance, many at once: reading one level of all states takes one round trip.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from pipegrid.core.caps import ChkCap, DirectoryCap
from pipegrid.errors import DirectoryError, PipegridError
from pipegrid.reactor.deferreds import Waiters
from pipegrid.tree.directory_reading import (
    Entry,
    ListingLimits,
    ReadsFiles,
    read_packed,
    unpack,
)
from pipegrid.tree.walk_order import TreePath, WalkLimits

KEPT_BYTES = 64 << 20
"""Maximum bytes of packed directories that are kept, in case another path or state has the same directory."""

AHEAD_BYTES = 16 << 20
"""Maximum bytes of packed directories that were read in advance and are not visited yet."""


class EntrySpan(NamedTuple):
    """
    An entry that is the same in several consecutive states.

    Attributes:
        start, end: the states from number ``start`` to ``end`` - 1 have the entry; the first state has number
            0.
        entry: the entry, which is equal in all these states.
    """

    start: int
    end: int
    entry: Entry


HistoryVisit = Callable[[TreePath, Sequence[EntrySpan]], bool]
"""Called with a path and its entries in the order of states; returns whether to enter directories at it."""

DirectorySpans = tuple[tuple[int, int, DirectoryCap], ...]


async def walk_history(
    grid: ReadsFiles,
    roots: Sequence[DirectoryCap],
    visit: HistoryVisit,
    unreadable: Callable[[TreePath, Exception], None],
    *,
    only_whole: bool = False,
    limits: WalkLimits | None = None,
    directories: CachedDirectories | None = None,
) -> None:
    """
    Walk several states of a tree together.

    All entries of a directory are visited, in ascending order of their names, before the content of its
    subdirectories.

    Args:
        roots: the root of each state.
        visit: called for each path that any state has, except the root.
        unreadable: called for each version of a directory that could not be read or is too deep; the states
            with this version then lack its entries.
        only_whole: whether a directory is skipped in all states if one of its versions could not be read.
        directories: a cache shared with other walks; None: this walk has its own.

    Raises:
        DirectoryError: there are more entries than the limits allow.
    """
    limits = limits or WalkLimits()
    cached = directories or CachedDirectories(grid, limits.reads)
    met = 0
    pending: list[tuple[TreePath, DirectorySpans]] = [
        ((), _joined((at, at + 1, cap) for at, cap in enumerate(roots)))
    ]
    try:
        while pending:
            path, spans = pending.pop()
            if len(path) > limits.depth:
                unreadable(
                    path, DirectoryError(f"this directory lies {len(path)} levels deep, too deep")
                )
                continue
            history, errors = await _read_versions(cached, spans)
            for error in errors:
                unreadable(path, error)
            entries = {} if errors and only_whole else history.closed()
            met += len(entries)
            if met > limits.objects:
                raise DirectoryError(
                    f"these trees have more than {limits.objects} objects, counted on all paths; give a "
                    "directory in them"
                )
            entered = [name for name in sorted(entries) if visit((*path, name), entries[name])]
            all_below = [((*path, name), _directories(entries[name])) for name in entered]
            below = [each for each in all_below if each[1]]
            pending += reversed(below)
            cached.expect(cap for _, caps in below for _, _, cap in caps)
    finally:
        if directories is None:
            cached.close()


async def _read_versions(
    cached: CachedDirectories, spans: DirectorySpans
) -> tuple[DirectoryHistory, list[PipegridError]]:
    """Return all readable versions of a directory, and the errors of the others."""
    cached.expect(cap for _, _, cap in spans)
    history = DirectoryHistory()
    errors = []
    for start, end, cap in spans:
        try:
            history.add(start, end, await cached.entries(cap, history.known))
        except PipegridError as error:  # noqa: PERF203
            errors.append(error)
    return history, errors


class DirectoryHistory:
    """
    The versions of one directory, added in the order of states.

    Attributes:
        known: entries that are already parsed, by their bytes; see ``unpack``.
    """

    def __init__(self) -> None:
        self.known: dict[bytes, Entry] = {}
        self._open: dict[str, tuple[int, Entry]] = {}
        self._closed: dict[str, list[EntrySpan]] = {}
        self._end = 0

    def add(self, start: int, end: int, entries: Sequence[Entry]) -> None:
        """Add the version that the states from number ``start`` to ``end`` - 1 have."""
        if start != self._end:
            self._close_all()
        opened = self._open
        for entry in entries:
            was = opened.get(entry.name)
            if was is None:
                opened[entry.name] = start, entry
            elif was[1] is not entry and was[1] != entry:
                self._close(entry.name, start)
                opened[entry.name] = start, entry
        if len(opened) > len(entries):
            for name in opened.keys() - {entry.name for entry in entries}:
                self._close(name, start)
                del opened[name]
        self._end = end

    def closed(self) -> dict[str, list[EntrySpan]]:
        """Return the entries of all versions by name; no version can be added after that."""
        self._close_all()
        return self._closed

    def _close_all(self) -> None:
        for name in self._open:
            self._close(name, self._end)
        self._open.clear()

    def _close(self, name: str, end: int) -> None:
        start, entry = self._open[name]
        self._closed.setdefault(name, []).append(EntrySpan(start, end, entry))


def _directories(spans: Sequence[EntrySpan]) -> DirectorySpans:
    """Return the directories among the entries of one path; equal ones in consecutive states are joined."""
    return _joined(
        (span.start, span.end, span.entry.cap)
        for span in spans
        if isinstance(span.entry.cap, DirectoryCap) and span.entry.kind == "directory"
    )


def _joined(spans: Iterable[tuple[int, int, DirectoryCap]]) -> DirectorySpans:
    found: list[tuple[int, int, DirectoryCap]] = []
    for start, end, cap in spans:
        if found and found[-1][1:] == (start, cap):
            start = found.pop()[0]
        found.append((start, end, cap))
    return tuple(found)


class CachedDirectories:
    """
    Reads directories in advance, and keeps their bytes for a while.

    Args:
        grid: an open grid.
        reads: maximum number of directories that are read at the same time.

    Attributes:
        count: number of directories that were read from the grid.
    """

    def __init__(self, grid: ReadsFiles, reads: int = WalkLimits().reads) -> None:
        self.count = 0
        self._grid = grid
        self._reads = reads
        self._limits = ListingLimits()
        self._queue: deque[DirectoryCap] = deque()
        self._kept: OrderedDict[DirectoryCap, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._is_beginning = False
        self._asked: set[DirectoryCap] = set()
        self._ahead: dict[DirectoryCap, int] = {}
        self._ahead_bytes = 0
        self._waiting: dict[DirectoryCap, Waiters[bytes]] = {}
        self._running: dict[DirectoryCap, Deferred[Any]] = {}

    def expect(self, caps: Iterable[DirectoryCap]) -> None:
        """
        Read these directories in advance, before all that were expected earlier; ``entries`` is called for
        them later.
        """
        new = [cap for cap in dict.fromkeys(caps) if isinstance(cap.file, ChkCap)]
        self._queue.extendleft(reversed(new))
        self._begin()

    async def entries(self, cap: DirectoryCap, known: dict[bytes, Entry]) -> tuple[Entry, ...]:
        """
        Return the entries of a directory.

        Args:
            known: see ``unpack``.

        Raises:
            PipegridError: the directory cannot be read, is damaged, or exceeds the limits.
        """
        self._asked.add(cap)
        data = self._kept.get(cap)
        if data is not None:
            self._kept.move_to_end(cap)
        else:
            if cap not in self._running:
                self._start(cap)
            waiting = self._waiting.get(cap)
            if waiting is not None:
                data = await waiting.wait()
            else:  # the read has already ended
                data = self._kept[cap] if cap in self._kept else await self._read(cap)
        self._ahead_bytes -= self._ahead.pop(cap, 0)
        self._begin()
        return unpack(cap, data, self._limits, known).entries

    def close(self) -> None:
        """Cancel all reads; ``entries`` must not be called after that."""
        self._queue.clear()
        for running in list(self._running.values()):
            running.cancel()

    def _begin(self) -> None:
        """
        Start the reads that are due. A read that ends immediately calls this again; the loop avoids deep
        recursion.
        """
        if self._is_beginning:
            return
        self._is_beginning = True
        try:
            while (
                self._queue and len(self._running) < self._reads and self._ahead_bytes < AHEAD_BYTES
            ):
                cap = self._queue.popleft()
                if cap in self._asked or cap in self._kept or cap in self._running:
                    continue
                assert isinstance(cap.file, ChkCap)
                self._ahead[cap] = cap.file.size
                self._ahead_bytes += cap.file.size
                self._start(cap)
        finally:
            self._is_beginning = False

    def _start(self, cap: DirectoryCap) -> None:
        self._waiting[cap] = Waiters()
        running = self._running[cap] = Deferred.fromCoroutine(self._read(cap))
        running.addBoth(self._ended, cap)

    async def _read(self, cap: DirectoryCap) -> bytes:
        if isinstance(cap.file, ChkCap):
            self.count += 1
        return await read_packed(self._grid, cap, self._limits)

    def _ended(self, outcome: bytes | Failure, cap: DirectoryCap) -> None:
        self._running.pop(cap, None)
        waiting = self._waiting.pop(cap)
        if isinstance(outcome, Failure):
            # If no caller waits for this directory, the error is dropped: ``entries`` reads the directory
            # again.
            self._ahead_bytes -= self._ahead.pop(cap, 0)
            error = outcome.value
            waiting.fail(
                error if isinstance(error, Exception) else DirectoryError("it was interrupted")
            )
        else:
            self._kept[cap] = outcome
            self._kept_bytes += len(outcome)
            while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
                old, data = self._kept.popitem(last=False)
                self._kept_bytes -= len(data)
                self._ahead_bytes -= self._ahead.pop(old, 0)
            waiting.fire(outcome)
        self._begin()
