"""``pipegrid status``: shows the state of the grid's servers."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING

import click

from pipegrid.cli.command_job import GridJob
from pipegrid.cli.console import Console, columns, say_some
from pipegrid.cli.error_report import ExitStatus
from pipegrid.cli.options import grid_options
from pipegrid.core.text import amount, counted, printable
from pipegrid.wire import grid_manager_certificates

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pipegrid.grid import Grid
    from pipegrid.grid.introducer_client import IntroducerStatus
    from pipegrid.transfer.results import ServerStatus


@click.command(name="status")
@grid_options
def status_command() -> GridJob:
    """
    Ask every server for its round-trip time and its free space.

    The table has a line for each server: nickname, id, protocol, round trip, free space and address, or why
    it cannot be reached, and why it gets no new shares, or until when a grid manager has certified it; -v
    adds its version. A line for each introducer follows. A certificate that expires within a week is
    reported on standard error.

    With --wait-for it first waits until N servers have answered, and then reports all of them.

    The exit status is 3 if fewer servers accept shares than an upload needs. Servers that are full or
    read-only accept none; where grid managers are configured, those without a valid certificate get none.
    """

    async def work(grid: Grid, console: Console) -> int:
        import attrs

        servers = await grid.status()
        lines = _lines(servers, grid.config.directory, console.verbosity > 0)
        for server, line in zip(servers, lines, strict=True):
            console.result(line, server._asdict())
        for introducer in grid.introducers:
            console.result(_introducer_line(introducer), {"introducer": attrs.asdict(introducer)})
        say_some(console, _near_expiry(servers, time.time()))
        reachable = sum(server.reachable for server in servers)
        writable = sum(server.writable for server in servers)
        console.note(
            f"{reachable} of {counted(len(servers), 'server')} reachable, {writable} of them "
            f"with space for shares; an upload needs {grid.config.happy}; directory {grid.config.directory}"
        )
        return ExitStatus.DONE if writable >= grid.config.happy else ExitStatus.UNHAPPY

    return GridJob(work)


def _lines(servers: Sequence[ServerStatus], directory: Path, with_version: bool) -> list[str]:
    """Return a line for each server, with the reason if it does not respond."""
    has_ids = any(server.nickname != server.server_id for server in servers)
    rows = []
    for server in servers:
        who = [server.nickname, *([_short(server.server_id)] if has_ids else []), server.protocol]
        address = server.address.removeprefix(f"{directory}/")
        no_uploads = (
            f"  no uploads: {server.no_uploads}" if server.no_uploads else _certified(server)
        )
        if server.reachable:
            rtt = "" if server.rtt_s is None else f"{server.rtt_s * 1000:.1f} ms"
            version = [server.version or "unknown version"] if with_version else []
            row = [*who, rtt, f"{amount(server.available_bytes)} free", address, *version]
            row[-1] += no_uploads
        else:
            row = [*who, f"unreachable: {server.reason} ({address}){no_uploads}"]
        # A line break in a server's version would otherwise begin another line.
        rows.append([printable(cell) for cell in row])
    first = 3 if has_ids else 2
    return columns(rows, right=(first, first + 1))


def _certified(server: ServerStatus) -> str:
    if server.certified_until is None:
        return ""
    return f"  certified by {server.certified_by} until {server.certified_until[:10]}"


def _near_expiry(servers: Sequence[ServerStatus], now_s: float) -> list[str]:
    """Return a sentence for each certificate that expires soon."""
    found = []
    for server in servers:
        if server.certified_until is None:
            continue
        left_s = datetime.fromisoformat(server.certified_until).timestamp() - now_s
        if 0 < left_s <= grid_manager_certificates.NEAR_EXPIRY_S:
            found.append(
                f"the certificate of {server.nickname} by grid manager {server.certified_by} expires in "
                f"{grid_manager_certificates.in_words(left_s)}; without another it then gets no new shares"
            )
    return found


def _short(server_id: str) -> str:
    """Return the beginning of a server's id, long enough for people; ``--json`` has the whole id."""
    return server_id if len(server_id) <= 16 else f"{server_id[:11]}…"


def _introducer_line(introducer: IntroducerStatus) -> str:
    who = f"introducer {introducer.name}  {introducer.address}"
    if introducer.connected:
        return f"{who}  connected, {counted(introducer.servers, 'server')} announced"
    return printable(f"{who}  not connected: {introducer.reason}")
