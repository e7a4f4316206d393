"""One backup run: the walk, what is stored, and the entry in the catalogue."""

from __future__ import annotations

import os
import time
import unicodedata
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import attrs
from twisted.internet.defer import Deferred, DeferredList

from pipegrid.core.caps import DirectoryCap, writes
from pipegrid.core.text import composed, counted, printable
from pipegrid.errors import NotEnoughSharesError, PipegridError, RollbackError, UsageError
from pipegrid.grid.file_grid import Grid
from pipegrid.reactor.deferreds import gather
from pipegrid.tree.backup.backup_database import BackupDatabase
from pipegrid.tree.backup.backup_sources import BackupDirectories, still_exists
from pipegrid.tree.backup.backup_state_directory import BackupPlace, CatalogueState
from pipegrid.tree.backup.catalogue import (
    Archives,
    BackupRun,
    Machine,
    entry_name,
    own_time,
    runs_of,
    warning_of_later_runs,
    warning_of_no_files,
)
from pipegrid.tree.backup.catalogue_store import (
    CatalogueChange,
    ChangedCatalogue,
    GridCatalogues,
)
from pipegrid.tree.backup.prune_records import SentObjects
from pipegrid.tree.backup.retention import Retention
from pipegrid.tree.extended_metadata import HardLinks
from pipegrid.tree.file_metadata import KEY
from pipegrid.tree.file_selection import TreeSelection
from pipegrid.tree.local_walk import WalkOptions, own_directories
from pipegrid.tree.tree_upload import TreeCounts, TreeReports, TreeResult, TreeUpload
from pipegrid.tree.upload_store import DryRunStore, GridFiles, TreeStore

if TYPE_CHECKING:
    from pipegrid.tree.backup.backup_stream import BackupStream

# Listing a stored run, in the catalogue and under an alias.
#
# The run is recorded locally first, so that the next run lists it if this fails.

T = TypeVar("T")
BackupSource: TypeAlias = "BackupDirectories | BackupStream"


class ListedRun(NamedTuple):
    """
    The outcome of listing a run.

    Attributes:
        run: as it is listed.
        forgotten: runs that are not listed any more.
        problems: why it is not listed, or not under its alias; the catalogue's problem is the first.
        is_nowhere: no server that responded has shares of the catalogue.
    """

    run: BackupRun
    forgotten: tuple[BackupRun, ...] = ()
    problems: tuple[PipegridError, ...] = ()
    is_nowhere: bool = False


# Storing a directory with the records of earlier runs, or finding out what a run would store.


class BackupOptions(NamedTuple):
    """
    What is stored, and which older runs are kept.

    Attributes:
        selection: makes a new one for each run of a directory, since a selection records what it has met.
        archives: the cap of a mutable directory, and names below it, which need not exist
            yet: where the run is kept as Tahoe-LAFS's ``backup`` does, in addition to the catalogue.
        name_was_chosen: the user chose the name, so runs of another directory or machine may have it.
        tags: of the run, by which ``Retention.tags`` may keep it.
    """

    selection: Callable[[str], TreeSelection] = lambda directory: TreeSelection()
    one_file_system: bool = False
    retention: Retention = Retention()
    archives: tuple[str, tuple[str, ...]] | None = None
    name_was_chosen: bool = True
    tags: tuple[str, ...] = ()


