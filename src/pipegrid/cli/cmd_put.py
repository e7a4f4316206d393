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
    read_only_option,
    wait_option,
)
from pipegrid.cli.outcome import ExitStatus
from pipegrid.cli.treeput import Chosen, selection_options

if TYPE_CHECKING:
    from pipegrid.tree.facade import Grid


@click.command(name="put")
@click.argument("files", nargs=-1, required=True, metavar="FILE... [PATH]", type=click.Path())
@click.option(
    "-r",
    "--recursive",
    is_flag=True,
    help="Each FILE is a directory: store it with all that is in it, and print its capability.",
)
@click.option(
    "--mutable",
    is_flag=True,
    help="Store files whose content can be replaced; their write caps are printed.",
)
@click.option(
    "--format",
    type=click.Choice(["sdmf", "mdmf"]),
    help="Of a mutable file: sdmf, one piece; or mdmf, of which parts can be changed.  [default: sdmf]",
)
@click.option("-f", "--force", is_flag=True, help="With PATH: replace what has this name.")
@read_only_option
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
    mutable: bool,
    format: str | None,
    force: bool,
    read_only: bool,
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

    With PATH, ALIAS:some/name or CAP/some/name, one FILE is linked into a directory that can be changed; what
    is missing of the way is made. A mutable file of that name is overwritten in place, as is one whose write
    cap is PATH; anything else is replaced with -f only. If PATH is a directory, the file keeps its name.

    With -r, directories are stored, empty ones, links, modes and times included. What cannot be read, and
    what has no content, such as a socket, is named and left out; then the exit status is 1.
    """
    check_key_options(convergence, random_key)
    _check_names(files)
    chosen = _chosen(recursive, exclude, exclude_from, exclude_vcs, files_from, one_file_system)
    sources, destination = _split(files, recursive)
    is_plain = not (recursive or convergence is not None or random_key or segment_bytes is not None)
    _check_place(destination, format, force, read_only, mutable, is_plain)
    placed = _is_placed(destination, sources, mutable, long)
    said = (required_shares, total_shares, segment_bytes, happy, convergence, random_key)

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.cli.uploads import Uploads

        options = _options(grid, *said)
        if placed:
            from pipegrid.cli.mutableput import put_at

            kind = (format or "sdmf") if mutable else None
            await put_at(grid, console, sources[0], destination, kind, force, options, read_only)
            return ExitStatus.DONE
        if chosen is not None:
            from pipegrid.cli.treeput import put_trees

            return await put_trees(grid, console, sources, chosen, one_file_system, options, long)
        return await Uploads(grid, console, sources, options, with_names=long).run()

    return GridJob(work)


def _check_names(files: tuple[str, ...]) -> None:
    if "" in files:
        raise click.UsageError(f"FILE: {EMPTY_NAME}", click.get_current_context())


def _chosen(
    recursive: bool,
    exclude: tuple[str, ...],
    exclude_from: tuple[str, ...],
    exclude_vcs: bool,
    files_from: str | None,
    one_file_system: bool,
) -> Chosen | None:
    """Return what is chosen of directories; None if files are stored."""
    if recursive:
        return Chosen(exclude, exclude_from, exclude_vcs, files_from)
    if exclude or exclude_from or exclude_vcs or files_from is not None or one_file_system:
        raise click.UsageError(
            "only of directories a part is stored; add -r", click.get_current_context()
        )
    return None


def _split(files: tuple[str, ...], recursive: bool) -> tuple[tuple[str, ...], str | None]:
    """Return what is stored, and the place on the grid that it goes to, if one is named."""
    from pipegrid.cli.mutableput import destination_of

    if files.count("-") > 1:
        raise click.UsageError("standard input can be stored only once", None)
    destination = None if recursive else destination_of(files)
    return (files if destination is None else files[:-1]), destination


def _check_place(
    destination: str | None,
    format: str | None,
    force: bool,
    read_only: bool,
    mutable: bool,
    is_plain: bool,
) -> None:
    """
    Raise click.UsageError if options do not go together.

    Args:
        is_plain: nothing is said that a mutable file has of its own, or that makes it a directory.
    """
    context = click.get_current_context()
    if format is not None and not mutable:
        raise click.UsageError("only mutable files have a format; add --mutable", context)
    if force and destination is None:
        raise click.UsageError("-f is for a PATH on the grid; there is none here", context)
    if read_only and destination is None:
        raise click.UsageError(
            "--read-only is for a file at a PATH: of any other mutable one the write cap would be lost",
            context,
        )
    if mutable and not is_plain:
        raise click.UsageError(
            "a mutable file has a key and a segment size of its own, and no directory; leave out -r, "
            "--convergence, --random-key and --segment-size",
            context,
        )


def _is_placed(
    destination: str | None, sources: tuple[str, ...], mutable: bool, long: bool
) -> bool:
    """Return whether one file is stored at a place, or as one that can change."""
    placed = destination is not None or mutable
    if placed and (len(sources) != 1 or long):
        raise click.UsageError(
            "give one FILE with --mutable or a PATH, and no -l", click.get_current_context()
        )
    return placed


def _options(
    grid: Grid,
    required_shares: int | None,
    total_shares: int | None,
    segment_bytes: int | None,
    happy: int | None,
    convergence: bytes | None,
    random_key: bool,
) -> dict[str, Any]:
    """Return the options of ``Grid.put``: what was said, and the grid's configuration for the rest."""
    params = choose_params(grid.config.params, required_shares, total_shares, segment_bytes)
    return {
        "params": params,
        # Who asks for three shares in all cannot mean that seven servers must have one.
        "happy": min(grid.config.happy, params.total_shares) if happy is None else happy,
        "convergence": convergence,
        "random_key": random_key,
    }
