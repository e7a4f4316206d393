"""``pipegrid stats``: what is in a tree, counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob
from pipegrid.cli.options import common_options, segment_limit_option, wait_option
from pipegrid.cli.outcome import one_status

if TYPE_CHECKING:
    from pipegrid.tree.facade import Grid


@click.command(name="stats")
@click.argument("path", metavar="CAP[/PATH]")
@wait_option
@segment_limit_option
@common_options
def command(path: str) -> GridJob:
    """
    Count the files and directories of a tree, each once, and their bytes.

    Names and meanings are those of 'tahoe stats'. Sizes of mutable files and directories are not known before
    they are read, and are left out. A directory that cannot be read is told of, and counts for what is known
    of it; the exit status tells.
    """

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.cli.trees import complain, directory_at
        from pipegrid.tree.stats import TreeStats
        from pipegrid.tree.walk import Unreadable

        place = await directory_at(grid, path)
        statuses = set()
        stats = TreeStats()
        assert place.cap is not None
        with grid.tree.walk(place.cap) as tree:
            async for met in tree:
                if isinstance(met, Unreadable):
                    statuses.add(complain(console, met))
                stats.count(met)
        fields = stats.fields()
        lines = [
            f"{name}: {value}" for name, value in fields.items() if not isinstance(value, list)
        ]
        lines += [f"  {first}-{last} bytes: {files}" for first, last, files in stats.histogram()]
        console.result("\n".join(lines), fields)
        return one_status(statuses)

    return GridJob(work)
