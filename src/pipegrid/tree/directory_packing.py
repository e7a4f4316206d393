"""
Which directories of a tree can be packed now; pure.

The cap of an immutable object follows from its content, so a directory can be packed as soon as the caps of
its children are *known*, which is when they are coded, long before they are stored. Then its own cap is
known,
and feeds its parent: a tree of any depth is on its way at once. The other side of that: a child may fail
after directories that hold its cap have left. So a directory is **settled** only when it is stored as it
should be, and all that is in it is settled. When its last child settles and one of them has failed, or has
become another one, it is packed once more, without it.

**Memory.** The entries of a directory are held until it is settled. So what is held are the directories on
the way from the root to where the walk is, and those with something on its way to the grid, which whoever
drives this bounds. What readers would not take of a directory (``has_space``) whoever drives this leaves out.

    walk:   enter(dir) ─ expect(child)… ─ leave(dir)
    file:   known(cap) ─ stored(cap)   or   failed()
    out:    take_ready() → a directory and what is to be packed → known, stored or failed of that directory
"""

from __future__ import annotations

from collections import deque
from typing import Any

import attrs

from pipegrid.core.caps import Cap, ChkCap, LitCap
from pipegrid.core.packed_directory import PackedChild, directory_cap

MAX_ENTRIES = 200_000
MAX_DIRECTORY_BYTES = 60 << 20
"""Readers take directories of 64 MiB and 200,000 entries."""

_CAP_BYTES = 150
"""At most what the cap of an immutable file or directory has."""

_METADATA_BYTES = 400
"""What an entry has beside its name and its cap (``entry_metadata``). Links have longer ones, but are few."""


@attrs.define
class _Entry:
    cap: Cap | None
    metadata: dict[str, Any]


class TreeNode:
    """
    Where in the tree something belongs: a file under way, or a directory.

    Attributes:
        parent: the directory that it is in; None for the root.
        name: of its entry there.
        held: what it is, with all that is in it: see ``tree_upload.TreeTally``.
    """

    __slots__ = ("held", "name", "parent")

    def __init__(self, parent: DirectoryNode | None, name: str) -> None:
        self.parent = parent
        self.name = name
        self.held = (0, 0, 0, 0)


class DirectoryNode(TreeNode):
    """A directory that is not settled yet; its fields are the plan's."""

    __slots__ = (
        "bytes",
        "cap",
        "dirty",
        "entries",
        "failed",
        "left",
        "namesakes",
        "packed",
        "sending",
        "unknown",
        "unsettled",
    )

    def __init__(self, parent: DirectoryNode | None, name: str) -> None:
        super().__init__(parent, name)
        self.entries: dict[str, _Entry] = {}
        self.namesakes: dict[str, int] = {}  # how many there are of names that look the same
        self.bytes = 0
        self.unknown = 0  # children without a cap
        self.unsettled = 0
        self.left = False  # the walk has nothing more for it
        self.packed = False  # at least once
        self.sending = False  # on its way
        self.dirty = False  # what was packed last is not what it should be
        self.failed = False
        self.cap: Cap | None = None

    def __repr__(self) -> str:
        return (
            f"<DirectoryNode {self.name!r}: {len(self.entries)} entries, {self.unknown} unknown, "
            f"{self.unsettled} unsettled>"
        )