class RunUpload:
    """
    Stores what one run of one client has.

    Args:
        say: called with sentences for the user.
        now: seconds since 1970.
        reports: called for entries that are met.
        read_only: nothing is recorded, and no file is read.

    Attributes:
        source: what is stored.

    Raises:
        UsageError, SinkError: the database cannot be used.
    """

    def __init__(
        self,
        grid: Grid,
        place: BackupPlace,
        source: BackupSource,
        *,
        say: Callable[[str], None],
        now: Callable[[], float],
        reports: TreeReports | None,
        read_only: bool,
    ) -> None:
        params = grid.config.params
        numbers = (params.required_shares, params.total_shares, params.max_segment_bytes)
        self.source = source
        self._grid = grid
        self._place = place
        self._now = now
        self._reports = reports or TreeReports()
        self._say = say
        self._read_only = read_only
        self.database = BackupDatabase(
            place.database,
            repr(numbers).encode() + grid.config.convergence,
            source.base if isinstance(source, BackupDirectories) else "/",
            now=now,
            say=say,
            read_only=read_only,
            sent=None if read_only else SentObjects(place.candidates.objects_path),
        )

    async def store(self, options: BackupOptions, store: TreeStore) -> TreeResult:
        """
        Store what is not recorded as stored.

        Raises:
            SourceError: it cannot be read.
            GridError: the store accepts nothing.
        """
        if not isinstance(self.source, BackupDirectories):
            return await self.source.store(self._grid, self._reports, self._now, self.database)
        local = self._grid.config.local
        own = [*self._place.own, *([] if local is None else [local.directory])]
        links = HardLinks()
        walk = self.source.walk(
            options.selection,
            self.database.file,
            links.identifier,
            WalkOptions(
                options.one_file_system,
                own_directories(*own),
                read=not self._read_only,
                now_ns=lambda: int(self._now() * 1e9),
            ),
        )
        upload = TreeUpload(
            self._grid, walk, store, self.source.title, self._reports, self.database
        )
        result = await upload.run()
        return result if self._read_only else await self._with_owners(result, links)

    async def _with_owners(self, result: TreeResult, links: HardLinks) -> TreeResult:
        """Return a stored tree whose metadata has the names of owners; report what is not stored."""
        names, more = await self._grid.workers.run(result.owners.stored)
        if more:
            self._say(f"the names of {counted(more, 'owner')} are not stored, only their numbers")
        if links.left_out:
            several = counted(links.left_out, "name")
            self._say(f"{several} of files with several names are stored as files of their own")
        ours = {**result.metadata.get(KEY, {}), **names}
        return attrs.evolve(result, metadata={**result.metadata, KEY: ours})


# Names of backups, and which directory a name belongs to; pure, except that it checks whether a directory
# exists.
#
# Runs of one name are one series: '--keep-...' forgets its older runs, and 'restore' takes the newest. So
# runs of another directory or machine join a series only if the user asks for it.

MAX_NAME_BYTES = 200
"""Of a name, or a tag."""

MAX_TAGS = 20


def check_name(name: str, listed: Iterable[BackupRun] = ()) -> str:
    """
    Return the name of a backup as it is listed: composed (NFC).

    Args:
        listed: runs whose names are accepted, since earlier versions allowed others.

    Raises:
        UsageError: a backup cannot have this name.
    """
    name = composed(name)
    if _is_sensible(name) or (name and any(run.name == name for run in listed)):
        return name
    raise UsageError(
        f"{name!r} cannot be the name of a backup: choose one with --as that has a letter or digit, neither "
        f"'/' nor control characters, no blank at either end, and {MAX_NAME_BYTES} bytes at most, such as "
        "'home'"
    )


def check_tags(tags: Sequence[str]) -> None:
    """
    Check the tags of a run.

    Raises:
        UsageError: a run cannot have these: an entry of the catalogue is bounded.
    """
    for tag in tags:
        fits = len(tag.encode("utf-8", "replace")) <= MAX_NAME_BYTES
        if not (fits and tag.isprintable() and tag.strip()):
            raise UsageError(
                f"{tag[:50]!r} cannot be a tag: choose one with neither control characters nor more than "
                f"{MAX_NAME_BYTES} bytes"
            )
    if len(tags) > MAX_TAGS:
        raise UsageError(f"a run has at most {MAX_TAGS} tags; give fewer")


def _is_sensible(name: str) -> bool:
    # An invisible or nearly empty name is a mistake: an unset variable, or an accidental key.
    shows = any(each.isalnum() or unicodedata.category(each) == "So" for each in name)
    fits = len(name.encode("utf-8", "replace")) <= MAX_NAME_BYTES
    return shows and fits and name.isprintable() and "/" not in name and name == name.strip()


def check_owner(runs: Iterable[BackupRun], name: str, root: str, machine: Machine) -> None:
    """
    Check that what this machine stores may add runs to the series of this name.

    A machine that has a run in the series may continue it: it was the first, or the user asked for it.

    Args:
        root: what is stored: absolute paths of directories, or a stream.

    Raises:
        UsageError: the runs are another machine's, or those of something else that still exists.
    """
    same = [run for run in runs if run.name == name]
    ours = [run for run in same if run.machine.id in ("", machine.id)]
    theirs = [run for run in same if run.machine.id not in ("", machine.id)]
    if theirs and not any(run.machine.id for run in ours):
        newest = max(theirs, key=lambda run: run.time)
        named = f"{newest.machine.name!r}, " if newest.machine.name else ""
        raise _taken(name, f"{newest.directory or 'a directory'} on {named}another machine", root)
    noted = [run for run in ours if run.directory]
    other = max(noted, key=lambda run: run.time).directory if noted else root
    if other == printable(root) or not still_exists(other):  # it was moved, perhaps to here
        return
    with suppress(OSError, ValueError):  # several directories, or not a path at all
        if os.path.samefile(other, root):
            return
    raise _taken(name, other, root)


