"""``pipegrid mount``: mounts backups, or a directory of the grid, as a read-only file system."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pipegrid.cli import cap_lookup
from pipegrid.cli.command_job import GridJob, ReactorGridJob
from pipegrid.cli.error_report import ExitStatus
from pipegrid.cli.options import (
    EMPTY_NAME,
    any_path,
    byte_space,
    gathered,
    reading_options,
    usage_error,
)
from pipegrid.cli.startup import lazy_modules
from pipegrid.core import caps
from pipegrid.core.text import printable
from pipegrid.errors import CapError, UsageError
from pipegrid.grid import client_paths
from pipegrid.mount import mount_point_checks, mount_service
from pipegrid.tree.backup import backup_run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pipegrid.cli.console import Console
    from pipegrid.mount.mounted_tree import MountedNode
    from pipegrid.tree.tree_grid import Grid


class MountOptions(NamedTuple):
    """The options of ``mount``; see their declarations."""

    cache_bytes: int
    cache_directory: str | None
    allow_other: bool


@click.command(name="mount")
@click.argument("arguments", nargs=-1, metavar="[CAP[/PATH]] DIR", shell_complete=any_path)
@click.option(
    "--cache-size",
    "cache_bytes",
    type=byte_space,
    default="2GiB",
    show_default=True,
    metavar="SIZE",
    help="Keep at most SIZE of what was read on the local disk, unencrypted, as long as it is mounted; 0: "
    "keep nothing.",
)
@click.option(
    "--cache-dir",
    "cache_directory",
    type=click.Path(file_okay=False, readable=False),
    metavar="DIR",
    help="Keep it in DIR.  [default: pipegrid/mount in your cache directory]",
)
@click.option(
    "--allow-other",
    is_flag=True,
    help="Let other users of this machine read it, as far as its permissions allow.",
)
@reading_options
@gathered("options", MountOptions)
def mount_command(arguments: tuple[str, ...], options: MountOptions) -> GridJob:
    """
    Mount this client's backups, or the directory at CAP, on DIR, read-only, until it is unmounted.

    Backups are shown as NAME/TIME, with a link NAME/latest to the newest run; CAP may also be
    ALIAS:some/path. DIR is an empty directory. Ctrl-C or 'fusermount3 -u DIR' unmounts it. A file whose
    servers are absent cannot be read, and is tried again later; others are not affected.
    """
    if not 1 <= len(arguments) <= 2:
        raise usage_error("give the directory to mount on, and before it, if you like, one CAP")
    if any(not each.strip() for each in arguments) or options.cache_directory == "":
        raise usage_error(f"DIR or CAP: {EMPTY_NAME}")
    if options.cache_bytes and options.cache_bytes < 1 << 20:
        raise usage_error("--cache-size is at least 1MiB, or 0")
    cap = arguments[0] if len(arguments) == 2 else None
    directory = arguments[-1]
    if cap is not None and os.path.isdir(cap) and not os.path.isdir(directory):
        raise usage_error(f"DIR comes last, after '{printable(directory)}'")

    async def work(reactor: Any, grid: Grid, console: Console) -> int:
        say = console.note
        _bring_in()
        mount_point_checks.check_fuse()
        path = mount_point_checks.check_mount_point(directory, say)
        root = await _root_of(grid, cap, say)
        kept = options.cache_directory or client_paths.cache_directory() / "mount"
        settings = mount_service.MountSettings(
            path, Path(os.path.abspath(kept)), options.cache_bytes, options.allow_other
        )
        mount = mount_service.Mount(reactor, grid, root, settings, say)
        try:
            await mount.start()
            shown = printable(directory)
            console.result(shown, {"directory": path})
            say(f"mounted; Ctrl-C or {mount_point_checks.unmount_command(path)} unmounts it")
            await mount.wait()
        finally:
            if not await mount.stop():
                say("programs still had files open there; they cannot read them any more")
        return ExitStatus.DONE

    return ReactorGridJob(work, cap or "", makes=cap is not None)


def _bring_in() -> None:
    """
    Import all modules that a mount uses, before they are needed.

    Raises:
        UsageError: a library is missing.
    """
    own = mount_point_checks, mount_service
    try:
        lazy_modules.bring_in_extra("'pipegrid mount' needs", "mount", *own)
    except (OSError, AttributeError) as error:
        raise UsageError(
            "'pipegrid mount' needs FUSE's library, which cannot be loaded; install libfuse, such as "
            f"libfuse3-3 or fuse3 on Debian ({error})"
        ) from error


async def _root_of(
    grid: Grid, cap: str | None, say: Callable[[str], object]
) -> Callable[[], Awaitable[MountedNode]]:
    """
    Read the root of the tree to mount, and return a function that returns this root.

    Raises:
        CapError: the cap is not that of a directory.
        PipegridError: the root cannot be read.
    """
    if cap is not None:
        place = await cap_lookup.place_of(grid, cap)
        if not isinstance(place.cap, caps.DirectoryCap):
            raise CapError(
                "this is not the cap of a directory, so it cannot be mounted; use 'pipegrid get' for a file"
            )
        await grid.tree.list_directory(place.cap)
        return mount_service.directory_root(place.cap)
    said = ""

    def say_once(sentence: str) -> None:
        nonlocal said
        if sentence != said:
            said = sentence
            say(sentence)

    backups = backup_run.Backups(grid, say=say_once)
    root = mount_service.backups_root(grid, backups.runs, say_once)
    await root()
    return root
