"""
The grid as applications see it: single files, and whole trees of files. The modules that walk and fetch trees
are imported on first use.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred

from pipegrid.argument_checks import check_callable, check_kind, check_whole
from pipegrid.core.caps import Cap
from pipegrid.errors import UsageError
from pipegrid.grid.file_grid import Grid as FileGrid
from pipegrid.grid.file_grid import started

if TYPE_CHECKING:
    from pipegrid.transfer.settings import UpkeepSettings
    from pipegrid.transfer.upkeep import UpkeepOutcome
    from pipegrid.tree.directory import Directory
    from pipegrid.tree.directory_reading import Listing, ListingLimits
    from pipegrid.tree.file_metadata import Modes
    from pipegrid.tree.file_selection import TreeSelection
    from pipegrid.tree.grid_paths import PathEnd
    from pipegrid.tree.local_directory_descriptor import DirectoryFd
    from pipegrid.tree.metadata_restore import ExtendedRestore
    from pipegrid.tree.tree_check import FirstMet as Met
    from pipegrid.tree.tree_check import TreeSummary
    from pipegrid.tree.tree_download import (
        GetTreeLimits,
        TreeGetOptions,
        TreeGetReports,
        TreeGetResult,
    )
    from pipegrid.tree.tree_upload import TreeReports, TreeResult
    from pipegrid.tree.walk import Walk, WalkLimits


class Trees:
    """Operations on directories; ``Grid.tree`` returns this."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._start = grid._start

    @started
    async def resolve(self, path: str, limits: ListingLimits | None = None) -> PathEnd:
        """
        Find the object at the end of a path; one directory is read for each name.

        Args:
            path: ``CAP/some/path``, or a cap alone; or ``ALIAS:some/path`` with an alias of the client's
                directory; or ``NAME@TIME:some/path`` in a run of one of its backups.

        Raises (through the Deferred):
            NoSuchChild: a name of the path does not exist.
            UsageError, CapError: this is not a path, or the alias, backup or run does not exist.
            DirectoryError: a directory of the path is damaged.
        """
        from pipegrid.tree.grid_paths import parse_here, resolve

        check_kind(path, str, "a path on a grid", "text")
        if "@" in path:
            from pipegrid.tree.backup.run_paths import RunFinder

            root, names = await RunFinder(self._grid).root_of(path)
        else:
            root, names = parse_here(path, self._grid.config.directory)
        return await resolve(self._grid, root, names, limits)

    @started
    async def list_directory(self, cap: str | Cap, limits: ListingLimits | None = None) -> Listing:
        """
        Read one directory.

        Raises (through the Deferred):
            CapError: not the cap of a directory.
            DirectoryError: the directory is damaged, or exceeds the limits.
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
        Return an asynchronous iterator over everything below a cap; see ``tree.walk``.

        Raises:
            CapError: the text is not a well-formed cap.
            UsageError: ``cap`` is neither text nor a cap, or the limits have a wrong type.
        """
        from pipegrid.tree.walk import WalkLimits, walk

        check_kind(limits, (WalkLimits, type(None)), "limits", "a WalkLimits")
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
        extended: ExtendedRestore | None = None,
        not_restored: Callable[[tuple[str, ...], str, str], None] | None = None,
        wants: Callable[[tuple[str, ...], bool], bool] | None = None,
    ) -> TreeGetResult:
        """
        Fetch a directory with all its content; files that exist already are not fetched again.

        Failures are reported to ``problem``, and the rest is fetched: check ``failed`` of the result.

        Args:
            cap: the cap of a directory.
            directory: the target; created if missing. Nothing in it is removed.
            metadata_json: the metadata of the directory's entry, for its own mode and time.
            force: replace existing files and links.
            paranoid: compare even files that have the right size and time.
            progress: called with the bytes that are complete, and the bytes of all files met so far.
            problem: called with the path of an entry that was left out, and the error.
            done: called with the path of a file or link, ``fetched``, ``present`` or ``link``, and its size.
            into: the directory above the target, or the target itself: nothing is written outside of it.
            waiting: called with a sentence when too few servers are reachable; then with None.
            modes: the mode bits to set: ``umask``, ``stored`` or ``exact``; see ``file_metadata.Modes``.
            max_paths: maximum of files, directories and links; by default a million.
            not_kept: called with the path of an entry that did not get its mode or time, and the reason.
            extended, not_restored: see ``TreeGetOptions`` and ``TreeGetReports``.
            wants: called with a path and whether it is a directory; returns whether it is fetched.

        Raises (through the Deferred):
            CapError: not the cap of a directory.
            SinkError: the directory cannot be created or written, or there are too many paths.
            PipegridError: the root cannot be read.
        """
        from pipegrid.core.caps import as_cap
        from pipegrid.tree.tree_download import TreeGet, TreeGetOptions, TreeGetReports

        check_kind(directory, (str, os.PathLike), "directory", "a path")
        check_kind(metadata_json, bytes, "metadata_json", "bytes")
        reports = TreeGetReports(progress, problem, done, waiting, not_kept, not_restored)
        bounds = self._get_bounds(limits, max_paths)
        given = (metadata_json, force, paranoid, bounds, into, modes, extended, wants)
        options = TreeGetOptions(*given)
        _check_get(reports, options)
        target = (as_cap(cap), os.fspath(directory))
        return await TreeGet(self._grid, self._grid.workers, *target, options, reports).run()

    def _get_bounds(self, limits: GetTreeLimits | None, max_paths: int | None) -> GetTreeLimits:

        from pipegrid.tree.tree_download import GetTreeLimits, bounded

        check_kind(limits, (GetTreeLimits, type(None)), "limits", "a GetTreeLimits")
        bounds = limits or bounded(self._grid.limits)
        if max_paths is not None:
            bounds = bounds._replace(paths=check_whole(max_paths, "max_paths", 1))
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
        Store a directory with all its content; the Deferred fires when everything is stored.

        Entries that cannot be read are left out and reported (``TreeReports.left_out``). Named pipes,
        sockets, devices and part files of unfinished downloads are skipped (``TreeReports.skipped``). If a
        put is interrupted, the next put of the same directory resumes: stored objects are checked, and not
        sent again.

        Args:
            selection: which entries are stored; by default all.
            one_file_system: store mounted file systems in the directory as empty directories.
            options: ``params``, ``happy``, ``convergence``, ``random_key``: see ``Grid.put``.

        Raises (through the Deferred):
            SourceError: the directory itself cannot be read.
            GridError: the grid accepts no objects.
            UsageError: the options are invalid.
        """
        from pipegrid.tree.file_selection import TreeSelection
        from pipegrid.tree.tree_upload import TreeReports, tree_upload
        from pipegrid.tree.upload_journal import unfinished_put

        check_kind(directory, (str, os.PathLike), "directory", "a path")
        check_kind(selection, (TreeSelection, type(None)), "selection", "a TreeSelection")
        check_kind(reports, (TreeReports, type(None)), "reports", "a TreeReports")
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
        Check everything in a tree, each object once; see ``tree.tree_check.check_tree``.

        Args:
            verify, add_lease, repair: see ``Grid.check_many``.
            renew: only add or renew leases.

        Raises (through the Deferred):
            CapError: ``cap`` is not a well-formed cap.
            UnhappyError: the grid has no servers.
        """
        from pipegrid.transfer.upkeep import UpkeepRequest
        from pipegrid.tree.tree_check import check_tree

        check_callable(ended, "ended")
        check_callable(unreadable, "unreadable")
        todo = UpkeepRequest(verify=verify, add_lease=add_lease, repair=repair, renew=renew)
        return await check_tree(
            self._grid, cap, todo, bounds=bounds, ended=ended, unreadable=unreadable
        )


