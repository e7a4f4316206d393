"""
Coverage of the processes in which trial runs the tests, and of no process that a test starts.

What tests start is measured in other ways, by memory, imports and time, which tracing would change.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

ASKED_FOR = "MEASURE_COVERAGE"
"""In the environment of trial; its workers take it away from what they start."""


def measure() -> None:
    """Begin, if this is one of trial's workers and somebody asked for it."""
    if Path(sys.argv[0]).name != "workertrial.py" or not os.environ.pop(ASKED_FOR, ""):
        return
    from coverage import Coverage

    root = Path(__file__).parent.parent
    coverage = Coverage(
        data_file=str(root / ".coverage"),
        data_suffix=True,
        config_file=str(root / "setup.cfg"),
    )
    coverage.start()

    def save() -> None:
        coverage.stop()
        coverage.save()

    atexit.register(save)
