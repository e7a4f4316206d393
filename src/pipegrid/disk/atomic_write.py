"""Atomic replacement: hidden name, rename, O_TMPFILE."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipegrid.disk.files import FULL
from pipegrid.disk.safe_open import CannotLock, names_file, open_locked

# The hidden name beside a file under which its bytes come together: one for each target.

SUFFIX = ".pipegrid-part"


def is_part_name(name: str) -> bool:
    """Whether a file of this name is the part of another one, which belongs to nobody's data."""
    return name.startswith(".") and name.endswith(SUFFIX)


def part_path(target: str, inside: int | None = None) -> str:
    """
    Return the hidden name beside a target; too long a name is cut, and made one of its own by a hash.

    Args:
        target: with all links resolved; or a name alone.
        inside: then the descriptor of its directory.
    """
    directory, name = os.path.split(target)
    try:
        longest = os.pathconf(directory or "." if inside is None else inside, "PC_NAME_MAX")
    except (OSError, ValueError):
        longest = 255
    hidden = f".{name}{SUFFIX}"
    if len(os.fsencode(hidden)) > longest:
        from hashlib import sha256  # OpenSSL takes three milliseconds to load

        digest = sha256(os.fsencode(name)).hexdigest()[:16]
        room = longest - len(f"..{digest}{SUFFIX}")
        cut = os.fsencode(name)[: max(0, room)].decode("utf-8", "ignore")
        hidden = f".{cut}.{digest}{SUFFIX}"
    return os.path.join(directory, hidden)


# Small files of our own that are there whole or not at all: made beside their place, and then named.
#
# A process that is killed meanwhile leaves the hidden name beside the old file, which stays as it was;
# whoever writes the file next takes that up. Who finds it in use, or cannot lock it, makes
# ``.NAME.something`` instead.

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


# What is left beside a file under the hidden name of its part: that name, if a process was killed while
# it gave the file its own; or a part that is of no use any more, since the file is complete.


def remove_stale_link(target: str, inside: int | None = None) -> None:
    """
    Take the hidden name of its part from a file that has its own name by now; if it has none, do nothing.

    A rerun finds the file to be there, and would leave the other name for ever. Whoever takes the name of a
    part away holds the part's lock, so that none is taken from somebody who has begun to write a new one.

    Args:
        target: with all links resolved; or a name alone.
        inside: then the descriptor of its directory.
    """
    _remove(target, inside, lambda fd: names_file(target, fd, inside))


def remove_part(target: str, inside: int | None = None) -> None:
    """
    Remove the part beside a file that is complete, unless somebody writes to it, or it is another user's.

    Args:
        target: as of ``take_away_second_name``.
    """
    _remove(target, inside, lambda fd: os.fstat(fd).st_uid == os.geteuid())


def _remove(target: str, inside: int | None, may_go: Callable[[int], bool]) -> None:
    part = part_path(target, inside)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(OSError):  # mostly there is none; and no file is worse for it
        fd = os.open(part, flags, dir_fd=inside)
        try:
            if not (stat.S_ISREG(os.fstat(fd).st_mode) and may_go(fd)):
                return
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if names_file(part, fd, inside):
                os.unlink(part, dir_fd=inside)
        finally:
            os.close(fd)


# Files that get their name when they are whole: nobody sees half of one, and whoever dies leaves nothing
# of it.
#
# Linux alone has them, and not on every file system (``O_TMPFILE``); ``can_name`` finds out.

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


def open_spool(directory: str) -> int:
    """
    Open a new file in a directory for what is too much for memory, which ends with its descriptor.

    Raises:
        OSError: there is no such directory, or no file can be made there.
    """
    if hasattr(os, "O_TMPFILE"):
        with suppress(OSError):
            return open_unnamed(directory, 0o600)
    name = f"{directory}/spool.{os.urandom(8).hex()}"
    fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(name)
    return fd


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
