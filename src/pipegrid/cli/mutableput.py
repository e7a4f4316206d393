"""``put`` of what has a place: mutable files, and names in directories that can be changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from pipegrid.cli.stdin import InterruptibleInput, opened
from pipegrid.core.caps import Cap, MutableCap, UnknownCap
from pipegrid.core.text import printable
from pipegrid.errors import CapError, SourceError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from pipegrid.cli.changing import GridDestination
    from pipegrid.cli.console import Console
    from pipegrid.tree.tree_grid import Grid


def destination_of(files: Sequence[str]) -> str | None:
    """
    Return the last of the arguments of ``put`` if it is a place on the grid, or None if all are files.

    An alias that is there is one, and so is what looks like one, unless there is a local file of this name.

    Raises:
        UsageError: the aliases cannot be read.
    """
    last = files[-1]
    if len(files) < 2:
        return None
    from pipegrid.cli.changing import is_on_grid

    return last.strip() if last.strip() != "-" and is_on_grid(last) else None


async def put_at(
    grid: Grid,
    console: Console,
    file: str,
    destination: str | None,
    format: str | None,
    force: bool,
    options: dict[str, Any],
    read_only: bool = False,
) -> None:
    """
    Store one file and print its cap.

    Args:
        destination: a path on the grid, the write cap of a mutable file, or None.
        format: of a new mutable file; None for an immutable one.
        options: of ``Grid.put``.
        read_only: print the cap that reads.

    Raises:
        ChildExists: there is something of that name that is not to be replaced.
        PipegridError: the grid or the file failed.
    """
    from pipegrid.cli.changing import spot_at
    from pipegrid.cli.trees import root_of
    from pipegrid.core.caps import parse_cap

    keeps = format is not None or options["random_key"]  # nobody else has the cap
    show = partial(_show, console, grid.config.directory if keeps else None, file)
    with _source(console, file) as source:
        if destination is None:
            show(await _store(grid, source, format, options), read_only)
            return
        root, names = root_of(grid, destination)
        if not names and isinstance(cap := parse_cap(root), MutableCap):
            if cap.access != "write":
                raise CapError("this cap does not write the file; use its write cap")
            await grid.overwrite(cap, source)
            show(cap, read_only)
            return
        spot = await spot_at(grid, destination, _name_of(file), make=True)
        spot.check_kind()
        there = _overwritten(spot, format, force)
        if there is not None:
            await grid.overwrite(there, source)
            show(there, read_only)
            return
        spot.check_free(force)
        left: list[Cap] = []
        try:
            await _put_into(spot, source, format, force, options, left.append)
        except BaseException:
            if left:
                show(left[0], False)  # its cap is what is left of it
            raise
        show(left[0], read_only)


def _show(console: Console, keep_in: Path | None, file: str, cap: Cap, read_only: bool) -> None:
    """Print a cap; where it cannot be printed, it is kept in this client's directory."""
    from pipegrid.cli.render import print_cap

    given = cap.readonly() if read_only and not isinstance(cap, UnknownCap) else cap
    text, fields = str(given), {"path": file, "cap": str(given)}
    if keep_in is None:
        console.result(text, fields)
    else:
        print_cap(console, keep_in, text, fields, str(cap), file)


def _name_of(file: str) -> str | None:
    """Return what a local file is called in a directory, as ``put -r`` and ``cp`` call it."""
    from pipegrid.tree.metadata import entry_name

    return None if file == "-" else entry_name(os.fsencode(os.path.basename(file)))[0]


async def _put_into(
    spot: GridDestination,
    source: Any,
    format: str | None,
    force: bool,
    options: dict[str, Any],
    stored: Callable[[Cap], None],
) -> None:
    """Make what is missing of the way, store a new file and link it; ``stored`` is told its cap between."""
    if spot.missing and isinstance(source, str) and not os.path.exists(source):
        raise SourceError(f"there is no local file {printable(source)}; check the path")
    directory = await spot.reach()
    put: Callable[..., Any] = directory.put
    if format is not None:
        put, options = directory.put_mutable, {"format": format, "params": options["params"]}
    await put(spot.name, source, metadata={}, replace=force, stored=stored, **options)


def _overwritten(spot: GridDestination, format: str | None, force: bool) -> MutableCap | None:
    """
    Return the write cap of what is overwritten in place, if anything is.

    With force, too: whoever has its cap is to see the new content, and nobody may have it but this entry.

    Args:
        format: of a new mutable file, which takes the place of the old one only with force.
    """
    there = None if spot.there is None else spot.there.write_cap
    if not isinstance(there, MutableCap) or (force and format is not None):
        return None
    if format is not None:
        raise UsageError(
            "there is a mutable file of this name already; leave out --mutable to overwrite it, or "
            "add -f to put a new one in its place"
        )
    return there


async def _store(grid: Grid, source: Any, format: str | None, options: dict[str, Any]) -> Cap:
    if format is None:
        return (await grid.put(source, **options)).cap
    return (await grid.create_mutable(source, format=format, params=options["params"])).cap


@contextmanager
def _source(console: Console, file: str) -> Iterator[Any]:
    if file != "-" and os.path.isdir(file):
        raise SourceError(
            f"'{printable(file)}' is a directory; 'pipegrid cp -r' copies all that is in it"
        )
    source = opened(file, console.stdin)
    try:
        yield source
    finally:
        if isinstance(source, InterruptibleInput):
            source.give_up()
