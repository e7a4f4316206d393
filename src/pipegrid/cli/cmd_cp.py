"""``pipegrid cp``: copies to, from and within a grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipegrid.cli.completing import any_path
from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob
from pipegrid.cli.options import EMPTY_NAME, grid_options, limit_options, usage_error
from pipegrid.core.text import printable

if TYPE_CHECKING:
    from pipegrid.tree.tree_grid import Grid


@click.command(name="cp")
@click.argument(
    "arguments",
    nargs=-1,
    required=True,
    metavar="SOURCE... TARGET",
    type=click.Path(readable=False),
    shell_complete=any_path,
)
@click.option(
    "-r", "--recursive", is_flag=True, help="Copy directories, too, with all that is in them."
)
@click.option("-f", "--force", is_flag=True, help="Replace existing files.")
@limit_options
@grid_options
def command(arguments: tuple[str, ...], recursive: bool, force: bool) -> GridJob:
    """
    Copy files and directories to a grid, from it, or within it.

    Each argument is a local path, or a place on the grid: ALIAS:some/path, CAP or CAP/some/path. If TARGET
    is an existing directory, each SOURCE goes into it and keeps its name; of a directory that is named by
    its cap or alias alone, what is in it. Several go into a directory only, as does a directory; it and the
    directories above it are created if they are missing.

    What can never change is linked, and no byte of it moves. Of what can change a copy is made as it is
    now, which never changes; 'ln' gives the original another name. A mutable file that has the name of a
    copy is overwritten, and keeps its cap; a directory of that name that can be changed takes what is
    copied; anything else is replaced with -f only.
    """
    if len(arguments) < 2:
        raise usage_error("give a source and a target")
    if any(not each.strip() for each in arguments):
        raise usage_error(EMPTY_NAME)
    if "-" in arguments:
        raise usage_error("standard input and output are for 'put' and 'cat'; cp copies files")
    from pipegrid.cli.changing import alias_meant, is_on_grid

    *sources, target = arguments
    on_grid = [is_on_grid(source) for source in sources]
    to_grid = is_on_grid(target)
    if not (to_grid or all(on_grid)):
        meant = next(filter(None, map(alias_meant, arguments)), "")
        if meant:
            raise usage_error(f"there is no file '{meant[:-1]}'; did you mean '{meant}'?")
        raise usage_error(
            f"'{printable(sources[on_grid.index(False)])}' and the target are both local files; one of them "
            "has to be on the grid: ALIAS:some/path or CAP/some/path"
        )

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.cli.copies import fetch_copies, store_copies

        if to_grid:
            given = list(zip(sources, on_grid, strict=True))
            return await store_copies(grid, console, given, target, recursive, force)
        return await fetch_copies(grid, console, sources, target, recursive, force)

    return GridJob(work, *arguments)
