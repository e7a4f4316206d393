"""``pipegrid get``: fetch a file, or a part of it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob
from pipegrid.cli.options import EMPTY_NAME, common_options, wait_option
from pipegrid.errors import UsageError

if TYPE_CHECKING:
    from pipegrid.core.caps import ChkCap, LitCap
    from pipegrid.grid import Grid


@click.command(name="get")
@click.argument("cap")
@click.option(
    "-o",
    "--output",
    type=click.Path(),
    metavar="FILE",
    help="Write to FILE, which appears when all of it is verified.  [default: standard output]",
)
@click.option("-f", "--force", is_flag=True, help="Replace FILE if it exists.")
@click.option(
    "--range",
    "byte_range",
    metavar="A-B",
    help="Only bytes A to B, both included, from 0; 'A-' is all from A on, '-N' the last N.",
)
@wait_option
@common_options
def command(cap: str, output: str | None, force: bool, byte_range: str | None) -> GridJob:
    """
    Fetch the file that CAP names.

    Every byte is verified before it is written. What was written to standard output before an error is
    good as far as it goes.
    """
    from pipegrid.cli.ranges import resolve
    from pipegrid.core.filecaps import readable

    # All that can be wrong with the question is found before a grid is opened.
    if force and output is None:
        raise click.UsageError("--force goes with -o", click.get_current_context())
    if output == "":
        raise click.UsageError(f"-o: {EMPTY_NAME}", click.get_current_context())
    file = readable(cap)
    start, length = (0, file.size) if byte_range is None else resolve(byte_range, file.size)

    async def work(grid: Grid, console: Console) -> int:
        if console.json and output is None:
            raise UsageError("--json would mix with the file on standard output; add -o FILE")
        return await fetch(grid, console, file, (start, length), output, force)

    return GridJob(work)


async def fetch(
    grid: Grid,
    console: Console,
    cap: ChkCap | LitCap,
    part: tuple[int, int],
    output: str | None,
    force: bool,
) -> int:
    """Fetch a part of a file, given as start and length, to where it shall go."""
    from pipegrid.cli.outfile import OutputFile
    from pipegrid.cli.progress import Progress
    from pipegrid.cli.render import corruption_fields, warn_of_corruption

    with ExitStack() as stack:
        sink = console.data_sink
        if output is not None:
            sink = stack.enter_context(OutputFile(output, force)).file
        progress = stack.enter_context(Progress(console, "get"))
        result = await grid.get(
            cap, sink, start=part[0], length=part[1], progress=progress.transfer()
        )
        sink.flush()
    warn_of_corruption(console, result.corrupt)
    console.detail(f"{result.size} bytes from shares {sorted(result.shares_used)}")
    if console.json:
        console.result(
            "",
            {
                "path": output,
                "size": result.size,
                "shares_used": result.shares_used,
                "corrupt": corruption_fields(result.corrupt),
            },
        )
    return 0