def _taken(name: str, by: str, root: str) -> UsageError:
    return UsageError(
        f"{name!r} is the backup of {printable(by)}: choose a name for that of {printable(root)} with --as, "
        f"or say '--as {name}' if both must have the same one"
    )


# One run of a backup: changed files are read and stored, and the run is added to the list.
#
# The order makes it safe to kill a run at any moment. A file is recorded when it is stored, a run when
# everything is stored, and then it is listed. So every record is true; what is not recorded is done again,
# and a recorded run that could not be listed is listed by the next one.
#
# The catalogue, and the directories under an alias, are prepared while the tree is stored.


U = TypeVar("U")


class BackupResult(NamedTuple):
    """
    A finished run.

    Attributes:
        run: as it is listed.
        catalogue: the cap that reads the list of runs, and all of them; it cannot change the list.
        counts: what was met, sent, checked and left out.
        forgotten: runs that are not listed any more.
        elapsed_s: in total.
        problems: why the stored run is not listed, or not under its alias; see ``run``.
    """

    run: BackupRun
    catalogue: DirectoryCap
    counts: TreeCounts
    forgotten: tuple[BackupRun, ...]
    elapsed_s: float
    problems: tuple[PipegridError, ...] = ()


class DryRunResult(NamedTuple):
    """
    What a run would do now.

    Attributes:
        objects, bytes: files and directories that would be sent, before they are encoded; for directories
            above changed files, an estimate.
        share_bytes: about what servers would store.
        checks: objects that would be checked on the grid.
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
        say: called with sentences for the user.
        now: seconds since 1970.
        machine: this one; None: the one that the system names.
    """

    def __init__(
        self,
        grid: Grid,
        *,
        say: Callable[[str], None] = lambda sentence: None,
        now: Callable[[], float] = time.time,
        machine: Machine | None = None,
    ) -> None:
        self._grid = grid
        self._now = now
        self._machine = machine
        self.place = BackupPlace(grid.config)
        self.catalogues = GridCatalogues(grid, now)
        self._storing = partial(RunUpload, grid, self.place, say=say, now=now)
        self.say = say

    async def run(
        self,
        source: str | BackupSource,
        name: str,
        options: BackupOptions | None = None,
        reports: TreeReports | None = None,
    ) -> BackupResult:
        """
        Store a directory as it is now, or several, or a stream, and list the run.

        If it is stored but cannot be listed, no error is raised: ``problems`` of the result says why, and the
        next run lists it.

        Raises:
            UsageError: another run is running, the name is impossible or belongs to another directory or
                machine, or the directory that keeps the run cannot be changed.
            SourceError: it cannot be read.
            GridError: the grid accepts nothing, or the list of runs cannot be created.
        """
        options = options or BackupOptions()
        check_tags(options.tags)
        source = _as_source(source)
        began_s = self._grid.clock.seconds()
        with self.place.locked():
            noted = self.place.noted(self.say)
            machine = self._machine or self.place.machine()
            name = await self._checked_name(name, noted, source.root, machine, options)
            storing = self._storing(source, reports=reports, read_only=False)
            with closing(storing.database):
                noted, counts, listed = await self._store(noted, name, machine, storing, options)
                storing.database.finish()
                # Of an object that was left out, or changed between two tries, some shares may be stored.
                if not (listed.problems or counts.left_out or counts.second_tries):
                    storing.database.succeeded()
        assert noted.cap is not None
        return BackupResult(
            listed.run,
            noted.cap.readonly(),
            counts,
            listed.forgotten,
            self._grid.clock.seconds() - began_s,
            listed.problems,
        )

    async def _checked_name(
        self, name: str, noted: CatalogueState, root: str, machine: Machine, options: BackupOptions
    ) -> str:
        """Return the name as it is listed, if it is possible and belongs to this directory."""
        name = check_name(name, noted.runs)
        if not options.name_was_chosen:
            check_owner(await self._listed(noted), name, root, machine)
        return name

    async def _store(
        self,
        noted: CatalogueState,
        name: str,
        machine: Machine,
        storing: RunUpload,
        options: BackupOptions,
    ) -> tuple[CatalogueState, TreeCounts, ListedRun]:
        """Store a directory, and list the run; also returns the catalogue as it was remembered then."""
        # The records of earlier runs hold for the grid that has the remembered list.
        believed = noted.content is not None
        if not believed:
            storing.database.require_check()
        (noted, archives), result = await _both(
            Deferred.fromCoroutine(self._prepare(noted, options)),
            Deferred.fromCoroutine(storing.store(options, GridFiles(self._grid))),
        )
        when = own_time(name, self._now(), noted.runs)
        run = BackupRun(name, when, result.cap, machine=machine, tags=options.tags)
        run = _filled(run, storing.source.root, result)
        for warn in (warning_of_later_runs, warning_of_no_files):
            warning = warn(run, noted.runs)
            if warning:
                self.say(warning)
        listed = await self._list(noted, archives, run, options.retention)
        if listed.is_nowhere and believed and isinstance(storing.source, BackupDirectories):
            run, result = await self._store_again(noted, listed.run, storing, options)
            listed = listed._replace(run=run)
        if listed.is_nowhere:
            _, *others = listed.problems
            listed = listed._replace(problems=(self._without_list(), *others))
        return noted, result.counts, listed

    async def _list(
        self, noted: CatalogueState, archives: Archives | None, run: BackupRun, retention: Retention
    ) -> ListedRun:
        """List a run that is stored; ``noted`` is the remembered catalogue without it."""
        others = [each for each in noted.unlisted if entry_name(each) != entry_name(run)]
        noted = noted._replace(unlisted=(*others, run))
        self.place.note(noted)

        async def trying(work: Coroutine[Any, Any, T]) -> T | PipegridError:
            try:
                return await work
            except PipegridError as error:
                return error

        note = self.place.candidates.note_forgotten
        change = CatalogueChange(noted.unlisted, retention, forgetting=note)
        forgotten: tuple[BackupRun, ...] = ()
        if noted.content is not None:
            assert noted.cap is not None
            forgotten = change.done(runs_of(noted.cap, noted.content)).forgotten
        steps: list[Coroutine[Any, Any, Any]] = [self._change(noted, change)]
        if archives is not None:
            steps.append(archives.keep(run, forgotten))
        outcomes = await gather([Deferred.fromCoroutine(trying(step)) for step in steps])
        problems = tuple(each for each in outcomes if isinstance(each, PipegridError))
        changed = outcomes[0]
        if not isinstance(changed, ChangedCatalogue):
            nowhere = isinstance(changed, NotEnoughSharesError) and not changed.found
            return ListedRun(run, (), problems, nowhere)
        self.place.note(CatalogueState(noted.cap, changed.content, (), changed.version))
        return ListedRun(changed.run or run, changed.forgotten, problems)

    async def _change(self, noted: CatalogueState, change: CatalogueChange) -> ChangedCatalogue:
        assert noted.cap is not None
        try:
            return await self.catalogues.change(noted.cap, change, noted.content)
        except RollbackError as error:
            if noted.content is None or noted.version < error.seen:
                raise  # the version seen last may come from another machine, and may reappear
            self.say(
                "servers show an older list of backups than this client has seen, so it is written again "
                "from what this client remembers"
            )
            return await self.catalogues.rewrite(noted.cap, change, noted.content)

    async def _store_again(
        self, noted: CatalogueState, run: BackupRun, storing: RunUpload, options: BackupOptions
    ) -> tuple[BackupRun, TreeResult]:
        """
        Store a directory on a grid that has lost the list, and perhaps all other objects: nothing is trusted.

        It may be another grid, by mistake; so no new list is created.
        """
        self.say(
            "no server has the list of backups, perhaps because this is another grid than before: "
            "everything is checked, and stored again if it is missing"
        )
        self.place.note(noted)  # without a run that may not be stored
        storing.database.require_check()
        result = await storing.store(options, GridFiles(self._grid))
        run = _filled(run, storing.source.root, result)
        others = [each for each in noted.unlisted if entry_name(each) != entry_name(run)]
        self.place.note(noted._replace(unlisted=(*others, run)))
        return run, result

    def _without_list(self) -> NotEnoughSharesError:
        """Return the error for a grid that has nothing of the list; its message says how to continue."""
        return NotEnoughSharesError(
            "no server has the list of backups: if this is another grid than before, use that one again; "
            f"if this one has lost it, move {self.place.directory} away, and the next run begins a new list",
            0,
            1,
        )

    async def _prepare(
        self, noted: CatalogueState, options: BackupOptions
    ) -> tuple[CatalogueState, Archives | None]:
        """Return a catalogue that can be changed, and the archives under the alias, if one is given."""
        archives = None
        making: list[Deferred[Any]] = [Deferred.fromCoroutine(self._catalogue(noted))]
        if options.archives is not None:
            archives = Archives(self._grid, *options.archives, now=self._now)
            making.append(Deferred.fromCoroutine(archives.prepare()))
        prepared, *_ = await gather(making)
        return prepared, archives

    async def _catalogue(self, noted: CatalogueState) -> CatalogueState:
        """Return the remembered catalogue, which can be changed; it is created if there is none."""
        if noted.cap is not None and writes(noted.cap):
            return noted
        runs = noted.runs
        if noted.cap is not None and noted.content is None:
            # A new list without the runs of the previous one would be wrong.
            before = runs_of(noted.cap, await self.catalogues.load(noted.cap))
            names = {entry_name(run) for run in runs}
            runs = (*(run for run in before if entry_name(run) not in names), *runs)
        made = CatalogueState(await self.catalogues.create(), b"", runs)
        self.place.note(made)
        return made

    async def _listed(self, noted: CatalogueState) -> tuple[BackupRun, ...]:
        """Return the runs that are in the list to which the next one is added."""
        if noted.cap is None or noted.content is not None:
            return noted.runs
        # The user has put the cap of another catalogue here: its runs count.
        return tuple(runs_of(noted.cap, await self.catalogues.load(noted.cap)))

    async def would_send(
        self,
        source: str | BackupSource,
        options: BackupOptions | None = None,
        reports: TreeReports | None = None,
        name: str | None = None,
    ) -> DryRunResult:
        """
        Find out what a run would send; no file is opened, and nothing is stored or recorded.

        Args:
            name: of the run, which is checked; None: not checked.

        Raises: as ``run`` does.
        """
        options = options or BackupOptions()
        check_tags(options.tags)
        chosen = _as_source(source)
        if not isinstance(chosen, BackupDirectories):
            raise UsageError(
                "what a stream would send is known only when it was read; leave out --dry-run"
            )
        params = self._grid.config.params
        store = DryRunStore(params)
        with self.place.locked():
            if name is not None:
                noted = self.place.noted(self.say)
                machine = self._machine or self.place.machine(keep=False)
                await self._checked_name(name, noted, chosen.root, machine, options)
            storing = self._storing(chosen, reports=reports, read_only=True)
            with closing(storing.database):
                result = await storing.store(options, store)
        share_bytes = store.bytes * params.total_shares // params.required_shares
        return DryRunResult(store.objects, store.bytes, share_bytes, store.checks, result.counts)

    async def runs(self) -> tuple[BackupRun, ...]:
        """
        Return all listed runs, oldest first; if the grid does not have the list, the remembered ones.

        Raises:
            PipegridError: the list cannot be read from the grid, and is not remembered.
        """
        noted = self.place.noted(self.say)
        if noted.cap is None:
            return noted.runs
        try:
            content = await self.catalogues.load(noted.cap)
        except PipegridError as error:
            if noted.content is None:
                raise
            self.say(
                f"this is the list that this client saw last, since it cannot be fetched: {error}"
            )
            return noted.runs
        return noted._replace(content=content).runs


def _as_source(source: str | BackupSource) -> BackupSource:
    return BackupDirectories([source]) if isinstance(source, str) else source


def _filled(run: BackupRun, root: str, result: TreeResult) -> BackupRun:
    """Return a run with the results of its upload."""
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
    """Return both results; if one fails, the other is cancelled, and has ended when this returns."""
    running: list[Deferred[Any]] = [first, second]
    try:
        one, other = await gather(running)
    except BaseException:
        await DeferredList(running, consumeErrors=True)
        raise
    return one, other
