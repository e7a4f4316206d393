"""One backup run: walking the directories, storing them, and listing the run in the catalogue."""

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

# This part lists a stored run in the catalogue and under an alias.
#
# The run is recorded locally first, so that the next run lists it if listing fails.

T = TypeVar("T")
BackupSource: TypeAlias = "BackupDirectories | BackupStream"


class ListedRun(NamedTuple):
    """
    The outcome of listing a run.

    Attributes:
        run: the run as it is listed.
        forgotten: older runs that were removed from the list.
        problems: why the run is not listed in the catalogue, or not under its alias; a problem of the
            catalogue comes first.
        is_nowhere: whether no server that responded has shares of the catalogue.
    """

    run: BackupRun
    forgotten: tuple[BackupRun, ...] = ()
    problems: tuple[PipegridError, ...] = ()
    is_nowhere: bool = False


# This part stores a directory, using the records of earlier runs, or only finds out what a run would store.


class BackupOptions(NamedTuple):
    """
    What a run stores, and which older runs are kept.

    Attributes:
        selection: returns a new selection for a directory; each run needs a new one, since a selection
            records what it has met.
        one_file_system: whether other file systems that are mounted below a directory are left out.
        archives: the cap of a mutable directory, and the names of a path below it, which need not exist yet.
            The run is also listed there, in the layout of Tahoe-LAFS's ``backup``. None: only in the
            catalogue.
        name_was_chosen: whether the user chose the name; if so, other runs of this name are allowed to be of
            another directory or machine.
        tags: the tags of the run; ``Retention.tags`` may keep the run because of them.
    """

    selection: Callable[[str], TreeSelection] = lambda directory: TreeSelection()
    one_file_system: bool = False
    retention: Retention = Retention()
    archives: tuple[str, tuple[str, ...]] | None = None
    name_was_chosen: bool = True
    tags: tuple[str, ...] = ()


class RunUpload:
    """
    Stores the source of one run.

    Args:
        say: called with sentences for the user.
        now: returns the seconds since 1970.
        reports: called for the entries that the walk meets.
        read_only: whether nothing is recorded and no file is read.

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
        Store what is not yet recorded as stored.

        Raises:
            SourceError: the source cannot be read.
            GridError: the store accepts no objects.
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
        """
        Return the result with the owners' names in the metadata of the root; report how many names are not
        stored.
        """
        names, more = await self._grid.workers.run(result.owners.stored)
        if more:
            self._say(f"the names of {counted(more, 'owner')} are not stored, only their numbers")
        if links.left_out:
            several = counted(links.left_out, "name")
            self._say(f"{several} of files with several names are stored as files of their own")
        ours = {**result.metadata.get(KEY, {}), **names}
        return attrs.evolve(result, metadata={**result.metadata, KEY: ours})


# This part checks the names of backups, and which directory a name belongs to. Its only input is whether a
# directory exists.
#
# Runs with the same name are one series: '--keep-...' forgets older runs of the series, and 'restore' takes
# the newest run. So runs of another directory or machine join a series only if the user asks for it.

MAX_NAME_BYTES = 200
"""The maximum length of a backup's name, and of a tag."""

MAX_TAGS = 20


def check_name(name: str, listed: Iterable[BackupRun] = ()) -> str:
    """
    Return the name of a backup as it is listed, which is normalized (NFC).

    Args:
        listed: runs whose names are always accepted, since earlier versions allowed other names.

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
        UsageError: a tag is empty, too long or not printable, or there are too many: the size of a catalogue
            entry is limited.
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
    # An invisible or nearly empty name is a mistake, such as an unset variable or a wrong key.
    shows = any(each.isalnum() or unicodedata.category(each) == "So" for each in name)
    fits = len(name.encode("utf-8", "replace")) <= MAX_NAME_BYTES
    return shows and fits and name.isprintable() and "/" not in name and name == name.strip()


def check_owner(runs: Iterable[BackupRun], name: str, root: str, machine: Machine) -> None:
    """
    Check that this machine may add runs of this source to the series with this name.

    A machine with a run in the series may continue the series: this machine started the series, or its user
    has asked to join it.

    Args:
        runs: all listed runs.
        root: what is stored: absolute paths of directories, or a description of a stream.

    Raises:
        UsageError: the runs of the series belong to another machine, or to another source that still exists.
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
    if other == printable(root) or not still_exists(other):  # the directory was moved or removed
        return
    with suppress(OSError, ValueError):  # ``other`` names several directories, or is no path
        if os.path.samefile(other, root):
            return
    raise _taken(name, other, root)


def _taken(name: str, by: str, root: str) -> UsageError:
    return UsageError(
        f"{name!r} is the backup of {printable(by)}: choose a name for that of {printable(root)} with --as, "
        f"or say '--as {name}' if both must have the same one"
    )


# One run of a backup reads and stores changed files, and adds the run to the list.
#
# The order of the steps makes it safe to kill a run at any moment. A file is recorded after it is stored, and
# a run after everything is stored; after that, the run is listed. So every record is true, unrecorded work is
# repeated, and the next run lists a recorded run that could not be listed.
#
# The catalogue, and the directories under an alias, are prepared while the tree is stored.


