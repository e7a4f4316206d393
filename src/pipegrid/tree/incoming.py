"""A local directory while a tree is fetched into it: what is yet to come, and what has come."""

from __future__ import annotations

import attrs

from pipegrid.tree.claimed import ClaimedNames
from pipegrid.tree.home import Home
from pipegrid.tree.metadata import Kept
from pipegrid.tree.walk import TreePath, Unreadable


@attrs.define(eq=False)
class IncomingDirectory:
    """
    A local directory that something is in, or comes into.

    Attributes:
        path: None if it is left out, with all in it; so is ``home``, which knows whether it is still there.
        names: its path on the grid.
        unfinished: what is yet to end in it, the walk through it included.
        links: to be made in it.
    """

    path: str | None
    home: Home | None
    parent: IncomingDirectory | None
    names: TreePath
    kept: Kept
    taken: ClaimedNames
    mode_before: int | None = None
    unfinished: int = 1
    links: list[tuple[TreePath, str, Kept]] = attrs.Factory(list)

    @property
    def depth(self) -> int:
        """How many levels it is below the root."""
        return len(self.names)

    @property
    def there(self) -> Home:
        """The directory, if it is not left out."""
        assert self.home is not None
        return self.home

    def claim(self, path: str) -> None:
        """Give what stands at a path in it to the entry of that name; see ``ClaimedNames``."""
        self.taken.claim(self.there, path)


@attrs.frozen
class Unread:
    """A directory of the tree that could not be read, and the local one that it comes into."""

    met: Unreadable
    parent: IncomingDirectory
