"""``pipegrid rm``: take names out of directories."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipegrid.cli.completing import grid_path
from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob
from pipegrid.cli.options import grid_options

if TYPE_CHECKING:
    from pipegrid.tree.tree_grid import Grid


@click.command(name="rm")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", shell_complete=grid_path)
@click.option(
    "-r", "--recursive", is_flag=True, help="Also a directory, with all that is below it."
)
@grid_options
def command(paths: tuple[str, ...], recursive: bool) -> GridJob:
    """
    Take files or directories out of their directories.

    Each PATH is ALIAS:some/name or CAP/some/name. A client that has the cap of what was there can read it
    until servers release it.
    """

    async def remove(grid: Grid, console: Console, path: str) -> None:
        from pipegrid.cli.changing import missing, spot_at
        from pipegrid.core.text import printable
        from pipegrid.errors import UsageError

        spot = await spot_at(grid, path)
        if spot.there is None:
            raise missing(spot)
        if spot.there.kind == "directory" and not recursive:
            raise UsageError(
                f"'{printable(spot.name)}' is a directory, whose cap may stand nowhere else; add -r to take "
                "it out with all that is below it"
            )
        if not await spot.directory.unlink_same(spot.name, spot.there):
            raise UsageError(
                f"'{printable(spot.name)}' was replaced by another client meanwhile, and stays; "
                f"look at it again"
            )
        console.json_result({"name": spot.name, "cap": str(spot.there.cap)})

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.cli.files import each_argument

        return await each_argument(console, paths, lambda path: remove(grid, console, path))

    return GridJob(work, *paths)
