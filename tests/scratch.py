"""Where tests have servers keep their shares, and trees lie, where disks are not what is tested."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

MEMORY = Path("/dev/shm")


def scratch_directory() -> Path:
    """Return a new directory, in memory where there is such a place: a disk takes its time."""
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="pipegrid-", dir=place))


def scratch_path(test: SynchronousTestCase) -> Path:
    """Return a path in such a directory, where nothing is yet; what is made there goes with the test."""
    directory = scratch_directory()
    test.addCleanup(shutil.rmtree, directory, ignore_errors=True)
    # Servers that a test only abandons may still write there when they are collected.
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory / "scratch"
