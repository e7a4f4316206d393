"""``pipegrid mv``: another name, or another directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipegrid.cli.completing import grid_path
from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob
from pipegrid.cli.options import grid_options

if TYPE_CHECKING:
    from pipegrid.tree.tree_grid import Grid


@click.command(name="mv")
@click.argument("sources", nargs=-1, required=True, metavar="PATH...", shell_complete=grid_path)
@click.argument("path", metavar="PATH", shell_complete=grid_path)
@click.option(
    "-f",
    "--force",
    is_flag=True,
    help="Replace what has the new name, but no directory that can change.",
)
@grid_options
def command(sources: tuple[str, ...], path: str, force: bool) -> GridJob:
    """
    Rename or move files or directories; their metadata moves with them.

    All are ALIAS:some/name or CAP/some/name. If the last is an existing directory, the name stays; missing
    directories are created. Several go into a directory that exists. Between two directories it is linked
    first and taken out then, so that nothing is lost if that is interrupted; the same command finishes it.
    """

    async def move_one(grid: Grid, console: Console, source: str) -> None:
        from pipegrid.cli.changing import missing, spot_at
        from pipegrid.cli.trees import root_of
        from pipegrid.errors import UsageError
        from pipegrid.tree.directory import is_same, move

        old = await spot_at(grid, source)
        if old.there is None:
            raise missing(old)
        new = await spot_at(grid, path, old.name, make=True)
        if new.directory.cap == old.there.cap and not new.missing and root_of(grid, path)[1]:
            new = await spot_at(grid, path)  # not into itself: it has got there already
        if old.there.cap is not None and old.there.cap in new.way:
            raise UsageError(
                "a directory cannot go into itself, since no path would lead to it then"
            )
        if new.missing or (old.directory.cap, old.name) != (new.directory.cap, new.name):
            if old.directory.cap == new.directory.cap or not is_same(old.there, new.there):
                new.check_free(force, old.there.cap)
            await move(old.directory, old.name, await new.reach(), new.name, force)
        console.json_result({"name": new.name, "cap": str(old.there.cap)})

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.cli.changing import check_takes
        from pipegrid.cli.files import each_argument

        await check_takes(grid, path, sources)
        return await each_argument(console, sources, lambda source: move_one(grid, console, source))

    return GridJob(work, *sources, path)
