"""What ``mirror verify`` does: hash what is there in some processes, and say what is damaged."""

from __future__ import annotations

import os

from pipegrid.cli.console import Console
from pipegrid.cli.job import OfflineJob
from pipegrid.cli.mirroring import Display
from pipegrid.cli.mirrortell import tell_verified

MOST_PROCESSES = 4
"""More wait for the disk, or for each other."""


def verify_job(dest: str, paranoid: bool, sample: float) -> OfflineJob:
    """Return what it does; ``sample`` is a share, 0.0 to 1.0, of what is there."""

    def work(console: Console) -> int:
        from pipegrid.mirror.destination import Destination
        from pipegrid.mirror.manifest import check_complete
        from pipegrid.mirror.present import Doubt
        from pipegrid.mirror.verify import verify

        check_complete(dest)
        with Display(console) as display:
            destination = Destination(dest)
            try:
                report = verify(
                    destination,
                    Doubt(paranoid, sample),
                    display.show,
                    processes=min(MOST_PROCESSES, os.cpu_count() or 1),
                )
            finally:
                destination.close()
        return tell_verified(console, report, dest)

    return OfflineJob(work)
