"""The work of ``cp``: finds the items that a command line names, and copies them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from pipegrid.cli import cmd_get_cat, output_file, progress_bar, put_files, tree_transfers
from pipegrid.cli.cap_lookup import argument_label, root_of
from pipegrid.cli.destination_child import no_directory, spot_at
from pipegrid.cli.error_report import ExitStatus, one_status
from pipegrid.core import caps
from pipegrid.core.caps import Cap, DirectoryCap, MutableCap, parse_cap
from pipegrid.core.text import printable
from pipegrid.errors import (
    ChildExists,
    NoSuchChild,
    PipegridError,
    SinkError,
    SourceError,
    UsageError,
)
from pipegrid.tree import copy_to_grid, directory, file_metadata

if TYPE_CHECKING:
    from twisted.internet.defer import Deferred

    from pipegrid.cli.console import Console
    from pipegrid.tree.copy_to_grid import Copier, Item
    from pipegrid.tree.local_directory_descriptor import DirectoryFd
    from pipegrid.tree.tree_grid import Grid


class CopyPrinter:
    """
    Reports the outcome of copies, from ``several`` sources or only one; ``statuses`` are the exit statuses of
    failures.
    """

    def __init__(self, console: Console, several: bool) -> None:
        self._console = console
        self._several = several
        self.statuses: set[ExitStatus] = set()

    def failed(self, label: str, error: Exception) -> None:
        """
        Report that the item ``label`` could not be copied, and why; add the error's exit status to
        ``statuses``.
        """
        fields = {"source": label}
        status = self._console.failed(error, printable(label), fields, self._several)
        self.statuses.add(status)

    def done(self, item: Item, how: str, cap: Cap | None) -> None:
        """
        Report that an item was copied, and how; the JSON line has the copy's cap, or null if it has none.
        """
        self._console.detail(f"{printable(item.label)}: {how}")
        fields = {"source": item.label, "name": item.name, "outcome": how}
        self._console.json_result({**fields, "cap": None if cap is None else str(cap)})


async def store_copies(
    grid: Grid,
    console: Console,
    sources: Sequence[tuple[str, bool]],
    target: str,
    recursive: bool,
    force: bool,
) -> ExitStatus:
    """
    Copy to a path on the grid; return the status.

    Args:
        sources: the sources, and for each whether it is on the grid.

    Raises:
        UsageError, CapError, NoSuchChild, ChildExists: the copy is not possible.
        PipegridError: an operation on the grid failed.
    """
    printer = CopyPrinter(console, several=len(sources) > 1)
    with progress_bar.ProgressBar(console, "cp") as progress:

        def put_tree(path: str) -> Deferred[DirectoryCap]:
            def stored(result: Any) -> DirectoryCap:
                if result.counts.left_out:
                    printer.statuses.add(ExitStatus.FAILED)
                cap: DirectoryCap = result.cap
                return cap

            put = grid.tree.put_tree(path, reports=tree_transfers.reports_of(console, progress))
            return put.addCallback(stored)

        calls = partial(put_files.progress_calls, progress)
        reports = copy_to_grid.CopyReports(printer.done, printer.failed)
        copier = copy_to_grid.Copier(grid, put_tree, reports, force, calls)
        root, names = await root_of(grid, target)
        if not names and isinstance(cap := parse_cap(root), MutableCap):
            await copier.over(await _only_file(grid, sources), cap)
            return ExitStatus.DONE
        items, contents = await _items(grid, copier, sources, recursive, target, printer.failed)
        if not items and printer.statuses:
            return one_status(printer.statuses)
        single = len(sources) == 1 and not contents and not items[0].is_directory
        await _copy_to(grid, copier, items, single, target)
    return one_status(printer.statuses)


async def _copy_to(
    grid: Grid, copier: Copier, items: Sequence[Item], single: bool, target: str
) -> None:
    """
    Copy items to the end of a path; ``single``: there is only one item, a file, to which the path may give a
    name.
    """
    import attrs

    root, names = await root_of(grid, target)
    way = await directory.look_up(grid, root, names)
    there = way[-1] if len(way) == len(names) + 1 else None
    if there is not None and isinstance(there.cap, DirectoryCap):
        _check_named(items, target)
        await copier.into(directory.Directory(grid, there.cap), items)
    elif there is not None and not single:
        name = names[-1] if names else ""
        raise ChildExists(
            f"'{printable(name)}' is a file, and several sources need a directory; give another target",
            name,
        )
    elif single and not target.strip().endswith("/"):
        spot = await spot_at(grid, target, make=True)
        await copier.into(await spot.reach(), [attrs.evolve(items[0], name=spot.name)])
    elif single:
        raise no_directory(names[-1])
    else:
        _check_named(items, target)
        await copier.into(await directory.make_directories(grid, root, names), items)


async def _items(
    grid: Grid,
    copier: Copier,
    sources: Sequence[tuple[str, bool]],
    recursive: bool,
    target: str,
    failed: Callable[[str, Exception], None],
) -> tuple[list[Item], bool]:
    """
    Return the items to copy, and whether any are the entries of a source that has no name.

    Args:
        failed: if there are several sources, is called with the name of each that cannot be copied, and the
            reason.

    Raises:
        PipegridError: the only source cannot be copied.
    """
    items: list[Item] = []
    contents = False
    for number, (text, on_grid) in enumerate(sources, 1):
        try:
            item = await _grid_item(grid, text) if on_grid else _local_item(text)
            if item.is_directory and not recursive:
                shown = f"'{printable(item.label)}'" if item.name else item.label
                raise UsageError(f"{shown} is a directory; add -r to copy all that is in it")
            if item.is_directory and not item.name:
                items += await copier.items_in(item)
                contents = True
            else:
                if len(sources) > 1:
                    _check_named([item], target)
                items.append(item)
        except PipegridError as error:  # noqa: PERF203
            if len(sources) == 1:
                raise
            failed(argument_label(text, number) if on_grid else text, error)
    return items, contents


async def _only_file(grid: Grid, sources: Sequence[tuple[str, bool]]) -> Item:
    if len(sources) == 1:
        text, on_grid = sources[0]
        item = await _grid_item(grid, text) if on_grid else _local_item(text)
        if not item.is_directory:
            return item
    raise UsageError("the target is a mutable file, which takes one file; give a directory")


async def _grid_item(grid: Grid, text: str) -> Item:
    child, name = await _found(grid, text)
    return copy_to_grid.Item(name, name or "the source", None, child)


async def _found(grid: Grid, text: str) -> tuple[directory.Child, str]:
    """Return the object at a path, and its name; the name is "" if the path is only a cap or an alias."""
    root, names = await root_of(grid, text)
    way = await directory.look_up(grid, root, names)
    if len(way) <= len(names):
        name = names[len(way) - 1]
        raise NoSuchChild(
            f"there is no '{printable(name)}' to copy; 'pipegrid ls' lists what exists", name
        )
    return way[-1], names[-1] if names else ""


def _local_item(path: str) -> Item:
    if not os.path.exists(path):
        raise SourceError(f"there is no local file {printable(path)}; check the path")
    raw = os.fsencode(os.path.basename(os.path.abspath(path)))
    return copy_to_grid.Item(file_metadata.entry_name(raw)[0], path, path)


def _check_named(items: Sequence[Item], target: str) -> None:
    for item in items:
        if not item.name:
            raise UsageError(
                "the cap of a file contains no name; add one to the target: "
                f"{'' if target.startswith('URI:') else printable(target.rstrip('/'))}/NAME"
            )


async def fetch_copies(
    grid: Grid,
    console: Console,
    sources: Sequence[str],
    target: str,
    recursive: bool,
    force: bool,
) -> ExitStatus:
    """
    Copy from the grid to a local file or directory; return the status.

    Raises:
        UsageError, NoSuchChild: the copy is not possible.
        PipegridError: the only source could not be fetched, as with ``get``.
    """
    alone = len(sources) == 1
    printer = CopyPrinter(console, several=not alone)
    found = await _found_among(grid, sources, recursive, printer.failed)
    if not found:
        return one_status(printer.statuses)
    if alone and found[0][0].kind != "directory" and not os.path.isdir(target):
        if target.endswith("/"):
            raise SinkError(
                f"there is no directory {printable(target)}; make it, or leave out the slash"
            )
        await _fetch_file(grid, console, found[0][0], target, force)
        return ExitStatus.DONE
    placed = _placed(found, target, None if alone else printer.failed)
    home = cmd_get_cat.made_home(target)
    for child, place in placed:
        printer.statuses.add(await _fetch(grid, console, child, place, force, alone, home))
    return one_status(printer.statuses)


async def _found_among(
    grid: Grid,
    sources: Sequence[str],
    recursive: bool,
    failed: Callable[[str, Exception], None],
) -> list[tuple[directory.Child, str]]:
    """Return the objects at several paths, and their names; arguments and errors are those of ``_items``."""
    found: list[tuple[directory.Child, str]] = []
    for number, source in enumerate(sources, 1):
        try:
            child, name = await _found(grid, source)
            if child.kind == "directory" and not recursive:
                shown = f"'{printable(name)}'" if name else "the source"
                raise UsageError(f"{shown} is a directory; add -r to copy all that is in it")
            found.append((child, name))
        except PipegridError as error:  # noqa: PERF203
            if len(sources) == 1:
                raise
            failed(argument_label(source, number), error)
    return found


async def _fetch(
    grid: Grid,
    console: Console,
    child: directory.Child,
    place: str,
    force: bool,
    alone: bool,
    home: DirectoryFd,
) -> ExitStatus:
    """Fetch an object into a directory. Report its failure, or, if it is ``alone``, raise the error."""
    try:
        if child.kind == "directory":
            return await _fetch_directory(grid, console, child, place, force, home)
        await _fetch_file(grid, console, child, place, force, home)
    except PipegridError as error:
        if alone:
            raise
        return console.failed(error, place, {"path": place}, True)
    return ExitStatus.DONE


def _placed(
    found: Sequence[tuple[directory.Child, str]],
    target: str,
    failed: Callable[[str, Exception], None] | None,
) -> list[tuple[directory.Child, str]]:
    """
    Return each object with its local path; refuse names that lead outside the target, and a path that another
    object has.

    Args:
        failed: see ``_items``; None: raise the error, since there is only one source.
    """
    taken: set[str] = set()
    result = []
    for child, name in found:
        try:
            place = _place_of(child, name, target)
            if place in taken:
                raise UsageError(
                    f"two sources would be copied to {printable(place)}; copy them one after the other"
                )
        except UsageError as error:
            if failed is None:
                raise
            failed(name or "the source", error)
            continue
        if place != target:
            taken.add(place)
        result.append((child, place))
    return result


def _place_of(child: directory.Child, name: str, target: str) -> str:
    if not name and child.kind == "directory":
        return target
    if not name:
        raise UsageError(
            "the cap of a file contains no name; give the name of a file as the target"
        )
    if name in (".", "..") or "/" in name or "\0" in name:
        raise UsageError(
            f"'{printable(name)}' cannot be the name of a local file; give one as the target"
        )
    return os.path.join(target, name)


async def _fetch_directory(
    grid: Grid, console: Console, child: directory.Child, place: str, force: bool, home: DirectoryFd
) -> ExitStatus:
    import json

    metadata_json = json.dumps(child.metadata).encode()
    options = tree_transfers.TreeOptions(force)
    return await tree_transfers.fetch_tree(
        grid, console, child.cap, place, options, metadata_json, home
    )


async def _fetch_file(
    grid: Grid,
    console: Console,
    child: directory.Child,
    place: str,
    force: bool,
    home: DirectoryFd | None = None,
) -> None:
    if child.cap is None:
        raise UsageError("no cap is known that reads this; use the write cap of its directory")
    cap = caps.fetchable(child.cap)
    part = (0, None) if isinstance(cap, MutableCap) else (0, cap.size)
    with progress_bar.ProgressBar(console, "cp") as progress:
        output = output_file.resumable(console, place, force, home)
        result = await cmd_get_cat.fetch(grid, console, cap, part, output, progress.transfer())
    console.json_result({"path": place, "size": result.size})
