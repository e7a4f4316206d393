"""Files and directories that only their owner may read or change."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import nullcontext

from pipegrid.disk.interruptible_pipe_writes import interruptible, is_pipe

TYPE_CHECKING = False  # defined as in ``typing``, which is slow to import

if TYPE_CHECKING:
    from pathlib import Path


# Files that only their owner should read (logs, traces, shares), and directories that only their owner may
# change.


PRIVATE_FILE = 0o600
PRIVATE_DIRECTORY = 0o700


def open_private(path: str, flags: int) -> int:
    """
    Open a file for writing, created for its owner alone if it does not exist; return its descriptor.

    A symbolic link is rejected: in a directory where others may write, it may lead anywhere. An existing
    regular file of this user loses the permissions of others; devices and pipes are not changed.

    Args:
        flags: of ``os.open``, without ``O_CREAT``; an existing file is truncated only if they say so.

    Raises:
        OSError: it cannot be opened, or is a symbolic link.
    """
    try:
        with interruptible() if is_pipe(path) else nullcontext():  # it waits for its reader
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


def make_directory(path: Path, mode: int = 0o755) -> None:
    """
    Create a directory and its parents unless they exist. Whatever the umask allows, only their owner may
    write to them; otherwise others could replace secrets or shares.

    Raises:
        OSError: it cannot be created, or something else has its name.
    """
    _make(str(path), mode, 0o755)


def make_private(path: str) -> None:
    """
    Create a directory and its missing parents, all for their owner alone, unless it exists.

    Raises:
        OSError: it cannot be created, or something else has its name.
    """
    _make(path, PRIVATE_DIRECTORY, PRIVATE_DIRECTORY)


def keep_private(directory: str) -> str | None:
    """
    Remove the permissions of others from a directory; a missing one is not an error.

    Returns:
        None, or the system's reason why that was not possible.
    """
    try:
        found = os.stat(directory)
        if found.st_mode & 0o077:
            os.chmod(directory, stat.S_IMODE(found.st_mode) & ~0o077)
            if os.stat(directory).st_mode & 0o077:
                return os.strerror(errno.EOPNOTSUPP)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None


def others_may(directory: str) -> str | None:
    """Return a directory's mode if it lets in users who are not in its group; else None."""
    try:
        mode = stat.S_IMODE(os.stat(directory).st_mode)
    except OSError:
        return None
    return f"its mode is {mode:04o}" if mode & 0o007 else None


def _make(path: str, mode: int, mode_above: int) -> None:
    """Create a directory with a mode, and its missing parents with another one."""
    try:
        _make_one(path, mode)
    except FileNotFoundError:
        above = os.path.dirname(path)
        if above in ("", path):
            raise
        _make(above, mode_above, mode_above)
        _make_one(path, mode)  # may be impossible nevertheless, as below /proc


def _make_one(path: str, mode: int) -> None:
    try:
        os.mkdir(path, mode)
    except FileNotFoundError:
        raise
    except OSError:  # it may exist: a read-only disk reports other errors first
        if not os.path.isdir(path):
            raise
