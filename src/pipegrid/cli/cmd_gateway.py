"""``pipegrid gateway``: serves Tahoe-LAFS's web API and the protocols of other programs, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipegrid.cli import log_file
from pipegrid.cli.command_job import GridJob, ReactorGridJob
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus
from pipegrid.cli.options import grid_options, log_option
from pipegrid.cli.startup import lazy_modules
from pipegrid.gateway import gateway_service, gateway_settings
from pipegrid.server import systemd
from pipegrid.tree import tree_grid


class GatewayJob(ReactorGridJob):
    """A job that runs the gateway until it is stopped, which counts as success."""

    follows_blacklist = True


@click.command(name="gateway")
@click.option(
    "--port",
    metavar="PORT",
    help="A TCP port of this machine alone (0: any free one), or a Twisted endpoint.  "
    "[default: the directory's web.port, or tcp:3456:interface=127.0.0.1]",
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A name by which clients reach the gateway, in addition to its address; may be repeated.",
)
@click.option(
    "--append-only",
    is_flag=True,
    help="restic's clients may store and read, and remove only locks.",
)
@click.option(
    "--private-repos",
    is_flag=True,
    help="Each of restic's users has access to the repositories /restic/USER/ and /restic/USER/NAME/ alone.",
)
@click.option(
    "--htpasswd-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Users and passwords of restic's clients.  [default: private/.htpasswd in the directory; without "
    "it, no client has access]",
)
@click.option(
    "--no-auth",
    is_flag=True,
    help="restic's clients need no password: all users of this machine have access, and no others.",
)
@log_option
@grid_options
def gateway_command(
    port: str | None,
    hosts: tuple[str, ...],
    append_only: bool,
    private_repos: bool,
    htpasswd_file: Path | None,
    no_auth: bool,
    log_path: str | None,
) -> GridJob:
    """
    Let other programs use the grid, until it is stopped: Tahoe-LAFS's web API, and restic's REST protocol
    below /restic/.

    Prints the gateway's address, and writes it to node.url in the directory, where 'tahoe' and other clients
    of a Tahoe-LAFS node look for it. -d may be a Tahoe-LAFS node's directory: its tahoe.cfg is followed, and
    options given here take precedence.

    Any client that reaches the port can store files, and read and change what its capabilities name. So it
    listens on this machine only, unless the port says otherwise.
    """

    async def work(reactor: Any, grid: tree_grid.Grid, console: Console) -> int:
        own = log_file, gateway_service, systemd
        lazy_modules.bring_in_extra("the gateway needs", "gateway", *own)
        restic = gateway_settings.ResticSettings(htpasswd_file, append_only, private_repos, no_auth)
        chosen = gateway_settings.load_settings(
            Path(grid.config.directory), port=port, hosts=hosts, restic=restic
        )
        with log_file.logging_to(console, log_path, reactor):
            gateway = gateway_service.RunningGateway(reactor, grid, chosen, console.note)
            await gateway.start()
            timer = systemd.stay_alive(reactor)
            try:
                console.result(gateway.url, {"url": gateway.url})
                systemd.notify(systemd.READY)
                await gateway.wait_until_cancelled()
            finally:
                systemd.notify(systemd.STOPPING)
                if timer is not None:
                    timer.stop()
                await gateway.stop()
        return ExitStatus.DONE

    return GatewayJob(work)
