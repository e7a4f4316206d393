"""
The space that backups and aliases occupy on servers, computed from file sizes and encoding parameters.

Each directory is read once, even if many runs contain it. The graph of directories and files is in a
temporary database.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing

import attrs
from twisted.internet.defer import Deferred

from pipegrid.core.caps import Cap, DirectoryCap, MutableCap, UnknownCap, parse_cap
from pipegrid.errors import PipegridError
from pipegrid.reactor.deferreds import gather
from pipegrid.tree.backup.catalogue import BackupRun
from pipegrid.tree.backup.reachability import READS_AT_ONCE, share_bytes_of
from pipegrid.tree.directory_reading import Listing, kind_of, read_listing
from pipegrid.tree.prune_roots import Root
from pipegrid.tree.tree_grid import Grid

_SCHEMA = """
PRAGMA temp_store = FILE;
CREATE TABLE objects (
    number INTEGER PRIMARY KEY, cap TEXT UNIQUE, bytes INTEGER NOT NULL, is_read INTEGER NOT NULL,
    run INTEGER, shared INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX unread ON objects (number) WHERE is_read = 0;
CREATE TABLE children (parent INTEGER, child INTEGER, PRIMARY KEY (parent, child)) WITHOUT ROWID;
"""


@attrs.frozen
class OccupiedSpace:
    """
    Occupied bytes, the total of all servers.

    Attributes:
        backups: for each backup's name, the bytes of everything that its runs contain.
        runs: for each run, in the given order, the bytes that no other run contains.
        kept: for each name of another root, the bytes of everything below it.
        unreadable: names of roots below which a directory could not be read; their numbers are too low.
    """

    backups: dict[str, int]
    runs: tuple[int, ...]
    kept: dict[str, int]
    unreadable: tuple[str, ...]


async def occupied_space(
    grid: Grid, runs: Sequence[BackupRun], kept: Sequence[Root]
) -> OccupiedSpace:
    """Compute the space that runs and other roots occupy."""
    with closing(_Graph(grid)) as graph:
        roots = [graph.node(run.cap) for run in runs]
        others = [graph.node(root.cap) for root in kept]
        await graph.read_all()
        labels = [*(f"{run.name} {run.time}" for run in runs), *(root.name for root in kept)]
        unreadable = [
            label
            for label, root in zip(labels, [*roots, *others], strict=True)
            if graph.failed and graph.reaches_failed(root)
        ]
        return OccupiedSpace(
            graph.totals([run.name for run in runs], roots),
            tuple(graph.unique(roots)),
            graph.totals([root.name for root in kept], others),
            tuple(unreadable),
        )


class _Graph:
    """
    The graph of directories and files, identified by their read caps, and of what each directory contains.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._params = grid.config.params
        self.failed: set[int] = set()
        self._base = sqlite3.connect("", isolation_level=None)
        self._base.executescript(_SCHEMA)
        self._base.execute("BEGIN")

    def close(self) -> None:
        """Remove the temporary database of the graph."""
        self._base.close()

    def node(self, cap: Cap) -> int:
        """Return the number of an object in the graph; a new object is added."""
        read = cap if isinstance(cap, UnknownCap) else cap.readonly()
        is_read = not isinstance(read, DirectoryCap) or kind_of(read) != "directory"
        self._base.execute(
            "INSERT OR IGNORE INTO objects (cap, bytes, is_read) VALUES (?, ?, ?)",
            (str(read), 0 if isinstance(read, UnknownCap) else share_bytes_of(read), is_read),
        )
        row = self._base.execute("SELECT number FROM objects WHERE cap = ?", (str(read),))
        number: int = row.fetchone()[0]
        return number

    async def read_all(self) -> None:
        """Read every directory once, several at a time."""
        ask = "SELECT number, cap FROM objects WHERE is_read = 0 LIMIT ?"
        while rows := self._base.execute(ask, (READS_AT_ONCE,)).fetchall():
            reads = [Deferred.fromCoroutine(self._listing(*row)) for row in rows]
            for (number, _), listing in zip(rows, await gather(reads), strict=True):
                self._base.execute("UPDATE objects SET is_read = 1 WHERE number = ?", (number,))
                for entry in listing.entries:
                    if entry.cap is not None:
                        self._base.execute(
                            "INSERT OR IGNORE INTO children VALUES (?, ?)",
                            (number, self.node(entry.cap)),
                        )

    async def _listing(self, number: int, text: str) -> Listing:
        cap = parse_cap(text)
        assert isinstance(cap, DirectoryCap)
        try:
            listing = await read_listing(self._grid, cap)
        except PipegridError:
            self.failed.add(number)
            return Listing((), 0)
        if isinstance(cap.file, MutableCap):
            k, n = self._params.required_shares, self._params.total_shares
            size = listing.size * n // k
            self._base.execute("UPDATE objects SET bytes = ? WHERE number = ?", (size, number))
        return listing

    def unique(self, roots: Sequence[int]) -> list[int]:
        """Return for the root of each run how many bytes no other run reaches."""
        for run, root in enumerate(roots):  # visits the children of each object at most twice
            waiting = [root]
            while waiting:
                number = waiting.pop()
                first, shared = self._base.execute(
                    "SELECT run, shared FROM objects WHERE number = ?", (number,)
                ).fetchone()
                if first == run or shared:
                    continue
                change = "shared = 1" if first is not None else f"run = {run:d}"
                self._base.execute(f"UPDATE objects SET {change} WHERE number = ?", (number,))
                rows = self._base.execute("SELECT child FROM children WHERE parent = ?", (number,))
                waiting += [child for (child,) in rows]
        sums = dict(
            self._base.execute(
                "SELECT run, sum(bytes) FROM objects WHERE shared = 0 AND run IS NOT NULL GROUP BY run"
            )
        )
        return [sums.get(run, 0) for run in range(len(roots))]

    def totals(self, names: Sequence[str], roots: Sequence[int]) -> dict[str, int]:
        """Return how many bytes the roots of each name reach together."""
        named: dict[str, list[int]] = {}
        for name, root in zip(names, roots, strict=True):
            named.setdefault(name, []).append(root)
        total = "SELECT coalesce(sum(bytes), 0) FROM objects JOIN below USING (number)"
        return {
            name: self._base.execute(f"{_below(some)} {total}").fetchone()[0]
            for name, some in named.items()
        }

    def reaches_failed(self, root: int) -> bool:
        """Return whether something below a root could not be read."""
        rows = self._base.execute(f"{_below([root])} SELECT number FROM below")
        return any(number in self.failed for (number,) in rows)


def _below(roots: Iterable[int]) -> str:
    """
    Return the start of a query, which defines ``below``: the numbers of all objects that the roots reach.
    """
    values = ", ".join(f"({root:d})" for root in roots) or "(-1)"
    return (
        f"WITH RECURSIVE below (number) AS (VALUES {values} UNION "
        "SELECT child FROM children JOIN below ON parent = number)"
    )
