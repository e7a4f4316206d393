"""What the paths of a mounted tree lead to, and its attributes. Nothing in it can be changed."""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Literal
from weakref import WeakKeyDictionary

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.interfaces import IReactorTime

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, MutableCap
from pipegrid.core.mutable.directory_content_edits import is_time
from pipegrid.errors import PipegridError, SinkError
from pipegrid.reactor.deferreds import RequestSet
from pipegrid.tree.backup.catalogue import BackupRun
from pipegrid.tree.backup.run_paths import choose_run
from pipegrid.tree.directory_reading import Entry
from pipegrid.tree.directory_views import DirectoryView, DirectoryViews
from pipegrid.tree.file_metadata import restored
from pipegrid.tree.local_files import local_name
from pipegrid.tree.tree_grid import Grid

MountedKind = Literal["directory", "file", "link", "unreadable"]

MountedPath = tuple[str, ...]
"""Names from the mount point, as ``os.fsdecode`` gives them."""

MOST_DEPTH = 1000
"""Names in a path: a mutable directory may contain itself."""

RUNS_FRESH_S = 10.0
"""How long the list of backups is taken to be as it was read; longer after each time that failed."""

RUNS_FRESH_MOST_S = 60.0

RUNS_WAIT_S = 10.0
"""How long reading the list again may take, while a program waits; after that it gets the last one."""

LATEST_NAME = "latest"
"""In the directory of a backup, the link to its newest run."""

_READ_BITS = 0o7555
_POSITION_BITS = 18
_TYPES = {
    "directory": stat.S_IFDIR,
    "file": stat.S_IFREG,
    "link": stat.S_IFLNK,
    "unreadable": stat.S_IFREG,
}


@attrs.frozen(eq=False)
class MountedNode:
    """
    One file, directory or link.

    Attributes:
        kind: ``unreadable``: its cap does not read, or is of an unknown kind; it cannot be opened.
        mode: permissions, without those to write.
        mtime_ns: when it was changed.
        cap: that reads it; None for links, and for the directories above the runs of backups.
        target: of a link.
        inside: the content of a directory that no cap reads.
    """

    kind: MountedKind
    mode: int
    mtime_ns: int = 0
    cap: Cap | None = None
    target: bytes = b""
    inside: MountedDirectory | None = None

    @property
    def full_mode(self) -> int:
        """Type and permissions, as in ``st_mode``."""
        return _TYPES[self.kind] | self.mode

    @property
    def directory(self) -> DirectoryCap | None:
        """The cap of the directory that this is."""
        return self.cap if self.kind == "directory" and isinstance(self.cap, DirectoryCap) else None


@attrs.define(eq=False)
class MountedDirectory:
    """
    The content of a directory.

    Attributes:
        children: by name, in the order in which they are listed.
        is_fixed: no client can change it.
    """

    children: Mapping[str, MountedNode]
    is_fixed: bool
    _positions: dict[str, int] = attrs.field(factory=dict, repr=False)
    _names: dict[MountedKind, tuple[list[str], dict[str, int]]] = attrs.field(
        factory=dict, repr=False
    )

    def position(self, name: str) -> int:
        """Return the position of a child among all."""
        if not self._positions:
            self._positions = {each: number for number, each in enumerate(self.children)}
        return self._positions[name]

    def names_of(self, kind: MountedKind) -> tuple[list[str], dict[str, int]]:
        """Return the names of the children of one kind, and their positions among them."""
        if kind not in self._names:
            names = [name for name, node in self.children.items() if node.kind == kind]
            self._names[kind] = names, {name: number for number, name in enumerate(names)}
        return self._names[kind]


def node_of(entry: Entry) -> MountedNode:
    """Return the node of an entry; metadata that makes no sense is ignored."""
    metadata = entry.metadata
    kept = restored(metadata)
    mtime_ns = _linked_ns(metadata) if kept.mtime_ns is None else kept.mtime_ns
    if entry.kind == "unknown":
        return MountedNode("unreadable", 0, mtime_ns)
    if entry.kind == "file" and kept.link is not None:
        return MountedNode("link", 0o777, mtime_ns, target=kept.link)
    usual = 0o755 if entry.kind == "directory" else 0o644
    mode = usual if kept.mode is None else kept.mode
    return MountedNode(entry.kind, mode & _READ_BITS, mtime_ns, entry.cap)


def _linked_ns(metadata: Mapping[str, Any]) -> int:
    tahoe = metadata.get("tahoe")
    linked = tahoe.get("linkmotime") if isinstance(tahoe, dict) else None
    return int(linked * 1e9) if is_time(linked) else 0


