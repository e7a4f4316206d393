"""``pipegrid check``: are the files still there?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pipegrid.cli.console import Console
from pipegrid.cli.health import fields, say_more, summary
from pipegrid.cli.job import GridJob, Invocation
from pipegrid.cli.options import CapArguments, cap_arguments, grid_options, limit_options
from pipegrid.cli.outcome import ExitStatus
from pipegrid.cli.render import grouped, say_some
from pipegrid.cli.upkeep import recursive_option, upkeep_job

if TYPE_CHECKING:
    from pipegrid.cli.files import NamedFile
    from pipegrid.grid import Grid
    from pipegrid.transfer.results import CheckResult, RepairResult


@click.command(name="check")
@cap_arguments
@recursive_option
@click.option("--verify", is_flag=True, help="Fetch all shares and verify every byte of them.")
@click.option(
    "--add-lease",
    is_flag=True,
    help="Add a lease to the good shares, or renew it, as 'renew' does.",
)
@click.option(
    "--repair",
    is_flag=True,
    help="Make again what is missing, if enough is left, and spread what is on fewer servers than could "
    "have it; without --verify, shares that servers list are trusted until they are fetched.",
)
@limit_options
@grid_options
@click.pass_obj
def command(
    invocation: Invocation,
    caps: CapArguments,
    recursive: bool,
    verify: bool,
    add_lease: bool,
    repair: bool,
) -> GridJob:
    """
    Report how many shares of files are left, and whether they are on as many servers as they can be.

    '-' reads caps from standard input. Many files are checked together, and reported as servers answer. A
    file is 'reachable' if nothing but servers that are down is missing, and 'on too few servers' if more of
    those in reach could have a share: --repair changes that. The exit status is 0 if all shares exist, on
    as many servers as possible, 1 if some are missing or on too few servers, 3 if servers did not take what
    a repair made, 4 if too few are left to restore the file, 5 if some are damaged; with several files, the
    worst of these: 4, 5, 3, 1, 0.
    """
    from pipegrid.transfer.results import RepairResult

    def show(
        console: Console, file: NamedFile[Any], result: CheckResult | RepairResult, lead: str
    ) -> ExitStatus:
        if isinstance(result, RepairResult):
            from pipegrid.cli.cmd_repair import report

            return report(console, file, result, lead)
        tell(console, file, result, lead, add_lease)
        return status(result)

    async def alone(grid: Grid, console: Console, cap: Any) -> CheckResult:
        from pipegrid.cli.progress import ProgressBar

        with ProgressBar(console, "check", "share") as progress:
            options = {"add_lease": True} if add_lease else {}
            call = progress.transfer()
            return await grid.check(cap, verify=verify, progress=call, **options)

    todo = {"verify": verify, "add_lease": add_lease, "repair": repair}
    only = None if repair else alone
    return upkeep_job(invocation, caps, recursive, "check", todo, show, only)


def tell(
    console: Console, file: NamedFile[Any], result: CheckResult, lead: str, add_lease: bool
) -> None:
    """Tell what was found of one file, and which leases were not renewed if that was wanted."""
    from pipegrid.cli.files import identity

    leases = {"renewed": result.renewed, "lease_problems": result.lease_problems}
    more = leases if add_lease else {}
    console.result(lead + summary(result), {**identity(file), **fields(result), **more})
    if not console.json:
        say_more(console, result, lead)
    say_some(console, [f"{lead}no lease: {reason}" for reason in grouped(result.lease_problems)])


def status(result: CheckResult) -> ExitStatus:
    """Return the exit status: the gravest of what was found."""
    if not result.recoverable:
        return ExitStatus.NOT_ENOUGH_SHARES
    if result.corrupt and not result.healthy:
        return ExitStatus.CORRUPTION  # a damaged copy does no harm where there is a good one
    return ExitStatus.DONE if result.healthy and not result.lease_problems else ExitStatus.FAILED
