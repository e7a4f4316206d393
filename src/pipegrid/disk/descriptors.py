"""
Paths that mean a descriptor of this process: ``/dev/stdout``, ``/dev/fd/3``, what a shell makes of
``>(...)``.

What was opened for us is written where it stands. To open the path would begin anew: a file that a shell
opened to append to would lose what is in it.
"""

from __future__ import annotations

import os

_MOST_LINKS = 40


def own_descriptor(path: str) -> int | None:
    """Return the descriptor that a path means; None: it means a file, a device or a pipe by its name."""
    ours = ("/proc/self/fd", f"/proc/{os.getpid()}/fd", "/dev/fd")
    for _ in range(_MOST_LINKS):
        directory, name = os.path.split(os.path.abspath(path))
        if name.isascii() and name.isdigit() and {directory, os.path.realpath(directory)} & {*ours}:
            return int(name)
        try:
            path = os.path.join(directory, os.readlink(path))
        except OSError:
            return None
    return None


def open_to_write(path: str) -> int:
    """
    Open a device or pipe, or share the descriptor of ours that the path means; the caller closes it.

    Raises:
        OSError: it cannot be opened.
    """
    own = own_descriptor(path)
    return os.open(path, os.O_WRONLY | os.O_CLOEXEC) if own is None else os.dup(own)