def content_of(entries: Iterable[Entry], is_fixed: bool) -> MountedDirectory:
    """
    Return the content of a directory of a grid.

    Names that are illegal, as a program may have written them, or that an earlier entry has, are left out, as
    ``restore`` leaves them out.
    """
    children: dict[str, MountedNode] = {}
    for entry in entries:
        with suppress(SinkError):
            name = local_name(entry.name, restored(entry.metadata).name)
            children.setdefault(name, node_of(entry))
    return MountedDirectory(children, is_fixed)


# The directories above the runs of backups.


def directory_name(name: str, taken: Iterable[str] = ()) -> str:
    """Return the name of the directory of a backup: its own, unless no directory can have it."""
    shown = name.replace("/", "_").replace("\0", "_") or "_"
    if shown in (".", ".."):
        shown = shown.replace(".", "_")
    shown = os.fsdecode(shown.encode("utf-8", "replace")[:200])
    number, found = 1, shown
    while found in taken:
        number += 1
        found = f"{shown}~{number}"
    return found


def backups_content(runs: Sequence[BackupRun], now: float) -> MountedDirectory:
    """
    Return one directory for each backup; in it one for each run, and a link to the newest.

    The newest is the one that ``restore`` takes.

    Args:
        now: seconds since 1970.
    """
    by_name: dict[str, list[BackupRun]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run)
    backups: dict[str, MountedNode] = {}
    for name in sorted(by_name):
        listed = sorted(by_name[name], key=lambda run: run.at)
        children = {run.time: _node_of_run(run) for run in listed}
        newest = choose_run(listed, None, None, now).run
        changed_ns = _time_ns(newest)
        target = os.fsencode(newest.time)
        children[LATEST_NAME] = MountedNode("link", 0o777, changed_ns, target=target)
        backups[directory_name(name, backups)] = MountedNode(
            "directory", 0o555, changed_ns, inside=MountedDirectory(children, is_fixed=False)
        )
    return MountedDirectory(backups, is_fixed=False)


def _node_of_run(run: BackupRun) -> MountedNode:
    kept = restored(run.metadata)
    mode = 0o755 if kept.mode is None else kept.mode
    mtime_ns = _time_ns(run) if kept.mtime_ns is None else kept.mtime_ns
    return MountedNode("directory", mode & _READ_BITS, mtime_ns, run.cap)


def _time_ns(run: BackupRun) -> int:
    return int(run.at.timestamp()) * 10**9


class BackupsRoot:
    """
    The directory of all backups of a client, as it was some seconds ago at most.

    Args:
        runs: reads the list.
        clock: of the grid.
        now: tells the seconds since 1970.
        say: called with a sentence if the list cannot be read again.
    """

    def __init__(
        self,
        runs: Callable[[], Coroutine[Any, Any, Sequence[BackupRun]]],
        clock: IReactorTime,
        now: Callable[[], float],
        say: Callable[[str], object],
    ) -> None:
        self._runs = runs
        self._say = say
        self._clock = clock
        self._now = now
        self._read_at = float("-inf")
        self._fresh_s = RUNS_FRESH_S
        self._node: MountedNode | None = None

    async def node(self) -> MountedNode:
        """Return it; raises as the reading of the list does, if it was never read."""
        if self._node is None or self._clock.seconds() - self._read_at > self._fresh_s:
            self._read_at = self._clock.seconds()  # others use the present list meanwhile
            reading = Deferred.fromCoroutine(self._runs())
            if self._node is not None:
                reading.addTimeout(RUNS_WAIT_S, self._clock)
            try:
                content = backups_content(await reading, self._now())
            except (PipegridError, DeferredTimeout) as error:
                if self._node is None:
                    raise
                slow = f"no server returned it within {RUNS_WAIT_S:.0f} seconds"
                reason = slow if isinstance(error, DeferredTimeout) else error
                self._say(f"the list of backups cannot be read again: {reason}")
                self._fresh_s = min(2 * self._fresh_s, RUNS_FRESH_MOST_S)
                return self._node
            self._fresh_s = RUNS_FRESH_S
            changed_ns = max((each.mtime_ns for each in content.children.values()), default=0)
            self._node = MountedNode("directory", 0o555, changed_ns, inside=content)
        return self._node


# Which neighbours of what a program opens it will probably open next.

MOST_AHEAD = 32
"""Neighbours that are fetched in advance."""

AHEAD_DIRECTORY_BYTES = 128 << 10
"""Larger directories are not read in advance: they would displace each other before they are used."""

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


# Paths.


