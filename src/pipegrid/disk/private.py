"""Files that tell what nobody else should read, wherever a user wants them: logs and traces."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import nullcontext

from pipegrid.disk.patience import may_wait


def open_private(path: str, flags: int) -> int:
    """
    Open a file for writing, made for nobody else to read if it is not there; return its descriptor.

    A name that is a symbolic link is refused: in a directory where others may write, it leads where they
    like. A file that is there and its owner's loses what others may do with it; devices and pipes stay
    as they are.

    Args:
        flags: of ``os.open``, beside ``O_CREAT``; what is there is not truncated unless they say so.

    Raises:
        OSError: it cannot be opened, or is a symbolic link.
    """
    try:
        with may_wait() if _is_pipe(path) else nullcontext():  # for its reader
            fd = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(
                errno.ELOOP, "it is a symbolic link; name the file that it leads to", path
            ) from error
        raise
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode) and found.st_mode & 0o077 and found.st_uid == os.geteuid():
        os.fchmod(fd, stat.S_IMODE(found.st_mode) & 0o700)
    return fd


def _is_pipe(path: str) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except OSError:
        return False
