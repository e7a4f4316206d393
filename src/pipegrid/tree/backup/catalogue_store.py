"""
The list of runs in a mutable directory of the grid, whose cap stays the same.

A run publishes it once, which takes one round trip if the client remembers the current content; if another
machine has changed the list meanwhile, the edits are applied to the new content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import attrs

from pipegrid.core.caps import ChkCap, DirectoryCap, LitCap, MutableCap
from pipegrid.core.mutable.directory_content_edits import Edit, Unlink
from pipegrid.errors import CapError, DirectoryError
from pipegrid.grid.file_grid import Grid
from pipegrid.tree.backup.catalogue import (
    MAX_BYTES,
    BackupRun,
    entry_name,
    entry_of,
    runs_of,
    shown_time,
)
from pipegrid.tree.backup.retention import Retention, reasons
from pipegrid.tree.directory import Directory, create_directory
from pipegrid.tree.retry_queue import with_retries


class CatalogueChange(NamedTuple):
    """
    What a run changes in the catalogue, whatever its content.

    Attributes:
        added: runs to list; the last one is the current run, which is always listed.
        retention: which runs are kept.
        forgetting: called with the runs that will be removed, before each attempt to write.
        removed: names of entries to remove, whatever the rules.
    """

    added: tuple[BackupRun, ...] = ()
    retention: Retention = Retention()
    forgetting: Callable[[Sequence[BackupRun]], None] = lambda _: None
    removed: frozenset[str] = frozenset()

    def done(self, listed: Sequence[BackupRun]) -> ChangedCatalogue:
        """Return the result of the change, still without content and version."""
        added = self.placed(listed)
        every = {entry_name(run): run for run in (*listed, *added)}
        runs = sorted(every.values(), key=lambda run: (run.time, run.name))
        last = added[-1] if added else None
        why = reasons(
            [run for run in runs if entry_name(run) not in self.removed],
            self.retention,
            None if last is None else last.time,
            None if last is None else last.machine,
        )
        stay = tuple(run for run in runs if why.get(run))
        forgotten = tuple(run for run in runs if not why.get(run))
        return ChangedCatalogue(b"", 0, stay, forgotten, last)

    def placed(self, listed: Sequence[BackupRun]) -> tuple[BackupRun, ...]:
        """Return the added runs; one whose name and second another machine's run has gets the next second."""
        there = {entry_name(run): run.machine for run in listed}
        added = {entry_name(run): run for run in self.added}
        placed = []
        for run in self.added:
            free = run
            while there.get(entry_name(free), run.machine) != run.machine or (
                added.get(entry_name(free), run) != run
            ):
                free = attrs.evolve(free, time=shown_time(free.at.timestamp() + 1))
            placed.append(free)
        return tuple(placed)

    def edits(self, listed: Sequence[BackupRun]) -> list[Edit]:
        """Return the edits for a directory with these runs."""
        done = self.done(listed)
        staying = set(map(entry_name, done.runs))
        there = set(map(entry_name, listed))
        added = self.placed(listed)
        edits: list[Edit] = [entry_of(run) for run in added if entry_name(run) in staying]
        gone = [entry_name(run) for run in done.forgotten if entry_name(run) in there]
        return edits + [Unlink(name, must_exist=False) for name in gone]


class ChangedCatalogue(NamedTuple):
    """
    A catalogue after a change.

    Attributes:
        content: its bytes.
        version: the sequence number of the version with this content.
        runs: that are listed, oldest first.
        forgotten: runs that are not listed any more.
        run: the last one that was added, as it is listed; None: none was.
    """

    content: bytes
    version: int
    runs: tuple[BackupRun, ...]
    forgotten: tuple[BackupRun, ...]
    run: BackupRun | None = None

    def __repr__(self) -> str:
        """Without the content, which has caps: logs contain it."""
        return f"ChangedCatalogue(..., version={self.version})"


class GridCatalogues:
    """
    Keeps catalogues as directories on a grid. A write is retried if servers were unreachable.

    Args:
        now: seconds since 1970.
    """

    def __init__(self, grid: Grid, now: Callable[[], float]) -> None:
        self._grid = grid
        self._now = now

    async def create(self) -> DirectoryCap:
        """
        Create an empty catalogue; return its write cap.

        Raises:
            PipegridError: it could not be stored.
        """
        return (await with_retries(self._grid.clock, lambda: create_directory(self._grid))).cap

    async def load(self, cap: DirectoryCap) -> bytes:
        """
        Return the bytes of a catalogue, of any kind that reads.

        Raises:
            PipegridError: it cannot be read.
        """
        file = cap.file
        is_mutable = isinstance(file, MutableCap) and file.access != "verify"
        if not (is_mutable or isinstance(file, (ChkCap, LitCap))):
            raise CapError("this is not the cap that 'pipegrid backup' printed; use that one")
        if not isinstance(file, ChkCap) or file.size <= MAX_BYTES:
            data = await self._grid.read(file, 0, None if not is_mutable else MAX_BYTES + 1)
            if len(data) <= MAX_BYTES:
                return data
        raise DirectoryError("this is not a catalogue of backups: it is too large for one")

    async def change(
        self, cap: DirectoryCap, change: CatalogueChange, remembered: bytes | None = None
    ) -> ChangedCatalogue:
        """
        Change a catalogue, whatever other machines have written.

        Args:
            remembered: its bytes as far as this client knows.

        Raises:
            RollbackError: servers have an older version than this client has seen.
            PipegridError: it could not be changed.
        """
        directory = Directory(self._grid, cap, self._now)
        done: ChangedCatalogue | None = None

        def edits(content: bytes) -> list[Edit]:
            nonlocal done
            listed = runs_of(cap, content)
            done = change.done(listed)
            change.forgetting(done.forgotten)
            return change.edits(listed)

        content, written = await with_retries(
            self._grid.clock, lambda: directory.change_by(edits, remembered)
        )
        assert done is not None
        return done._replace(content=content, version=written.version.sequence_number)

    async def rewrite(
        self, cap: DirectoryCap, change: CatalogueChange, remembered: bytes
    ) -> ChangedCatalogue:
        """Change the remembered content of a catalogue, and write it over whatever the servers have."""
        listed = runs_of(cap, remembered)
        done = change.done(listed)
        change.forgetting(done.forgotten)
        content = Directory(self._grid, cap, self._now).applied(remembered, change.edits(listed))
        written = await with_retries(self._grid.clock, lambda: self._grid.overwrite(cap, content))
        return done._replace(content=content, version=written.version.sequence_number)
