"""``pipegrid backups``: which runs are there?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob
from pipegrid.cli.options import common_options, wait_option
from pipegrid.cli.outcome import ExitStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipegrid.tree.backup.catalogue import BackupRun
    from pipegrid.tree.facade import Grid


@click.command(name="backups")
@click.argument("cap", required=False, metavar="[CAP]")
@wait_option
@common_options
def command(cap: str | None) -> GridJob:
    """
    List the runs of all backups, the oldest first.

    CAP is what 'backup' printed, on this machine or another one; without it, those of this client are listed.
    """

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.cli.render import amount, plural
        from pipegrid.core.text import printable

        for run in await listed_runs(grid, console, cap):
            name = printable(run.name)
            left_out = f", {run.left_out} left out" if run.left_out else ""
            console.result(
                f"{run.time}  {name}  {plural(run.files, 'file')}, {amount(run.bytes)}{left_out}",
                {
                    "name": run.name,
                    "time": run.time,
                    "cap": str(run.cap),
                    "files": run.files,
                    "bytes": run.bytes,
                    "left_out": run.left_out,
                },
            )
        return ExitStatus.DONE

    return GridJob(work)


async def listed_runs(grid: Grid, console: Console, cap: str | None) -> Sequence[BackupRun]:
    """
    Return the runs that a catalogue lists, or this client's own.

    Raises:
        CapError: not the cap of a catalogue.
        PipegridError: it cannot be read.
    """
    from pipegrid.core.caps import DirectoryCap, parse_cap
    from pipegrid.errors import CapError
    from pipegrid.tree.backup.catalogue import runs_of
    from pipegrid.tree.backup.run import Backups

    backups = Backups(grid, say=lambda sentence: console.say(f"pipegrid: {sentence}"))
    if cap is None:
        return await backups.runs()
    parsed = parse_cap(cap.strip())
    if not isinstance(parsed, DirectoryCap):
        raise CapError("this is not the cap that 'pipegrid backup' printed; use that one")
    return runs_of(parsed, await backups.catalogues.load(parsed))
