"""
A check that all files of the last complete run exist and are right. Synchronous; makes no request.

For most files the quick check suffices, which takes four microseconds of CPU time; a closer check takes
twenty. With several processors, forked processes check a part of the files each. If a process ends without a
result, the calling process checks its part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from pipegrid.disk.safe_open import read_file
from pipegrid.mirror import MANIFEST
from pipegrid.mirror.archive_file import ArchiveFile, BadEntry, MirrorError
from pipegrid.mirror.destination import Destination
from pipegrid.mirror.file_list_format import lines_in, read_list
from pipegrid.mirror.file_scheduler import MAX_SHOWN, Report
from pipegrid.mirror.local_check import VerifyPolicy
from pipegrid.mirror.manifest import ManifestPart, parts_of_manifest, read_pieces
from pipegrid.mirror.stat_cache import ForkedWork, QuickCheck, QuickCheckResult

TYPE_CHECKING = False  # the same as ``typing.TYPE_CHECKING``, without the slow import
if TYPE_CHECKING:
    from typing import Any

_COUNTS = (
    "wanted_files",
    "wanted_bytes",
    "present_files",
    "present_bytes",
    "failed_files",
    "unnoted_files",
)


def verify(
    destination: Destination,
    policy: VerifyPolicy,
    progress: Callable[[Report], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
    now: Callable[[], float] = time.monotonic,
    processes: int = 1,
) -> Report:
    """
    Check all files; ``failed`` of the report names missing and wrong files.

    Args:
        progress: called every few hundred files.
        stopped: returns whether to end early.
        processes: how many processes share the work; more than one only if this process has no other threads.

    Raises:
        MirrorError: no run to this destination was complete.
    """
    report = Report()
    began_s = now()
    own, *others = parts_of_manifest(destination, processes)
    workers: list[tuple[ManifestPart, ForkedWork]] = []
    # Made before the fork, so that the rows are read once for all processes.
    quick_check = destination.new_quick_check() if policy.is_none else None
    try:
        for part in others:
            work = partial(_look_apart, destination, policy, quick_check, part)
            workers.append((part, ForkedWork(work)))

        def report_progress() -> None:
            report.elapsed_s = now() - began_s
            if progress is not None:
                progress(report)

        def look(part: ManifestPart) -> None:
            _look(destination, policy, quick_check, part, report, report_progress, stopped)

        look(own)
        for part, process in workers:
            if stopped():
                break
            found = process.join()
            if found is None:
                look(part)
            else:
                _add(report, found)
        report.unnoted_files += destination.unnoted_files
        report_progress()
    finally:
        if quick_check is not None:
            quick_check.close()
        for _, process in workers:
            process.stop()
    return report


def verify_rest(destination: Destination, glimpse: QuickCheckResult | None) -> Report | None:
    """
    Return the report of a closer check of those files that the quick check did not find unchanged; the other
    files count as present.

    None: there was no quick check, or the manifest has changed since.
    """
    try:
        if glimpse is None:
            return None
        if read_file(destination.manifest, len(glimpse.text) + 1) != glimpse.text:
            return None
    except OSError:
        return None
    report = Report()
    report.wanted_files = report.present_files = glimpse.files
    report.wanted_bytes = report.present_bytes = glimpse.size_bytes
    for each in read_list(glimpse.others, MANIFEST):
        _look_at(destination, each, False, report)
    report.unnoted_files = destination.unnoted_files
    return report


def _look(
    destination: Destination,
    policy: VerifyPolicy,
    quick_check: QuickCheck | None,
    part: ManifestPart,
    report: Report,
    report_progress: Callable[[], None] = lambda: None,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    for lines in _closely(destination, quick_check, part, report):
        for each in read_list(lines, MANIFEST) if lines else ():
            _look_at(destination, each, policy.next(), report)
            if stopped():
                return
        report_progress()
        if stopped():
            return


def _closely(
    destination: Destination, quick_check: QuickCheck | None, part: ManifestPart, report: Report
) -> Iterator[list[bytes]]:
    """Yield the lines of a part that need a closer check; count the files of all other lines as present."""
    for text in read_pieces(destination, part):
        if quick_check is None:
            yield lines_in(text)
            continue
        files, size_bytes, others = quick_check.look(text)
        report.wanted_files += files
        report.wanted_bytes += size_bytes
        report.present_files += files
        report.present_bytes += size_bytes
        yield others


def _look_at(destination: Destination, each: ArchiveFile, rehash: bool, report: Report) -> None:
    wrong: str | None = None
    try:
        if not destination.is_there(each, rehash):
            wrong = "it is missing, or has changed"
    except (BadEntry, MirrorError) as error:  # for example the disk fails
        wrong = str(error)
    report.wanted_files += 1
    report.wanted_bytes += each.size or 0
    if wrong is None:
        report.present_files += 1
        report.present_bytes += each.size or 0
    else:
        report.fail(each.path, wrong)


def _look_apart(
    destination: Destination,
    policy: VerifyPolicy,
    quick_check: QuickCheck | None,
    part: ManifestPart,
    stopped: Callable[[], bool],
) -> dict[str, Any]:
    """Check a part, and return the attributes of its report. Runs in a forked process."""
    destination.forked()
    report = Report()
    _look(destination, policy, quick_check, part, report, stopped=stopped)
    report.unnoted_files = destination.unnoted_files
    destination.close()
    return vars(report)


def _add(report: Report, found: dict[str, Any]) -> None:
    for name in _COUNTS:
        setattr(report, name, getattr(report, name) + found[name])
    report.failed += found["failed"][: MAX_SHOWN - len(report.failed)]
