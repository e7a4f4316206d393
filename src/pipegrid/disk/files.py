"""
What a share store asks of a disk: small calls that say what they could not do, and where.

Nothing here knows shares; nothing follows a symbolic link in its last step, so that no name in
a storage directory leads out of it.
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

TYPE_CHECKING = False  # as ``typing`` has it, which is not to be waited for
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from pipegrid.core.hashes import Buffer

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What a system says when a file cannot become longer, for want of room, or of more than one may have."""

_CANNOT_ALLOCATE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_SYNC_FILE_RANGE_WRITE = 2
_MAX_PIECES = 1024  # IOV_MAX on Linux
_PIECE_BYTES = 1 << 20


def disk_error(error: OSError, what: str) -> ServerRefused:
    """
    Return the error to report for one of the operating system.

    Its cause is that one, for who has no server, and another sentence.

    Args:
        what: the failed action with its place, to stand behind "cannot".
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
    """Return length bytes of a file, or as many as there are."""
    data = os.pread(fd, length, offset)
    while len(data) < length:  # one call gives 2 GiB at most
        more = os.pread(fd, length - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def write_pieces(fd: int, pieces: Sequence[Buffer], offset: int) -> int:
    """
    Write pieces one behind the other with one call; returns how many bytes it took, at least 1.

    Raises:
        OSError: nothing was written.
    """
    written = os.pwritev(fd, pieces[:_MAX_PIECES], offset)
    if not written:
        raise OSError(errno.EIO, "a write that writes nothing")
    return written


def write_all_pieces(fd: int, pieces: Sequence[Buffer], offset: int) -> None:
    """Write all of the pieces, however many calls that takes."""
    written = write_pieces(fd, pieces, offset)
    if written < sum(map(len, pieces)):
        write_all(fd, b"".join(pieces)[written:], offset + written)


class FilePart:
    """
    Part of an open file, in the place of bytes that are too many for memory.

    Args:
        fd: stays the caller's, and must be open as long as this is used.
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
            OSError: the disk failed, or the file ends before the part does.
        """
        for at in range(self._begin, self._end, _PIECE_BYTES):
            size = min(_PIECE_BYTES, self._end - at)
            data = read_all(self._fd, size, at)
            if len(data) < size:
                raise OSError(errno.EIO, "the file ends too early")
            yield data


def write_all(fd: int, data: Buffer | FilePart, offset: int) -> None:
    """Write all of data, however many calls that takes."""
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
    Have room for a part of a file set aside, so that writing there does not find the disk full; what is
    behind the file's end becomes zeros.

    It does nothing where the system or the file system cannot do that.

    Raises:
        OSError: there is no such room. The file may be longer than it was.
    """
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, offset, length)
        except OSError as error:
            if error.errno not in _CANNOT_ALLOCATE:
                raise


def begin_writing(fd: int) -> None:
    """
    Have the kernel begin to write what a file has in memory, without waiting for it to end.

    A hint: it does nothing where there is no such call (outside of Linux), and never fails.
    """
    function = _sync_file_range()
    if function is not None:
        function(fd, 0, 0, _SYNC_FILE_RANGE_WRITE)  # from the start to the end, whatever is dirty


@lru_cache(maxsize=1)
def _sync_file_range() -> Any:
    import ctypes  # costs a millisecond that most commands need not spend

    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


def lock_if_free(path: str) -> int | None:
    """Return a descriptor of a file, locked; None if somebody else has it, or it cannot be opened."""
    try:
        return open_locked(path, os.O_RDWR)
    except OSError:
        return None


def create_locked(path: str, mode: int = 0o666) -> int | None:
    """
    Make a file and take its lock; return the descriptor, or None if there is something of that name.

    Raises:
        FileNotFoundError: there is no such directory.
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
        return None  # whoever opened it in between has it
    except BaseException:  # where there are no locks nobody would ever remove it
        os.close(fd)
        remove(path)
        raise
    return fd


def remove(path: str) -> None:
    """Remove a file that may be gone already."""
    with suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)


def remove_empty(directory: str) -> None:
    """Remove a directory if it is there and empty."""
    with suppress(OSError):
        os.rmdir(directory)


def free_bytes(path: str) -> int | None:
    """
    Return the room for unprivileged users in a directory, or None if it cannot be told.

    There is none where fewer than one in a hundred files can still be made: shares of a byte each use up the
    files of a disk long before its bytes, and the server needs some for itself.

    Raises:
        NotADirectoryError: something else has its name, or that of a directory above it.
    """
    try:
        status = os.statvfs(path + "/.")  # which only a directory has
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
    """Return whether this process may write in a directory, or make it if it is not there yet."""
    return os.access(_existing(path), os.W_OK | os.X_OK)


def _existing(path: str) -> str:
    """Return path, or what is there above it: directories are made when the first share comes."""
    path = os.path.abspath(path)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


def read_boot_id() -> bytes:
    """
    Return 16 bytes that differ after every start of the machine.

    Where the system offers none they are random, so that nothing is taken for synced that may not be.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return bytes.fromhex(file.read().strip().replace(b"-", b"").decode("ascii"))
    except (OSError, ValueError):
        return os.urandom(16)
