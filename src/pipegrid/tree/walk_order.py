"""
The order in which a walk reads and meets the directories of a tree. This module does no input or output.
"""

from __future__ import annotations

import hashlib
import heapq
from itertools import count
from typing import Any, NamedTuple

import attrs

from pipegrid.core.caps import (
    Cap,
    ChkCap,
    ChkVerifierCap,
    DirectoryCap,
    LitCap,
    UnknownCap,
    writes,
)
from pipegrid.errors import DirectoryError
from pipegrid.tree.directory_reading import ENTRY_BYTES, Entry, Kind, Listing, kind_of, metadata_of

# The limits of a walk, and the objects that it yields.

TreePath = tuple[str, ...]
"""The names on the path from the root of a tree."""


class WalkLimits(NamedTuple):
    """
    Limits of a walk.

    Attributes:
        reads: maximum number of directories that are being read at the same time.
        ahead_bytes: maximum memory for directories that were read, or are being read, in advance.
        open_bytes: maximum memory for the directories that the walk is in.
        depth: maximum number of levels below the root.
        objects: maximum number of objects met. An object counts once for each path to it: thirty directories
            that each link the next one twice have a billion paths.
    """

    reads: int = 64
    ahead_bytes: int = 64 << 20
    open_bytes: int = 256 << 20
    depth: int = 1000
    objects: int = 20_000_000


class Found(NamedTuple):
    """
    A directory, file, or unknown object that a walk has met.

    Attributes:
        path: names from the root; empty for the root itself.
        cap: the read cap; None if only an encrypted write cap is stored.
        kind: ``directory``, ``file`` or ``unknown``.
        metadata_json: the metadata of the object's entry; see ``metadata``.
        again: whether an object with the same verify cap was met before. Then a directory is entered only
            with ``all_paths``, or if it was met only by its verify cap before. Always false for literal
            objects, since they are on no server.
        listing: the content of a directory that is entered next.
        best: the cap that grants most, if the tree reveals one that grants more than reading.
    """

    path: TreePath
    cap: Cap | None
    kind: Kind
    metadata_json: bytes = b"{}"
    again: bool = False
    listing: Listing | None = None
    best: Cap | None = None

    def __repr__(self) -> str:
        """Return a text for logs, without the metadata, the content and the write cap."""
        return f"Found({self.path!r}, {self.cap!r}, {self.kind!r}, ...)"

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the object's entry."""
        return metadata_of(self.metadata_json)


class Unreadable(NamedTuple):
    """
    A directory that could not be read, or is not entered; the walk continues after it.

    Attributes:
        path, cap, metadata_json, best: as in ``Found``.
        error: the reason; its message is a sentence.
    """

    path: TreePath
    cap: Cap | None
    error: Exception
    metadata_json: bytes = b"{}"
    best: Cap | None = None

    def __repr__(self) -> str:
        """Return a text for logs, without the metadata and the write cap."""
        return f"Unreadable({self.path!r}, {self.cap!r}, {self.error!r}, ...)"

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the directory's entry."""
        return metadata_of(self.metadata_json)


Met = Found | Unreadable


def identity_of(cap: Cap | None) -> bytes | None:
    """
    Return 16 bytes that identify an object, the same for its read, write and verify cap; None if it is on no
    server.

    The bytes are derived from the verify cap, so a hostile cap with the storage index of another file cannot
    make the walk skip that file.
    """
    if cap is None or isinstance(cap, UnknownCap):
        return None
    file = cap.file if isinstance(cap, DirectoryCap) else cap
    if isinstance(file, LitCap):
        return None
    if isinstance(file, (ChkCap, ChkVerifierCap)):  # the usual case; the text of the cap is slow
        numbers = file.required_shares, file.total_shares, file.size
        named = b"%b%b%d:%d:%d" % (file.storage_index, file.ueb_hash, *numbers)
    else:
        named = str(file.verifier()).encode("ascii")
    return hashlib.sha256(named).digest()[:16]


