"""How tests run a soak, as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

from misc.command import environment
from misc.speedtest.processes import ROOT


def soak(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``misc.soak.NAME``, from this tree."""
    return subprocess.run(
        [sys.executable, "-m", f"misc.soak.{name}", *options],
        env=environment() | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))},
        capture_output=True,
        text=True,
        timeout=100,
    )
