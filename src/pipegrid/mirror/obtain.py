"""Indexes, as they are in the archive, to where they can be read, and nobody sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipegrid.mirror.report import Report
from pipegrid.mirror.wanted import Wanted

if TYPE_CHECKING:
    from pipegrid.mirror.early import AnyMirror


class Obtained:
    """
    What has become of indexes that were asked for.

    Attributes:
        size_bytes: fetched.
        lacking: what no mirror gave, and why, by path.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self.lacking: dict[str, str] = {}


async def obtain(mirror: AnyMirror, files: Sequence[Wanted], staged: bool = True) -> Obtained:
    """
    Fetch files to where nobody sees them.

    They are asked for by hash, if they may be; mirrors that have less than the archive may not have them so.
    """
    done = Obtained()
    if not files:
        return done
    report = await mirror.sync(files, staged=staged, always=True)
    done.size_bytes = report.fetched_bytes
    if report.failed_files and any(file.remote is not None for file in files):
        plain = [file.but(remote=None) for file in files]
        report = await mirror.sync(plain, staged=staged, always=True)
        done.size_bytes += report.fetched_bytes
    if report.failed_files:
        await mirror.run(_note_lacking, mirror, files, report, done, staged)
    return done


def _note_lacking(
    mirror: AnyMirror, files: Sequence[Wanted], report: Report, done: Obtained, staged: bool
) -> None:
    reasons = dict(report.failed)
    for file in files:
        if not mirror.destination.is_there(file, staged=staged):
            done.lacking[file.path] = reasons.get(file.path, "no mirror has it")
