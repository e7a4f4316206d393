"""``get -r``: a whole directory into a local one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipegrid.cli.job import GridJob
from pipegrid.cli.options import EMPTY_NAME
from pipegrid.cli.outcome import ExitStatus, one_status, sentence

if TYPE_CHECKING:
    from pipegrid.cli.console import Console
    from pipegrid.tree.downloading import TreeGetResult
    from pipegrid.tree.facade import Grid


def tree_job(
    caps: tuple[str, ...],
    cap_files: tuple[str, ...],
    output: str | None,
    byte_range: str | None,
    force: bool,
    paranoid: bool,
) -> GridJob:
    """
    Return the job of fetching one tree.

    Raises:
        click.UsageError: the arguments make no sense.
    """
    context = click.get_current_context()
    if len(caps) != 1 or cap_files:
        raise click.UsageError("--recursive takes one CAP, or CAP/some/path", context)
    if output is None:
        raise click.UsageError("--recursive needs a directory to write to; add -o DIR", context)
    if output == "":
        raise click.UsageError(f"-o: {EMPTY_NAME}", context)
    if byte_range is not None:
        raise click.UsageError("--range is for one file; leave out --recursive", context)
    directory = output

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.cli.trees import directory_at

        place = await directory_at(grid, caps[0])
        return await fetch_tree(
            grid, console, place.cap, directory, place.metadata_json, force, paranoid
        )

    return GridJob(work)


async def fetch_tree(
    grid: Grid,
    console: Console,
    cap: object,
    directory: str,
    metadata_json: bytes = b"{}",
    force: bool = False,
    paranoid: bool = False,
) -> ExitStatus:
    """Fetch a tree, and tell what came of it; returns the status of what failed, or 1 if that differs."""
    from pipegrid.cli.progress import Progress
    from pipegrid.cli.trees import shown_path

    statuses: set[ExitStatus] = set()

    def problem(path: tuple[str, ...], error: Exception) -> None:
        status = console.complain(error, about=shown_path(path))
        statuses.add(status)
        if console.json:
            fields = {"path": list(path), "error": sentence(error), "exit_status": int(status)}
            console.result("", fields)

    def done(path: tuple[str, ...], how: str, size: int) -> None:
        if console.json:
            console.result("", {"path": list(path), "outcome": how, "size": size})
        else:
            console.detail(f"{shown_path(path)}: {how}")

    with Progress(console, "get") as progress:
        result = await grid.tree.get_tree(
            cap,  # type: ignore[arg-type]
            directory,
            metadata_json=metadata_json,
            force=force,
            paranoid=paranoid,
            progress=progress.transfer(),
            problem=problem,
            done=done,
        )
    _tell(console, directory, result)
    return one_status(statuses)


def _tell(console: Console, directory: str, result: TreeGetResult) -> None:
    """Tell what is there now, and what is not."""
    from pipegrid.cli.render import amount, plural

    fields = {
        "directory": directory,
        "files": result.files,
        "present": result.present,
        "directories": result.directories,
        "links": result.links,
        "size": result.size,
        "fetched_bytes": result.fetched_bytes,
        "failed": result.failed,
    }
    if console.json:
        console.result("", fields)
    else:
        there = f", {result.present} were there" if result.present else ""
        links = f", {plural(result.links, 'link')}" if result.links else ""
        left_out = f"; {result.failed} left out" if result.failed else ""
        fetched = (
            f"{plural(result.files, 'file')} fetched ({amount(result.fetched_bytes)}){there}{links}"
        )
        directories = (
            "1 directory" if result.directories == 1 else f"{result.directories} directories"
        )
        console.say(f"pipegrid: {fetched}, in {directories}{left_out}")
