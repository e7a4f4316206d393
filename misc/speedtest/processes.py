"""
Storage servers and other processes for the tools here: those of ``pipegrid.speedtest.child_processes``,
and ours.

The tools are no part of the package; what they run finds them by the path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from misc.command import environment
from pipegrid.speedtest import child_processes
from pipegrid.speedtest.child_processes import (
    LOOPBACK,
    Servers,
    cpu_s,
    first_line,
    peak_bytes,
    ping_s,
)

__all__ = [
    "LOOPBACK",
    "Servers",
    "cpu_s",
    "first_line",
    "peak_bytes",
    "ping_s",
    "run_module",
    "running",
]

ROOT = Path(__file__).resolve().parents[2]


def running(command: Sequence[str]) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run a process, which finds these tools, as long as the context lasts."""
    return child_processes.running(command, _surroundings())


def run_module(name: str, *arguments: str, timeout_s: float = 110.0) -> str:
    """Run one of these tools in a process with a reactor of its own; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", name, *arguments],
        env=_surroundings(),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
    )
    return done.stdout


def _surroundings() -> dict[str, str]:
    surroundings = environment()
    surroundings["PYTHONPATH"] += os.pathsep + str(ROOT)
    return surroundings
