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
    limit_options,
    wait_option,
)
from pipegrid.cli.treeput import Chosen, selection_options

if TYPE_CHECKING:
    from pipegrid.tree.facade import Grid


@click.command(name="put")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path())
@click.option(
    "-r",
    "--recursive",
    is_flag=True,
    help="Each FILE is a directory: store it with all that is in it, and print its capability.",
)
@selection_options
@encoding_options
@happy_option
@key_options
@click.option(
    "-l",
    "--long",
    is_flag=True,
    help="Print the name of each file behind its cap; 'get --cap-file' reads that.",
)
@limit_options
@wait_option
@common_options
def command(
    files: tuple[str, ...],
    recursive: bool,
    exclude: tuple[str, ...],
    exclude_from: tuple[str, ...],
    exclude_vcs: bool,
    files_from: str | None,
    one_file_system: bool,
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

    With -r, directories are stored, empty ones, links, modes and times included. What cannot be read, and
    what has no content, such as a socket, is named and left out; then the exit status is 1.
    """
    check_key_options(convergence, random_key)
    if "" in files:
        raise click.UsageError(f"FILE: {EMPTY_NAME}", click.get_current_context())
    chosen = None
    if recursive:
        chosen = Chosen(exclude, exclude_from, exclude_vcs, files_from)
    elif exclude or exclude_from or exclude_vcs or files_from is not None or one_file_system:
        raise click.UsageError(
            "only of directories a part is stored; add -r", click.get_current_context()
        )
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
        if chosen is not None:
            from pipegrid.cli.treeput import put_trees

            return await put_trees(grid, console, files, chosen, one_file_system, options, long)
        return await Uploads(grid, console, files, options, with_names=long).run()

    return GridJob(work)
