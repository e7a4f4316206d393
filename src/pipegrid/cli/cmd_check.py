"""``pipegrid check``: are the files still there?"""

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
    upkeep_bounds,
    wait_option,
)
from pipegrid.cli.outcome import ExitStatus
from pipegrid.cli.render import grouped, say_some
from pipegrid.cli.upkeep import files_or_trees, look_after, recursive_option

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
    help="Make again what is missing, if enough is left; without --verify, what is there is believed to be "
    "good until it is fetched.",
)
@limit_options
@wait_option
@common_options
@click.pass_obj
def command(
    invocation: Invocation,
    caps: tuple[str, ...],
    cap_files: tuple[str, ...],
    recursive: bool,
    verify: bool,
    add_lease: bool,
    repair: bool,
) -> GridJob:
    """
    Tell how many shares of files are left.

    '-' stands for caps on standard input. Many files are asked about together, and told of as answers
    come. The exit status is 0 if all are there, 1 if some are missing, 3 if servers did not take what a
    repair made, 4 if too few are left to restore the file, 5 if some are damaged; with several files, the
    worst of these: 4, 5, 3, 1, 0.
    """
    check_caps(caps, cap_files)
    from pipegrid.transfer.results import RepairResult

    files = files_or_trees(invocation.console, caps, cap_files, recursive)

    async def work(grid: Grid, console: Console) -> int:
        def show(file: NamedFile[Any], result: CheckResult | RepairResult) -> ExitStatus:
            lead = f"{file.label}: " if recursive or len(files) > 1 else ""
            if isinstance(result, RepairResult):
                from pipegrid.cli.cmd_repair import report

                return report(console, file, result, lead)
            tell(console, file, result, lead, add_lease)
            return status(result)

        if len(files) == 1 and not (recursive or repair):
            from pipegrid.cli.progress import Progress
            from pipegrid.cli.trees import located
            from pipegrid.core.filecaps import keepable

            with Progress(console, "check", "share") as progress:
                file = await located(grid, files[0], keepable)
                options = {"add_lease": True} if add_lease else {}
                call = progress.transfer()
                result = await grid.check(file.cap, verify=verify, progress=call, **options)
                return show(file, result)
        from pipegrid.transfer.upkeep.upkeep import Todo

        todo = Todo(verify=verify, add_lease=add_lease, repair=repair)
        bounds = upkeep_bounds(invocation)
        return await look_after(grid, console, files, todo, bounds, "check", show, recursive)

    return GridJob(work)


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
