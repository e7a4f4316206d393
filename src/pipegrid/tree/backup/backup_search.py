"""Searching for files by name in all runs of a backup; ``history_walk`` describes what a search reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import attrs

from pipegrid.core.caps import Cap, DirectoryCap, immutable_size
from pipegrid.errors import UsageError
from pipegrid.tree.backup.catalogue import BackupRun
from pipegrid.tree.backup.history_walk import CachedDirectories, EntrySpan, walk_history
from pipegrid.tree.directory_reading import Entry, Kind, ReadsFiles
from pipegrid.tree.file_metadata import restored
from pipegrid.tree.file_selection import TreeSelection
from pipegrid.tree.walk_order import TreePath, WalkLimits


class SearchedNames(NamedTuple):
    """
    What is searched for.

    Attributes:
        patterns: patterns as in ``TreeSelection``: a name, or a path from the root with a slash.
        newer_ns, older_ns: the file was changed at or after ``newer_ns``, and before ``older_ns``, in
            nanoseconds since 1970. None: no limit.
    """

    patterns: tuple[str, ...]
    newer_ns: int | None = None
    older_ns: int | None = None

    def matcher(self) -> Callable[[str, bool], bool]:
        """
        Return a function that gets a path and whether it is a directory, and returns whether a pattern
        matches.

        Raises:
            UsageError: a pattern is malformed, or no pattern was given.
        """
        if not self.patterns:
            raise UsageError("there is no pattern to search for; give one such as '*.jpg'")
        selection = TreeSelection(self.patterns)
        return lambda path, is_directory: not selection.takes(path, is_directory)

    def fits(self, mtime_ns: int | None) -> bool:
        """
        Return whether a modification time is within the limits. An unknown time is within them only if no
        limit is set.
        """
        if mtime_ns is None:
            return self.newer_ns is None and self.older_ns is None
        return (self.newer_ns is None or mtime_ns >= self.newer_ns) and (
            self.older_ns is None or mtime_ns < self.older_ns
        )


@attrs.frozen
class FoundVersion:
    """
    One version of a file, or all versions of a directory, at one path.

    Attributes:
        path: the path from the root of the backup.
        kind: the kind of the entry; all versions of a directory count as one.
        cap: the cap of the file, or of the newest version of the directory.
        mtime_ns: when the entry was changed, in nanoseconds since 1970; None: unknown.
        first, last: the oldest and the newest run with this version.
        count: the number of runs with this version.
    """

    path: TreePath
    kind: Kind
    cap: Cap | None
    mtime_ns: int | None
    first: BackupRun
    last: BackupRun
    count: int

    @property
    def size(self) -> int | None:
        """The size of the file in bytes; None for a directory, or if it is unknown."""
        return None if self.kind == "directory" else immutable_size(self.cap)


async def search_runs(
    grid: ReadsFiles,
    runs: Sequence[BackupRun],
    wanted: SearchedNames,
    found: Callable[[FoundVersion], None],
    unreadable: Callable[[TreePath, Exception], None],
    *,
    directories: CachedDirectories | None = None,
    limits: WalkLimits | None = None,
) -> None:
    """
    Find all matching versions of files and directories; a directory that several runs share is read once.

    Args:
        grid: an open grid.
        runs: runs of one backup, oldest first.
        found: called for each version; the versions of one path follow each other, oldest first.
        unreadable: called with the path of a directory that could not be read, and the error.
        directories: a cache shared by several searches; None: this search has its own.

    Raises:
        UsageError: a pattern is malformed.
        DirectoryError: there are more objects than the limits allow.
    """
    matches = wanted.matcher()

    def visit(path: TreePath, spans: Sequence[EntrySpan]) -> bool:
        shown = "/".join(path)
        fitting = [span for span in spans if matches(shown, span.entry.kind == "directory")]
        for version in _versions(path, fitting, runs) if fitting else ():
            if wanted.fits(version.mtime_ns):
                found(version)
        return True

    roots = [run.cap for run in runs]
    await walk_history(grid, roots, visit, unreadable, limits=limits, directories=directories)


def _versions(
    path: TreePath, spans: Sequence[EntrySpan], runs: Sequence[BackupRun]
) -> list[FoundVersion]:
    """Return the versions of a path; a version that vanishes and reappears in a later run counts once."""
    grouped: dict[Any, list[EntrySpan]] = {}
    for span in spans:
        grouped.setdefault(_identity(span.entry), []).append(span)
    return [
        FoundVersion(
            path,
            same[-1].entry.kind,
            same[-1].entry.cap,
            restored(same[-1].entry.metadata).mtime_ns,
            runs[same[0].start],
            runs[same[-1].end - 1],
            sum(span.end - span.start for span in same),
        )
        for same in grouped.values()
    ]


def _identity(entry: Entry) -> Any:
    if isinstance(entry.cap, DirectoryCap):
        return "directory"
    return entry.cap, restored(entry.metadata).mtime_ns
