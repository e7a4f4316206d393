"""What the commands that mirror have to tell at their ends, and what of it goes into a grid."""

from __future__ import annotations

import os

from pipegrid.cli.console import Console
from pipegrid.cli.outcome import ExitStatus
from pipegrid.cli.verifysame import verified
from pipegrid.core.text import counted, printable

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    from typing import Any

    from pipegrid.cli.mirroring import MirrorOptions
    from pipegrid.grid import Grid
    from pipegrid.mirror.entries import Entries
    from pipegrid.mirror.mirror import Mirror
    from pipegrid.mirror.scheduler import Report, Tally


async def store(
    mirror: Mirror, grid: Grid | None, report: Report, fetching: MirrorOptions
) -> dict[str, Any]:
    """Store what is there now, if that is wanted; returns what there is to tell of it."""
    if grid is None or report.failed_files or fetching.dry_run:
        return {}
    from pipegrid.mirror.grid_archive import GridStore

    stored = GridStore(mirror, grid, os.path.abspath(grid.config.directory), fetching.paranoid)
    cap = await stored.store()
    return {"cap": str(cap), "stored": stored.stored_files}


def tell_skipped(console: Console, entries: Entries) -> None:
    """Name the entries of indexes that could not be used."""
    for why in entries.skipped:
        console.fault(f"pipegrid: skipped: {printable(why)}")
    more = entries.skipped_files - len(entries.skipped)
    if more:
        console.fault(
            f"pipegrid: {counted(more, 'more entry', 'more entries')} skipped, for such reasons"
        )


def tell(
    console: Console,
    report: Report,
    dest: str,
    removed: list[str],
    dry_run: bool,
    further: dict[str, Any] | None = None,
) -> int:
    """
    Print what has become of a run; returns the exit status.

    Args:
        further: what the kind of archive has to tell besides, in JSON.
    """
    for path, why in report.failed:
        console.fault(f"pipegrid: {printable(path)} could not be fetched ({printable(why)})")
    _tell_how_many_more(console, report)
    would = "would be " if dry_run else ""
    for path in removed:
        console.detail(f"{printable(path)} {would or 'was '}removed")
    for tally in report.ranking:
        console.say(_ranked(tally))
    text = (
        f"{counted(report.fetched_files, 'file')}, {counted(report.fetched_bytes, 'byte')} {would}fetched;"
        f" {counted(report.present_files, 'was', 'were')} there, {report.failed_files} failed"
    )
    skipped = further.get("skipped", 0) if further is not None else 0
    if skipped:
        text += f", {skipped} skipped"
    if removed:
        text += f", {len(removed)} {would}removed"
    if further is not None and "cap" in further:
        text += f"\nin the grid: {further['cap']}"
    console.result(
        text,
        {
            "dest": dest,
            "dry_run": dry_run,
            "files": report.wanted_files,
            "bytes": report.wanted_bytes,
            "fetched": report.fetched_files,
            "fetched_bytes": report.fetched_bytes,
            "present": report.present_files,
            "failed": report.failed_files,
            "removed": len(removed),
            "retries": report.retries,
            "seconds": round(report.elapsed_s, 3),
            "mirrors": list(map(_tally_fields, report.ranking)),
            **(further or {}),
        },
    )
    return ExitStatus.FAILED if report.failed_files or skipped else ExitStatus.DONE


def _tally_fields(tally: Tally) -> dict[str, Any]:
    return {
        "url": tally.url,
        "files": tally.files,
        "bytes": tally.received_bytes,
        "bytes_per_s": round(tally.bytes_per_s),
        "refused": tally.refused,
        "broken": tally.broken,
        "given_up": tally.given_up,
    }


def _tell_how_many_more(console: Console, report: Report) -> None:
    more = report.failed_files - len(report.failed)
    if more:
        console.fault(f"pipegrid: {counted(more, 'more file')}, for reasons like these")


def _ranked(tally: Tally) -> str:
    rate = f"{tally.bytes_per_s / 1e6:.1f} MB/s" if tally.bytes_per_s else "nothing"
    text = f"{tally.url}: {counted(tally.files, 'file')}, {rate}"
    failed = f"{counted(tally.refused, 'file')} lacking or wrong" if tally.refused else ""
    broken = f"{counted(tally.broken, 'request')} failed" if tally.broken else ""
    if failed or broken:
        text += f"; {', '.join(filter(None, (failed, broken)))}"
    if tally.given_up is not None:
        text += f"; given up ({printable(tally.given_up)})"
    return text


def tell_verified(console: Console, report: Report, dest: str) -> int:
    """Print what ``verify`` has found; returns the exit status."""
    for path, why in report.failed:
        console.fault(f"pipegrid: {printable(path)}: {printable(why)}")
    _tell_how_many_more(console, report)
    if report.unnoted_files:
        files = counted(report.unnoted_files, "file")
        console.say(
            f"pipegrid: what hashing has found of {files} cannot be noted, since {dest} "
            "cannot be written to; have somebody verify it who may"
        )
    console.result(
        *verified(
            dest,
            report.wanted_files,
            report.wanted_bytes,
            report.present_files,
            report.failed_files,
            report.unnoted_files,
        )
    )
    return ExitStatus.CORRUPTION if report.failed_files else ExitStatus.DONE
