"""
The catalogue: the list of runs in a mutable directory on the grid, whose cap stays the same.

A run publishes the list once. This takes one round trip if the client remembers the current content. If
another machine has changed the list meanwhile, the edits are applied to the new content.
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
    What a run changes in the catalogue, independent of the present content.

    Attributes:
        added: runs to list; the last one is the current run, which is always listed.
        retention: the rules for which runs are kept.
        forgetting: called with the runs that will be removed, before each attempt to write.
        removed: names of entries to remove, even if a rule keeps them.
    """

    added: tuple[BackupRun, ...] = ()
    retention: Retention = Retention()
    forgetting: Callable[[Sequence[BackupRun]], None] = lambda _: None
    removed: frozenset[str] = frozenset()

    def done(self, listed: Sequence[BackupRun]) -> ChangedCatalogue:
        """
        Return the result of the change to a catalogue with these runs; its content is empty, and its version
        is 0.
        """
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
        """
        Return the added runs; a run gets the next free second if a run of another machine has its name and
        second.
        """
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
        """Return the edits that apply the change to a directory with these runs."""
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
        content: the bytes of the catalogue.
        version: the sequence number of the version with this content.
        runs: the listed runs, oldest first.
        forgotten: runs that were removed from the list.
        run: the last added run, as it is listed; None: no run was added.
    """

    content: bytes
    version: int
    runs: tuple[BackupRun, ...]
    forgotten: tuple[BackupRun, ...]
    run: BackupRun | None = None

    def __repr__(self) -> str:
        """Return a text for logs, without the content, since that has caps."""
        return f"ChangedCatalogue(..., version={self.version})"


class GridCatalogues:
    """
    Keeps catalogues as directories on a grid. Writes are retried if servers were unreachable.

    Args:
        now: returns the seconds since 1970.
    """

    def __init__(self, grid: Grid, now: Callable[[], float]) -> None:
        self._grid = grid
        self._now = now

    async def create(self) -> DirectoryCap:
        """
        Create an empty catalogue; return its write cap.

        Raises:
            PipegridError: the catalogue could not be stored.
        """
        return (await with_retries(self._grid.clock, lambda: create_directory(self._grid))).cap

    async def load(self, cap: DirectoryCap) -> bytes:
        """
        Return the bytes of a catalogue.

        Args:
            cap: a read or write cap, of a mutable or immutable catalogue.

        Raises:
            PipegridError: the catalogue cannot be read.
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
        Change a catalogue, based on the newest version that any machine has written.

        Args:
            remembered: the bytes of the catalogue that this client has seen last; None: unknown.

        Raises:
            RollbackError: servers have an older version than this client has seen.
            PipegridError: the catalogue could not be changed.
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
        """Change the remembered content of a catalogue, and overwrite the content on servers."""
        listed = runs_of(cap, remembered)
        done = change.done(listed)
        change.forgetting(done.forgotten)
        content = Directory(self._grid, cap, self._now).applied(remembered, change.edits(listed))
        written = await with_retries(self._grid.clock, lambda: self._grid.overwrite(cap, content))
        return done._replace(content=content, version=written.version.sequence_number)
