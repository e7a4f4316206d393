"""``pipegrid alias``: names for directories."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipegrid.cli.app import CommandGroup
from pipegrid.cli.console import Console
from pipegrid.cli.exit_status import ExitStatus
from pipegrid.cli.job import GridJob, OfflineJob
from pipegrid.cli.options import (
    alias_name,
    common_options,
    format_option,
    grid_options,
    read_only_option,
)

if TYPE_CHECKING:
    from pathlib import Path

    from pipegrid.tree.tree_grid import Grid


@click.group(name="alias", cls=CommandGroup)
@common_options
def alias_command() -> None:
    """
    Give directories names, which paths can begin with: NAME:some/path.

    They are stored in private/aliases of the client's directory, as Tahoe-LAFS has them: with -d of a node's
    directory both programs share them.
    """


@alias_command.command(name="add")
@click.argument("name")
@click.argument("cap")
@common_options
def add(name: str, cap: str) -> OfflineJob:
    """Let NAME stand for the directory of CAP."""
    directory = _configured()

    def work(console: Console) -> int:
        from pipegrid.cli.cap_file import check_no_file
        from pipegrid.core.caps import parse_cap
        from pipegrid.core.text import as_pasted
        from pipegrid.errors import UsageError
        from pipegrid.tree.aliases import add_alias, checked_name
        from pipegrid.tree.grid_paths import has_path

        check_no_file(cap)
        text = as_pasted(cap).removesuffix("/")
        if has_path(text):
            raise UsageError(
                "an alias stands for the cap of a directory, and this is a path; 'pipegrid mkdir PATH' "
                "prints the cap, if the directory can be changed"
            )
        add_alias(directory, name, text)
        _warn_if_elsewhere(console, directory, text)
        console.json_result({"alias": checked_name(name), "cap": str(parse_cap(text))})
        return ExitStatus.DONE

    return OfflineJob(work)


@alias_command.command(name="create")
@click.argument("name")
@format_option
@read_only_option
@grid_options
def create(name: str, format: str | None, read_only: bool) -> GridJob:
    """Make a new directory that can be changed, let NAME stand for it, and print its cap."""

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.tree.aliases import add_alias, check_free, checked_name

        wanted, home = checked_name(name), grid.config.directory
        check_free(home, wanted)  # before anything is stored
        directory = await grid.create_directory(format=format)
        cap = str(directory.cap)
        if read_only:
            add_alias(home, wanted, cap)
            cap = str(directory.cap.readonly())
        # Else first of all: if the alias cannot be written, the cap is what is left.
        try:
            console.result(cap, {"alias": wanted, "cap": cap})
        finally:
            if not read_only:
                add_alias(home, wanted, cap)
        return ExitStatus.DONE

    return GridJob(work)


@alias_command.command(name="list")
@click.option("--read-only", is_flag=True, help="Print the read caps, which can be shared.")
@common_options
def list_(read_only: bool) -> OfflineJob:
    """List the aliases and their caps: with them the directories can be changed."""
    from pipegrid.cli.grid_arguments import client_directory

    directory = client_directory()

    def work(console: Console) -> int:
        from pipegrid.core.caps import UnknownCap, parse_cap
        from pipegrid.core.text import printable
        from pipegrid.errors import CapError
        from pipegrid.tree.aliases import read_aliases

        status = ExitStatus.DONE
        for name, text in sorted(read_aliases(directory).items()):
            try:
                cap = parse_cap(text)
                if read_only and isinstance(cap, UnknownCap):
                    raise CapError("its cap is of a kind that is not known here")
                shown = str(
                    cap.readonly() if read_only and not isinstance(cap, UnknownCap) else cap
                )
            except CapError as error:
                status = ExitStatus(console.complain(error, about=printable(name)))
                continue
            console.result(f"{printable(name)}: {shown}", {"alias": name, "cap": shown})
        return status

    return OfflineJob(work)


@alias_command.command(name="remove")
@click.argument("name", shell_complete=alias_name)
@common_options
def remove(name: str) -> OfflineJob:
    """Forget NAME; the directory stays, and its cap is printed, since it may be the only copy."""
    directory = _configured()

    def work(console: Console) -> int:
        from pipegrid.tree.aliases import ROOT_NAME, as_written, read_aliases, remove_alias

        def show(cap: str) -> None:
            console.result(cap, {"alias": name.removesuffix(":"), "cap": cap})

        # Before it is forgotten: if it cannot be printed, the alias is what is left.
        remove_alias(directory, name, show)
        bare = name.strip().removesuffix(":")
        if as_written(bare, read_aliases(directory)) is not None:
            path = directory / "private" / ROOT_NAME
            console.say(f"pipegrid: '{bare}' stands for the directory of {path} now")
        return ExitStatus.DONE

    return OfflineJob(work)


def _warn_if_elsewhere(console: Console, directory: Path, cap: str) -> None:
    """Say that the servers of a directory are missing, where all that are known are on this machine."""
    from pipegrid.core.caps import UnknownCap, parse_cap
    from pipegrid.errors import UsageError
    from pipegrid.grid.client_config import load
    from pipegrid.grid.embedded_grid import lacks

    known = parse_cap(cap)
    storage_index = None if isinstance(known, UnknownCap) else known.storage_index
    try:
        elsewhere = storage_index is not None and lacks(
            load(directory, offline=True), storage_index
        )
    except UsageError:
        return  # whoever opens the grid tells what is wrong
    if elsewhere:
        console.say(
            "pipegrid: no share of this directory is on this machine, and no other servers are known here; "
            "join the grid that has it with 'pipegrid init NURL...', and add the alias there"
        )


def _configured() -> Path:
    """
    Raises:
        UsageError: nothing is configured there.
    """
    from pipegrid.cli.grid_arguments import client_directory
    from pipegrid.errors import UsageError
    from pipegrid.grid.client_paths import is_configured

    directory = client_directory()
    if not is_configured(directory):
        raise UsageError(
            f"{directory} is no client's directory, so no servers are known; join the grid of the alias with "
            "'pipegrid init NURL...', or name a client's directory with -d"
        )
    return directory
