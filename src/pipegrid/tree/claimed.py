"""
Which entry of a directory has which place in a local one, where several names may lead to one place.

File systems that fold cases do so, and those that keep a short name beside a long one (``LONGNA~1.TXT``), or
drop dots and blanks at its end. What folds can be told beforehand; the rest shows when an entry meets what
another one has become. So what stands at an entry's place is noted, and belongs to that entry alone.
"""

from __future__ import annotations

import os

from pipegrid.tree.home import Home
from pipegrid.tree.names import TakenNames, same_name


class ClaimedNames(TakenNames):
    """
    The names and places of one directory that were given to its entries.

    Args:
        folds: as of ``TakenNames``.
    """

    def __init__(self, folds: bool) -> None:
        super().__init__(folds)
        self._owners: dict[tuple[int, int], str] = {}

    def claim(self, home: Home, path: str) -> None:
        """
        Give what stands at a path, if anything does, to the entry that has this name.

        Args:
            home: the local directory.

        Raises:
            SinkError: it is another entry's, or the directory is not in its place any more.
        """
        name = os.path.basename(path)
        with home.entered() as inside:
            identity = _identity(inside, name)
            if identity is None:
                return
            owner = self._owners.get(identity, name)
            if owner != name and _is_one(inside, owner, name):
                raise same_name(owner, name)
            self._owners[identity] = name


def _identity(inside: int, name: str) -> tuple[int, int] | None:
    try:
        found = os.stat(name, dir_fd=inside, follow_symlinks=False)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _is_one(inside: int, name: str, other: str) -> bool:
    """Return whether two names of a file are one; not so two links to it, which are both listed."""
    return not {name, other} <= set(os.listdir(inside))
