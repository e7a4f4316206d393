"""``pipegrid check``: is the file still there?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob
from pipegrid.cli.options import common_options, wait_option
from pipegrid.cli.outcome import ExitStatus
from pipegrid.cli.render import corruption_fields, located, plural

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
        console.result(_summary(result), _fields(cap.strip(), result))
        if not console.json:
            _say_more(console, result)
        return status(result)

    return GridJob(work)


def status(result: CheckResult) -> ExitStatus:
    """Return the exit status: the gravest of what was found."""
    if not result.recoverable:
        return ExitStatus.NOT_ENOUGH_SHARES
    if result.corrupt:
        return ExitStatus.CORRUPTION
    return ExitStatus.DONE if result.healthy else ExitStatus.FAILED


def _summary(result: CheckResult) -> str:
    if result.total_shares == 0:
        return "healthy: the file is in its cap"
    state = "healthy" if result.healthy else "damaged" if result.recoverable else "lost"
    text = (
        f"{state}: {len(result.good_shares)} of {plural(result.total_shares, 'share')} good, "
        f"any {result.required_shares} restore the file; happiness {result.happiness}"
    )
    if result.corrupt:
        text += f"; {plural(len(result.corrupt), 'problem')} found"
    if result.unreachable:
        text += f"; {plural(len(result.unreachable), 'server')} out of reach"
    return text


def _say_more(console: Console, result: CheckResult) -> None:
    for error in result.corrupt:
        console.say(f"pipegrid: {located(error)}")
    for nickname in result.unreachable:
        console.say(f"pipegrid: {nickname} is out of reach")
    for number, servers in sorted(result.good_shares.items()):
        console.detail(f"share {number}: {', '.join(servers)}")


def _fields(cap: str, result: CheckResult) -> dict[str, Any]:
    return {
        "cap": cap,
        "healthy": result.healthy,
        "recoverable": result.recoverable,
        "required_shares": result.required_shares,
        "total_shares": result.total_shares,
        "happiness": result.happiness,
        "good_shares": result.good_shares,
        "corrupt": corruption_fields(result.corrupt),
        "unreachable": result.unreachable,
    }
