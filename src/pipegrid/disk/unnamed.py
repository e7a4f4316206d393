"""
Files that get their name when they are whole: nobody sees half of one, and whoever dies leaves nothing of it.

Linux alone has them, and not on every file system (``O_TMPFILE``); ``can_name`` finds out.
"""

from __future__ import annotations

import errno
import os

from pipegrid.disk.files import FULL

_FLAGS: int = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_TMPFILE", 0)
_PASSING = (*FULL, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.EROFS)
"""What says nothing of the file system: it may be over when somebody has looked after the disk."""


def open_unnamed(directory: str, mode: int = 0o666) -> int:
    """
    Open a new file of a directory's file system that has no name.

    Args:
        mode: of the file, of which the umask may take some.

    Raises:
        OSError: there is no such directory, or its file system has no such files.
    """
    return os.open(directory, _FLAGS, mode)


def give_name(fd: int, path: str) -> None:
    """
    Give a file its name.

    Raises:
        FileExistsError: something has that name, and keeps it.
        FileNotFoundError: there is no such directory.
        OSError: the disk failed.
    """
    # No directory is meant by the descriptor, as the path is absolute; but with one Python follows the link,
    # which is the only way to the file.
    os.link(f"/proc/self/fd/{fd:d}", path, src_dir_fd=fd, follow_symlinks=True)


def can_name(directory: str) -> bool:
    """
    Return whether files of a directory's file system can do without a name, as far as that can be told.

    Nothing is named for that: whoever dies meanwhile leaves nothing. So ``give_name`` may still be forbidden.

    Raises:
        OSError: it cannot be told now: no directory is there, no room, or too many files are open.
    """
    if not hasattr(os, "O_TMPFILE"):
        return False
    try:
        fd = open_unnamed(directory)
    except OSError as error:
        if isinstance(error, FileNotFoundError) or error.errno in _PASSING:
            raise
        return False
    try:
        give_name(fd, directory)
    except FileExistsError:  # so the way to the file is there; without /proc it is not
        return True
    except OSError as error:
        if error.errno in _PASSING:
            raise
        return False
    finally:
        os.close(fd)
    return False
