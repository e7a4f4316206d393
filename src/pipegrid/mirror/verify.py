"""Whether all that the last complete run wanted is there and right. Synchronous; asks nobody."""

from __future__ import annotations

import time
from collections.abc import Callable

from pipegrid.mirror.destination import Destination
from pipegrid.mirror.manifest import read_manifest
from pipegrid.mirror.present import Doubt
from pipegrid.mirror.report import Report
from pipegrid.mirror.wanted import BadEntry, Wanted

TOLD_EVERY = 256


def verify(
    destination: Destination,
    doubt: Doubt,
    progress: Callable[[Report], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
    now: Callable[[], float] = time.monotonic,
) -> Report:
    """
    Return what is there; ``failed`` names what is missing or wrong.

    Args:
        progress: told every few hundred files.
        stopped: whether to end early.

    Raises:
        MirrorError: no run to this destination was complete.
    """
    report = Report()
    began_s = now()
    for each in read_manifest(destination):
        wrong = _wrong(destination, each, doubt.next())
        report.wanted_files += 1
        report.wanted_bytes += each.size or 0
        if wrong is None:
            report.present_files += 1
            report.present_bytes += each.size or 0
        else:
            report.fail(each.path, wrong)
        if report.wanted_files % TOLD_EVERY == 0:
            report.elapsed_s = now() - began_s
            if progress is not None:
                progress(report)
            if stopped():
                break
    report.elapsed_s = now() - began_s
    if progress is not None:
        progress(report)
    return report


def _wrong(destination: Destination, each: Wanted, doubted: bool) -> str | None:
    try:
        right = destination.is_there(each, doubted)
    except BadEntry as error:
        return str(error)
    return None if right else "it is missing, or has changed"
