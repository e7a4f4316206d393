"""``pipegrid manifest``: the caps of all that is in a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob
from pipegrid.cli.options import common_options, segment_limit_option, usage_error, wait_option
from pipegrid.cli.outcome import one_status

if TYPE_CHECKING:
    from pipegrid.core.caps import Cap
    from pipegrid.tree.facade import Grid


@click.command(name="manifest")
@click.argument("path", metavar="CAP[/PATH]")
@click.option(
    "--verify-cap", "verifier", is_flag=True, help="Print verifier caps, which cannot read."
)
@click.option("-s", "--storage-index", is_flag=True, help="Print storage indexes, and no paths.")
@wait_option
@segment_limit_option
@common_options
def command(path: str, verifier: bool, storage_index: bool) -> GridJob:
    """
    Print the cap and path of every object of a tree, each once.

    The lines are those of a cap file. What has no shares, as small files have none, has no verifier cap
    and no storage index, and is left out with these options. A directory that cannot be read is
    printed, too, and told of; it does not stop the rest.
    """
    if verifier and storage_index:
        raise usage_error("choose one of --verify-cap and -s")

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.cli.capfile import as_line
        from pipegrid.cli.trees import complain, directory_at
        from pipegrid.core import base32
        from pipegrid.tree.walk import Found, Unreadable

        place = await directory_at(grid, path)
        statuses = set()
        assert place.cap is not None
        with grid.tree.walk(place.cap) as tree:
            async for met in tree:
                if isinstance(met, Unreadable):
                    statuses.add(complain(console, met))
                elif met.again:
                    continue
                if met.cap is None:
                    continue
                kind = met.kind if isinstance(met, Found) else "directory"
                index = index_of(met.cap)
                fields = {
                    "path": list(met.path),
                    "type": kind,
                    "cap": str(met.cap),
                    "verifycap": verifier_of(met.cap),
                    "storage-index": "" if index is None else base32.encode(index),
                }
                name = "/".join(met.path)
                shown = str(met.cap)
                if storage_index:
                    shown = fields["storage-index"]  # type: ignore[assignment]
                elif verifier:
                    shown = fields["verifycap"]  # type: ignore[assignment]
                if not shown:
                    continue
                if console.json and isinstance(met, Unreadable):
                    continue  # it was told with its error
                line = shown if storage_index or not name else as_line(shown, name)
                console.result(line, fields)
        return one_status(statuses)

    return GridJob(work)


def verifier_of(cap: Cap) -> str:
    """Return the verifier cap of an object; nothing if it has no shares, or is unknown."""
    from pipegrid.core.caps import UnknownCap

    found = None if isinstance(cap, UnknownCap) else cap.verifier()
    return "" if found is None else str(found)


def index_of(cap: Cap) -> bytes | None:
    """Return the storage index of an object; None if it has no shares, or is unknown."""
    from pipegrid.core.caps import UnknownCap

    return None if isinstance(cap, UnknownCap) else cap.storage_index
