"""The directories that one run of a backup stores, as one tree."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pipegrid.tree import local_walk

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipegrid.tree.file_selection import TreeSelection
    from pipegrid.tree.local_walk import EntryWalk, LinkId, LocalWalk, WalkOptions

# A command creates these objects before it connects, so the walks are imported later, when a walk is created.

BETWEEN = ", "
"""Separates the directories of one run in the catalogue."""

MAX_ROOT_BYTES = 4096
"""Maximum length of the text naming the directories in the catalogue; further ones are only counted."""


class BackupDirectories:
    """
    The directories of one run.

    The tree of a single directory has its content at the root. A tree of several directories has each at its
    absolute path, as in restic and borg, so names cannot collide. A directory inside another one is stored as
    part of it. If such a directory is a mount point, it is stored even if other mount points are left out.

    Args:
        given: paths; symbolic links are followed.

    Attributes:
        walked: absolute paths without symbolic links, none inside another.
        selected: the same, but a single directory as it was given.
        base: the directory whose content is at the root of the tree.
        name: the default name of the backup.
        root: the text that names the directories in the catalogue.
    """

    def __init__(self, given: Sequence[str]) -> None:
        real = sorted({os.path.realpath(each) for each in given}, key=lambda each: each.split("/"))
        self.walked: list[str] = []
        self._inside: dict[str, list[str]] = {}
        for each in real:
            above = next((path for path in self.walked if _is_inside(each, path)), None)
            if above is None:
                self.walked.append(each)
            else:
                self._inside.setdefault(above, []).append(each[len(above.rstrip("/")) + 1 :])
        self.selected = [given[0]] if len(given) == 1 else self.walked
        self.is_one = len(self.walked) == 1
        self.base = self.walked[0] if self.is_one else "/"
        names = (os.path.basename(os.path.abspath(each)) or "root" for each in self.selected)
        self.name = "+".join(names)
        self.root = _root_of(self.walked)

    @property
    def title(self) -> str:
        """The directories as they were given, for messages."""
        return BETWEEN.join(self.selected)

    def walk(
        self,
        selection: Callable[[str], TreeSelection],
        know: Callable[[str, os.stat_result], Any],
        link_id: LinkId,
        options: WalkOptions,
    ) -> EntryWalk:
        """
        Return a walk through the directories.

        Args:
            selection: called with each directory; returns the selection for its walk.
            know, link_id: called with paths relative to ``base``.
            options: the options for the walk of each directory.
        """
        if self.is_one:
            inside = self._inside.get(self.base, ())
            (directory,) = self.selected
            return local_walk.LocalWalk(
                directory,
                selection=selection(directory),
                options=options,
                know=know,
                link_id=link_id,
                mounted=inside,
            )

        def walk_of(directory: str, prefix: str, levels_above: int) -> LocalWalk:
            return local_walk.LocalWalk(
                directory,
                selection=selection(directory),
                options=options,
                know=lambda path, found: know(f"{prefix}/{path}", found),
                link_id=lambda found, path: link_id(found, f"{prefix}/{path}"),
                mounted=self._inside.get(directory, ()),
                levels_above=levels_above,
            )

        return local_walk.JoinedWalk(self.walked, walk_of)


def _root_of(paths: Sequence[str]) -> str:
    """Return the text that names these directories in the catalogue."""
    size, count = 0, 0
    for count, path in enumerate(paths):
        size += len(os.fsencode(path)) + len(BETWEEN)
        if count and size > MAX_ROOT_BYTES:
            return f"{BETWEEN.join(paths[:count])} and {len(paths) - count} more"
    return BETWEEN.join(paths)


def _is_inside(path: str, directory: str) -> bool:
    return path.startswith(directory.rstrip("/") + "/")


def still_exists(root: str) -> bool:
    """
    Return whether at least one of the directories that the text ``root`` of the catalogue names exists; for a
    stream, return True.
    """
    if not root.startswith("/"):
        return True  # the output of a program
    separated = BETWEEN + "/"
    return any(map(os.path.exists, (root, *root.replace(separated, "\0/").split("\0"))))
