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
    limit_options,
    segment_limit_option,
    upkeep_bounds,
    wait_option,
)
from pipegrid.cli.outcome import ExitStatus
from pipegrid.cli.render import grouped, plural, say_some
from pipegrid.cli.upkeep import files_or_trees, look_after, recursive_option

if TYPE_CHECKING:
    from pipegrid.cli.files import NamedFile
    from pipegrid.grid import Grid
    from pipegrid.transfer.results import CheckResult, RepairResult


@click.command(name="repair")
@cap_arguments
@recursive_option
@limit_options
@wait_option
@segment_limit_option
@common_options
@click.pass_obj
def command(
    invocation: Invocation, caps: tuple[str, ...], cap_files: tuple[str, ...], recursive: bool
) -> GridJob:
    """
    Make again the shares of files that are missing or damaged.

    All shares are fetched and every byte of them is checked; good ones stay where they are, and
    their leases are renewed. A verifier cap is enough; '-' stands for caps on standard input. The exit
    status is 0 if every share is there now, 3 if no server took some of them, 4 if too few are left to
    restore the file; with several files, the worst of these: 4, 3, 0. 'check --repair' fetches less: it
    believes servers which shares they have, and fetches those of damaged files alone.
    """
    check_caps(caps, cap_files)
    from pipegrid.transfer.results import CheckResult, RepairResult

    files = files_or_trees(invocation.console, caps, cap_files, recursive)

    async def work(grid: Grid, console: Console) -> int:
        def show(file: NamedFile[Any], result: CheckResult | RepairResult) -> ExitStatus:
            lead = f"{file.label}: " if recursive or len(files) > 1 else ""
            if isinstance(result, CheckResult):  # it is in its cap
                result = RepairResult(result.cap, result, result, {}, [], [], 0.0)
            return report(console, file, result, lead)

        if len(files) == 1 and not recursive:
            from pipegrid.cli.progress import Progress
            from pipegrid.cli.trees import located
            from pipegrid.core.filecaps import keepable

            with Progress(console, "repair") as progress:
                file = await located(grid, files[0], keepable)
                call = progress.transfer()
                return show(file, await grid.repair(file.cap, progress=call))
        from pipegrid.transfer.upkeep.upkeep import Todo

        bounds, todo = upkeep_bounds(invocation), Todo(verify=True, repair=True)
        return await look_after(grid, console, files, todo, bounds, "repair", show, recursive)

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
