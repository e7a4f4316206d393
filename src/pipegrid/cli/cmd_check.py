"""``pipegrid check``: is the file still there?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipegrid.cli.console import Console
from pipegrid.cli.health import fields, say_more, summary
from pipegrid.cli.job import GridJob
from pipegrid.cli.options import common_options, wait_option
from pipegrid.cli.outcome import ExitStatus

if TYPE_CHECKING:
    from pipegrid.grid import Grid
    from pipegrid.transfer.results import CheckResult


@click.command(name="check")
@click.argument("cap")
@click.option("--verify", is_flag=True, help="Fetch all shares and verify every byte of them.")
@wait_option
@common_options
def command(cap: str, verify: bool) -> GridJob:
    """
    Tell how many shares of a file are left.

    The exit status is 0 if all are there, 1 if some are missing, 4 if too few are left to restore
    the file, 5 if some are damaged.
    """

    from pipegrid.core.filecaps import checkable

    file = checkable(cap)

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.cli.progress import Progress

        with Progress(console, "check") as progress:
            result = await grid.check(file, verify=verify, progress=progress.transfer())
        console.result(summary(result), {"cap": cap.strip(), **fields(result)})
        if not console.json:
            say_more(console, result)
        return status(result)

    return GridJob(work)


def status(result: CheckResult) -> ExitStatus:
    """Return the exit status: the gravest of what was found."""
    if not result.recoverable:
        return ExitStatus.NOT_ENOUGH_SHARES
    if result.corrupt:
        return ExitStatus.CORRUPTION
    return ExitStatus.DONE if result.healthy else ExitStatus.FAILED
