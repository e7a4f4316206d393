"""``pipegrid stats``: what is in a tree, counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipegrid.cli.completing import grid_path
from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob
from pipegrid.cli.options import reading_options

if TYPE_CHECKING:
    from pipegrid.tree.tree_grid import Grid


@click.command(name="stats")
@click.argument("path", metavar="CAP[/PATH]", shell_complete=grid_path)
@reading_options
def command(path: str) -> GridJob:
    """
    Count the files and directories of a tree, each once, and their bytes.

    Names and meanings are those of 'tahoe stats'. Sizes of mutable files and directories are not known before
    they are read, and are left out. A directory that cannot be read is reported, and counts for what is known
    of it; the exit status shows it.
    """

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.cli.trees import directory_at, walk_through
        from pipegrid.tree.walk import TreeStats

        stats = TreeStats()
        status = await walk_through(grid, console, await directory_at(grid, path), stats.count)
        fields = stats.fields()
        lines = [
            f"{name}: {value}" for name, value in fields.items() if not isinstance(value, list)
        ]
        lines += [f"  {first}-{last} bytes: {files}" for first, last, files in stats.histogram()]
        console.result("\n".join(lines), fields)
        return status

    return GridJob(work, path)
