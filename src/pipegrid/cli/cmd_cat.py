"""``pipegrid cat``: the bytes of files, on standard output."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob, Invocation
from pipegrid.cli.options import CapArguments, cap_arguments, reading_options
from pipegrid.cli.outcome import ExitStatus
from pipegrid.errors import UsageError

if TYPE_CHECKING:
    from pipegrid.grid import Grid


@click.command(name="cat")
@cap_arguments
@reading_options
@click.pass_obj
def command(invocation: Invocation, caps: CapArguments) -> GridJob:
    """
    Write files to standard output, one after the other.

    Each is a cap, perhaps with a path after it: CAP/some/path. Every byte is verified before it is written;
    the first that cannot be fetched ends it.
    """
    from pipegrid.cli.files import check_all, named_files, starts_of
    from pipegrid.cli.trees import Locator
    from pipegrid.core.caps import fetchable

    files = named_files(invocation.console, *caps, fetchable)
    check_all(files)  # before anything is written

    async def work(grid: Grid, console: Console) -> int:
        if console.json:
            raise UsageError("--json would mix with the files on standard output; leave it out")
        locator = Locator(grid)
        for file in files:
            cap = (await locator.located(file, fetchable)).cap
            await grid.get(cap, console.data_sink)
            console.data_sink.flush()
        return ExitStatus.DONE

    return GridJob(work, *starts_of(files))
