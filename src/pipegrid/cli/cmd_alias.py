"""``pipegrid alias``: gives names to directories."""

from __future__ import annotations

from pathlib import Path

import click

from pipegrid.cli import cap_list_files, cap_lookup
from pipegrid.cli.command_grammar import CommandGroup
from pipegrid.cli.command_job import GridJob, OfflineJob
from pipegrid.cli.console import Console
from pipegrid.cli.error_report import ExitStatus
from pipegrid.cli.options import (
    alias_name,
    common_options,
    format_option,
    grid_options,
    read_only_option,
)
from pipegrid.core import caps
from pipegrid.core.text import as_pasted, printable
from pipegrid.errors import CapError, UsageError
from pipegrid.grid import client_config, client_paths, local_grid
from pipegrid.tree import aliases, grid_paths, tree_grid


@click.group(name="alias", cls=CommandGroup)
@common_options
def alias_command() -> None:
    """
    Name directories, so that paths can begin with NAME:some/path.

    Aliases are stored in private/aliases of the client's directory, in the format of Tahoe-LAFS: with -d
    NODEDIR both programs share them.
    """


@alias_command.command(name="add")
@click.argument("name")
@click.argument("cap")
@common_options
def add(name: str, cap: str) -> OfflineJob:
    """Let NAME stand for the directory of CAP."""
    directory = _configured()

    def work(console: Console) -> int:
        cap_list_files.check_no_file(cap)
        text = as_pasted(cap).removesuffix("/")
        if grid_paths.has_path(text):
            raise UsageError(
                "an alias stands for the cap of a directory, and this is a path; 'pipegrid mkdir PATH' "
                "prints the cap, if the directory can be changed"
            )
        aliases.add_alias(directory, name, text)
        _warn_of_missing_servers(console, directory, text)
        console.json_result({"alias": aliases.checked_name(name), "cap": str(caps.parse_cap(text))})
        return ExitStatus.DONE

    return OfflineJob(work)


@alias_command.command(name="create")
@click.argument("name")
@format_option
@read_only_option
@grid_options
def create(name: str, format: str | None, read_only: bool) -> GridJob:
    """Make a mutable directory, let NAME stand for it, and print its cap."""

    async def work(grid: tree_grid.Grid, console: Console) -> int:
        wanted, home = aliases.checked_name(name), grid.config.directory
        aliases.check_free(home, wanted)  # checks before anything is stored
        directory = await grid.create_directory(format=format)
        cap = str(directory.cap)
        if read_only:
            aliases.add_alias(home, wanted, cap)
            cap = str(directory.cap.readonly())
        # A write cap is printed before the alias is written: if writing fails, the cap is not lost.
        try:
            console.result(cap, {"alias": wanted, "cap": cap})
        finally:
            if not read_only:
                aliases.add_alias(home, wanted, cap)
        return ExitStatus.DONE

    return GridJob(work)


@alias_command.command(name="list")
@click.option("--read-only", is_flag=True, help="Print the read caps, which can be shared.")
@common_options
def list_(read_only: bool) -> OfflineJob:
    """List the aliases and their write caps; any program that has a write cap can change the directory."""
    directory = cap_lookup.client_directory()

    def work(console: Console) -> int:
        status = ExitStatus.DONE
        for name, text in sorted(aliases.read_aliases(directory).items()):
            try:
                cap = caps.parse_cap(text)
                if read_only:
                    if isinstance(cap, caps.UnknownCap):
                        raise CapError("this version does not know its kind of cap")
                    cap = cap.readonly()
            except CapError as error:
                status = ExitStatus(console.complain(error, about=printable(name)))
                continue
            console.result(f"{printable(name)}: {cap}", {"alias": name, "cap": str(cap)})
        return status

    return OfflineJob(work)


@alias_command.command(name="remove")
@click.argument("name", shell_complete=alias_name)
@common_options
def remove(name: str) -> OfflineJob:
    """Forget NAME; the directory stays, and its cap is printed, since it may be the only copy."""
    directory = _configured()

    def work(console: Console) -> int:
        def show(cap: str) -> None:
            console.result(cap, {"alias": name.removesuffix(":"), "cap": cap})

        # The cap is printed before the alias is removed: if printing fails, the alias stays.
        aliases.remove_alias(directory, name, show)
        bare = name.strip().removesuffix(":")
        if aliases.as_written(bare, aliases.read_aliases(directory)) is not None:
            path = directory / "private" / aliases.ROOT_NAME
            console.note(f"'{bare}' stands for the directory of {path} now")
        return ExitStatus.DONE

    return OfflineJob(work)


def _warn_of_missing_servers(console: Console, directory: Path, cap: str) -> None:
    """Warn if all known servers are on this machine, and none of them has a share of a directory."""
    known = caps.parse_cap(cap)
    storage_index = None if isinstance(known, caps.UnknownCap) else known.storage_index
    try:
        on_other_servers = storage_index is not None and local_grid.lacks(
            client_config.load(directory, offline=True), storage_index
        )
    except UsageError:
        return  # the command reports the error when it opens the grid
    if on_other_servers:
        console.note(
            "no share of this directory is on this machine, and no other servers are known here; "
            "join the grid that has it with 'pipegrid init NURL...', and add the alias there"
        )


def _configured() -> Path:
    """
    Return the client's directory.

    Raises:
        UsageError: the directory is not configured.
    """
    directory = cap_lookup.client_directory()
    if not client_paths.is_configured(directory):
        raise UsageError(
            f"{directory} is not a client's directory, so no servers are known; join the grid of the alias "
            "with "
            "'pipegrid init NURL...', or name a client's directory with -d"
        )
    return directory
