"""
The grid as applications see it: files, and whole trees of them.

What walks and fetches trees is imported when the first tree is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred

from pipegrid.argument_checks import check_callable, check_kind, check_whole
from pipegrid.core.caps import Cap
from pipegrid.errors import UsageError
from pipegrid.grid.file_grid import Grid as FileGrid
from pipegrid.grid.file_grid import started

if TYPE_CHECKING:
    from pipegrid.reactor.workers import CpuWorkers
    from pipegrid.transfer.settings import UpkeepSettings
    from pipegrid.transfer.upkeep import UpkeepOutcome
    from pipegrid.tree.directory import Directory
    from pipegrid.tree.directory_descriptor import DirectoryFd
    from pipegrid.tree.directory_reading import Listing, ListingLimits
    from pipegrid.tree.entry_metadata import Modes
    from pipegrid.tree.file_selection import TreeSelection
    from pipegrid.tree.grid_paths import PathEnd
    from pipegrid.tree.tree_check import FirstMet as Met
    from pipegrid.tree.tree_check import TreeSummary
    from pipegrid.tree.tree_download import GetTreeLimits, TreeGetReports, TreeGetResult
    from pipegrid.tree.tree_upload import TreeReports, TreeResult
    from pipegrid.tree.walk import Walk, WalkLimits


class Trees:
    """What a grid does with directories; ``Grid.tree`` has it."""

    def __init__(
        self,
        grid: Grid,
        workers: CpuWorkers,
        start: Callable[[Coroutine[Any, Any, Any]], Deferred[Any]],
    ) -> None:
        self._grid = grid
        self._start = start
        self._workers = workers

    @started
    async def resolve(self, path: str, limits: ListingLimits | None = None) -> PathEnd:
        """
        Find what a path leads to: a listing for each name.

        Args:
            path: ``CAP/some/path``, or a cap alone; or ``ALIAS:some/path`` with an alias of the client's
                directory.

        Raises (through the Deferred):
            NoSuchChild: there is no such name on the way.
            UsageError, CapError: it is no path, or there is no such alias.
            DirectoryError: a directory on the way is damaged.
        """
        from pipegrid.tree.grid_paths import parse_here, resolve

        check_kind(path, str, "a path on a grid", "text")
        root, names = parse_here(path, self._grid.config.directory)
        return await resolve(self._grid, root, names, limits)

    @started
    async def list_directory(self, cap: str | Cap, limits: ListingLimits | None = None) -> Listing:
        """
        Read one directory.

        Raises (through the Deferred):
            CapError: not the cap of a directory.
            DirectoryError: it is damaged, or beyond the limits.
        """
        from pipegrid.core.caps import DirectoryCap, as_cap
        from pipegrid.errors import CapError
        from pipegrid.tree.directory_reading import read_listing

        parsed = as_cap(cap)
        if not isinstance(parsed, DirectoryCap):
            raise CapError("this is not the cap of a directory, and only those can be listed")
        return await read_listing(self._grid, parsed, limits)

    def walk(
        self,
        cap: str | Cap,
        *,
        all_paths: bool = False,
        limits: WalkLimits | None = None,
        listing: ListingLimits | None = None,
    ) -> Walk:
        """
        Return an asynchronous iterator over all that is below a cap; see ``tree.walk``.

        Raises:
            CapError: it is no well-formed cap.
            UsageError: it is none at all, or these are no limits.
        """
        from pipegrid.tree.walk import WalkLimits, walk

        check_kind(limits, (WalkLimits, type(None)), "what a walk may take", "a WalkLimits")
        return walk(self._grid, cap, all_paths=all_paths, limits=limits, listing=listing)

    @started
    async def get_tree(
        self,
        cap: str | Cap,
        directory: str | os.PathLike[str],
        *,
        metadata_json: bytes = b"{}",
        force: bool = False,
        paranoid: bool = False,
        progress: Callable[[int, int], None] | None = None,
        problem: Callable[[tuple[str, ...], Exception], None] | None = None,
        done: Callable[[tuple[str, ...], str, int], None] | None = None,
        limits: GetTreeLimits | None = None,
        into: DirectoryFd | None = None,
        waiting: Callable[[str | None], None] | None = None,
        modes: Modes = "umask",
        max_paths: int | None = None,
        not_kept: Callable[[tuple[str, ...], str], None] | None = None,
    ) -> TreeGetResult:
        """
        Fetch a directory with all that is in it; what is there already is not fetched again.

        What fails is told to ``problem``, and stops nothing else: look at ``failed`` of the result.

        Args:
            cap: of a directory.
            directory: where it goes; made if missing. Nothing that is there is removed.
            metadata_json: what the entry of the directory says, for its own mode and time.
            force: replace files and links that are in the way.
            paranoid: compare also those that have size and time of the file with what the cap says.
            progress: called with bytes that are there, and those known so far.
            problem: called with the path of what was left out, and why.
            done: called with the path of a file or link, ``fetched``, ``present`` or ``link``, and its size.
            into: the directory that it is made in, or itself: nothing is written outside of that, whatever
                comes into its place.
            waiting: called with a sentence when too few servers are in reach, so that nothing more begins,
                and with None when it goes on.
            modes: what files and directories get of theirs: ``umask`` (permissions it allows), ``stored``
                (all permissions; of directories, set-group-ID and sticky bits, too), or ``exact`` (all bits).
            max_paths: of files, directories and links, a million by default; few bytes can hold many more.
            not_kept: called with the path of what has not its mode or time, and why.

        Raises (through the Deferred):
            CapError: not the cap of a directory.
            SinkError: the directory cannot be made, there are too many paths, or its disk is full or must not
                be written to.
            PipegridError: the root cannot be read.
        """
        from pipegrid.core.caps import as_cap
        from pipegrid.tree.tree_download import TreeGet, TreeGetOptions, TreeGetReports

        check_kind(directory, (str, os.PathLike), "where a tree goes", "a path")
        check_kind(metadata_json, bytes, "what the entry of a directory says", "bytes")
        reports = TreeGetReports(progress, problem, done, waiting, not_kept)
        _check_get(reports, modes)
        bounds = self._get_bounds(limits, max_paths)
        options = TreeGetOptions(metadata_json, force, paranoid, bounds, into, modes)
        path = os.fspath(directory)
        return await TreeGet(self._grid, self._workers, as_cap(cap), path, options, reports).run()

    def _get_bounds(self, limits: GetTreeLimits | None, max_paths: int | None) -> GetTreeLimits:
        import attrs

        from pipegrid.tree.tree_download import GetTreeLimits, bounded

        check_kind(limits, (GetTreeLimits, type(None)), "what a get may take", "a GetTreeLimits")
        bounds = limits or bounded(self._grid.limits)
        if max_paths is not None:
            bounds = attrs.evolve(bounds, paths=check_whole(max_paths, "max_paths", 1))
        return bounds

    @started
    async def put_tree(
        self,
        /,
        directory: str | os.PathLike[str],
        *,
        selection: TreeSelection | None = None,
        one_file_system: bool = False,
        reports: TreeReports | None = None,
        **options: Any,
    ) -> TreeResult:
        """
        Store a directory with all that is in it; fires when all is stored.

        What cannot be read is left out and told (``TreeReports.left_out``); named pipes, sockets and devices
        are skipped, and so are the parts of unfinished downloads (``TreeReports.skipped``). If this is
        cut off, the next put of the same directory goes on: what was stored is checked, not sent again.

        Args:
            selection: what of it; by default everything.
            one_file_system: what is mounted in it is stored as an empty directory.
            options: ``params``, ``happy``, ``convergence``, ``random_key``: see ``Grid.put``.

        Raises (through the Deferred):
            SourceError: the directory itself cannot be read.
            GridError: the grid takes nothing.
            UsageError: the options are impossible.
        """
        from pipegrid.tree.file_selection import TreeSelection
        from pipegrid.tree.tree_upload import TreeReports, tree_upload
        from pipegrid.tree.upload_journal import unfinished_put

        check_kind(directory, (str, os.PathLike), "a directory that is stored", "a path")
        check_kind(
            selection, (TreeSelection, type(None)), "what is stored of it", "a TreeSelection"
        )
        check_kind(reports, (TreeReports, type(None)), "what a put reports", "a TreeReports")
        check_callable(getattr(reports, "left_out", None), "left_out")
        check_callable(getattr(reports, "progress", None), "progress")
        self._grid._put_options(**{k: v for k, v in options.items() if k != "random_key"})
        notes = unfinished_put(self._grid, directory, options)
        try:
            chosen = (selection, one_file_system, reports)
            result = await tree_upload(self._grid, directory, *chosen, options, notes).run()
            notes.forget()
            return result
        finally:
            notes.close()

    @started
    async def check_tree(
        self,
        cap: str | Cap,
        *,
        verify: bool = False,
        add_lease: bool = False,
        repair: bool = False,
        renew: bool = False,
        bounds: UpkeepSettings | None = None,
        ended: Callable[[Met, UpkeepOutcome], None] | None = None,
        unreadable: Callable[[Met, Exception], None] | None = None,
    ) -> TreeSummary:
        """
        Look after everything in a tree, each object once; see ``tree.tree_check.check_tree``.

        Args:
            verify, add_lease, repair: see ``Grid.check_many``.
            renew: only add leases, or renew them.

        Raises (through the Deferred):
            CapError: it is no well-formed cap.
            UnhappyError: there are no servers.
        """
        from pipegrid.transfer.upkeep import UpkeepRequest
        from pipegrid.tree.tree_check import check_tree

        check_callable(ended, "ended")
        check_callable(unreadable, "unreadable")
        todo = UpkeepRequest(verify=verify, add_lease=add_lease, repair=repair, renew=renew)
        return await check_tree(
            self._grid, cap, todo, bounds=bounds, ended=ended, unreadable=unreadable
        )


def _check_get(reports: TreeGetReports, modes: Modes) -> None:
    import attrs

    from pipegrid.tree.entry_metadata import MODES

    for name, call in attrs.asdict(reports, recurse=False).items():
        check_callable(call, name)
    if modes not in MODES:
        raise UsageError(f"modes is {str(modes)[:50]!r}; it is one of {', '.join(MODES)}")


class Grid(FileGrid):
    """A storage grid: files, mutable files, directories and trees."""

    @property
    def tree(self) -> Trees:
        """Whole directories: walked, listed and fetched."""
        return Trees(self, self._workers, self._start)

    def directory(self, cap: str | Cap) -> Directory:
        """
        Return a directory to be listed and, with its write cap, changed; nothing is asked of the grid yet.

        Raises:
            CapError: the cap is malformed, or not that of a directory.
        """
        from pipegrid.tree.directory import Directory

        return Directory(self, cap)

    def create_directory(self, *, format: str | None = None) -> Deferred[Directory]:
        """
        Store an empty directory that can be changed; fires with it (``.cap`` is its write cap).

        Args:
            format: ``"sdmf"`` or ``"mdmf"``; None: as configured.

        Raises (through the Deferred):
            UnhappyError: too few servers took it.
            UsageError: there is no such format.
        """
        from pipegrid.tree.directory import create_directory

        return self._start(create_directory(self, format))
