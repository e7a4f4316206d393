"""
Paths on the command line, and walks that commands show.

Wherever a command takes a cap it takes ``CAP/some/path`` and ``ALIAS:some/path`` as well. What such a path
leads to is found when the grid is open: ``Locator`` is the one place for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from pipegrid.cli.files import NamedFile
from pipegrid.cli.outcome import ExitStatus, one_status
from pipegrid.core.caps import (
    ChkCap,
    ChkVerifierCap,
    DirectoryCap,
    LitCap,
    MutableCap,
    UnknownCap,
    unknown_kind,
)
from pipegrid.core.text import printable
from pipegrid.errors import CapError

if TYPE_CHECKING:
    from pipegrid.cli.console import Console
    from pipegrid.grid.grid import Grid
    from pipegrid.tree.grid_paths import PathEnd, PathFinder
    from pipegrid.tree.tree_grid import Grid as TreeGrid
    from pipegrid.tree.walk import Met

C = TypeVar("C", bound=ChkCap | ChkVerifierCap | LitCap | MutableCap)


class Locator:
    """Finds what the paths of many files lead to; ``grid_paths.PathFinder`` does it for directories."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._paths: PathFinder | None = None

    async def located(self, file: NamedFile[Any], understand: Callable[[Any], C]) -> NamedFile[C]:
        """
        Return a file with the cap of what its path leads to; without a path it is itself.

        Args:
            understand: returns a cap of the kind that is wanted, or raises CapError.

        Raises:
            NoSuchChild: there is no such name on the way.
            CapError: what is there is of another kind, or the file has a problem.
            PipegridError: a directory on the way could not be read.
        """
        if file.problem is not None:
            raise file.problem
        if not file.names:
            return file
        if self._paths is None:
            from pipegrid.tree.grid_paths import PathFinder

            self._paths = PathFinder(self._grid)
        place = await self._paths.resolve(file.root, file.names)
        return attrs.evolve(file, cap=understand(_there(place)), names=())


def _there(place: PathEnd) -> Any:
    cap = place.best or place.cap
    if cap is None:
        raise CapError(
            f"the entry '{printable(place.names[-1])}' holds a write cap only, which the read cap of its "
            "directory does not give; use the write cap of the directory"
        )
    return cap


async def place_of(grid: Grid, text: str) -> PathEnd:
    """Return what a cap or path leads to; errors as of ``Locator.located``."""
    from pipegrid.tree.grid_paths import resolve

    root, names = root_of(grid, text)
    place = await resolve(grid, root, names)
    _there(place)
    return place


def root_of(grid: Grid, text: str) -> tuple[str, tuple[str, ...]]:
    """
    Take a path apart that may begin with an alias of the grid's directory; see ``paths.parse``.

    Raises:
        UsageError: it is no path, or there is no such alias.
    """
    from pipegrid.cli.meant import check_no_file
    from pipegrid.errors import UsageError
    from pipegrid.tree.grid_paths import parse_here

    try:
        return parse_here(text, grid.config.directory)
    except UsageError:
        check_no_file(text)
        raise


async def directory_at(grid: Grid, text: str) -> PathEnd:
    """
    Return the directory that a cap or path leads to.

    Raises:
        CapError: something else is there.
        PipegridError: as of ``Locator.located``.
    """
    place = check_known(await place_of(grid, text))
    if not isinstance(place.cap, DirectoryCap):
        raise CapError("this is not the cap of a directory; use 'get' or 'cat' for a file")
    return place


def check_known(place: PathEnd) -> PathEnd:
    """
    Return a place, if a cap is known that reads what is there.

    Raises:
        CapError: it is a verifier cap, or one of a kind to come.
    """
    if place.kind != "unknown":
        return place
    cap = place.cap
    if isinstance(cap, UnknownCap):
        raise unknown_kind(cap)
    what = "directory" if isinstance(cap, DirectoryCap) else "file"
    raise CapError(
        f"this is the verifier cap of a {what}: it checks its shares, but does not show what is in it; use "
        "its read cap"
    )


def shown_path(path: Sequence[str]) -> str:
    """Return a path as a terminal can show it; ``.`` for the root."""
    return printable("/".join(path)) or "."


async def walk_through(
    grid: TreeGrid, console: Console, place: PathEnd, meet: Callable[[Met], None]
) -> ExitStatus:
    """
    Walk through a directory; returns the status of what could not be read, which is told, in JSON too.

    Args:
        meet: given everything that is met, unreadable directories as well, after they were told.
    """
    from pipegrid.tree.walk import Unreadable

    statuses = set()
    assert place.cap is not None
    with grid.tree.walk(place.cap) as tree:
        async for met in tree:
            if isinstance(met, Unreadable):
                fields, shown = {"path": list(met.path)}, shown_path(met.path)
                statuses.add(console.failed(met.error, shown, fields, cap=str(met.cap)))
            meet(met)
    return one_status(statuses)
