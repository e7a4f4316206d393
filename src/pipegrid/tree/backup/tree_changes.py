"""The differences between two trees, such as two runs of a backup; equal directories are not read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs

from pipegrid.core.caps import DirectoryCap, immutable_size
from pipegrid.tree.backup.history_walk import EntrySpan, walk_history
from pipegrid.tree.directory_reading import Entry, ReadsFiles
from pipegrid.tree.file_metadata import KEY, restored
from pipegrid.tree.walk_order import TreePath

ChangeKind = Literal["added", "removed", "content", "type", "metadata"]


@attrs.frozen
class TreeChange:
    """
    One path at which two trees differ.

    Attributes:
        path: the path from the roots.
        how: ``added`` or ``removed``, also for everything in an added or removed directory; otherwise
            ``type`` for a change between file, directory and link, ``content``, or ``metadata`` if only that
            differs.
        old, new: the entry in each tree, or None.
    """

    path: TreePath
    how: ChangeKind
    old: Entry | None = None
    new: Entry | None = None

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        """The bytes of the old and the new file; None: not a file, or its size is unknown."""
        return _size(self.old), _size(self.new)


@attrs.define
class TreeChangeCounts:
    """
    How much differs between two trees.

    Attributes:
        added, removed, changed, metadata: number of paths; ``changed`` counts those that differ in content or
            type.
        added_bytes, removed_bytes: bytes of new and of old files, counting files that are in one tree only or
            whose content differs.
    """

    added: int = 0
    removed: int = 0
    changed: int = 0
    metadata: int = 0
    added_bytes: int = 0
    removed_bytes: int = 0

    @property
    def total(self) -> int:
        """The number of paths that differ."""
        return self.added + self.removed + self.changed + self.metadata

    def count(self, change: TreeChange) -> None:
        """Add one change to the counts."""
        if change.how in ("content", "type"):
            self.changed += 1
        else:
            setattr(self, change.how, getattr(self, change.how) + 1)
        if change.how != "metadata":
            old, new = change.sizes
            self.removed_bytes += old or 0
            self.added_bytes += new or 0


async def compare_trees(
    grid: ReadsFiles,
    old: DirectoryCap,
    new: DirectoryCap,
    changed: Callable[[TreeChange], None],
    unreadable: Callable[[TreePath, Exception], None],
) -> None:
    """
    Find the differences between two trees.

    If the content of a directory differs, the directory itself counts as changed only if its metadata differs
    in more than times.

    Args:
        grid: an open grid.
        changed: called for each path that differs.
        unreadable: called with the path of a directory that could not be read, and the error.

    Raises:
        DirectoryError: there are more objects than the limits allow.
    """

    def visit(path: TreePath, spans: Sequence[EntrySpan]) -> bool:
        before = next((span.entry for span in spans if span.start == 0), None)
        after = next((span.entry for span in spans if span.end == 2), None)
        change = change_of(path, before, after)
        if change is not None:
            changed(change)
        return _directory(before) != _directory(after)

    if old != new:
        await walk_history(grid, [old, new], visit, unreadable, only_whole=True)


def change_of(path: TreePath, old: Entry | None, new: Entry | None) -> TreeChange | None:
    """
    Return how the two entries of one path differ; None: they are equal, or only the content of a directory
    differs.
    """
    how: ChangeKind | None = None
    if old is None or new is None:
        how = "added" if old is None else "removed"
    elif old is new:
        return None
    elif kind_of_entry(old) != kind_of_entry(new):
        how = "type"
    elif old.cap != new.cap and old.kind != "directory":
        how = "content"
    elif _described(old, old.cap == new.cap) != _described(new, old.cap == new.cap):
        how = "metadata"
    return None if how is None else TreeChange(path, how, old, new)


def kind_of_entry(entry: Entry) -> str:
    """Return the kind of an entry; ``link`` for a symbolic link."""
    return "link" if restored(entry.metadata).link is not None else entry.kind


def _described(entry: Entry, with_time: bool) -> dict[str, Any]:
    """
    Return the metadata of an entry without link times; without ``with_time``, also without its ``mtime``.
    """
    found = {key: value for key, value in entry.metadata.items() if key != "tahoe"}
    if with_time:
        return found
    ours = found.get(KEY)
    if isinstance(ours, dict):
        found[KEY] = {key: value for key, value in ours.items() if key != "mtime_ns"}
    found.pop("mtime", None)
    return found


def _directory(entry: Entry | None) -> DirectoryCap | None:
    return entry.cap if entry is not None and isinstance(entry.cap, DirectoryCap) else None


def _size(entry: Entry | None) -> int | None:
    return None if entry is None else immutable_size(entry.cap)
