"""
What is left beside a file under the hidden name of its part: that name, if a process was killed while it gave
the file its own; or a part that is of no use any more, since the file is complete.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
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
    _remove(target, inside, lambda fd: names_file(target, fd, inside))


def remove_part(target: str, inside: int | None = None) -> None:
    """
    Remove the part beside a file that is complete, unless somebody writes to it, or it is another user's.

    Args:
        target: as of ``take_away_second_name``.
    """
    _remove(target, inside, lambda fd: os.fstat(fd).st_uid == os.geteuid())


def _remove(target: str, inside: int | None, may_go: Callable[[int], bool]) -> None:
    part = part_path(target, inside)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(OSError):  # mostly there is none; and no file is worse for it
        fd = os.open(part, flags, dir_fd=inside)
        try:
            if not (stat.S_ISREG(os.fstat(fd).st_mode) and may_go(fd)):
                return
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if names_file(part, fd, inside):
                os.unlink(part, dir_fd=inside)
        finally:
            os.close(fd)
