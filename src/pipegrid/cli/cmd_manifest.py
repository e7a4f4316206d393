"""``pipegrid manifest``: the caps of all that is in a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pipegrid.cli.completing import grid_path
from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob
from pipegrid.cli.options import reading_options, usage_error
from pipegrid.core.text import printable

if TYPE_CHECKING:
    from pipegrid.tree.tree_grid import Grid


@click.command(name="manifest")
@click.argument("path", metavar="CAP[/PATH]", shell_complete=grid_path)
@click.option(
    "--verify-cap", "verifier", is_flag=True, help="Print verifier caps, which cannot read."
)
@click.option("-s", "--storage-index", is_flag=True, help="Print storage indexes, and no paths.")
@reading_options
def command(path: str, verifier: bool, storage_index: bool) -> GridJob:
    """
    Print the cap and path of every object of a tree, each once.

    The lines are those of a cap file. What has no shares, as small files have none, has no verifier cap and
    no storage index, and is left out with these options. A directory that cannot be read is printed and
    reported; it does not stop the rest.
    """
    if verifier and storage_index:
        raise usage_error("choose one of --verify-cap and -s")

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.cli.capfile import as_line
        from pipegrid.cli.trees import directory_at, walk_through
        from pipegrid.core import base32
        from pipegrid.core.caps import UnknownCap
        from pipegrid.tree.walk import Found, Met

        def meet(met: Met) -> None:
            if met.cap is None or (isinstance(met, Found) and met.again):
                return
            known = None if isinstance(met.cap, UnknownCap) else met.cap
            index = None if known is None else known.storage_index
            checks = None if known is None else known.verifier()
            fields: dict[str, Any] = {
                "path": list(met.path),
                "type": met.kind if isinstance(met, Found) else "directory",
                "cap": str(met.cap),
                "verifycap": "" if checks is None else str(checks),
                "storage-index": "" if index is None else base32.encode(index),
            }
            name = "/".join(met.path)
            kind = "storage-index" if storage_index else "verifycap" if verifier else "cap"
            shown = printable(
                fields[kind]
            )  # of a kind that nobody knows it may be any text, of several lines
            told = console.json and not isinstance(met, Found)  # with its error
            if shown and not told:
                line = shown if storage_index or not name else as_line(shown, name)
                console.result(line, fields)

        return await walk_through(grid, console, await directory_at(grid, path), meet)

    return GridJob(work, path)
