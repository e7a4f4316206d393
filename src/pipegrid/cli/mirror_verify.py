"""The job of ``mirror verify``: hashes existing files in several processes, and reports damage."""

from __future__ import annotations

import errno
import os
from contextlib import closing

from pipegrid.cli.command_job import OfflineJob
from pipegrid.cli.console import Console
from pipegrid.cli.mirror_options import MirrorProgress, report_verified
from pipegrid.mirror import archive_file, destination, local_check, manifest, verify

TYPE_CHECKING = False  # instead of the import from ``typing``, which is slow
if TYPE_CHECKING:
    from pipegrid.mirror.stat_cache import QuickCheckResult

MOST_PROCESSES = 4
"""Maximum number of processes that hash files; more would wait for the disk, or for each other."""


def verify_job(
    dest: str, paranoid: bool, sample: float, glimpse: QuickCheckResult | None = None
) -> OfflineJob:
    """
    Return the job of a verification.

    Args:
        sample: the share of existing files to hash again, 0.0 to 1.0.
        glimpse: the result of the quick check, or None; given only if no recorded file is hashed again.
    """

    def work(console: Console) -> int:
        manifest.check_complete(dest)
        with MirrorProgress(console) as display, closing(_open(dest)) as destination:
            report = verify.verify_rest(destination, glimpse) or verify.verify(
                destination,
                local_check.VerifyPolicy(paranoid, sample),
                display.show,
                processes=min(MOST_PROCESSES, os.cpu_count() or 1),
            )
        return report_verified(console, report, dest)

    return OfflineJob(work)


def _open(dest: str) -> destination.Destination:
    """Open the destination; open it only for reading if this process cannot write to it."""
    try:
        return destination.Destination(dest)
    except archive_file.MirrorError as error:
        why = error.__cause__
        if isinstance(why, OSError) and why.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return destination.ReadOnlyDestination(dest)
        raise
