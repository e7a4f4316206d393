"""``pipegrid renew``: have servers keep the shares of files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pipegrid.cli.console import Console
from pipegrid.cli.health import say_unreachable
from pipegrid.cli.job import GridJob, Invocation
from pipegrid.cli.options import cap_arguments, check_caps, common_options, wait_option
from pipegrid.cli.outcome import ExitStatus
from pipegrid.cli.render import grouped, plural, say_some

if TYPE_CHECKING:
    from pipegrid.cli.files import NamedFile
    from pipegrid.grid import Grid
    from pipegrid.transfer.results import RenewResult

FILES_AT_ONCE = 10


@click.command(name="renew")
@cap_arguments
@wait_option
@common_options
@click.pass_obj
def command(invocation: Invocation, caps: tuple[str, ...], cap_files: tuple[str, ...]) -> GridJob:
    """
    Add leases to the shares of files, or renew them, so that servers keep them.

    No share is read: it takes one question to each server. A verifier cap is enough. The exit status is
    0 if all shares that were found have a lease now, 1 if some have none or servers were out of reach, 4 if
    those with a lease are too few to restore the file; with several files, 1 if these differ.
    """
    check_caps(caps, cap_files)
    from pipegrid.cli.files import each_in_order, named_files
    from pipegrid.cli.trees import located
    from pipegrid.core.filecaps import checkable

    files = named_files(invocation.console, caps, cap_files, checkable)

    async def work(grid: Grid, console: Console) -> int:
        async def renew(file: NamedFile[Any]) -> RenewResult:
            file = await located(grid, file, checkable)
            return await grid.renew(file.cap)

        def show(file: NamedFile[Any], result: RenewResult) -> ExitStatus:
            return report(console, file, result, f"{file.label}: " if len(files) > 1 else "")

        return await each_in_order(console, files, FILES_AT_ONCE, renew, show)

    return GridJob(work)


def report(console: Console, file: NamedFile[Any], result: RenewResult, lead: str) -> ExitStatus:
    """Print what came of it, each line beginning with ``lead``."""
    from pipegrid.cli.files import identity

    console.result(
        lead + summary(result),
        {
            **identity(file),
            "leases": result.leases,
            "required_shares": result.required_shares,
            "total_shares": result.total_shares,
            "unreachable": result.unreachable,
            "reasons": result.reasons,
        },
    )
    say_unreachable(console, result.unreachable, lead)
    say_some(console, [f"{lead}no lease: {reason}" for reason in grouped(result.reasons)])
    for number, servers in result.leases.items():
        console.detail(f"{lead}share {number}: {', '.join(servers)}")
    if not result.recoverable:
        return ExitStatus.NOT_ENOUGH_SHARES
    return ExitStatus.FAILED if result.unreachable or result.reasons else ExitStatus.DONE


def summary(result: RenewResult) -> str:
    """Return it in one line."""
    if result.total_shares == 0:
        return "nothing to renew: the file is in its cap"
    servers = {server for holders in result.leases.values() for server in holders}
    text = (
        f"{len(result.leases)} of {plural(result.total_shares, 'share')} have a lease now, "
        f"on {plural(len(servers), 'server')}"
    )
    if not result.recoverable:
        return f"lost: {text}; any {result.required_shares} restore the file"
    return f"renewed: {text}"
