"""``pipegrid backups``: which runs are there?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pipegrid.cli.completing import grid_path
from pipegrid.cli.console import Console
from pipegrid.cli.job import GridJob
from pipegrid.cli.options import grid_options
from pipegrid.cli.outcome import ExitStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipegrid.tree.backup.catalogue import BackupRun
    from pipegrid.tree.tree_grid import Grid

NONE_LISTED = (
    "this client's own list has no backup; if another machine has stored one, give the cap that 'pipegrid "
    "backup' printed there"
)


@click.command(name="backups")
@click.argument("cap", required=False, metavar="[CAP]", shell_complete=grid_path)
@grid_options
def command(cap: str | None) -> GridJob:
    """
    List the runs of all backups, the oldest first.

    CAP is what 'backup' printed, on this machine or another one, or ALIAS:some/path where 'backup --as' keeps
    archives; without it, those of this client are listed.
    """

    async def work(grid: Grid, console: Console) -> int:
        from pipegrid.cli.render import amount
        from pipegrid.core.text import counted, printable

        runs = await listed_runs(grid, console, cap)
        if cap is None and not runs:
            console.say(f"pipegrid: {NONE_LISTED}")
        several = len({run.machine.id for run in runs} - {""}) > 1
        for run in runs:
            name = printable(run.name)
            host = f", on {printable(run.machine.name)}" if several and run.machine.name else ""
            left_out = f", {run.left_out} left out" if run.left_out else ""
            what = f"  {counted(run.files, 'file')}, {amount(run.bytes)}{left_out}"
            console.result(
                f"{run.time}  {name}{what if run.counted else ''}{host}",
                {
                    "name": run.name,
                    "time": run.time,
                    "cap": str(run.cap),
                    "files": run.files if run.counted else None,
                    "bytes": run.bytes if run.counted else None,
                    "left_out": run.left_out,
                    "directory": run.directory,
                    "machine": run.machine.id,
                    "host": run.machine.name,
                },
            )
        return ExitStatus.DONE

    return GridJob(work, cap or "", makes=cap is not None)


async def listed_runs(
    grid: Grid, console: Console, cap: str | None, *, some: bool = False
) -> Sequence[BackupRun]:
    """
    Return the runs that a catalogue lists, or archives keep, or this client's own.

    Args:
        cap: of a catalogue, or a path that leads to one, or to where archives are kept.
        some: whether it is an error if this client's own list has none.

    Raises:
        CapError: not the cap of a catalogue.
        PipegridError: it cannot be read.
        UsageError: this client's own list has none, and there must be some.
    """
    from pipegrid.cli.trees import place_of
    from pipegrid.core.caps import DirectoryCap
    from pipegrid.errors import CapError, UsageError
    from pipegrid.tree.backup.backup_run import Backups
    from pipegrid.tree.backup.catalogue import archived_runs, runs_of

    backups = Backups(grid, say=lambda sentence: console.say(f"pipegrid: {sentence}"))
    if cap is None:
        own = await backups.runs()
        if some and not own:
            raise UsageError(NONE_LISTED)
        return own
    place = await place_of(grid, cap)
    if not isinstance(place.cap, DirectoryCap):
        raise CapError("this is not the cap that 'pipegrid backup' printed; use that one")
    name = place.names[-1] if place.names else "backup"
    content = await backups.catalogues.load(place.cap)
    archived = await archived_runs(grid, place.cap, content, name)
    return runs_of(place.cap, content) if archived is None else archived