@attrs.frozen
class MountedPlace:
    """
    What a path leads to.

    Attributes:
        path: to it.
        parent: the directory that contains it; None for the mount point.
    """

    node: MountedNode
    path: MountedPath
    parent: MountedDirectory | None = None

    @property
    def inode(self) -> int:
        """
        The number of the file, the same in each mount of this tree.

        In directories that cannot change, the numbers are in the order of the names: ``cp`` reads files in
        the order of their numbers, which lets neighbours be fetched in advance.
        """
        if self.parent is None:
            return 1
        if not self.parent.is_fixed:
            return _digest(self.path, 63)
        home = _digest(self.path[:-1], 63 - _POSITION_BITS)
        return home << _POSITION_BITS | (self.parent.position(self.path[-1]) + 1)


def _digest(path: MountedPath, bits: int) -> int:
    data = os.fsencode("/".join(path))
    found = int.from_bytes(blake2b(data, digest_size=8).digest(), "big") >> (64 - bits)
    return found | 2  # neither 0 nor that of the mount point


class MountedTree:
    """
    Everything below a mount point; call it in the reactor's thread.

    Directories are read when they are used, and mutable ones again some seconds later. Subdirectories
    are read in advance while a program lists them in order.

    Args:
        root: returns the node of the mount point.
    """

    def __init__(self, grid: Grid, root: Callable[[], Awaitable[MountedNode]]) -> None:
        self.views = DirectoryViews(grid)
        self._root = root
        self._content: WeakKeyDictionary[DirectoryView, MountedDirectory] = WeakKeyDictionary()
        self._order = AccessOrder()
        self._reading: RequestSet[DirectoryCap] = RequestSet(grid.clock)
        self._closed = False

    async def locate(self, path: MountedPath) -> MountedPlace:
        """
        Return what a path leads to.

        Raises:
            OSError: it does not exist, or leads through what is no directory, or in a circle.
            PipegridError: a directory could not be read.
        """
        if len(path) > MOST_DEPTH:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
        place = MountedPlace(await self._root(), ())
        above: set[DirectoryCap] = set()
        for depth, name in enumerate(path, 1):
            parent = await self.content(place.node)
            node = parent.children.get(name)
            if node is None:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            cap = node.directory
            if cap is not None and isinstance(cap.file, MutableCap):
                if cap in above:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                above.add(cap)
            place = MountedPlace(node, path[:depth], parent)
        return place

    async def content(self, node: MountedNode) -> MountedDirectory:
        """
        Return the content of a directory; raises as ``locate`` does.
        """
        if node.inside is not None:
            return node.inside
        cap = node.directory
        if cap is None:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        view = await self.views.view(cap)
        found = self._content.get(view)
        if found is None:
            is_fixed = not isinstance(cap.file, MutableCap)
            found = self._content[view] = content_of(view.entries.values(), is_fixed)
        return found

    async def list_directory(self, path: MountedPath) -> list[tuple[str, MountedPlace]]:
        """Return the children of a directory, by name; raises as ``locate`` does."""
        place = await self.locate(path)
        content = await self.content(place.node)
        if path and place.parent is not None:
            self._read_ahead(place.parent, path[-1])
        return [
            (name, MountedPlace(node, (*path, name), content))
            for name, node in content.children.items()
        ]

    def _read_ahead(self, parent: MountedDirectory, name: str) -> None:
        names, positions = parent.names_of("directory")
        if name not in positions or not parent.is_fixed or self._closed:
            return
        for position in self._order.opened(id(parent), positions[name]):
            cap = parent.children[names[position]].directory if position < len(names) else None
            if cap is None or isinstance(cap.file, MutableCap):
                continue
            if not isinstance(cap.file, ChkCap) or cap.file.size <= AHEAD_DIRECTORY_BYTES:
                self._reading.start(self._read(cap), cap)

    async def _read(self, cap: DirectoryCap) -> None:
        with suppress(PipegridError):  # it is reported when the directory is used
            await self.views.view(cap)

    async def attributes(self, path: MountedPath) -> dict[str, int]:
        """Return what ``stat`` shows, times in nanoseconds; raises as ``locate`` does."""
        place = await self.locate(path)
        node = place.node
        size = len(node.target)
        if node.kind == "file":
            size = await self.views.present_size(node.cap) or 0
        return {
            "st_mode": node.full_mode,
            "st_ino": place.inode,
            "st_nlink": 1,  # of directories it says that their subdirectories are not counted
            "st_uid": os.getuid(),
            "st_gid": os.getgid(),
            "st_size": size,
            "st_blocks": -(-size // 512),
            "st_blksize": 128 << 10,
            "st_atime": node.mtime_ns,
            "st_mtime": node.mtime_ns,
            "st_ctime": node.mtime_ns,
        }

    def close(self) -> None:
        self._closed = True
        self._reading.cancel()