class TreePlan:
    """
    One tree.

    Attributes:
        root_cap: when the root is settled, its cap.
        root_failed: it cannot be stored.
        held_entries: of directories that the walk has left, and that are not settled.
    """

    def __init__(self) -> None:
        self.root_cap: Cap | None = None
        self.root_failed = False
        self.held_entries = 0
        self._ready: deque[DirectoryNode] = deque()

    @property
    def done(self) -> bool:
        """Whether the root is settled, or never will be."""
        return self.root_failed or self.root_cap is not None

    # What the walk meets.

    def enter(
        self, parent: DirectoryNode | None, name: str, metadata: dict[str, Any]
    ) -> DirectoryNode:
        """A directory begins; of the root, name and metadata do not count."""
        directory = DirectoryNode(parent, name)
        if parent is not None:
            self._expect(parent, name, metadata)
        return directory

    def expect(self, parent: DirectoryNode, name: str, metadata: dict[str, Any]) -> TreeNode:
        """A file is met, the cap of which will follow."""
        self._expect(parent, name, metadata)
        return TreeNode(parent, name)

    def has_space(self, directory: DirectoryNode) -> bool:
        """Whether readers would take the directory with one more entry."""
        return len(directory.entries) < MAX_ENTRIES and directory.bytes < MAX_DIRECTORY_BYTES

    def free_name(self, directory: DirectoryNode, name: str) -> str:
        """Return this name, or, if an entry has it already, one that can be told from it."""
        unique, count = name, directory.namesakes.get(name, 1)
        while unique in directory.entries:
            count += 1
            unique = f"{name} ({count})"
        if count > 1:
            directory.namesakes[name] = count
        return unique

    def leave(self, directory: DirectoryNode) -> None:
        """The walk has met all that is in it."""
        directory.left = True
        self.held_entries += len(directory.entries)
        directory.namesakes.clear()
        self._look_at(directory)

    # What becomes of it.

    def bytes_known(self, directory: DirectoryNode, cap: ChkCap | LitCap) -> None:
        """The cap of a directory's bytes is known; see ``known``."""
        self.known(directory, directory_cap(cap))

    def known(self, place: TreeNode, cap: Cap) -> None:
        """The cap of something is known; it is not stored yet. Telling it again changes nothing."""
        parent = place.parent
        if isinstance(place, DirectoryNode):
            place.cap = cap
        entry = None if parent is None or parent.failed else parent.entries.get(place.name)
        if parent is None or entry is None or entry.cap == cap:
            return
        if entry.cap is None:
            parent.unknown -= 1
        elif parent.packed:
            parent.dirty = True
        entry.cap = cap
        self._look_at(parent)

    def stored(self, place: TreeNode, cap: Cap) -> None:
        """Something is stored under this cap; of a directory: what was packed last."""
        if isinstance(place, DirectoryNode):
            if place.failed:
                return
            place.sending = False
        self.known(place, cap)
        if isinstance(place, DirectoryNode):
            self._look_at(place)
        else:
            self._child_ended(place)

    def failed(self, place: TreeNode) -> None:
        """Something cannot be stored, and is left out; a directory with all that is in it."""
        if isinstance(place, DirectoryNode):
            if place.failed:
                return
            place.failed = True
            self._forget_entries(place)
        parent = place.parent
        if parent is None:
            self.root_failed = True
            return
        if parent.failed:
            return
        self.held_entries -= parent.left
        if parent.entries.pop(place.name).cap is None:
            parent.unknown -= 1
        if parent.packed:
            parent.dirty = True
        self._child_ended(place)

    def take_ready(self) -> tuple[DirectoryNode, list[PackedChild]] | None:
        """Return a directory that is to be stored now, and what is to be packed; None: there is none."""
        while self._ready:
            directory = self._ready.popleft()
            if not directory.failed:
                return directory, _children(directory)
        return None

    def is_lost(self, place: TreeNode) -> bool:
        """Whether something, or a directory that it is in, was said to have failed."""
        at: TreeNode | None = place
        while at is not None:
            if isinstance(at, DirectoryNode) and at.failed:
                return True
            at = at.parent
        return False

    def again(self, directory: DirectoryNode) -> list[PackedChild]:
        """
        Return what is to be packed of a directory that could not be stored, and was not said to have failed.
        """
        assert directory.sending
        assert not directory.unknown
        directory.dirty = False
        return _children(directory)

    # Within.

    def _forget_entries(self, directory: DirectoryNode) -> None:
        if directory.left:
            self.held_entries -= len(directory.entries)
        directory.entries.clear()

    def _expect(self, parent: DirectoryNode, name: str, metadata: dict[str, Any]) -> None:
        assert not parent.left
        assert name not in parent.entries
        parent.entries[name] = _Entry(None, metadata)
        parent.bytes += len(name.encode("utf-8")) + _METADATA_BYTES + _CAP_BYTES
        parent.unknown += 1
        parent.unsettled += 1

    def _child_ended(self, place: TreeNode) -> None:
        parent = place.parent
        if parent is not None and not parent.failed:
            parent.unsettled -= 1
            self._look_at(parent)

    def _look_at(self, directory: DirectoryNode) -> None:
        """Pack a directory if that is due, or settle it, and those above that this settles."""
        while not (
            directory.failed or not directory.left or directory.unknown or directory.sending
        ):
            if not directory.packed or (directory.dirty and not directory.unsettled):
                directory.packed = directory.sending = True
                directory.dirty = False
                self._ready.append(directory)
                return
            if directory.unsettled:
                return
            self._forget_entries(directory)
            parent = directory.parent
            if parent is None:
                self.root_cap = directory.cap
                return
            if parent.failed:
                return
            parent.unsettled -= 1
            directory = parent


def _children(directory: DirectoryNode) -> list[PackedChild]:
    children = []
    for name, entry in directory.entries.items():
        assert entry.cap is not None
        children.append(PackedChild(name, entry.cap, entry.metadata))
    return children