def _check_get(reports: TreeGetReports, options: TreeGetOptions) -> None:

    from pipegrid.tree.file_metadata import MODES
    from pipegrid.tree.metadata_restore import ExtendedRestore

    check_kind(options.extended, (ExtendedRestore, type(None)), "extended", "an ExtendedRestore")
    for name, call in reports._asdict().items():
        check_callable(call, name)
    check_callable(options.wants, "wants")
    if options.modes not in MODES:
        raise UsageError(f"modes is {str(options.modes)[:50]!r}; it is one of {', '.join(MODES)}")


class Grid(FileGrid):
    """A storage grid: files, mutable files, directories and trees."""

    @property
    def tree(self) -> Trees:
        """Operations on whole directory trees: walk, list, fetch, store, check."""
        return Trees(self)

    def directory(self, cap: str | Cap) -> Directory:
        """
        Return a directory, which can be listed and, with its write cap, changed; no request is sent yet.

        Raises:
            CapError: the cap is malformed, or not the cap of a directory.
        """
        from pipegrid.tree.directory import Directory

        return Directory(self, cap)

    def create_directory(self, *, format: str | None = None) -> Deferred[Directory]:
        """
        Store an empty mutable directory; the Deferred fires with it (``.cap`` is its write cap).

        Args:
            format: ``"sdmf"`` or ``"mdmf"``; None: as configured.

        Raises (through the Deferred):
            UnhappyError: too few servers accepted the directory.
            UsageError: this format does not exist.
        """
        from pipegrid.tree.directory import create_directory

        return self._start(create_directory(self, format))