U = TypeVar("U")


class BackupResult(NamedTuple):
    """
    The result of a finished run.

    Attributes:
        run: the run as it is listed.
        catalogue: the read cap of the catalogue; it reads the list and all runs, but cannot change the list.
        counts: numbers of entries that were met, sent, checked and left out.
        forgotten: older runs that were removed from the list.
        elapsed_s: duration of the whole run.
        problems: why the stored run is not listed in the catalogue, or not under its alias.
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
        objects, bytes: number and size of the files and directories that would be sent, before they are
            encoded; for directories above changed files, an estimate.
        share_bytes: estimated bytes of shares that servers would store.
        checks: number of objects that would be checked on the grid.
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
        now: returns the seconds since 1970.
        machine: the identity of this machine; None: from ``BackupPlace.machine``.
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
        Store one or several directories, or a stream, as they are now, and list the run.

        If the run is stored but cannot be listed, no error is raised: ``problems`` of the result says why,
        and the next run lists it.

        Raises:
            UsageError: another run is running; the name is not allowed, or belongs to another directory or
                machine; or the directory for the archives cannot be changed.
            SourceError: the source cannot be read.
            GridError: the grid accepts no objects, or the list of runs cannot be created.
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
                # If an object was left out, or changed before a retry, servers may have shares that no record
                # lists.
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
        """
        Return the name as it is listed. Raise UsageError if it is not allowed or, unless the user has chosen
        it, belongs to another machine or source.
        """
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
        """
        Store the source, and list the run. Return the catalogue as it was before this run was added, the
        counts, and the listed run.
        """
        # The records of earlier runs are only valid for the grid that has the remembered list.
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
        """List a stored run; ``noted`` is the remembered catalogue without this run."""
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
                raise  # another machine may have written the newer version, which may reappear
            self.say(
                "servers show an older list of backups than this client has seen, so it is written again "
                "from what this client remembers"
            )
            return await self.catalogues.rewrite(noted.cap, change, noted.content)

    async def _store_again(
        self, noted: CatalogueState, run: BackupRun, storing: RunUpload, options: BackupOptions
    ) -> tuple[BackupRun, TreeResult]:
        """
        Check everything, and store what is missing, on a grid that lost the list and perhaps all other
        objects.

        No new list is created, since this may be the wrong grid.
        """
        self.say(
            "no server has the list of backups, perhaps because this is another grid than before: "
            "everything is checked, and stored again if it is missing"
        )
        self.place.note(noted)  # without the run, some of whose objects may be lost
        storing.database.require_check()
        result = await storing.store(options, GridFiles(self._grid))
        run = _filled(run, storing.source.root, result)
        others = [each for each in noted.unlisted if entry_name(each) != entry_name(run)]
        self.place.note(noted._replace(unlisted=(*others, run)))
        return run, result

    def _without_list(self) -> NotEnoughSharesError:
        """Return the error for a grid that has no share of the list; its message says how to continue."""
        return NotEnoughSharesError(
            "no server has the list of backups: if this is another grid than before, use that one again; "
            f"if this one has lost it, move {self.place.directory} away, and the next run begins a new list",
            0,
            1,
        )

    async def _prepare(
        self, noted: CatalogueState, options: BackupOptions
    ) -> tuple[CatalogueState, Archives | None]:
        """
        Return a catalogue that this client can change, and the prepared archives under the alias, or None.
        """
        archives = None
        making: list[Deferred[Any]] = [Deferred.fromCoroutine(self._catalogue(noted))]
        if options.archives is not None:
            archives = Archives(self._grid, *options.archives, now=self._now)
            making.append(Deferred.fromCoroutine(archives.prepare()))
        prepared, *_ = await gather(making)
        return prepared, archives

    async def _catalogue(self, noted: CatalogueState) -> CatalogueState:
        """
        Return the remembered catalogue if this client can change it; otherwise create one with the same runs.
        """
        if noted.cap is not None and writes(noted.cap):
            return noted
        runs = noted.runs
        if noted.cap is not None and noted.content is None:
            # A new list must contain the runs of the previous one.
            before = runs_of(noted.cap, await self.catalogues.load(noted.cap))
            names = {entry_name(run) for run in runs}
            runs = (*(run for run in before if entry_name(run) not in names), *runs)
        made = CatalogueState(await self.catalogues.create(), b"", runs)
        self.place.note(made)
        return made

    async def _listed(self, noted: CatalogueState) -> tuple[BackupRun, ...]:
        """Return the runs of the list to which this run will be added."""
        if noted.cap is None or noted.content is not None:
            return noted.runs
        # The user has replaced the cap by that of another catalogue, so the runs of that catalogue count.
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
            name: the name of the run, which is checked; None: no name is checked.

        Raises: the same errors as ``run``.
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
        Return all listed runs, oldest first; if the list cannot be read from the grid, the remembered runs.

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
    """Return the run, completed with the results of its upload."""
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
    """Return the results of both Deferreds. If one fails, cancel the other and wait until it has ended."""
    running: list[Deferred[Any]] = [first, second]
    try:
        one, other = await gather(running)
    except BaseException:
        await DeferredList(running, consumeErrors=True)
        raise
    return one, other
