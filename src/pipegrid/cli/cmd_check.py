"""``pipegrid check``: are the files still there?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pipegrid.cli.console import Console
from pipegrid.cli.health import fields, say_more, summary
from pipegrid.cli.job import GridJob, Invocation
from pipegrid.cli.options import cap_arguments, check_caps, common_options, wait_option
from pipegrid.cli.outcome import ExitStatus
from pipegrid.cli.render import grouped, say_some

if TYPE_CHECKING:
    from pipegrid.grid import Grid
    from pipegrid.transfer.results import CheckResult


FILES_AT_ONCE = 10


@click.command(name="check")
@cap_arguments
@click.option("--verify", is_flag=True, help="Fetch all shares and verify every byte of them.")
@click.option(
    "--add-lease",
    is_flag=True,
    help="Add a lease to the good shares, or renew it, as 'renew' does.",
)
@wait_option
@common_options
@click.pass_obj
def command(
    invocation: Invocation,
    caps: tuple[str, ...],
    cap_files: tuple[str, ...],
    verify: bool,
    add_lease: bool,
) -> GridJob:
    """
    Tell how many shares of files are left.

    The exit status is 0 if all are there, 1 if some are missing, 4 if too few are left to restore
    the file, 5 if some are damaged; with several files, 1 if these differ.
    """
    check_caps(caps, cap_files)
    from pipegrid.cli.files import NamedFile, each_in_order, identity, named_files
    from pipegrid.cli.trees import located
    from pipegrid.core.filecaps import checkable

    files = named_files(invocation.console, caps, cap_files, checkable)

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.cli.progress import Progress

        with Progress(console, "check", "share") as progress:

            async def check(file: NamedFile[Any]) -> CheckResult:
                file = await located(grid, file, checkable)
                report = progress.transfer()
                options = {"add_lease": True} if add_lease else {}
                return await grid.check(file.cap, verify=verify, progress=report, **options)

            def show(file: NamedFile[Any], result: CheckResult) -> ExitStatus:
                lead = f"{file.label}: " if len(files) > 1 else ""
                more = (
                    {"renewed": result.renewed, "lease_problems": result.lease_problems}
                    if add_lease
                    else {}
                )
                console.result(lead + summary(result), {**identity(file), **fields(result), **more})
                if not console.json:
                    say_more(console, result, lead)
                say_some(
                    console,
                    [f"{lead}no lease: {reason}" for reason in grouped(result.lease_problems)],
                )
                return status(result)

            return await each_in_order(console, files, FILES_AT_ONCE, check, show)

    return GridJob(work)


def status(result: CheckResult) -> ExitStatus:
    """Return the exit status: the gravest of what was found."""
    if not result.recoverable:
        return ExitStatus.NOT_ENOUGH_SHARES
    if result.corrupt and not result.healthy:
        return ExitStatus.CORRUPTION  # a damaged copy does no harm where there is a good one
    return ExitStatus.DONE if result.healthy and not result.lease_problems else ExitStatus.FAILED
