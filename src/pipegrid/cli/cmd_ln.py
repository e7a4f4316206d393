"""``pipegrid ln``: another name for what is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipegrid.cli.completing import grid_path
from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob
from pipegrid.cli.options import grid_options

if TYPE_CHECKING:
    from pipegrid.tree.tree_grid import Grid


@click.command(name="ln")
@click.argument(
    "sources", nargs=-1, required=True, metavar="CAP[/PATH]...", shell_complete=grid_path
)
@click.argument("path", metavar="PATH", shell_complete=grid_path)
@click.option(
    "-f",
    "--force",
    is_flag=True,
    help="Replace what has this name, but no directory that can change.",
)
@grid_options
def command(sources: tuple[str, ...], path: str, force: bool) -> GridJob:
    """
    Link files or directories into a directory that can be changed.

    PATH is ALIAS:some/name or CAP/some/name; if it is an existing directory, and CAP has a path, the name
    stays. Missing directories are created. Several go into a directory that exists.
    """

    async def link(grid: Grid, console: Console, source: str) -> None:
        from pipegrid.cli.changing import spot_at
        from pipegrid.cli.trees import root_of, shown_path
        from pipegrid.errors import NoSuchChild
        from pipegrid.tree.directory import link_of, look_up

        root, names = root_of(grid, source)
        way = await look_up(grid, root, names)
        if len(way) <= len(names):
            name = names[len(way) - 1]
            raise NoSuchChild(f"there is no '{shown_path([name])}' to link; check the path", name)
        spot = await spot_at(grid, path, names[-1] if names else None, make=True)
        spot.check_free(force, way[-1].cap)
        await (await spot.reach()).change([link_of(way[-1], spot.name, force)])
        console.json_result({"name": spot.name, "cap": str(way[-1].cap)})

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.cli.changing import check_takes
        from pipegrid.cli.files import each_argument

        await check_takes(grid, path, sources)
        return await each_argument(console, sources, lambda source: link(grid, console, source))

    return GridJob(work, *sources, path)
