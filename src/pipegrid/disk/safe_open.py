"""Open with a lock, or without blocking on a pipe."""

from __future__ import annotations

import errno
import fcntl
import os
import stat

TYPE_CHECKING = False  # as in ``typing``, which is slow to import

if TYPE_CHECKING:
    from pathlib import Path


# Files that are locked; apart from ``files``, for who has no time to load more.


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


# Files of settings and notes, read without ever waiting for somebody else, and what a directory's entries
# are.
#
# A named pipe that lies in such a file's place would keep the thread that opens it for ever, signals or not.


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


# Paths that mean a descriptor of this process: ``/dev/stdout``, ``/dev/fd/3``, what a shell makes of
# ``>(...)``.
#
# What was opened for us is written where it stands. To open the path would begin anew: a file that a shell
# opened to append to would lose what is in it.

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
