"""What ``mirror verify`` does: hash what is there in some processes, and say what is damaged."""

from __future__ import annotations

import errno
import os

from pipegrid.cli.console import Console
from pipegrid.cli.job import OfflineJob
from pipegrid.cli.mirror_options import Display, tell_verified
from pipegrid.mirror import (
    archive_file,
    destination,
    local_check,
    manifest,
    readonly_destination,
    verify,
)

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    from pipegrid.mirror.quick_check import QuickCheckResult

MOST_PROCESSES = 4
"""More wait for the disk, or for each other."""


def verify_job(
    dest: str, paranoid: bool, sample: float, glimpse: QuickCheckResult | None = None
) -> OfflineJob:
    """
    Return what it does.

    Args:
        sample: a share, 0.0 to 1.0, of what is there.
        glimpse: what was found already; only where nothing is doubted.
    """

    def work(console: Console) -> int:
        manifest.check_complete(dest)
        with Display(console) as display:
            destination = _open(dest)
            try:
                report = verify.verify_rest(destination, glimpse) or verify.verify(
                    destination,
                    local_check.VerifyPolicy(paranoid, sample),
                    display.show,
                    processes=min(MOST_PROCESSES, os.cpu_count() or 1),
                )
            finally:
                destination.close()
        return tell_verified(console, report, dest)

    return OfflineJob(work)


def _open(dest: str) -> destination.Destination:
    """Open it, also where this process may only read."""
    try:
        return destination.Destination(dest)
    except archive_file.MirrorError as error:
        why = error.__cause__
        if isinstance(why, OSError) and why.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return readonly_destination.ReadOnlyDestination(dest)
        raise
