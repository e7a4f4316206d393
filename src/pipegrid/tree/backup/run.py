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
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import attrs
from twisted.internet.defer import Deferred, DeferredList

from pipegrid.core.caps import DirectoryCap, MutableCap
from pipegrid.core.text import printable
from pipegrid.errors import PipegridError, RollbackError
from pipegrid.grid.grid import Grid
from pipegrid.reactor.together import together
from pipegrid.tree.backup.archives import Archives
from pipegrid.tree.backup.catalogue import BackupRun, Machine, entry_name, runs_of
from pipegrid.tree.backup.cataloguestore import (
    CatalogueChange,
    CatalogueStore,
    Changed,
    GridCatalogues,
)
from pipegrid.tree.backup.database import Database
from pipegrid.tree.backup.naming import check_name, check_owner, free_time
from pipegrid.tree.backup.place import BackupPlace, Noted
from pipegrid.tree.backup.retention import Retention
from pipegrid.tree.localwalk import LocalWalk, own_directories
from pipegrid.tree.selection import TreeSelection
from pipegrid.tree.store import GridFiles, NoStore, StoresFiles
from pipegrid.tree.upload import TreeUpload
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
            database = self._database(root)
            try:
                store = GridFiles(self._grid)
                (noted, archives), result = await _both(
                    Deferred.fromCoroutine(self._prepare(noted, options)),
                    Deferred.fromCoroutine(
                        self._store(directory, options, store, database, reports)
                    ),
                )
                database.finish()
            finally:
                database.close()
            counts = result.counts
            run = BackupRun(
                name,
                free_time(name, self._now(), noted.runs),
                result.cap,
                result.metadata,
                counts.files,
                counts.bytes,
                counts.left_out,
                printable(root),
                machine,
            )
            self._tell_of_later(run, noted.runs)
            run, forgotten, problems = await self._list(noted, archives, run, options.retention)
        finally:
            self.place.unlock()
        elapsed_s = self._grid.clock.seconds() - began_s
        assert noted.cap is not None
        return BackupResult(run, noted.cap.readonly(), counts, forgotten, elapsed_s, problems)

    async def _checked_name(
        self, name: str, noted: Noted, root: str, machine: Machine, options: BackupOptions
    ) -> str:
        """Return the name as it is listed, if it can be one, and this directory's."""
        name = check_name(name, noted.runs)
        if not options.name_was_chosen:
            check_owner(await self._listed(noted), name, root, machine)
        return name

    def _tell_of_later(self, run: BackupRun, listed: Iterable[BackupRun]) -> None:
        """Say so if what is listed claims to be newer than what was stored just now."""
        later = max((each.time for each in listed if each.name == run.name), default="")
        if later > run.time:
            self._say(
                f"a run of {run.name!r} that is listed claims to be of {later}, later than this one, of "
                f"{run.time}: some clock is or was wrong; 'restore' takes that one for the newest unless "
                "--at says when"
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

    async def _list(
        self, noted: Noted, archives: Archives | None, run: BackupRun, retention: Retention
    ) -> tuple[BackupRun, tuple[BackupRun, ...], tuple[PipegridError, ...]]:
        """List a run that is stored; returns it as listed, which are forgotten, and what went wrong."""
        others = [each for each in noted.unlisted if entry_name(each) != entry_name(run)]
        noted = attrs.evolve(noted, unlisted=(*others, run))
        self.place.note(noted)
        problems: list[PipegridError] = []

        async def trying(work: Coroutine[Any, Any, T]) -> T | None:
            try:
                return await work
            except PipegridError as error:
                problems.append(error)
                return None

        change = CatalogueChange(noted.unlisted, retention)
        forgotten: tuple[BackupRun, ...] = ()
        if noted.content is not None:
            assert noted.cap is not None
            forgotten = tuple(change.apply(runs_of(noted.cap, noted.content))[1])
        steps: list[Deferred[Any]] = [Deferred.fromCoroutine(trying(self._change(noted, change)))]
        if archives is not None:
            keeping = archives.keep(run, forgotten)
            steps.append(Deferred.fromCoroutine(trying(keeping)))
        changed: Changed | None = (await together(steps))[0]
        if changed is None:
            return run, (), tuple(problems)
        self.place.note(Noted(noted.cap, changed.content, (), changed.version))
        return changed.run or run, changed.forgotten, tuple(problems)

    async def _listed(self, noted: Noted) -> tuple[BackupRun, ...]:
        """Return the runs beside which the next one will be listed."""
        if noted.cap is None or noted.content is not None:
            return noted.runs
        # Somebody has put the cap of another catalogue here: what is in that is what counts.
        return tuple(runs_of(noted.cap, await self.catalogues.load(noted.cap)))

    async def _change(self, noted: Noted, change: CatalogueChange) -> Changed:
        assert noted.cap is not None
        try:
            return await self.catalogues.change(noted.cap, change, noted.content)
        except RollbackError as error:
            if noted.content is None or noted.version < error.seen:
                raise  # what was seen last may be another machine's, and come back
            self._say(
                "servers show an older list of backups than this client has seen, so it is written anew from "
                "what this client remembers"
            )
            return await self.catalogues.write_anew(noted.cap, change, noted.content)

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

    def _database(self, directory: str, read_only: bool = False) -> Database:
        config = self._grid.config
        params = config.params
        numbers = (params.required_shares, params.total_shares, params.max_segment_bytes)
        context = repr(numbers).encode() + config.convergence
        root = os.path.realpath(directory)
        database = self.place.database
        return Database(database, context, root, now=self._now, say=self._say, read_only=read_only)

    async def _store(
        self,
        directory: str,
        options: BackupOptions,
        store: StoresFiles,
        database: Database,
        reports: TreeReports | None,
        read: bool = True,
    ) -> TreeResult:
        local = self._grid.config.local
        own = [*self.place.own, *([] if local is None else [local.directory])]
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