# This part decides which directory of a tree is read next, and what the walk meets next. It does no input or
# output.
#
# A tree is met depth first: each directory before its children, and the children in ascending order of their
# names. So the order does not depend on how fast servers are, and the consumer knows that a directory has
# ended when it gets an object that is not below it. Directories are *read* in advance: all that are known,
# the next in order first, many at the same time. So reading a level takes one round trip, not one per
# directory.
#
# **Memory.** Open directories are those from the root to the walk's position, and those read in advance. Each
# of the two groups has a limit in bytes. A directory that would exceed the limit of the first group is left
# out with a message; the limit of the second group delays reads. The next directory in order is always read.
# An open directory is one candidate for reading in advance, regardless of its number of children, so a
# directory of 100,000 directories takes only the memory of its listing.
#
# **Loops.** A mutable directory can contain itself. It is then met as its own descendant, and is neither
# entered nor read again. Unless all paths are wanted, the same applies to every directory that was met
# before. The exception is a directory that was met only by its verify cap, since it could not be entered
# then.

_UNREAD_BYTES = 1 << 20
"""The assumed memory of a directory whose size is unknown."""

_EXPANSION = 6
"""Assumed memory of an unread directory, per byte of its packed size (about 300 bytes per entry)."""


def _expected_bytes(cap: DirectoryCap) -> int:
    """Return the assumed memory of a directory before it is read."""
    file = cap.file
    if isinstance(file, (ChkCap, LitCap)):
        return _EXPANSION * file.size + ENTRY_BYTES
    return _UNREAD_BYTES


class _Step(NamedTuple):
    """
    A directory above another one. It has no reference to a listing, so that memory is freed without the
    garbage collector.
    """

    identity: bytes | None
    before: _Step | None


@attrs.define(eq=False, repr=False)
class ReadAheadDirectory:
    """
    A directory that will be read, is being read, or is open; only ``WalkOrder`` changes its fields.

    Attributes:
        cap: the cap by which the directory is read.
        way: the directories above it, up to the root.
        depth: number of levels below the root.
        key: its place in the order of the walk: the positions, in their parents, of the directories above it
            and of itself.
        state: ``unread``, ``reading``, ``ready`` or ``failed``.
        ahead: whether its memory counts as read in advance.
        position: the position of the entry that is met next.
        next_ahead: the position of the first entry that reading in advance has not reached.
        children: by position, child directories whose reading has begun and that were not met yet.
        dropped: whether the directory is no longer needed.
    """

    cap: DirectoryCap
    way: _Step | None
    depth: int
    key: bytes
    identity: bytes | None
    state: str = "unread"
    listing: Listing | None = None
    error: Exception | None = None
    ahead: bool = False
    position: int = 0
    next_ahead: int = 0
    children: dict[int, ReadAheadDirectory] = attrs.Factory(dict)
    dropped: bool = False

    @property
    def memory_bytes(self) -> int:
        """The memory that the directory takes, or is assumed to take."""
        if self.listing is not None:
            return self.listing.memory_bytes
        return 0 if self.state == "failed" else _expected_bytes(self.cap)

    @property
    def is_in_itself(self) -> bool:
        """
        Whether the directory is also one of the directories above it; the time is proportional to its depth.
        """
        step = self.way if self.identity is not None else None
        while step is not None and step.identity != self.identity:
            step = step.before
        return step is not None


