"""Paths of a mounted tree: lookup, attributes and directory contents. All of it is read-only."""

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
"""Names, beginning at the mount point, as ``os.fsdecode`` returns them."""

MOST_DEPTH = 1000
"""Maximum number of names in a path: a mutable directory can contain itself."""

RUNS_FRESH_S = 10.0
"""How long the list of backups is used before it is read again; each failure doubles this, up to a minute."""

RUNS_FRESH_MOST_S = 60.0

RUNS_WAIT_S = 10.0
"""How long a program waits while the list of backups is read again; after that it gets the previous list."""

LATEST_NAME = "latest"
"""Name of a link in each backup's directory, which leads to the newest run."""

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
    One file, directory or symbolic link.

    Attributes:
        kind: ``unreadable``: no read cap of a known kind exists, so the object cannot be opened.
        mode: permissions, without those to write.
        mtime_ns: time of the last change, in nanoseconds since 1970.
        cap: the read cap; None for links, unreadable objects, and directories that are not stored on the
            grid.
        target: target of a link.
        inside: content of a directory that is not stored on the grid; None for all other nodes.
    """

    kind: MountedKind
    mode: int
    mtime_ns: int = 0
    cap: Cap | None = None
    target: bytes = b""
    inside: MountedDirectory | None = None

    @property
    def full_mode(self) -> int:
        """The type and permissions, as in ``st_mode``."""
        return _TYPES[self.kind] | self.mode

    @property
    def directory(self) -> DirectoryCap | None:
        """The cap of this directory; None if this is not a directory, or not stored on the grid."""
        return self.cap if self.kind == "directory" and isinstance(self.cap, DirectoryCap) else None


@attrs.define(eq=False)
class MountedDirectory:
    """
    The content of a directory.

    Attributes:
        children: nodes by name, in the order of the listing.
        is_fixed: whether the directory never changes.
    """

    children: Mapping[str, MountedNode]
    is_fixed: bool
    _positions: dict[str, int] = attrs.field(factory=dict, repr=False)
    _names: dict[MountedKind, tuple[list[str], dict[str, int]]] = attrs.field(
        factory=dict, repr=False
    )

    def position(self, name: str) -> int:
        """Return the position of a child in the listing."""
        if not self._positions:
            self._positions = {each: number for number, each in enumerate(self.children)}
        return self._positions[name]

    def names_of(self, kind: MountedKind) -> tuple[list[str], dict[str, int]]:
        """Return the names of the children of one kind, and the position of each name in this list."""
        if kind not in self._names:
            names = [name for name, node in self.children.items() if node.kind == kind]
            self._names[kind] = names, {name: number for number, name in enumerate(names)}
        return self._names[kind]


def node_of(entry: Entry) -> MountedNode:
    """Return the node of a directory entry; invalid metadata are ignored."""
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
    Return the content of a directory of the grid.

    As in ``restore``, some entries are left out: those whose name is not valid for a file, and those whose
    name an earlier entry has.
    """
    children: dict[str, MountedNode] = {}
    for entry in entries:
        with suppress(SinkError):
            name = local_name(entry.name, restored(entry.metadata).name)
            children.setdefault(name, node_of(entry))
    return MountedDirectory(children, is_fixed)


# The directories that contain the runs of backups; these are not stored on the grid.


def directory_name(name: str, taken: Iterable[str] = ()) -> str:
    """Return a directory name for a backup: the backup's name, changed if it is taken or not valid."""
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
    Return one directory for each backup, which contains a directory for each run, and a link to the newest
    run.

    The newest run is the one that ``restore`` chooses.

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
    The directory of all backups of a client; the list of backups is read again when it is old.

    Args:
        runs: reads the list of backups.
        clock: the grid's clock.
        now: returns the time in seconds since 1970.
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
        """Return the node of the directory; if the list was never read, an error of reading it is raised."""
        if self._node is None or self._clock.seconds() - self._read_at > self._fresh_s:
            self._read_at = self._clock.seconds()  # meanwhile, other callers use the previous list
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


# Prediction: which neighbours of an opened file or directory a program will probably open next.

MOST_AHEAD = 32
"""Maximum number of neighbours that are fetched in advance."""

AHEAD_DIRECTORY_BYTES = 128 << 10
"""Maximum size of a directory that is read in advance; larger ones would displace each other before use."""

SKIPPED = 4
"""How many neighbours a program may skip without ending the sequence."""

_MOST_PLACES = 256


@attrs.define
class _Sequence:
    last: int = -1
    window: int = 0
    fetched_to: int = 0


class AccessOrder:
    """Observes the order in which the children of directories are opened."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[Hashable, _Sequence] = OrderedDict()

    def opened(self, place: Hashable, position: int) -> range:
        """
        Return the positions of children to fetch in advance, after a child was opened.

        If the first child opened is one of the first five, the next two are fetched. This number doubles with
        each further child that is opened in order, up to ``MOST_AHEAD``. After a child that is opened out of
        order, none is fetched. No position is returned twice in one sequence.

        Args:
            place: a directory.
            position: position of the child in the directory.
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
        path: the path.
        parent: the directory that contains the object; None for the mount point.
    """

    node: MountedNode
    path: MountedPath
    parent: MountedDirectory | None = None

    @property
    def inode(self) -> int:
        """
        The inode number, the same in each mount of this tree.

        In directories that cannot change, numbers have the order of the listing. ``cp`` reads files in the
        order of their inode numbers, so the next files can be fetched in advance.
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
    return found | 2  # neither 0 nor 1, the number of the mount point


class MountedTree:
    """
    Everything below a mount point; call the methods in the reactor's thread.

    A directory is read when it is used; a mutable one is read again if it is used some seconds later. While a
    program lists the subdirectories of an immutable directory in order, the next ones are read in advance.

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
            OSError: the path does not exist, has too many names, goes through an object that is not a
                directory, or goes in a circle.
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
        """Return names and places of a directory's children; raises as ``locate`` does."""
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
        with suppress(PipegridError):  # the error is reported when the directory is used
            await self.views.view(cap)

    async def attributes(self, path: MountedPath) -> dict[str, int]:
        """Return what ``stat`` shows, with times in nanoseconds; raises as ``locate`` does."""
        place = await self.locate(path)
        node = place.node
        size = len(node.target)
        if node.kind == "file":
            size = await self.views.present_size(node.cap) or 0
        return {
            "st_mode": node.full_mode,
            "st_ino": place.inode,
            "st_nlink": 1,  # for a directory, 1 means that its subdirectories are not counted
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
