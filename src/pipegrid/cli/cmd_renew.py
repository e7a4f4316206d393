"""``pipegrid renew``: have servers keep the shares of files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pipegrid.cli.console import Console
from pipegrid.cli.health import are_down, lost
from pipegrid.cli.job import GridJob, Invocation
from pipegrid.cli.options import CapArguments, cap_arguments, grid_options, limit_options
from pipegrid.cli.outcome import ExitStatus
from pipegrid.cli.render import grouped, say_some
from pipegrid.cli.upkeep import recursive_option, upkeep_job
from pipegrid.core.text import counted

if TYPE_CHECKING:
    from pipegrid.cli.files import NamedFile
    from pipegrid.grid import Grid
    from pipegrid.transfer.results import RenewResult


@click.command(name="renew")
@cap_arguments
@recursive_option
@limit_options
@grid_options
@click.pass_obj
def command(invocation: Invocation, caps: CapArguments, recursive: bool) -> GridJob:
    """
    Add leases to the shares of files, or renew them, so that servers keep them.

    No share is read: it takes one question to each server. A verifier cap is enough; '-' reads caps from
    standard input. The exit status is 0 if all shares that were found have a lease now, 1 if some have none
    or servers were out of reach, 4 if those with a lease are too few to restore the file; with several
    files, the worst of these: 4, 1, 0.
    """

    async def alone(grid: Grid, console: Console, cap: Any) -> RenewResult:
        return await grid.renew(cap)

    return upkeep_job(invocation, caps, recursive, "renew", {"renew": True}, report, alone)


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
    if result.unreachable:
        console.say(f"pipegrid: {lead}{are_down(result.unreachable)}")
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
        f"{len(result.leases)} of {counted(result.total_shares, 'share')} have a lease now, "
        f"on {counted(len(servers), 'server')}"
    )
    if not result.recoverable:
        return f"{lost(result)}: {text}; any {result.required_shares} restore the file"
    return f"renewed: {text}"
