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


# Files that only their owner may read (logs, traces, shares), and directories that only their owner may
# change.


PRIVATE_FILE = 0o600
PRIVATE_DIRECTORY = 0o700


def open_private(path: str, flags: int) -> int:
    """
    Open a file for writing, and return its descriptor; a new file is created with permissions for its owner
    alone.

    A symbolic link is rejected: in a directory where other users may write, a link may lead anywhere. If the
    file exists and is a regular file of this user, other users lose their permissions; devices and pipes are
    not changed.

    Args:
        flags: of ``os.open``, without ``O_CREAT``; an existing file is truncated only with ``O_TRUNC``.

    Raises:
        OSError: the file cannot be opened, or is a symbolic link.
    """
    try:
        with interruptible() if is_pipe(path) else nullcontext():  # opening waits for a reader
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
    Create a directory and its missing parents. Whatever the umask allows, only their owner may write to them;
    otherwise other users could replace secrets or shares.

    Raises:
        OSError: the directory cannot be created, or a file has its name.
    """
    _make(str(path), mode, 0o755)


def make_private(path: str) -> None:
    """
    Create a directory and its missing parents, all accessible to their owner alone; an existing directory is
    not changed.

    Raises:
        OSError: the directory cannot be created, or a file has its name.
    """
    _make(path, PRIVATE_DIRECTORY, PRIVATE_DIRECTORY)


def keep_private(directory: str) -> str | None:
    """
    Remove other users' permissions from a directory; a missing directory is not an error.

    Returns:
        None, or the system's reason why the permissions could not be removed.
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
    """Return a directory's mode if users outside its group may access the directory; else None."""
    try:
        mode = stat.S_IMODE(os.stat(directory).st_mode)
    except OSError:
        return None
    return f"its mode is {mode:04o}" if mode & 0o007 else None


def _make(path: str, mode: int, mode_above: int) -> None:
    """Create a directory with one mode, and its missing parents with another mode."""
    try:
        _make_one(path, mode)
    except FileNotFoundError:
        above = os.path.dirname(path)
        if above in ("", path):
            raise
        _make(above, mode_above, mode_above)
        _make_one(path, mode)  # may still fail, as below /proc


def _make_one(path: str, mode: int) -> None:
    try:
        os.mkdir(path, mode)
    except FileNotFoundError:
        raise
    except OSError:  # such as EROFS, even if the directory exists
        if not os.path.isdir(path):
            raise
