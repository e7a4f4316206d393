"""``pipegrid put``: store files, print their caps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob
from pipegrid.cli.options import (
    EMPTY_NAME,
    check_key_options,
    choose_params,
    common_options,
    encoding_options,
    happy_option,
    key_options,
    wait_option,
)

if TYPE_CHECKING:
    from pipegrid.grid import Grid


@click.command(name="put")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path())
@encoding_options
@happy_option
@key_options
@click.option(
    "-l",
    "--long",
    is_flag=True,
    help="Print the name of each file behind its cap; 'get --cap-file' reads that.",
)
@wait_option
@common_options
def command(
    files: tuple[str, ...],
    required_shares: int | None,
    total_shares: int | None,
    segment_bytes: int | None,
    happy: int | None,
    convergence: bytes | None,
    random_key: bool,
    long: bool,
) -> GridJob:
    """
    Store files ('-' is standard input) and print their capabilities.

    There is one line for each file, in the order of the arguments. A file that cannot be stored does
    not stop the others.
    """
    check_key_options(convergence, random_key)
    if "" in files:
        raise click.UsageError(f"FILE: {EMPTY_NAME}", click.get_current_context())
    if files.count("-") > 1:
        raise click.UsageError("standard input can be stored only once", None)

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.cli.uploads import Uploads

        params = choose_params(grid.config.params, required_shares, total_shares, segment_bytes)
        options: dict[str, Any] = {
            "params": params,
            # Who asks for three shares in all cannot mean that seven servers must have one.
            "happy": min(grid.config.happy, params.total_shares) if happy is None else happy,
            "convergence": convergence,
            "random_key": random_key,
        }
        return await Uploads(grid, console, files, options, with_names=long).run()

    return GridJob(work)
