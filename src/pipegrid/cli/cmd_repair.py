"""``pipegrid repair``: make again what is missing of files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pipegrid.cli.console import Console
from pipegrid.cli.health import are_down, fields, say_more, summary
from pipegrid.cli.job import GridJob, Invocation
from pipegrid.cli.options import CapArguments, cap_arguments, limit_options, reading_options
from pipegrid.cli.outcome import ExitStatus
from pipegrid.cli.render import grouped, say_some
from pipegrid.cli.upkeep import recursive_option, upkeep_job
from pipegrid.core.text import counted

if TYPE_CHECKING:
    from pipegrid.cli.files import NamedFile
    from pipegrid.grid import Grid
    from pipegrid.transfer.results import CheckResult, RepairResult


@click.command(name="repair")
@cap_arguments
@recursive_option
@click.option(
    "-f",
    "--force",
    is_flag=True,
    help="Of what can change: write the newest version that can be read again, also where one is lost by it "
    "that is newer, or as new.",
)
@limit_options
@reading_options
@click.pass_obj
def command(invocation: Invocation, caps: CapArguments, recursive: bool, force: bool) -> GridJob:
    """
    Repair files: make missing or damaged shares again, and spread them over the servers.

    All shares are fetched and every byte of them is checked; good ones stay where they are, and their
    leases are renewed. A server that has no share that counts is sent one. A verifier cap is enough, but to
    repair a mutable file takes its write cap; '-' reads caps from standard input. The exit status is 0 if
    every share exists now, on as many servers as possible, 3 if servers did not take some, 4 if too few are
    left to restore the file; with several files, the worst of these: 4, 3, 0. 'check --repair' fetches
    less: it trusts the servers' lists of shares, and fetches those of damaged files alone.
    """
    from pipegrid.transfer.results import CheckResult, RepairResult

    def show(
        console: Console, file: NamedFile[Any], result: CheckResult | RepairResult, lead: str
    ) -> ExitStatus:
        if isinstance(result, CheckResult):  # it is in its cap
            result = RepairResult(result.cap, result, result, {}, [], [], 0.0)
        return report(console, file, result, lead)

    async def alone(grid: Grid, console: Console, cap: Any) -> RepairResult:
        from pipegrid.cli.progress import ProgressBar

        with ProgressBar(console, "repair") as progress:
            return await grid.repair(cap, progress=progress.transfer(), force=force)

    todo = {"verify": True, "repair": True, "force": force}
    return upkeep_job(invocation, caps, recursive, "repair", todo, show, alone)


def report(
    console: Console, file: NamedFile[Any], result: RepairResult, lead: str = ""
) -> ExitStatus:
    """Print what a repair did, each line beginning with ``lead``."""
    from pipegrid.cli.files import identity

    console.result(
        lead + _outcome(result),
        {
            **identity(file),
            "before": fields(result.before),
            "after": fields(result.after),
            "uploaded": result.uploaded,
            "renewed": result.renewed,
            "reasons": result.reasons,
            "elapsed_s": result.elapsed_s,
        },
    )
    if not console.json:
        say_more(console, result.before, lead)
        for number, server in result.uploaded.items():
            console.detail(f"{lead}share {number} made again: {server}")
    if result.whole:
        return ExitStatus.DONE
    say_some(console, [lead + reason for reason in grouped(result.reasons)])
    return ExitStatus.UNHAPPY


def _outcome(result: RepairResult) -> str:
    after = result.after
    if after.total_shares == 0:
        return summary(after)
    made = counted(len(result.uploaded), "share")
    if not result.whole:
        state = f"not repaired: {made} made again, but more servers must take some"
    elif result.uploaded:
        state = f"repaired: {made} made again"
    else:
        state = "healthy: nothing to repair"
    text = (
        f"{state}; {len(after.good_shares)} of {counted(after.total_shares, 'share')} good, "
        f"happiness {after.happiness}"
    )
    return f"{text}; {are_down(after.unreachable)}" if after.unreachable else text
