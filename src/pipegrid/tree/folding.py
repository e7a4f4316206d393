"""
Whether a file system takes two names that differ in case for one, which nothing but a try can tell.
"""

from __future__ import annotations

import os
from contextlib import suppress

from pipegrid.disk.partname import SUFFIX
from pipegrid.tree.home import Home

_PROBE, _OTHER = (f".pipegrid-{letter}{SUFFIX}" for letter in "aA")
"""No file of a tree can have such a name."""

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TRIES = 100
"""Another process, which tries the same, may take the file away."""


def folds_names(home: Home) -> bool:
    """
    Return whether the file system of a directory does so.

    The file that is made for that has one name for all, so that one that a kill has left is found.
    """
    with home.entered() as inside, suppress(OSError):
        for _ in range(_TRIES):
            found = _tried(inside)
            if found is not None:
                return found
    return False


def _tried(inside: int) -> bool | None:
    """Try it in the directory of a descriptor; None: the file was taken away meanwhile."""
    os.close(os.open(_PROBE, _FLAGS, 0o600, dir_fd=inside))
    try:
        for name in (_OTHER, _PROBE):
            with suppress(FileNotFoundError):
                os.stat(name, dir_fd=inside, follow_symlinks=False)
                return name == _OTHER
        return None
    finally:
        with suppress(OSError):
            os.unlink(_PROBE, dir_fd=inside)
