"""``pipegrid status``: which servers are there?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob
from pipegrid.cli.options import grid_options
from pipegrid.cli.outcome import ExitStatus
from pipegrid.cli.render import amount
from pipegrid.core.text import counted, printable

if TYPE_CHECKING:
    from pipegrid.grid import Grid
    from pipegrid.grid.introducer import IntroducerStatus
    from pipegrid.transfer.results import ServerStatus


@click.command(name="status")
@grid_options
def command() -> GridJob:
    """
    Ask every server whether it is there, how far away, and how much room it has.

    A line for each: nickname, id, protocol, address, then round trip, room and version, or why it
    cannot be reached, and why it is given no new shares; then one for each introducer.

    With --wait-for it first waits for as many servers, and then tells how all of them are, whether
    they came or not.

    The exit status is 3 if fewer servers take shares than an upload needs: one that is full or
    read-only takes none, nor one without a valid certificate where grid managers are configured.
    """

    async def work(grid: Grid, console: Console) -> int:
        import attrs

        servers = await grid.status()
        for server in servers:
            console.result(_line(server), attrs.asdict(server))
        for introducer in grid.introducers:
            console.result(_introducer_line(introducer), {"introducer": attrs.asdict(introducer)})
        reachable = sum(server.reachable for server in servers)
        writable = sum(server.writable for server in servers)
        console.say(
            f"pipegrid: {reachable} of {counted(len(servers), 'server')} reachable, {writable} of them "
            f"with room for shares, an upload needs {grid.config.happy}; directory {grid.config.directory}"
        )
        return ExitStatus.DONE if writable >= grid.config.happy else ExitStatus.UNHAPPY

    return GridJob(work)


def _line(server: ServerStatus) -> str:
    who = f"{server.nickname}  {_short(server.server_id)}  {server.protocol}  {server.address}"
    no_uploads = f"  no uploads: {server.no_uploads}" if server.no_uploads else ""
    if not server.reachable:
        return printable(f"{who}  unreachable: {server.reason}{no_uploads}")
    rtt = "" if server.rtt_s is None else f"{server.rtt_s * 1000:.1f} ms  "
    version = server.version or "unknown version"
    # A server that has lines in its version would make some for others here.
    return printable(f"{who}  {rtt}{amount(server.available_bytes)} free  {version}{no_uploads}")


def _short(server_id: str) -> str:
    """Return as much of an id as people need to tell servers apart; ``--json`` has all of it."""
    return server_id if len(server_id) <= 16 else f"{server_id[:11]}…"


def _introducer_line(introducer: IntroducerStatus) -> str:
    who = f"introducer {introducer.name}  {introducer.address}"
    if introducer.connected:
        return f"{who}  connected, {counted(introducer.servers, 'server')} announced"
    return printable(f"{who}  not connected: {introducer.reason}")
