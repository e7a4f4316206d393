"""
Small files of our own that are there whole or not at all: made beside their place, and then named.

A process that is killed meanwhile leaves the hidden name beside the old file, which stays as it was; whoever
writes the file next takes that up. Who finds it in use, or cannot lock it, makes ``.NAME.something`` instead.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipegrid.disk.locks import CannotLock, names_file, open_locked
from pipegrid.disk.partname import part_path

_CANNOT_SYNC = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


def replace_file(path: Path, data: bytes, *, mode: int = 0o600, durable: bool = True) -> None:
    """
    Write a file anew, or for the first time.

    Args:
        mode: of the file afterwards.
        durable: its bytes are on the disk before its name is, and both when this returns; False where
            nothing is lost with them.

    Raises:
        OSError: it cannot be written; what was there is as it was.
    """
    with _beside(path, data, mode, durable) as name:
        os.replace(name, path)
    if durable:
        _sync_name(path)


def create_file(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """
    Write a file, durably, unless there is one: then that stands, also if it was made at the same moment.

    Raises:
        OSError: it cannot be written.
    """
    with _beside(path, data, mode, True) as name:
        with suppress(FileExistsError):
            os.link(name, path)
        with suppress(OSError):  # the file is there, and no worse for another name
            os.unlink(name)
    _sync_name(path)


def _sync_name(path: Path) -> None:
    """
    Have a name on the disk: the only cap of a directory that an alias has, or a key that others know.

    The file is there by now, so nothing is said of a directory that cannot be synced.
    """
    with suppress(OSError):
        sync_path(path.parent)


def sync_directory(fd: int) -> bool:
    """
    Have the names in an open directory on the disk; returns whether its file system can do that.

    Some (CIFS, many of FUSE) reject it, and keep names in their own way: that is no error.

    Raises:
        OSError: the disk fails.
    """
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
        return False
    return True


def sync_path(path: Path | str) -> None:
    """
    Have what is in a file on the disk, or the names in a directory.

    Raises:
        OSError: it may not be read, or the system cannot do that.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _beside(path: Path, data: bytes, mode: int, durable: bool) -> Iterator[str]:
    """Give the name of a new file beside the path, for the caller to take away; errors do so, too."""
    fd, name = _open_beside(path)
    with os.fdopen(fd, "wb") as file:  # open, and so locked, until it has the name of its own
        try:
            os.fchmod(fd, mode)
            file.write(data)
            file.flush()
            if durable:
                os.fsync(fd)
            yield name
        except BaseException:
            with suppress(OSError):
                if names_file(name, fd):
                    os.unlink(name)
            raise


def _open_beside(path: Path) -> tuple[int, str]:
    """Open an empty file for what is to come; returns its descriptor and its name."""
    hidden = part_path(str(path))
    with suppress(OSError):  # of a disk that takes nothing, the other way tells
        fd = _open_hidden(hidden)
        if fd is not None:
            return fd, hidden
    import tempfile  # takes 5 ms with all that it brings, and is seldom needed

    return tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")


def _open_hidden(name: str) -> int | None:
    """Open and lock the hidden file, and empty it; None: it is in use, or not ours."""
    for _ in range(2):
        try:
            fd = open_locked(name, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, mode=0o600)
        except CannotLock:
            if not os.lstat(name).st_size:  # it was made just now
                os.unlink(name)
            raise
        if fd is None:
            return None
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                break
            if found.st_nlink == 1:
                if found.st_size:
                    os.ftruncate(fd, 0)
                fd, opened = -1, fd
                return opened
            os.unlink(name)  # of a file that was given its own name when its process was killed
        finally:
            if fd >= 0:
                os.close(fd)
    return None
