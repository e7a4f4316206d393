"""Opens files with a lock, or without waiting for the other end of a pipe."""

from __future__ import annotations

import errno
import fcntl
import os
import stat

TYPE_CHECKING = False  # defined as in ``typing``, which is slow to import

if TYPE_CHECKING:
    from pathlib import Path


# This module is separate from ``file_system_calls`` because commands load it at start-up.


def names_file(path: str, fd: int, inside: int | None = None) -> bool:
    """
    Return whether a path is still the name of an open file; another process may have renamed or removed the
    file.

    Args:
        inside: the descriptor of the path's directory, if the path is a name alone.
    """
    ours = os.fstat(fd)
    return names_inode(path, (ours.st_dev, ours.st_ino), inside)


def names_inode(path: str, inode: tuple[int, int], inside: int | None = None) -> bool:
    """
    Return whether a path is a name of the file with this device and inode number; ``inside`` as in
    ``names_file``.
    """
    try:
        there = os.stat(path, dir_fd=inside, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (there.st_dev, there.st_ino) == inode


class CannotLock(OSError):
    """The file can be opened but not locked: some network file systems have no locks."""


def open_locked(
    path: str, flags: int, wait: bool = False, shared: bool = False, mode: int = 0o666
) -> int | None:
    """
    Open a file and lock it; return the descriptor, or None if another process has the lock.

    Between opening and locking, another process may rename or remove the file. So the name is checked again
    under the lock; if it now belongs to another file, that file is opened instead.

    Args:
        flags: for ``os.open``.
        wait: wait for the lock; only for locks that are held for a moment.
        shared: take a shared lock, which several processes may hold at the same time.
        mode: the permissions of a file that is created.

    Raises:
        FileNotFoundError: the file does not exist, or (when creating) its directory.
        CannotLock: the file system has no locks.
        OSError: the file cannot be opened, or is a symbolic link.
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


# Settings and notes are read from files without waiting: opening a named pipe that has replaced such a file
# would block the thread for ever, and signals would not end that.


def is_directory(entry: os.DirEntry[str]) -> bool:
    """
    Return whether an entry is a directory, and not a symbolic link; False if it cannot be examined.

    Some file systems do not return the types of entries with their names; then each entry is examined, which
    may fail.
    """
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def is_file(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a regular file; False if it cannot be examined."""
    try:
        return entry.is_file(follow_symlinks=False)
    except OSError:
        return False


def read_file(path: Path | str, most_bytes: int = -1) -> bytes:
    """
    Return a file's content, or the beginning of it.

    Args:
        most_bytes: the largest number of bytes to read; -1: all.

    Raises:
        OSError: the file cannot be read, or is a directory or named pipe.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISDIR(mode):
        os.close(fd)
        if stat.S_ISDIR(mode):  # Python's own error would not name the path
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is a named pipe; put a file in its place", str(path))
    with os.fdopen(fd, "rb") as file:
        return file.read(most_bytes)


# ``/dev/stdout``, ``/dev/fd/3`` and a shell's ``>(...)`` name a descriptor of this process, which is written
# from its current position. Opening the path again would start at position 0: a file that a shell opened for
# appending would lose its content.

_MOST_LINKS = 40


def own_descriptor(path: str) -> int | None:
    """Return the descriptor of this process that a path names; None if the path names anything else."""
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
    Open a device or pipe, or duplicate the descriptor that the path names; the caller closes the result.

    Raises:
        OSError: the path cannot be opened.
    """
    own = own_descriptor(path)
    return os.open(path, os.O_WRONLY | os.O_CLOEXEC) if own is None else os.dup(own)
