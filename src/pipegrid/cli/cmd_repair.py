"""``pipegrid repair``: make again what is missing of files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pipegrid.cli.console import Console
from pipegrid.cli.health import fields, say_more, summary
from pipegrid.cli.job import GridJob, Invocation
from pipegrid.cli.options import (
    cap_arguments,
    check_caps,
    common_options,
    segment_limit_option,
    wait_option,
)
from pipegrid.cli.outcome import ExitStatus
from pipegrid.cli.render import grouped, plural, say_some

if TYPE_CHECKING:
    from pipegrid.cli.files import NamedFile
    from pipegrid.grid import Grid
    from pipegrid.transfer.results import RepairResult


FILES_AT_ONCE = 2


@click.command(name="repair")
@cap_arguments
@wait_option
@segment_limit_option
@common_options
@click.pass_obj
def command(invocation: Invocation, caps: tuple[str, ...], cap_files: tuple[str, ...]) -> GridJob:
    """
    Make again the shares of files that are missing or damaged.

    All shares are fetched and every byte of them is checked; good ones stay where they are, and
    their leases are renewed. A verifier cap is enough. The exit status is 0 if every share is there
    now, 3 if no server took some of them, 4 if too few are left to restore the file; with several
    files, 1 if these differ.
    """
    check_caps(caps, cap_files)
    from pipegrid.cli.files import each_in_order, named_files
    from pipegrid.cli.trees import located
    from pipegrid.core.filecaps import checkable

    files = named_files(invocation.console, caps, cap_files, checkable)

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.cli.progress import Progress

        with Progress(console, "repair") as progress:

            async def repair(file: NamedFile[Any]) -> RepairResult:
                file = await located(grid, file, checkable)
                return await grid.repair(file.cap, progress=progress.transfer())

            def show(file: NamedFile[Any], result: RepairResult) -> ExitStatus:
                return report(console, file, result, f"{file.label}: " if len(files) > 1 else "")

            return await each_in_order(console, files, FILES_AT_ONCE, repair, show)

    return GridJob(work)


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
