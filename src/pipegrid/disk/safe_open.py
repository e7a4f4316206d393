"""Opening of files with a lock, or without waiting for the other end of a pipe."""

from __future__ import annotations

import errno
import fcntl
import os
import stat

TYPE_CHECKING = False  # defined as in ``typing``, which is slow to import

if TYPE_CHECKING:
    from pathlib import Path


# Separate from ``file_system_calls``, because it is loaded at start-up.


def names_file(path: str, fd: int, inside: int | None = None) -> bool:
    """
    Return whether path still is the name of the open file; others may have renamed or removed it.

    Args:
        inside: the descriptor of the directory of path, if path is a name alone.
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
    """The file can be opened but not locked: some network file systems have no locks."""


def open_locked(
    path: str, flags: int, wait: bool = False, shared: bool = False, mode: int = 0o666
) -> int | None:
    """
    Open a file and lock it; return the descriptor, or None if another process has the lock.

    Between opening and locking, another process may rename or remove the file. So the name is checked again
    under the lock; if it is that of another file, that is opened.

    Args:
        flags: as of ``os.open``.
        wait: wait for the lock, where it is held only for a moment.
        shared: other processes may hold the lock at the same time, if theirs is shared, too.
        mode: of a file that is created.

    Raises:
        FileNotFoundError: the file does not exist, or (when creating) its directory.
        CannotLock: the file system has no locks.
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


# Files of settings and notes are read without waiting: opening a named pipe in place of such a file would
# block the thread for ever, signals or not.


def is_directory(entry: os.DirEntry[str]) -> bool:
    """
    Return whether an entry is a directory, and not a link; False if it cannot be examined.

    Some file systems do not return types with names; then each entry is examined, which may fail for one.
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
        most_bytes: the largest number of bytes to read; -1: all.

    Raises:
        OSError: it cannot be read, or is a directory or named pipe.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISDIR(mode):
        os.close(fd)
        if stat.S_ISDIR(mode):  # Python would name the descriptor instead of the path
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is a named pipe; put a file in its place", str(path))
    with os.fdopen(fd, "rb") as file:
        return file.read(most_bytes)


# ``/dev/stdout``, ``/dev/fd/3`` and a shell's ``>(...)`` name a descriptor of this process, which is
# written from its current position on. Opening the path again would start at 0: a file that a shell opened
# for appending would lose its content.

_MOST_LINKS = 40


def own_descriptor(path: str) -> int | None:
    """Return the descriptor that a path names; None if it names a file, a device or a pipe."""
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
    Open a device or pipe, or duplicate the descriptor that the path names; the caller closes it.

    Raises:
        OSError: it cannot be opened.
    """
    own = own_descriptor(path)
    return os.open(path, os.O_WRONLY | os.O_CLOEXEC) if own is None else os.dup(own)