class WalkOrder:
    """
    The order of one walk.

    Args:
        cap: the cap of the root, which need not be a directory.
        metadata_json: the metadata of the root's entry, if it has one.
        all_paths: enter a directory at each of its paths, as needed for restoring a tree.
        by_write_caps: enter only mutable directories, by their write caps. This finds all write caps of the
            tree, since nothing below other directories has one. Objects that are not entered do not count as
            met before.
    """

    def __init__(
        self,
        cap: Cap | None,
        limits: WalkLimits | None = None,
        *,
        metadata_json: bytes = b"{}",
        all_paths: bool = False,
        by_write_caps: bool = False,
    ) -> None:
        self.limits = limits or WalkLimits()
        self._all_paths = all_paths
        self._by_write_caps = by_write_caps
        self._metadata_json = metadata_json
        self._root: Cap | None = cap
        self._began = False
        self._over = False
        self._head: ReadAheadDirectory | None = None
        self._stack: list[ReadAheadDirectory] = []
        self._path: list[str] = []
        self._cursors: list[tuple[bytes, int, ReadAheadDirectory]] = []
        self._ties = count()
        self._seen: set[bytes | None] = set()
        self._shut: set[bytes | None] = set()
        self._reading_ids: set[bytes | None] = set()
        self._reading = 0
        self._open_bytes = 0
        self._ahead_bytes = 0
        self._met = 0
        root = self._entered(cap)
        if root is not None:
            self._head = ReadAheadDirectory(root, None, 0, b"", identity_of(root))

    @property
    def done(self) -> bool:
        """Whether the walk has ended: everything was met, or a limit ended it."""
        return self._over or (self._began and not self._stack)

    @property
    def held_bytes(self) -> int:
        """The memory of all directories that are open or were read in advance."""
        return self._open_bytes + self._ahead_bytes

    # Reading.

    def next_read(self) -> ReadAheadDirectory | None:
        """Return the directory to read now, if any; the caller then passes the outcome to ``arrived``."""
        if self._over:
            return None
        head = self._head
        if head is not None and head.state == "unread":
            return self._begin(head)
        while self._cursors and self._reading < self.limits.reads:
            parent = self._cursors[0][2]
            cap = None if parent.dropped else self._next_child(parent)
            if cap is None:
                heapq.heappop(self._cursors)
                continue
            if self._ahead_bytes + _expected_bytes(cap) > self.limits.ahead_bytes:
                return None
            index = parent.next_ahead
            parent.next_ahead += 1
            directory = self._child(parent, index, cap)
            heapq.heapreplace(self._cursors, (directory.key, next(self._ties), parent))
            known = self._is_over(directory) or directory.identity in self._reading_ids
            if directory.is_in_itself if self._all_paths else known:
                continue
            directory.ahead = True
            parent.children[index] = directory
            return self._begin(directory)
        return None

    def _is_over(self, directory: ReadAheadDirectory) -> bool:
        """Return whether a directory was met before and need not be entered again by this cap."""
        identity = directory.identity
        if identity is None or identity not in self._seen:
            return False
        return identity not in self._shut or kind_of(directory.cap) != "directory"

    def _entered(self, cap: Cap | None) -> DirectoryCap | None:
        """Return the cap if it is the cap of a directory to be entered; otherwise None."""
        if isinstance(cap, DirectoryCap) and (not self._by_write_caps or writes(cap)):
            return cap
        return None

    def _begin(self, directory: ReadAheadDirectory) -> ReadAheadDirectory:
        directory.state = "reading"
        self._reading += 1
        if directory.identity is not None:
            self._reading_ids.add(directory.identity)
        if directory.ahead:
            self._ahead_bytes += directory.memory_bytes
        return directory

    def arrived(self, directory: ReadAheadDirectory, outcome: Listing | Exception) -> None:
        """Record the outcome of reading a directory: its listing, or an error."""
        assert directory.state == "reading"
        self._reading -= 1
        if directory.dropped:
            return
        before = directory.memory_bytes
        if isinstance(outcome, Listing):
            directory.state, directory.listing = "ready", outcome
            if directory.depth < self.limits.depth and outcome.entries:
                heapq.heappush(self._cursors, (directory.key, next(self._ties), directory))
        else:
            directory.state, directory.error = "failed", outcome
        if directory.ahead:
            self._ahead_bytes += directory.memory_bytes - before

    def _next_child(self, parent: ReadAheadDirectory) -> DirectoryCap | None:
        """
        Return the next child directory of an open directory whose reading has not begun, or None;
        ``next_ahead`` becomes the position of the child.
        """
        assert parent.listing is not None
        entries = parent.listing.entries
        for index in range(max(parent.next_ahead, parent.position), len(entries)):
            cap = self._entered(entries[index].best)
            if cap is not None and index not in parent.children:
                parent.next_ahead = index
                return cap
        parent.next_ahead = len(entries)
        return None

    def _child(
        self, parent: ReadAheadDirectory, index: int, cap: DirectoryCap
    ) -> ReadAheadDirectory:
        way = _Step(parent.identity, parent.way)
        key = parent.key + index.to_bytes(4, "big")
        return ReadAheadDirectory(cap, way, parent.depth + 1, key, identity_of(cap))

    # Meeting.

    def next_met(self) -> Met | None:
        """Return the next object; None if a directory must be read first, or if the walk has ended."""
        if self._over:
            return None
        if not self._began:
            return self._meet_root()
        while self._stack:
            top = self._stack[-1]
            assert top.listing is not None
            if top.position == len(top.listing.entries):
                self._leave(top)
                continue
            if self._met >= self.limits.objects:
                return self._give_up()
            entry = top.listing.entries[top.position]
            cap = self._entered(entry.best)
            if cap is not None:
                child = top.children.get(top.position) or self._child(top, top.position, cap)
                top.children[top.position] = child
                met = self._enter(child, entry)
                if met is None:
                    return None
                del top.children[top.position]
            else:
                met = Found(
                    (*self._path, entry.name),
                    entry.cap,
                    entry.kind,
                    entry.metadata_json,
                    again=not self._by_write_caps and self._note(identity_of(entry.best)),
                    best=entry.best,
                )
            top.position += 1
            self._met += 1
            return met
        return None

    def _meet_root(self) -> Met | None:
        met: Met | None = Found((), self._root, kind_of(self._root), self._metadata_json)
        if self._head is not None:
            met = self._enter(self._head, None)
        if met is not None:
            self._began = True
            self._met = 1
        return met

    def _enter(self, child: ReadAheadDirectory, entry: Entry | None) -> Met | None:
        """Meet a directory; ``entry`` is None for the root. Return None if the directory is not read yet."""
        cap: Cap | None = child.cap
        path, metadata_json, best = tuple(self._path), self._metadata_json, None
        if entry is not None:
            path, metadata_json = (*path, entry.name), entry.metadata_json
            cap, best = entry.cap, entry.best
        again = child.identity is not None and child.identity in self._seen
        if self._is_over(child) and not self._all_paths:
            self._drop(child)
            return Found(path, cap, kind_of(child.cap), metadata_json, True, best=best)
        error = child.error or self._obstacle(child)
        if error is None:
            if child.listing is None:
                self._head = child
                return None
            if self._open_bytes + child.memory_bytes > self.limits.open_bytes:
                error = DirectoryError(
                    "this directory and those above it have more entries than fit in memory; it "
                    "was left out: walk it by itself, by its cap"
                )
        self._head = None
        if error is not None:
            if kind_of(child.cap) != "directory" and not again:
                self._shut.add(child.identity)
            self._note(child.identity)
            self._drop(child)
            return Unreadable(path, cap, error, metadata_json, best)
        self._note(child.identity)
        self._shut.discard(child.identity)
        if child.ahead:
            self._ahead_bytes -= child.memory_bytes
            child.ahead = False
        self._open_bytes += child.memory_bytes
        self._stack.append(child)
        if entry is not None:
            self._path.append(entry.name)
        return Found(path, cap, "directory", metadata_json, again, child.listing, best)

    def _obstacle(self, child: ReadAheadDirectory) -> Exception | None:
        if child.depth > self.limits.depth:
            return DirectoryError(
                f"this directory lies {child.depth} levels deep, too deep, and was not entered; to "
                "walk it, begin with its own cap"
            )
        if child.is_in_itself:
            return DirectoryError("this directory contains itself, and was not entered again")
        return None

    def _note(self, identity: bytes | None) -> bool:
        """Return whether an object was met before, and record it as met."""
        if identity is None or identity in self._seen:
            return identity is not None
        self._seen.add(identity)
        return False

    def _leave(self, top: ReadAheadDirectory) -> None:
        self._stack.pop()
        if self._stack:
            self._path.pop()
        self._open_bytes -= top.memory_bytes
        self._forget(top)

    def _drop(self, directory: ReadAheadDirectory) -> None:
        """Forget a directory that is not entered, with all directories below it that were read in advance."""
        dropping = [directory]
        while dropping:
            each = dropping.pop()
            dropping += each.children.values()
            if each.ahead:
                self._ahead_bytes -= each.memory_bytes
                each.ahead = False
            self._forget(each)

    def _forget(self, directory: ReadAheadDirectory) -> None:
        directory.dropped = True
        directory.children.clear()
        self._reading_ids.discard(directory.identity)

    def _give_up(self) -> Met:
        self._over = True
        return Unreadable(
            tuple(self._path),
            self._stack[-1].cap,
            DirectoryError(
                f"this tree has more than {self.limits.objects} objects, counted on all paths; the rest "
                "was left out: walk parts of it by their own paths"
            ),
        )
