"""
Files of settings and notes, read without ever waiting for somebody else, and what a directory's entries are.

A named pipe that lies in such a file's place would keep the thread that opens it for ever, signals or not.
"""

from __future__ import annotations

import errno
import os
import stat

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    from pathlib import Path


def is_directory(entry: os.DirEntry[str]) -> bool:
    """
    Return whether an entry is a directory, and no link; False if it cannot be looked at.

    File systems that do not say so where names are listed have each entry looked at, which may fail for one.
    """
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def is_file(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a regular file; as ``is_directory``."""
    try:
        return entry.is_file(follow_symlinks=False)
    except OSError:
        return False


def read_file(path: Path | str, most_bytes: int = -1) -> bytes:
    """
    Return a file's content, or its beginning.

    Args:
        most_bytes: no more than these are read; -1: all.

    Raises:
        OSError: it cannot be read, or is a directory or named pipe.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISDIR(mode):
        os.close(fd)
        if stat.S_ISDIR(mode):  # of which Python would say that "11" is one
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is a named pipe; put a file in its place", str(path))
    with os.fdopen(fd, "rb") as file:
        return file.read(most_bytes)
