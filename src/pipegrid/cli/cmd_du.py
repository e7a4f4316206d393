"""``pipegrid du``: how large is a tree?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipegrid.cli.completing import grid_path
from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob
from pipegrid.cli.options import NO_SHORT_HELP, human_option, reading_options
from pipegrid.cli.outcome import ExitStatus
from pipegrid.cli.render import amount

if TYPE_CHECKING:
    from pipegrid.tree.tree_grid import Grid


@click.command(name="du", context_settings=NO_SHORT_HELP)
@click.argument("paths", nargs=-1, required=True, metavar="CAP[/PATH]...", shell_complete=grid_path)
@click.option("-s", "--summarize", is_flag=True, help="Only the sum.")
@human_option
@reading_options
def command(paths: tuple[str, ...], summarize: bool, human: bool) -> GridJob:
    """
    Print the bytes of the files in every directory of a tree, those below it included.

    Each file counts once, where it is met first, as each is stored once. Files whose cap does not say their
    size, such as mutable ones, count as nothing. Of several trees each is counted by itself.
    """

    async def measure(grid: Grid, console: Console, path: str, root: str | None) -> ExitStatus:
        from pipegrid.cli.cmd_ls import size_of
        from pipegrid.cli.trees import directory_at, shown_path, walk_through
        from pipegrid.tree.walk import Met, Unreadable

        sums: list[tuple[tuple[str, ...], int]] = []

        def close(depth: int) -> None:
            while len(sums) > depth:
                name, size = sums.pop()
                if sums:
                    sums[-1] = (sums[-1][0], sums[-1][1] + size)
                if not summarize or not sums:
                    within = shown_path(name)
                    if root is not None:
                        within = f"{root.rstrip('/')}/{within}" if name else root
                    more = {} if root is None else {"argument": root}
                    console.result(
                        f"{amount(size):>8} {within}" if human else f"{size:>15} {within}",
                        {**more, "path": list(name), "size": size},
                    )

        def meet(met: Met) -> None:
            close(len(met.path))
            if isinstance(met, Unreadable):
                return
            if met.listing is not None:
                sums.append((met.path, 0))
            elif met.kind == "file" and not met.again:
                name, size = sums[-1]
                sums[-1] = (name, size + (size_of(met.cap) or 0))

        status = await walk_through(grid, console, await directory_at(grid, path), meet)
        close(0)
        return status

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.cli.files import argument_label, each_argument

        numbers = iter(range(1, len(paths) + 1))

        async def each(path: str) -> ExitStatus:
            number = next(numbers)
            root = argument_label(path, number) if len(paths) > 1 else None
            return await measure(grid, console, path, root)

        return await each_argument(console, paths, each)

    return GridJob(work, *paths)
