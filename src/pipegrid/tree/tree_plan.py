"""
The plan of an upload: which directories of a tree can be packed and stored now. This module does no input or
output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from pipegrid.core.caps import Cap, ChkCap, LitCap
from pipegrid.core.packed_directory import PackedChild, directory_cap
from pipegrid.tree.extended_metadata import attribute_bytes
from pipegrid.tree.file_metadata import KEY

MAX_ENTRIES = 200_000
MAX_DIRECTORY_BYTES = 60 << 20
"""Limit of a directory's estimated size; readers accept at most 64 MiB and 200,000 entries."""

_CAP_BYTES = 150
"""The maximum length of the cap of an immutable file or directory."""

_METADATA_BYTES = 400
"""Assumed metadata of one entry, in addition to its name and cap; entries of links have more, but are few."""


class _Entry:
    __slots__ = ("cap", "metadata")

    def __init__(
        self,
        cap: Cap | None,
        metadata: dict[str, Any],
    ) -> None:
        self.cap = cap
        self.metadata = metadata


class TreeNode:
    """
    The place of a file or directory in the tree.

    Attributes:
        parent: the directory that contains it; None for the root.
        name: the name of its entry in ``parent``.
        held: the counts of the file, or of the directory and its content: see ``tree_upload.TreeTally``.
    """

    __slots__ = ("held", "name", "parent")

    def __init__(self, parent: DirectoryNode | None, name: str) -> None:
        self.parent = parent
        self.name = name
        self.held = (0, 0, 0, 0)

    def upwards(self) -> Iterator[TreeNode]:
        """Yield this node, and all directories above it."""
        at: TreeNode | None = self
        while at is not None:
            yield at
            at = at.parent

    @property
    def is_lost(self) -> bool:
        """Whether this node or a directory above it has failed."""
        return any(isinstance(each, DirectoryNode) and each.failed for each in self.upwards())


class DirectoryNode(TreeNode):
    """A directory that is not settled yet; only ``TreePlan`` changes its fields."""

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
        self.namesakes: dict[str, int] = {}  # highest number used for equal names
        self.bytes = 0
        self.unknown = 0  # number of children without a known cap
        self.unsettled = 0
        self.left = False  # whether the walk has met all its children
        self.packed = False  # whether it was packed at least once
        self.sending = False  # being stored
        self.dirty = False  # whether the children differ from those last packed
        self.failed = False
        self.cap: Cap | None = None

    def __repr__(self) -> str:
        return (
            f"<DirectoryNode {self.name!r}: {len(self.entries)} entries, {self.unknown} unknown, "
            f"{self.unsettled} unsettled>"
        )


class TreePlan:
    """
    The directories of one tree, from the walk until everything is stored.

    The cap of an immutable object follows from its content. So a directory can be packed as soon as the caps
    of its children are *known*, which is after their encoding and before they are stored. Then its own cap is
    known too, for the directory above, so all levels of a tree are stored at the same time. But a child may
    fail after directories with its cap were stored. So a directory is **settled** only when its last content
    is stored and all its children are settled. If a child failed or got another cap, the directory is packed
    again when its last child settles.

    Entries of a directory are held in memory until it is settled. The unsettled directories are those that
    the walk is in, and those that contain objects being stored, whose number the caller limits. The caller
    leaves out entries that readers would not accept (``has_space``).

        walk:   enter(dir) ─ expect(child)… ─ leave(dir)
        file:   known(cap) ─ stored(cap)   or   failed()
        out:    take_ready() → a directory and its children to pack → known, stored or failed of it

    Attributes:
        root_cap: the cap of the root when it is settled; until then None.
        root_failed: whether the root cannot be stored.
        held_entries: number of entries of unsettled directories that the walk has left.
    """

    def __init__(self) -> None:
        self.root_cap: Cap | None = None
        self.root_failed = False
        self.held_entries = 0
        self._ready: deque[DirectoryNode] = deque()

    @property
    def done(self) -> bool:
        """Whether the root is settled, or has failed."""
        return self.root_failed or self.root_cap is not None

    # The methods below are called for what the walk meets.

    def enter(
        self, parent: DirectoryNode | None, name: str, metadata: dict[str, Any]
    ) -> DirectoryNode:
        """Begin a directory; for the root, name and metadata are ignored."""
        directory = DirectoryNode(parent, name)
        if parent is not None:
            self._expect(parent, name, metadata)
        return directory

    def expect(self, parent: DirectoryNode, name: str, metadata: dict[str, Any]) -> TreeNode:
        """Add a file that the walk has met; its cap follows later."""
        self._expect(parent, name, metadata)
        return TreeNode(parent, name)

    def has_space(self, directory: DirectoryNode) -> bool:
        """Return whether the directory may have one more entry without becoming too large for readers."""
        return len(directory.entries) < MAX_ENTRIES and directory.bytes < MAX_DIRECTORY_BYTES

    def free_name(self, directory: DirectoryNode, name: str) -> str:
        """Return this name or, if an entry has it already, a similar unused one."""
        unique, count = name, directory.namesakes.get(name, 1)
        while unique in directory.entries:
            count += 1
            unique = f"{name} ({count})"
        if count > 1:
            directory.namesakes[name] = count
        return unique

    def leave(self, directory: DirectoryNode) -> None:
        """Record that the walk has met everything in the directory."""
        directory.left = True
        self.held_entries += len(directory.entries)
        directory.namesakes.clear()
        self._look_at(directory)

    # The methods below are called when objects are stored.

    def bytes_known(self, directory: DirectoryNode, cap: ChkCap | LitCap) -> None:
        """Record the cap of a directory's bytes; see ``known``."""
        self.known(directory, directory_cap(cap))

    def known(self, place: TreeNode, cap: Cap) -> None:
        """
        Record the cap of an object, which may be stored later. A second call with the same cap changes
        nothing.
        """
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
        """
        Record that an object is stored under this cap; for a directory, with the content that was packed
        last.
        """
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
        """
        Record that an object cannot be stored. The object is left out; a directory, with all its content.
        """
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
        """
        Return a directory that can be stored now, and its children to pack; None: no directory is ready.
        """
        while self._ready:
            directory = self._ready.popleft()
            if not directory.failed:
                return directory, _children(directory)
        return None

    def again(self, directory: DirectoryNode) -> list[PackedChild]:
        """
        Return the children to pack for another attempt to store a directory; ``failed`` must not have been
        called for it.
        """
        assert directory.sending
        assert not directory.unknown
        directory.dirty = False
        return _children(directory)

    # Internal.

    def _forget_entries(self, directory: DirectoryNode) -> None:
        if directory.left:
            self.held_entries -= len(directory.entries)
        directory.entries.clear()

    def _expect(self, parent: DirectoryNode, name: str, metadata: dict[str, Any]) -> None:
        assert not parent.left
        assert name not in parent.entries
        parent.entries[name] = _Entry(None, metadata)
        parent.bytes += len(name.encode("utf-8")) + _METADATA_BYTES + _CAP_BYTES
        parent.bytes += attribute_bytes(metadata.get(KEY))
        parent.unknown += 1
        parent.unsettled += 1

    def _child_ended(self, place: TreeNode) -> None:
        parent = place.parent
        if parent is not None and not parent.failed:
            parent.unsettled -= 1
            self._look_at(parent)

    def _look_at(self, directory: DirectoryNode) -> None:
        """
        Pack a directory or settle it, if possible; after settling it, do the same with the directory above.
        """
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
