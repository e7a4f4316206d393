"""
File system calls of the share store, with errors that say which action failed, and on which path.

No call follows a symbolic link in the last component of a path, so that no name leads out of a storage
directory.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache

from pipegrid.disk.safe_open import CannotLock as CannotLock
from pipegrid.disk.safe_open import names_file as names_file
from pipegrid.disk.safe_open import names_inode as names_inode
from pipegrid.disk.safe_open import open_locked as open_locked
from pipegrid.errors import NoSpace, ServerRefused

TYPE_CHECKING = False  # defined as in ``typing``, which is slow to import
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from pipegrid.core.hashes import Buffer

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a write when the disk or a quota is full, or the file becomes too large."""

LEAST_FILES = 64
"""The fewest file descriptors a process needs: with fewer, Python would abort, or a command would not end."""

_CANNOT_ALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_SYNC_FILE_RANGE_WRITE = 2
_MAX_PIECES = 1024  # IOV_MAX on Linux
_PIECE_BYTES = 1 << 20


def few_files() -> str | None:
    """
    Raise the process's limit of open files to ``LEAST_FILES`` if it is lower; return an error sentence if
    that fails, else None.

    A command that runs out of descriptors while it runs could not end cleanly.
    """
    limit = os.sysconf("SC_OPEN_MAX")
    if not 0 <= limit < LEAST_FILES:
        return None
    try:
        import resource  # some systems lack this module

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (LEAST_FILES, hard))
    except (ImportError, OSError, ValueError):
        return (
            f"too few file descriptors: the limit is {limit}; raise it with "
            f"'ulimit -n 1024' (at least {LEAST_FILES} are needed)"
        )
    return None


def disk_error(error: OSError, what: str) -> ServerRefused:
    """
    Return the error to report for an error of the operating system, which becomes the returned error's cause.

    Args:
        what: the failed action and its place; the text follows "cannot".
    """
    if error.errno in FULL:
        made: ServerRefused = NoSpace(
            f"cannot {what}: the disk is full; free some space or use another server"
        )
    else:
        reason = os.strerror(error.errno) if error.errno else str(error)
        made = ServerRefused(f"cannot {what}: {reason}; check the disk or use another server")
    made.__cause__ = error
    return made


def read_all(fd: int, length: int, offset: int) -> bytes:
    """Return ``length`` bytes of a file, or fewer at the end of the file."""
    data = os.pread(fd, length, offset)
    while len(data) < length:  # one call returns at most 2 GiB
        more = os.pread(fd, length - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def write_pieces(fd: int, pieces: Sequence[Buffer], offset: int) -> int:
    """
    Write consecutive pieces with one call; return how many bytes were written, at least 1.

    Raises:
        OSError: nothing was written.
    """
    written = os.pwritev(fd, pieces[:_MAX_PIECES], offset)
    if not written:
        raise OSError(errno.EIO, "a write that writes nothing")
    return written


def write_all_pieces(fd: int, pieces: Sequence[Buffer], offset: int) -> None:
    """Write all of the pieces, with as many calls as needed."""
    written = write_pieces(fd, pieces, offset)
    if written < sum(map(len, pieces)):
        write_all(fd, b"".join(pieces)[written:], offset + written)


class FilePart:
    """
    A part of an open file, used in place of bytes that do not fit in memory.

    Args:
        fd: the caller's descriptor, which must stay open as long as this object is used.
    """

    __slots__ = ("_begin", "_end", "_fd")

    def __init__(self, fd: int, begin: int, end: int) -> None:
        self._fd = fd
        self._begin = begin
        self._end = end

    def __len__(self) -> int:
        return self._end - self._begin

    def pieces(self) -> Iterator[bytes]:
        """
        Yield the bytes, a megabyte at a time.

        Raises:
            OSError: the disk failed, or the file ends within the part.
        """
        for at in range(self._begin, self._end, _PIECE_BYTES):
            size = min(_PIECE_BYTES, self._end - at)
            data = read_all(self._fd, size, at)
            if len(data) < size:
                raise OSError(errno.EIO, "the file ends too early")
            yield data


def write_all(fd: int, data: Buffer | FilePart, offset: int) -> None:
    """Write all bytes of ``data``, with as many calls as needed."""
    if isinstance(data, FilePart):
        for piece in data.pieces():
            write_all(fd, piece, offset)
            offset += len(piece)
        return
    view = memoryview(data)
    while view:
        written = write_pieces(fd, [view], offset)
        view = view[written:]
        offset += written


def allocate(fd: int, offset: int, length: int) -> None:
    """
    Reserve disk space for a part of a file, so that later writes to this part do not find the disk full.
    Bytes after the file's end become zeros.

    Does nothing if the system or the file system does not support reservations.

    Raises:
        OSError: there is not enough space. The file may have become longer.
    """
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, offset, length)
        except OSError as error:
            if error.errno not in _CANNOT_ALLOCATE:
                raise


