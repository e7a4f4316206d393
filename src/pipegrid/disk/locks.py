"""Files that are locked; apart from ``files``, for who has no time to load more."""

from __future__ import annotations

import fcntl
import os


def names_file(path: str, fd: int, inside: int | None = None) -> bool:
    """
    Whether path still is the name of the open file; others may have renamed or removed it.

    Args:
        inside: the descriptor of the directory that path is in, if it is a name alone.
    """
    ours = os.fstat(fd)
    return names_inode(path, (ours.st_dev, ours.st_ino), inside)


def names_inode(path: str, inode: tuple[int, int], inside: int | None = None) -> bool:
    """Whether path is a name of the file with that device and number; ``inside`` as of ``names_file``."""
    try:
        there = os.stat(path, dir_fd=inside, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (there.st_dev, there.st_ino) == inode


class CannotLock(OSError):
    """The file can be opened, but not locked: some network file systems have no locks."""


def open_locked(
    path: str, flags: int, wait: bool = False, shared: bool = False, mode: int = 0o666
) -> int | None:
    """
    Open a file and take its lock; return the descriptor, or None if somebody else has the lock.

    Between the opening and the locking another process may rename or remove the file. So the
    name is looked at again under the lock, and if it leads elsewhere now, all begins anew.

    Args:
        flags: as of ``os.open``.
        wait: wait for the lock, where it is known to be held for a moment only.
        shared: others may have it at the same time, if they share it, too.
        mode: of a file that is made.

    Raises:
        FileNotFoundError: there is no such file, or (when creating) no such directory.
        CannotLock: it cannot be locked by anybody.
    """
    while True:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            _lock(fd, kind | (0 if wait else fcntl.LOCK_NB))
            if names_file(path, fd):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _lock(fd: int, kind: int) -> None:
    try:
        fcntl.flock(fd, kind)
    except BlockingIOError:
        raise
    except OSError as error:
        raise CannotLock(*error.args) from error
