"""``pipegrid put``: stores files, and prints their caps."""

from __future__ import annotations

from typing import Any, NamedTuple

import click

from pipegrid.cli import destination_child, put_files, tree_transfers
from pipegrid.cli.command_job import GridJob
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus
from pipegrid.cli.options import (
    EMPTY_NAME,
    Encoding,
    any_path,
    choose_params,
    encoding_options,
    gathered,
    grid_options,
    happy_option,
    key_options,
    limit_options,
    read_only_option,
    usage_error,
)
from pipegrid.cli.tree_transfers import SelectionOptions, selection_options
from pipegrid.tree import tree_grid


class PutOptions(NamedTuple):
    """
    The options of ``put``; see their declarations.

    Attributes:
        selection: arguments of ``SelectionOptions``, which select files in directories.
        key: arguments of ``Grid.put``, which say how the keys of files are made.
    """

    recursive: bool
    mutable: bool
    format: str | None
    force: bool
    read_only: bool
    selection: dict[str, Any]
    encoding: Encoding
    happy: int | None
    key: dict[str, Any]
    long: bool

    @property
    def makes_plain_files(self) -> bool:
        """Whether all given options are also valid for mutable files."""
        has_key = self.key["random_key"] or self.key["convergence"] is not None
        return not (self.recursive or has_key or self.encoding["max_segment_bytes"] is not None)

    def selected(self) -> SelectionOptions | None:
        """
        Return which files in directories are stored; None without ``-r``.

        Raises:
            click.UsageError: options for directories are given without ``-r``.
        """
        if self.recursive:
            return SelectionOptions(**self.selection)
        if any(each not in ((), None, False) for each in self.selection.values()):
            raise usage_error("these options are for directories; add -r")
        return None


@click.command(name="put")
@click.argument(
    "files",
    nargs=-1,
    required=True,
    metavar="FILE... [PATH]",
    type=click.Path(readable=False),
    shell_complete=any_path,
)
@click.option(
    "-r",
    "--recursive",
    is_flag=True,
    help="Each FILE is a directory: store it with everything in it, and print its capability.",
)
@click.option(
    "--mutable",
    is_flag=True,
    help="Store files whose content can be replaced; their write caps are printed.",
)
@click.option(
    "--format",
    type=click.Choice(["sdmf", "mdmf"]),
    help="Format of a mutable file: sdmf, one segment; or mdmf, of which parts can be changed.  "
    "[default: as configured, or sdmf]",
)
@click.option(
    "-f",
    "--force",
    is_flag=True,
    help="With PATH: replace what has this name, except a mutable directory. A mutable file is replaced "
    "only with --mutable; without it, its content is overwritten, with or without -f.",
)
@read_only_option
@selection_options
@encoding_options
@happy_option
@key_options
@click.option(
    "-l",
    "--long",
    is_flag=True,
    help="Print the name of each file after its cap; 'get --cap-file' reads that.",
)
@limit_options
@grid_options
@gathered("options", PutOptions)
def put_command(files: tuple[str, ...], options: PutOptions) -> GridJob:
    """
    Store files ('-' is standard input) and print their capabilities.

    There is one line for each file, in the order of the arguments. A file that cannot be stored does not
    stop the others.

    With PATH, ALIAS:some/name or CAP/some/name, one FILE is linked into a mutable directory; missing
    directories are created. A mutable file of that name, or one whose write cap is PATH, is overwritten in
    place; anything else is replaced only with -f. If PATH is a directory, the file keeps its name in it; a
    PATH that ends in a slash must be a directory.

    With -r, directories are stored, empty ones, links, modes and times included. What cannot be read is
    named and left out; then the exit status is 1. Named pipes, sockets and devices are skipped, and counted.
    """
    if "" in files:
        raise usage_error(f"FILE: {EMPTY_NAME}")
    selected = options.selected()
    sources, path = _split(files, options.recursive)
    _check_place(path, options)
    placed = _is_placed(path, sources, options)

    async def work(grid: tree_grid.Grid, console: Console) -> int:
        how = {**_encoding(grid, options.encoding, options.happy), **options.key}
        if placed:
            kind = (options.format or grid.config.mutable_format) if options.mutable else None
            place = put_files.PutTarget(path, kind, options.force, options.read_only)
            await put_files.put_at(grid, console, sources[0], place, how)
            return ExitStatus.DONE
        if selected is not None:
            return await tree_transfers.put_trees(
                grid, console, sources, selected, how, options.long
            )
        return await put_files.Uploads(grid, console, sources, how, options.long).run()

    return GridJob(work, path or "")


def _split(files: tuple[str, ...], recursive: bool) -> tuple[tuple[str, ...], str | None]:
    """Return the sources, and the path on the grid to store at, or None."""
    if files.count("-") > 1:
        raise click.UsageError("standard input can be stored only once", None)
    destination = put_files.destination_of(files)
    if recursive and destination is not None:
        raise usage_error(
            "put -r has no PATH; 'pipegrid cp -r' copies a directory to a place on the grid"
        )
    if len(files) > 1 and destination is None and not recursive:
        meant = destination_child.alias_in(files[-1])
        if meant:  # raises before other files are stored
            raise usage_error(f"there is no file '{meant[:-1]}'; did you mean '{meant}'?")
    return (files if destination is None else files[:-1]), destination


def _check_place(destination: str | None, options: PutOptions) -> None:
    """Raise click.UsageError if options contradict each other."""
    if options.format is not None and not options.mutable:
        raise usage_error("only mutable files have a format; add --mutable")
    if options.force and destination is None:
        raise usage_error("-f is for a PATH on the grid; there is none here")
    if options.read_only and destination is None:
        raise usage_error(
            "--read-only needs a PATH; without one the write cap of the mutable file would be lost"
        )
    if options.mutable and not options.makes_plain_files:
        raise usage_error(
            "a mutable file has a key and a segment size of its own, and no directory; leave out -r, "
            "--convergence, --random-key and --segment-size"
        )


def _is_placed(destination: str | None, sources: tuple[str, ...], options: PutOptions) -> bool:
    """Return whether one file is stored at a path on the grid, or as a mutable file."""
    placed = destination is not None or options.mutable
    if placed and (len(sources) != 1 or options.long):
        raise usage_error(
            "give one FILE with --mutable or a PATH, and no -l; 'pipegrid cp' copies several to a place"
        )
    return placed


def _encoding(grid: tree_grid.Grid, encoding: Encoding, happy: int | None) -> dict[str, Any]:
    """
    Return encoding arguments for ``Grid.put``: the given options, and for the others the grid's
    configuration.
    """
    params = choose_params(grid.config.params, encoding)
    if happy is None:
        # With three shares in total, for example, the configured happiness of seven cannot be reached.
        happy = min(grid.config.happy, params.total_shares)
    return {"params": params, "happy": happy}
