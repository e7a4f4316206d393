"""
Whether a Tahoe-LAFS node still runs in a directory that PipeGrid is to serve.

A running node keeps ``running.process``: its process id, and when that process was made, in seconds since
1970. One that was killed leaves it behind, and by now the id may be another's; so both have to agree.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from pipegrid.disk.reading import read_file
from pipegrid.errors import UsageError

NAME = "running.process"
TOLERANCE_S = 2.0
_MAX_BYTES = 1000


def refuse_if_running(directory: Path, proc: Path = Path("/proc")) -> None:
    """
    Raise UsageError if a Tahoe-LAFS node runs in the directory, as far as this system tells.

    Args:
        proc: the kernel's file system about processes.
    """
    try:
        pid_text, made_text = read_file(directory / NAME, _MAX_BYTES).split()
        pid, made_s = int(pid_text), float(made_text)
    except (OSError, ValueError):
        return
    began_s = process_began(pid, proc)
    if began_s is not None and abs(began_s - made_s) <= TOLERANCE_S:
        raise UsageError(
            f"the Tahoe-LAFS node of {directory} is still running, as process {pid}; stop it first"
        )


def process_began(pid: int, proc: Path = Path("/proc")) -> float | None:
    """Return when a process was made, in seconds since 1970; None if it is gone, or nobody knows."""
    with suppress(OSError, ValueError, IndexError):
        # The second field is the name in brackets, which may hold anything; the 22nd counts from the boot.
        fields = (proc / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        boot_s = next(
            int(line.split()[1])
            for line in (proc / "stat").read_text("ascii", "replace").splitlines()
            if line.startswith("btime ")
        )
        return boot_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return None
