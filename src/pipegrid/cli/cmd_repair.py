"""``pipegrid repair``: make again what is missing of a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipegrid.cli.console import Console
from pipegrid.cli.health import fields, say_more, summary
from pipegrid.cli.job import GridJob
from pipegrid.cli.options import common_options, wait_option
from pipegrid.cli.outcome import ExitStatus
from pipegrid.cli.render import plural

if TYPE_CHECKING:
    from pipegrid.grid import Grid
    from pipegrid.transfer.results import RepairResult


@click.command(name="repair")
@click.argument("cap")
@wait_option
@common_options
def command(cap: str) -> GridJob:
    """
    Make again the shares of a file that are missing or damaged.

    All shares are fetched and every byte of them is checked; good ones stay where they are, and
    their leases are renewed. A verifier cap is enough. The exit status is 0 if every share is there
    now, 3 if no server took some of them, 4 if too few are left to restore the file.
    """

    from pipegrid.core.filecaps import checkable

    file = checkable(cap)

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.cli.progress import Progress

        with Progress(console, "repair") as progress:
            result = await grid.repair(file, progress=progress.transfer())
        console.result(
            _outcome(result),
            {
                "cap": cap.strip(),
                "before": fields(result.before),
                "after": fields(result.after),
                "uploaded": result.uploaded,
                "renewed": result.renewed,
                "reasons": result.reasons,
                "elapsed_s": result.elapsed_s,
            },
        )
        if not console.json:
            say_more(console, result.before)
            for number, server in result.uploaded.items():
                console.detail(f"share {number} made again: {server}")
        if result.whole:
            return ExitStatus.DONE
        for reason in result.reasons:
            console.say(f"pipegrid: {reason}")
        return ExitStatus.UNHAPPY

    return GridJob(work)


def _outcome(result: RepairResult) -> str:
    after = result.after
    if after.total_shares == 0:
        return summary(after)
    made = plural(len(result.uploaded), "share")
    if not result.whole:
        state = f"not repaired: {made} made again, but more servers must take some"
    elif result.uploaded:
        state = f"repaired: {made} made again"
    else:
        state = "healthy: nothing to repair"
    return (
        f"{state}; {len(after.good_shares)} of {plural(after.total_shares, 'share')} good, "
        f"happiness {after.happiness}"
    )