def begin_writing(fd: int) -> None:
    """
    Make the kernel start to write a file's data from memory to the disk, without waiting for the end.

    Does nothing on systems other than Linux, and never fails.
    """
    function = _sync_file_range()
    if function is not None:
        function(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)  # length 0: the whole file


@lru_cache(maxsize=1)
def _sync_file_range() -> Any:
    import ctypes  # importing it takes a millisecond, and most commands do not need it

    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


def lock_if_free(path: str) -> int | None:
    """
    Open and lock a file; return its descriptor, or None if another process has the lock or the file cannot be
    opened.
    """
    try:
        return open_locked(path, os.O_RDWR)
    except OSError:
        return None


def create_locked(path: str, mode: int = 0o666) -> int | None:
    """
    Create a file and lock it; return the descriptor, or None if the name exists or another process has locked
    the new file first.

    Raises:
        FileNotFoundError: the directory does not exist.
        OSError: the file cannot be created or locked; no new file is left.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, mode)
    except FileExistsError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None  # another process has locked the new file first
    except BaseException:  # without locks, nothing would remove the file later
        os.close(fd)
        remove(path)
        raise
    return fd


def remove(path: str) -> None:
    """Remove a file, if it exists."""
    with suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)


def remove_empty(directory: str) -> None:
    """Remove a directory if it exists and is empty."""
    with suppress(OSError):
        os.rmdir(directory)


def free_bytes(path: str) -> int | None:
    """
    Return the free space, in bytes, for unprivileged users in a directory, or in its nearest existing parent
    if it does not exist; None if unknown.

    The result is 0 if fewer than one in a hundred inodes are free: shares of one byte use up the inodes of a
    disk long before its bytes, and the server needs some inodes itself.

    Raises:
        NotADirectoryError: the path, or one of its parents, is not a directory.
    """
    try:
        status = os.statvfs(path + "/.")  # fails if the path is not a directory
    except NotADirectoryError:
        raise
    except FileNotFoundError:
        above = os.path.dirname(os.path.abspath(path))
        return None if above == os.path.abspath(path) else free_bytes(above)
    except OSError:
        return None
    if status.f_files and status.f_favail < status.f_files // 100:
        return 0
    return status.f_bavail * status.f_frsize


def is_writable(path: str) -> bool:
    """
    Return whether this process has permission to write in a directory, or to create the directory if it does
    not exist.
    """
    path = os.path.abspath(path)
    while not os.path.lexists(path):  # a missing directory is created with its first share
        path = os.path.dirname(path)
    return os.access(path, os.W_OK | os.X_OK)


def read_boot_id() -> bytes:
    """
    Return 16 bytes that change with every start of the machine.

    If the system has no such value, the bytes are random, so that unsynced data is never taken for synced.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return bytes.fromhex(file.read().strip().replace(b"-", b"").decode("ascii"))
    except (OSError, ValueError):
        return os.urandom(16)
