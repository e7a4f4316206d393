"""What a test leaves open, which is not what others of its process still close."""

from __future__ import annotations

import gc
import os
import time
from contextlib import suppress

_FOLDER = "/proc/self/fd"
# A thread that lets go of a file does so behind the answer that a test has waited for.
_PATIENCE_S = 2.0
_LOOK_EVERY_S = 0.01

Open = frozenset[tuple[int, str]]
"""Descriptors, each with what it stands for: a path, or ``socket:[inode]``."""


def open_files() -> Open:
    """Return what this process has open; nothing where no `/proc` tells."""
    found = set()
    try:
        numbers = os.listdir(_FOLDER)
    except OSError:
        return frozenset()
    for number in numbers:
        with suppress(OSError):  # the one that listed them, or another thread's
            found.add((int(number), os.readlink(f"{_FOLDER}/{number}")))
    return frozenset(found)


def left_open(before: Open) -> list[str]:
    """
    Return what is open that was not before, once garbage and threads have had time to let go.

    What was open before and no longer is does not count: garbage of the tests before this one is collected,
    and closed, at any time, so that descriptors that are merely counted come out wrong now and then.
    """
    new = open_files() - before
    if new:
        gc.collect()
    until = time.monotonic() + _PATIENCE_S
    while (new := open_files() - before) and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)
    return sorted(what for _, what in new)
