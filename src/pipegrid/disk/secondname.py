"""
The hidden name that a file still has beside its own, since a process was killed while it gave it that.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress

from pipegrid.disk.locks import names_file
from pipegrid.disk.partname import part_path


def take_away_second_name(target: str, inside: int | None = None) -> None:
    """
    Take the hidden name of its part from a file that has its own name by now; if it has none, do nothing.

    A rerun finds the file to be there, and would leave the other name for ever. Whoever takes the name of a
    part away holds the part's lock, so that none is taken from somebody who has begun to write a new one.

    Args:
        target: with all links resolved; or a name alone.
        inside: then the descriptor of its directory.
    """
    part = part_path(target, inside)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(OSError):  # mostly there is none; and no file is worse for another name
        fd = os.open(part, flags, dir_fd=inside)
        try:
            if not (stat.S_ISREG(os.fstat(fd).st_mode) and names_file(target, fd, inside)):
                return
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if names_file(part, fd, inside):
                os.unlink(part, dir_fd=inside)
        finally:
            os.close(fd)
