"""
Who mounts file systems of its own on this machine, one after the other.

A server that ``crash`` starts has a view of mounts of its own, in which what somebody else unmounts meanwhile
stays mounted: the next mount of that image found the file system that had failed.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MOST_S = 60.0


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other program of ours has mounts, a minute at most; then keep them waiting."""
    path = os.path.join(tempfile.gettempdir(), f"pipegrid-mounts-{os.getuid()}.lock")
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        until_s = time.monotonic() + MOST_S
        while time.monotonic() < until_s:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.1)
        yield
    finally:
        os.close(lock)
