"""``pipegrid mkdir``: a directory that can be changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob
from pipegrid.cli.options import common_options, wait_option
from pipegrid.cli.outcome import ExitStatus

if TYPE_CHECKING:
    from pipegrid.tree.facade import Grid


@click.command(name="mkdir")
@click.argument("path", metavar="[PATH]", required=False)
@click.option(
    "--format",
    type=click.Choice(["sdmf", "mdmf"]),
    default="sdmf",
    help="How the directory is stored; sdmf serves all but huge ones.",
)
@wait_option
@common_options
def command(path: str | None, format: str) -> GridJob:
    """
    Make a directory that can be changed, and print its cap, which lets change it.

    With PATH, ALIAS:some/path or CAP/some/path, it is linked there, and what is missing of the way is made.
    If there is a directory, its cap is printed.
    """

    async def work(grid: Grid, console: Console) -> int:
        if path is None:
            directory = await grid.create_directory(format=format)
        else:
            from pipegrid.cli.trees import root_of
            from pipegrid.tree.directory import make_directories

            root, names = root_of(grid, path)
            directory = await make_directories(grid, root, names, format)
        cap = directory.cap
        console.result(str(cap), {"cap": str(cap), "read_cap": str(cap.readonly())})
        return ExitStatus.DONE

    return GridJob(work)
