"""
One run of a backup: what has changed is read and stored, the list of runs gets a line, its cap is kept.

The order is what makes it safe to be killed at any moment: a file is recorded when it is stored, a run is
listed when all of it is, and the new cap of the list is kept when the list is on the grid. So what was
written down is always true; what was not is done again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import attrs

from pipegrid.core.caps import DirectoryCap
from pipegrid.grid.grid import Grid
from pipegrid.tree.backup.catalogue import (
    CatalogueStore,
    ImmutableCatalogues,
    Run,
    check_name,
    shown_time,
)
from pipegrid.tree.backup.database import Database
from pipegrid.tree.backup.place import BackupPlace
from pipegrid.tree.backup.retention import Retention, kept
from pipegrid.tree.localwalk import LocalWalk, own_directories
from pipegrid.tree.selection import Selection
from pipegrid.tree.store import GridStore, NoStore, Store
from pipegrid.tree.upload import TreeCounts, TreeReports, TreeResult, TreeUpload


@attrs.frozen
class BackupOptions:
    """
    What is stored, and what becomes of older runs.

    Attributes:
        selection: made anew for each run, since it notes what it has met.
    """

    selection: Callable[[], Selection] = Selection
    one_file_system: bool = False
    retention: Retention = attrs.field(factory=Retention)


@attrs.frozen
class BackupResult:
    """
    A finished run.

    Attributes:
        run: as it is listed.
        catalogue: the cap that brings back all runs that are listed.
        counts: what was met, sent, checked and left out.
        forgotten: runs that are not listed any more.
        elapsed_s: in all.
    """

    run: Run
    catalogue: DirectoryCap
    counts: TreeCounts
    forgotten: tuple[Run, ...]
    elapsed_s: float


@attrs.frozen
class WouldSend:
    """
    What a run would do now.

    Attributes:
        objects, bytes: files and directories that would be sent, before they are encoded; of directories
            above changed files about so many bytes.
        share_bytes: about what servers would take.
        checks: objects that would be looked for on the grid.
        counts: what was met and left out.
    """

    objects: int
    bytes: int
    share_bytes: int
    checks: int
    counts: TreeCounts


class Backups:
    """
    One client's backups on one grid.

    Args:
        say: told, in a sentence, what the user should know.
        now: seconds since 1970.
        catalogues: where the list of runs is kept.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        say: Callable[[str], None] = lambda sentence: None,
        now: Callable[[], float] = time.time,
        catalogues: CatalogueStore | None = None,
    ) -> None:
        self._grid = grid
        self._say = say
        self._now = now
        self.place = BackupPlace(grid.config)
        self.catalogues: CatalogueStore = catalogues or ImmutableCatalogues(grid)

    async def run(
        self,
        directory: str,
        name: str,
        options: BackupOptions | None = None,
        reports: TreeReports | None = None,
    ) -> BackupResult:
        """
        Store a directory as it is now.

        Raises:
            UsageError: another run is under way, or the name cannot be one.
            SourceError: the directory cannot be read.
            GridError: the grid takes nothing, or not the list of runs.
        """
        options = options or BackupOptions()
        check_name(name)
        began_s = self._grid.clock.seconds()
        self.place.lock()
        try:
            listed = await self.place.listed(self.catalogues, self._say)
            database = self._database(directory)
            try:
                store = GridStore(self._grid)
                result = await self._store(directory, options, store, database, reports)
                counts = result.counts
                run = Run(
                    name,
                    shown_time(self._now()),
                    result.cap,
                    result.metadata,
                    counts.files,
                    counts.bytes,
                    counts.left_out,
                )
                others = [
                    each for each in listed.runs if (each.name, each.time) != (name, run.time)
                ]
                all_runs = [*others, run]
                runs = kept(all_runs, options.retention)
                cap = await self.catalogues.save(runs, listed.cap)
                self.place.note(runs, cap)
                database.finish()
            finally:
                database.close()
        finally:
            self.place.unlock()
        forgotten = tuple(each for each in all_runs if each not in set(runs))
        elapsed_s = self._grid.clock.seconds() - began_s
        return BackupResult(run, cap, counts, forgotten, elapsed_s)

    async def would_send(
        self,
        directory: str,
        options: BackupOptions | None = None,
        reports: TreeReports | None = None,
    ) -> WouldSend:
        """
        Find out what a run would send; no file is opened, and nothing is stored or recorded.

        Raises: as ``run`` does.
        """
        options = options or BackupOptions()
        self.place.lock()
        try:
            database = self._database(directory, read_only=True)
            try:
                params = self._grid.config.params
                store = NoStore(params)
                result = await self._store(directory, options, store, database, reports, read=False)
            finally:
                database.close()
        finally:
            self.place.unlock()
        share_bytes = store.bytes * params.total_shares // params.required_shares
        return WouldSend(store.objects, store.bytes, share_bytes, store.checks, result.counts)

    async def runs(self) -> tuple[Run, ...]:
        """
        Return all runs that are listed, oldest first.

        Raises:
            PipegridError: the list is on the grid, and cannot be read.
        """
        return (await self.place.listed(self.catalogues, self._say)).runs

    def _database(self, directory: str, read_only: bool = False) -> Database:
        config = self._grid.config
        params = config.params
        numbers = (params.required_shares, params.total_shares, params.max_segment_bytes)
        context = repr(numbers).encode() + config.convergence
        root = os.path.realpath(directory)
        return Database(
            self.place.database, context, root, now=self._now, say=self._say, read_only=read_only
        )

    async def _store(
        self,
        directory: str,
        options: BackupOptions,
        store: Store,
        database: Database,
        reports: TreeReports | None,
        read: bool = True,
    ) -> TreeResult:
        local = self._grid.config.local
        own = [self.place.directory] if local is None else [self.place.directory, local.directory]
        walk = LocalWalk(
            directory,
            without=own_directories(*own),
            selection=options.selection(),
            one_file_system=options.one_file_system,
            know=database.file,
            read=read,
            now_ns=lambda: int(self._now() * 1e9),
        )
        seconds = self._grid.clock.seconds
        upload = TreeUpload(
            self._grid.workers,
            seconds,
            walk,
            store,
            directory,
            reports,
            database,
            self._grid.limits,
        )
        return await upload.run()
