"""``get -r``: a whole directory into a local one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegrid.cli.job import GridJob
from pipegrid.cli.options import EMPTY_NAME, CapArguments, usage_error
from pipegrid.cli.outcome import ExitStatus, one_status

MAX_NOTED = 20
"""Files without their mode or time, each of which is reported on its own; all are counted."""

if TYPE_CHECKING:
    from pipegrid.cli.console import Console
    from pipegrid.tree.local_directory import DirectoryFd
    from pipegrid.tree.metadata import Modes
    from pipegrid.tree.tree_download import TreeGetResult
    from pipegrid.tree.tree_grid import Grid


def tree_job(
    named: CapArguments,
    output: str | None,
    byte_range: str | None,
    force: bool,
    paranoid: bool,
    exact_modes: bool,
    max_paths: int | None,
) -> GridJob:
    """
    Return the job of fetching one tree.

    Raises:
        click.UsageError: the arguments make no sense.
    """
    caps, cap_files = named
    if len(caps) != 1 or cap_files:
        raise usage_error("--recursive takes one CAP, or CAP/some/path")
    if output is None:
        raise usage_error("--recursive needs a directory to write to; add -o DIR")
    if output == "":
        raise usage_error(f"-o: {EMPTY_NAME}")
    if byte_range is not None:
        raise usage_error("--range is for one file; leave out --recursive")
    directory = output

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.cli.trees import directory_at

        place = await directory_at(grid, caps[0])
        return await fetch_tree(
            grid,
            console,
            place.cap,
            directory,
            place.metadata_json,
            force,
            paranoid,
            modes="exact" if exact_modes else "umask",
            max_paths=max_paths,
        )

    return GridJob(work, *caps)


async def fetch_tree(
    grid: Grid,
    console: Console,
    cap: object,
    directory: str,
    metadata_json: bytes = b"{}",
    force: bool = False,
    paranoid: bool = False,
    into: DirectoryFd | None = None,
    modes: Modes = "umask",
    max_paths: int | None = None,
) -> ExitStatus:
    """
    Fetch a tree, and tell what came of it; returns the status of what failed, or 1 if that differs.

    Args:
        into: see ``target.begin_tree``.
        modes, max_paths: see ``Grid.tree.get_tree``.
    """
    from pipegrid.cli.progress import ProgressBar
    from pipegrid.cli.trees import shown_path
    from pipegrid.cli.waiting import waiting_of

    statuses: set[ExitStatus] = set()

    def problem(path: tuple[str, ...], error: Exception) -> None:
        statuses.add(console.failed(error, shown_path(path), {"path": list(path)}))

    def done(path: tuple[str, ...], how: str, size: int) -> None:
        if console.json:
            console.result("", {"path": list(path), "outcome": how, "size": size})
        else:
            console.detail(f"{shown_path(path)}: {how}")

    noted = 0

    def not_kept(path: tuple[str, ...], why: str) -> None:
        nonlocal noted
        noted += 1
        if noted <= MAX_NOTED:
            console.say(f"pipegrid: {shown_path(path) or '.'}: {why}")

    with ProgressBar(console, "get") as progress:
        result = await grid.tree.get_tree(
            cap,  # type: ignore[arg-type]
            directory,
            metadata_json=metadata_json,
            force=force,
            paranoid=paranoid,
            progress=progress.transfer(),
            problem=problem,
            done=done,
            into=into,
            waiting=waiting_of(console, progress),
            modes=modes,
            max_paths=max_paths,
            not_kept=not_kept,
        )
    _tell(console, directory, result)
    return one_status(statuses)


def _tell(console: Console, directory: str, result: TreeGetResult) -> None:
    """Tell what is there now, and what is not."""
    from pipegrid.cli.render import amount
    from pipegrid.cli.waiting import retried_note
    from pipegrid.core.text import counted

    fields = {
        "directory": directory,
        "files": result.files,
        "present": result.present,
        "directories": result.directories,
        "links": result.links,
        "size": result.size,
        "fetched_bytes": result.fetched_bytes,
        "second_tries": result.second_tries,
        "failed": result.failed,
        "part_files": result.part_files,
        "not_kept": result.not_kept,
    }
    if console.json:
        console.result("", fields)
    else:
        there = f", {counted(result.present, 'was', 'were')} there" if result.present else ""
        links = f", {counted(result.links, 'link')}" if result.links else ""
        left_out = f"; {result.failed} left out" if result.failed else ""
        if result.part_files:
            left_out += f"; skipped {counted(result.part_files, 'part file')}"
        if result.not_kept:
            left_out += f"; {result.not_kept} without the mode or time that was stored"
        if result.second_tries:
            left_out = f"; {retried_note(result.second_tries)}{left_out}"
        fetched = f"{counted(result.files, 'file')} fetched ({amount(result.fetched_bytes)}){there}{links}"
        directories = counted(result.directories, "directory", "directories")
        console.say(f"pipegrid: {fetched}, in {directories}{left_out}")
