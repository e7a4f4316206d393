"""``pipegrid status``: which servers are there?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob
from pipegrid.cli.options import common_options
from pipegrid.cli.outcome import ExitStatus
from pipegrid.cli.render import amount

if TYPE_CHECKING:
    from pipegrid.grid import Grid
    from pipegrid.transfer.results import ServerStatus


@click.command(name="status")
@common_options
def command() -> GridJob:
    """
    Ask every server whether it is there, how far away, and how much room it has.

    The exit status is 3 if fewer servers answer than an upload needs.
    """

    async def work(grid: Grid, console: Console) -> int:
        import attrs

        servers = await grid.status()
        for server in servers:
            console.result(_line(server), attrs.asdict(server))
        reachable = sum(server.reachable for server in servers)
        console.say(
            f"pipegrid: {reachable} of {len(servers)} servers reachable, an upload needs "
            f"{grid.config.happy}; directory {grid.config.directory}"
        )
        return ExitStatus.DONE if reachable >= grid.config.happy else ExitStatus.UNHAPPY

    return GridJob(work)


def _line(server: ServerStatus) -> str:
    if not server.reachable:
        return f"{server.nickname}  unreachable: {server.reason}"
    rtt = "" if server.rtt_s is None else f"{server.rtt_s * 1000:.1f} ms  "
    version = server.version or "unknown version"
    return f"{server.nickname}  {rtt}{amount(server.available_bytes)} free  {version}"
