"""
One run of a backup: what has changed is read and stored, and the list of runs gets a line.

The order is what makes it safe to be killed at any moment: a file is recorded when it is stored, a run is
noted when all of it is, and listed then. So what was written down is always true; what was not is done again,
and a run that was noted but could not be listed is listed by the next one.

What the catalogue needs beforehand, and the directories under an alias, is seen to while the tree is stored.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import Deferred, DeferredList

from pipegrid.core.caps import DirectoryCap, MutableCap
from pipegrid.core.text import printable
from pipegrid.errors import NotEnoughSharesError, PipegridError
from pipegrid.grid.grid import Grid
from pipegrid.reactor.together import together
from pipegrid.tree.backup.archives import Archives
from pipegrid.tree.backup.catalogue import (
    BackupRun,
    Machine,
    entry_name,
    own_time,
    runs_of,
    said_of_later,
)
from pipegrid.tree.backup.cataloguestore import (
    CatalogueStore,
    GridCatalogues,
)
from pipegrid.tree.backup.naming import check_name, check_owner
from pipegrid.tree.backup.place import BackupPlace, Noted
from pipegrid.tree.backup.retention import Retention
from pipegrid.tree.backup.runlister import ListedRun, RunLister
from pipegrid.tree.backup.storing import Storing
from pipegrid.tree.selection import TreeSelection
from pipegrid.tree.store import GridFiles, NoStore
from pipegrid.tree.uploaded import TreeCounts, TreeReports, TreeResult

T = TypeVar("T")
U = TypeVar("U")


@attrs.frozen
class BackupOptions:
    """
    What is stored, and what becomes of older runs.

    Attributes:
        selection: made anew for each run, since it notes what it has met.
        archives: the cap of a directory that can be changed, and names below it, which need not be there
            yet: where the run is kept as Tahoe-LAFS's ``backup`` keeps it, beside the catalogue.
        name_was_chosen: runs of another directory or machine may have the same name, since somebody has said
            so.
    """

    selection: Callable[[], TreeSelection] = TreeSelection
    one_file_system: bool = False
    retention: Retention = attrs.field(factory=Retention)
    archives: tuple[str, tuple[str, ...]] | None = None
    name_was_chosen: bool = True


@attrs.frozen
class BackupResult:
    """
    A finished run.

    Attributes:
        run: as it is listed.
        catalogue: the cap that brings back all runs that are listed, and cannot change the list.
        counts: what was met, sent, checked and left out.
        forgotten: runs that are not listed any more.
        elapsed_s: in all.
        problems: why the run is stored, and is not listed, or not under its alias; see ``run``.
    """

    run: BackupRun
    catalogue: DirectoryCap
    counts: TreeCounts
    forgotten: tuple[BackupRun, ...]
    elapsed_s: float
    problems: tuple[PipegridError, ...] = ()


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
        machine: this one, if it is another than the system says.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        say: Callable[[str], None] = lambda sentence: None,
        now: Callable[[], float] = time.time,
        catalogues: CatalogueStore | None = None,
        machine: Machine | None = None,
    ) -> None:
        self._grid = grid
        self._say = say
        self._now = now
        self._machine = machine
        self.place = BackupPlace(grid.config)
        self.catalogues: CatalogueStore = catalogues or GridCatalogues(grid, now)
        self._lister = RunLister(self.place, self.catalogues, say)

    async def run(
        self,
        directory: str,
        name: str,
        options: BackupOptions | None = None,
        reports: TreeReports | None = None,
    ) -> BackupResult:
        """
        Store a directory as it is now, and list it.

        If it is stored but cannot be listed, that is no error here: ``problems`` of the result tells why, and
        the next run lists it.

        Raises:
            UsageError: another run is under way, the name cannot be one, or is another directory's or
                machine's, or a directory under which it is to be kept cannot be changed.
            SourceError: the directory cannot be read.
            GridError: the grid takes nothing, or the list of runs cannot be made.
        """
        options = options or BackupOptions()
        began_s = self._grid.clock.seconds()
        self.place.lock()
        try:
            noted = self.place.noted(self._say)
            root, machine = os.path.realpath(directory), self._machine or self.place.machine()
            name = await self._checked_name(name, noted, root, machine, options)
            storing = self._storing(directory, reports)
            try:
                noted, counts, listed = await self._store(noted, name, machine, storing, options)
                storing.database.finish()
            finally:
                storing.database.close()
        finally:
            self.place.unlock()
        assert noted.cap is not None
        elapsed_s = self._grid.clock.seconds() - began_s
        return BackupResult(
            listed.run,
            noted.cap.readonly(),
            counts,
            listed.forgotten,
            elapsed_s,
            listed.problems,
        )

    async def _checked_name(
        self, name: str, noted: Noted, root: str, machine: Machine, options: BackupOptions
    ) -> str:
        """Return the name as it is listed, if it can be one, and this directory's."""
        name = check_name(name, noted.runs)
        if not options.name_was_chosen:
            check_owner(await self._listed(noted), name, root, machine)
        return name

    async def _store(
        self, noted: Noted, name: str, machine: Machine, storing: Storing, options: BackupOptions
    ) -> tuple[Noted, TreeCounts, ListedRun]:
        """Store a directory, and list it; returns what was remembered of the catalogue then, too."""
        # What was stored before is on the grid that has the list which is remembered here.
        believed = noted.content is not None
        if not believed:
            storing.database.doubt()
        (noted, archives), result = await _both(
            Deferred.fromCoroutine(self._prepare(noted, options)),
            Deferred.fromCoroutine(storing.store(options, GridFiles(self._grid))),
        )
        when = own_time(name, self._now(), noted.runs)
        run = _filled(BackupRun(name, when, result.cap, machine=machine), storing.root, result)
        later = said_of_later(run, noted.runs)
        if later:
            self._say(later)
        listed = await self._lister.list(noted, archives, run, options.retention)
        if listed.is_nowhere and believed:
            run, result = await self._store_again(noted, listed.run, storing, options)
            listed = attrs.evolve(listed, run=run)
        if listed.is_nowhere:
            _, *others = listed.problems
            listed = attrs.evolve(listed, problems=(self._without_list(), *others))
        return noted, result.counts, listed

    async def _store_again(
        self, noted: Noted, run: BackupRun, storing: Storing, options: BackupOptions
    ) -> tuple[BackupRun, TreeResult]:
        """
        Store a directory on a grid that has lost the list, and with it perhaps all else: nothing is believed.

        It may be another grid than before, by mistake; so the list is not made anew.
        """
        self._say(
            "no server has the list of backups, as if this were another grid than before: all that was "
            "stored is looked for, and stored again if it is missing"
        )
        self.place.note(noted)  # without a run that may be nowhere
        storing.database.doubt()
        result = await storing.store(options, GridFiles(self._grid))
        run = _filled(run, storing.root, result)
        others = [each for each in noted.unlisted if entry_name(each) != entry_name(run)]
        self.place.note(attrs.evolve(noted, unlisted=(*others, run)))
        return run, result

    def _without_list(self) -> NotEnoughSharesError:
        """Return the error of a grid on which nothing is left of the list, with the way on."""
        return NotEnoughSharesError(
            "no server has the list of backups: if this is another grid than before, use that one again; "
            f"if this one has lost it, move {self.place.directory} away, and the next run begins a new list",
            0,
            1,
        )

    async def _prepare(self, noted: Noted, options: BackupOptions) -> tuple[Noted, Archives | None]:
        """Return a catalogue that can be changed, and what is under the alias, if there is to be one."""
        archives = None
        if options.archives is not None:
            archives = Archives(self._grid, *options.archives, now=self._now)
        making: list[Deferred[Any]] = [Deferred.fromCoroutine(self._catalogue(noted))]
        if archives is not None:
            making.append(Deferred.fromCoroutine(archives.prepare()))
        prepared, *_ = await together(making)
        return prepared, archives

    async def _catalogue(self, noted: Noted) -> Noted:
        """Return what is remembered of a catalogue that can be changed; it is made if there is none."""
        if noted.cap is not None and _is_writable(noted.cap):
            return noted
        runs = noted.runs
        if noted.cap is not None and noted.content is None:
            # A list without the runs of the one before would be a lie.
            before = runs_of(noted.cap, await self.catalogues.load(noted.cap))
            names = {entry_name(run) for run in runs}
            runs = (*(run for run in before if entry_name(run) not in names), *runs)
        made = Noted(await self.catalogues.create(), b"", runs)
        self.place.note(made)
        return made

    async def _listed(self, noted: Noted) -> tuple[BackupRun, ...]:
        """Return the runs beside which the next one will be listed."""
        if noted.cap is None or noted.content is not None:
            return noted.runs
        # Somebody has put the cap of another catalogue here: what is in that is what counts.
        return tuple(runs_of(noted.cap, await self.catalogues.load(noted.cap)))

    async def would_send(
        self,
        directory: str,
        options: BackupOptions | None = None,
        reports: TreeReports | None = None,
        name: str | None = None,
    ) -> WouldSend:
        """
        Find out what a run would send; no file is opened, and nothing is stored or recorded.

        Args:
            name: what it would be called, which must be possible, and its own; None: that does not matter.

        Raises: as ``run`` does.
        """
        options = options or BackupOptions()
        self.place.lock()
        try:
            if name is not None:
                root, noted = os.path.realpath(directory), self.place.noted(self._say)
                machine = self._machine or self.place.machine(keep=False)
                await self._checked_name(name, noted, root, machine, options)
            storing = self._storing(directory, reports, read_only=True)
            try:
                store = NoStore(self._grid.config.params)
                result = await storing.store(options, store)
            finally:
                storing.database.close()
        finally:
            self.place.unlock()
        params = self._grid.config.params
        share_bytes = store.bytes * params.total_shares // params.required_shares
        return WouldSend(store.objects, store.bytes, share_bytes, store.checks, result.counts)

    async def runs(self) -> tuple[BackupRun, ...]:
        """
        Return all runs that are listed, oldest first; if the grid cannot tell, those that are remembered.

        Raises:
            PipegridError: the list is on the grid, cannot be read, and is not remembered.
        """
        noted = self.place.noted(self._say)
        if noted.cap is None:
            return noted.runs
        try:
            content = await self.catalogues.load(noted.cap)
        except PipegridError as error:
            if noted.content is None:
                raise
            self._say(f"this is the list as it was here last, since it cannot be fetched: {error}")
            return noted.runs
        return attrs.evolve(noted, content=content).runs

    def _storing(
        self, directory: str, reports: TreeReports | None, read_only: bool = False
    ) -> Storing:
        return Storing(
            self._grid,
            self.place,
            directory,
            say=self._say,
            now=self._now,
            reports=reports,
            read_only=read_only,
        )


def _filled(run: BackupRun, root: str, result: TreeResult) -> BackupRun:
    """Return a run of what was stored."""
    counts = result.counts
    return attrs.evolve(
        run,
        cap=result.cap,
        metadata=result.metadata,
        files=counts.files,
        bytes=counts.bytes,
        left_out=counts.left_out,
        directory=printable(root),
    )


async def _both(first: Deferred[T], second: Deferred[U]) -> tuple[T, U]:
    """Return both results; if one fails the other is cancelled, and has ended when this has."""
    running: list[Deferred[Any]] = [first, second]
    try:
        one, other = await together(running)
    except BaseException:
        await DeferredList(running, consumeErrors=True)
        raise
    return one, other


def _is_writable(cap: DirectoryCap) -> bool:
    return isinstance(cap.file, MutableCap) and cap.file.access == "write"
