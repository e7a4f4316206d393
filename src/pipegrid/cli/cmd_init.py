"""``pipegrid init``: make a client's directory."""

from __future__ import annotations

from pathlib import Path

import click

from pipegrid.cli.console import Console
from pipegrid.cli.job import Invocation, OfflineJob
from pipegrid.cli.options import choose_params, common_options, encoding_options


@click.command(name="init")
@click.option(
    "--local",
    is_flag=True,
    help="Make a grid on this machine, even if servers.yaml names servers.",
)
@click.option(
    "--servers",
    type=click.IntRange(1, 256),
    default=10,
    show_default=True,
    metavar="N",
    help="How many storage directories the local grid has.",
)
@encoding_options
@click.option(
    "--happy", type=click.IntRange(1, 256), metavar="H", help="Servers that an upload needs."
)
@common_options
@click.pass_obj
def command(
    invocation: Invocation,
    local: bool,
    servers: int,
    required_shares: int | None,
    total_shares: int | None,
    segment_bytes: int | None,
    happy: int | None,
) -> OfflineJob:
    """
    Make the client's directory, with a grid of its own on this machine.

    If the directory has a private/servers.yaml, its servers are the grid instead.

    The options become the defaults of later uploads.
    """

    def work(console: Console) -> int:
        from pipegrid.core.params import Params
        from pipegrid.grid.config import create_client, create_local, default_directory
        from pipegrid.grid.servers import load_static_servers

        params = choose_params(Params(), required_shares, total_shares, segment_bytes)
        directory = invocation.directory or default_directory()
        named = 0 if local else len(load_static_servers(Path(directory)).servers)
        if named:
            config = create_client(directory, params=params, happy=happy)
        else:
            config = create_local(directory, servers=servers, params=params, happy=happy)
        console.result(
            str(config.directory),
            {
                "directory": str(config.directory),
                "servers": named or servers,
                "required_shares": params.required_shares,
                "total_shares": params.total_shares,
                "happy": config.happy,
            },
        )
        return 0

    return OfflineJob(work)
