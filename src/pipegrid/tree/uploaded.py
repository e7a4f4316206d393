"""
How far the upload of a tree has come, and what came of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from pipegrid.core.caps import DirectoryCap
from pipegrid.tree.plan import DirectoryNode, TreeNode

SubtreeCounts = tuple[int, int, int, int]
"""Files, directories, links and bytes."""


@attrs.define
class TreeCounts:
    """
    How far a tree has come.

    Attributes:
        files, directories, links: met so far, without those that were left out.
        bytes: of those files.
        sent_files, sent_directories, sent_bytes: that were not known, and are stored now. What lives in its
            cap is not sent.
        already_stored: objects of these of which servers said that they had all shares already.
        unchanged_bytes: of files that an earlier run has stored, and that were not sent again.
        checked: known objects that were looked for on the grid, and were found whole or stored again.
        unleased: those of them that are whole, and to which too few servers gave leases.
        second_tries: objects that were stored, or found, when servers were in reach again.
        left_out: files, directories and whatever else is not in the tree, or only in part.
        skipped: named pipes, sockets and devices, which no tree holds.
        part_files: of unfinished downloads, which are skipped, too.
    """

    files: int = 0
    directories: int = 0
    links: int = 0
    bytes: int = 0
    sent_files: int = 0
    sent_directories: int = 0
    sent_bytes: int = 0
    already_stored: int = 0
    unchanged_bytes: int = 0
    checked: int = 0
    unleased: int = 0
    second_tries: int = 0
    left_out: int = 0
    skipped: int = 0
    part_files: int = 0


class TreeTally:
    """
    Counts what is met, and takes back what turns out not to be in the tree.

    A directory that cannot be stored is missing with all that is in it, so each node knows what it holds; the
    one above is told when the walk leaves it.
    """

    def __init__(self, counts: TreeCounts) -> None:
        self._counts = counts

    def met(
        self, place: TreeNode, files: int = 0, directories: int = 0, links: int = 0, size: int = 0
    ) -> None:
        """Count one thing; ``size``: its bytes."""
        place.held = amounts = (files, directories, links, size)
        self._count(amounts, 1)
        if not isinstance(place, DirectoryNode) and place.parent is not None:
            _hold(place.parent, amounts, 1)

    def grown(self, place: TreeNode, more: int) -> None:
        """A file is so many bytes longer than its file system said."""
        amounts = (0, 0, 0, more)
        self._count(amounts, 1)
        _hold(place, amounts, 1)
        at = place
        while at.parent is not None and (not isinstance(at, DirectoryNode) or at.left):
            at = at.parent
            _hold(at, amounts, 1)

    def left(self, directory: DirectoryNode) -> None:
        """All that is in a directory was met; before the plan hears of it."""
        if directory.parent is not None:
            _hold(directory.parent, directory.held, 1)

    def lost(self, place: TreeNode) -> None:
        """Count it no more, unless a directory above it is lost already; before the plan hears of it."""
        amounts = place.held
        above = place.parent
        while above is not None:
            if above.failed:
                return
            above = above.parent
        self._count(amounts, -1)
        at = place
        while at.parent is not None and (not isinstance(at, DirectoryNode) or at.left):
            at = at.parent
            _hold(at, amounts, -1)

    def _count(self, amounts: SubtreeCounts, sign: int) -> None:
        files, directories, links, size = amounts
        counts = self._counts
        counts.files += sign * files
        counts.directories += sign * directories
        counts.links += sign * links
        counts.bytes += sign * size


def _hold(place: TreeNode, amounts: SubtreeCounts, sign: int) -> None:
    files, directories, links, size = place.held
    place.held = (
        files + sign * amounts[0],
        directories + sign * amounts[1],
        links + sign * amounts[2],
        size + sign * amounts[3],
    )


@attrs.frozen
class TreeResult:
    """
    A stored tree.

    Attributes:
        cap: of its root; all that is below it is stored.
        metadata: of its root, which no entry has.
        counts: what is in it, what was sent, how much was left out.
        elapsed_s: from the start until all was stored.
    """

    cap: DirectoryCap
    metadata: dict[str, Any]
    counts: TreeCounts
    elapsed_s: float


@attrs.frozen
class TreeReports:
    """
    What the caller of a tree's put is told.

    Attributes:
        left_out: called with a path (from the root; the root is ``.``) and a sentence.
        skipped: called with a path, and what that is, in words: a named pipe, a socket, a device, or the part
            of an unfinished download.
        progress: called when something is stored, and when more was met.
        sending: called with how many bytes more servers have acknowledged of files that are not stored yet;
            less than nothing when one is stored, or will not be.
        waiting: called with a sentence when too few servers are in reach, so that nothing more begins, and
            with None when it goes on.
    """

    left_out: Callable[[str, str], None] = lambda path, why: None
    progress: Callable[[TreeCounts], None] = lambda counts: None
    sending: Callable[[TreeCounts, int], None] = lambda counts, more: None
    waiting: Callable[[str | None], None] = lambda why: None
    skipped: Callable[[str, str], None] = lambda path, what: None


class OnItsWay:
    """Reports how far one large file has come, until it is stored; then it is one of the counts."""

    def __init__(self, reports: TreeReports, counts: TreeCounts, size: int) -> None:
        self._reports = reports
        self._counts = counts
        self._size = size
        self._told = 0

    def is_at(self, done: int, total: int) -> None:
        """So much of its shares is acknowledged."""
        self._tell(self._size * done // max(1, total))

    def end(self) -> None:
        """It is under way no more."""
        self._tell(0)

    def _tell(self, now: int) -> None:
        if now != self._told:
            more, self._told = now - self._told, now
            self._reports.sending(self._counts, more)


def path_of(directory: DirectoryNode) -> str:
    """Return where a directory is, from the root, which is nothing."""
    names = []
    at: TreeNode | None = directory
    while at is not None and at.parent is not None:
        names.append(at.name)
        at = at.parent
    return "/".join(reversed(names))
