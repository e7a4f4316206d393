"""``pipegrid mkdir``: a directory that can be changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipegrid.cli.completing import grid_path
from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob
from pipegrid.cli.options import format_option, grid_options, read_only_option, usage_error
from pipegrid.cli.outcome import ExitStatus
from pipegrid.cli.render import print_cap

if TYPE_CHECKING:
    from pipegrid.tree.tree_grid import Grid


@click.command(name="mkdir")
@click.argument("paths", nargs=-1, metavar="[PATH...]", shell_complete=grid_path)
@format_option
@read_only_option
@grid_options
def command(paths: tuple[str, ...], format: str | None, read_only: bool) -> GridJob:
    """
    Make directories that can be changed, and print their write caps.

    With PATH, ALIAS:some/path or CAP/some/path, it is linked there, and missing directories are created.
    If there is a directory, its cap is printed.
    """
    if read_only and not paths:
        raise usage_error(
            "--read-only is for a directory at a PATH: of any other the write cap would be lost"
        )

    async def make(grid: Grid, console: Console, path: str | None) -> None:
        if path is None:
            directory = await grid.create_directory(format=format)
        else:
            from pipegrid.cli.trees import root_of
            from pipegrid.tree.directory import make_directories

            root, names = root_of(grid, path)
            directory = await make_directories(grid, root, names, format)
        cap = directory.cap
        read_cap = str(cap.readonly())
        fields = {"read_cap": read_cap} if read_only else {"cap": str(cap), "read_cap": read_cap}
        shown = read_cap if read_only else str(cap)
        print_cap(console, grid.config.directory, shown, fields, str(cap), path or "")

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.cli.files import each_argument

        if paths:
            return await each_argument(console, paths, lambda path: make(grid, console, path))
        await make(grid, console, None)
        return ExitStatus.DONE

    return GridJob(work, *(paths or ("",)))
