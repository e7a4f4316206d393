"""
Where plaintext comes from: a path, an open file, or bytes.

A source is read twice, once for the key and once for the encoding, so it must be seekable and must
not change in between; what is neither (a pipe) is first copied to a temporary file. All
methods block and are meant for a worker thread.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import time
from typing import BinaryIO, Protocol, Union

from pipegrid.arguments import check_has
from pipegrid.core.hashes import Buffer
from pipegrid.errors import SourceError

SourceLike = Union[str, "os.PathLike[str]", bytes, bytearray, memoryview, BinaryIO]

_RACY_S = 2.0
"""A file opened this soon after a change may change again without its time stamp showing it."""


class Source(Protocol):
    """Plaintext of a known size."""

    name: str
    size: int

    def read_at(self, offset: int, length: int) -> Buffer:
        """
        Return exactly ``length`` bytes from ``offset``.

        Raises:
            SourceError: they cannot be read, or the file has become shorter.
        """

    def check_unchanged(self) -> bool:
        """
        Return whether time stamps prove that the source is as it was when it was opened.

        False: they cannot tell; compare the content.

        Raises:
            SourceError: it has changed.
        """

    def close(self) -> None:
        """Give back what was opened for it; a file that the caller opened stays open."""


class BytesSource:
    """Plaintext that is in memory already."""

    def __init__(self, data: bytes | bytearray | memoryview, name: str = "the data") -> None:
        # A bytearray might change under us. Bytes are not copied, neither here nor when they are read.
        self._view = memoryview(bytes(data))
        self.name = name
        self.size = len(self._view)

    def read_at(self, offset: int, length: int) -> memoryview:
        """Return the slice, where it is."""
        return self._view[offset : offset + length]

    def check_unchanged(self) -> bool:
        """Return True: the bytes are our own, and never change."""
        return True

    def close(self) -> None:
        """Do nothing: no file was opened."""


class FileSource:
    """
    Plaintext in a regular file, read by position, so that it does not matter who else seeks.

    Attributes:
        path: the absolute path by which a caller named it; None if it was not opened by that.
        identity: device, inode, size, and when it was last changed, in nanoseconds since 1970.
    """

    def __init__(self, file: BinaryIO, name: str, owned: bool) -> None:
        self._file = file
        self._fd = file.fileno()
        self._owned = owned
        self.name = name
        found = os.fstat(self._fd)
        self._opened = _signature(found)
        self._racy = time.time() - max(found.st_mtime, found.st_ctime) < _RACY_S
        self.size = found.st_size
        self.path: str | None = None
        self.identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    def read_at(self, offset: int, length: int) -> bytes:
        """Return the bytes, however many reads it takes."""
        try:
            data = os.pread(self._fd, length, offset)
            while 0 < len(data) < length:
                more = os.pread(self._fd, length - len(data), offset + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise SourceError(f"cannot read {self.name}: {error.strerror}") from error
        if len(data) != length:
            raise SourceError(
                f"{self.name} became shorter while it was read; nothing was stored, try again "
                "when nobody writes to it"
            )
        return data

    def check_unchanged(self) -> bool:
        """Compare size, inode and time stamps with those at opening."""
        if _signature(os.fstat(self._fd)) != self._opened:
            raise SourceError(
                f"{self.name} changed while it was read; nothing was stored, try again when "
                "nobody writes to it"
            )
        return not self._racy

    def close(self) -> None:
        """Close the file if it was opened here."""
        if self._owned:
            self._file.close()


def _signature(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def open_source(source: SourceLike, name: str | None = None) -> Source:
    """
    Return the source for whatever the caller gave.

    Args:
        source: bytes; a path; or a binary file object, which is read from its beginning if it is a
            regular file and from its position otherwise. It stays open.
        name: what errors call it.

    Raises:
        SourceError: it cannot be opened or read, or is a directory.
        UsageError: it is nothing of the kind.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        return BytesSource(source, name or "the data")
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        try:
            file: BinaryIO = open(path, "rb")  # noqa: SIM115  (closed by the source)
        except OSError as error:
            if str(path).startswith("URI:"):  # which is a secret
                raise SourceError(
                    "what is stored is bytes, a path or a file opened in binary mode; this is a capability, "
                    "and there is no file of that name; 'get' fetches what it names"
                ) from None
            raise SourceError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise SourceError(f"{path!r} is no path: {error}; give another") from error
        try:
            opened = _from_file(file, name or path, owned=True)
            if not file.closed:  # else it was no regular file, and was copied
                opened.path = os.fsdecode(os.path.abspath(path))
            return opened
        except BaseException:
            file.close()
            raise
    check_has(source, ("read",), "what is stored", "bytes, a path or a file opened in binary mode")
    name = name or str(getattr(source, "name", "the file object"))
    if getattr(source, "closed", False) is True:
        raise SourceError(f"cannot read {name}: it is closed; give a file that is open")
    return _from_file(source, name, owned=False)


def size_of(source: SourceLike) -> int | None:
    """Return how long a source probably is, without opening it; None if that takes reading it."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return memoryview(source).nbytes
    if not isinstance(source, (str, os.PathLike)):
        return None
    try:
        found = os.stat(source)
    except (OSError, ValueError):
        return 0  # it will fail at once
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _is_plain(file: BinaryIO) -> bool:
    """Return whether the object's bytes are those of a regular file that can be read by position."""
    raw = getattr(file, "raw", file)  # a decompressor, say, has a file and is none
    if not isinstance(raw, io.FileIO) or not raw.readable():
        return False
    if file.writable():
        file.flush()  # what its buffer holds would be missed
    fd = file.fileno()
    found = os.fstat(fd)
    return stat.S_ISREG(found.st_mode) and (found.st_size > 0 or _is_empty(fd))


def _is_empty(fd: int) -> bool:
    """Return whether a file of no size holds nothing; in ``/proc``, and on some mounts, it does."""
    try:
        return not os.pread(fd, 1, 0) or os.fstat(fd).st_size > 0
    except OSError:
        return False  # reading it all tells why


def _copy(file: BinaryIO, spool: BinaryIO, name: str) -> None:
    try:
        while data := _next(file, name):
            spool.write(data)
        spool.flush()
    except (TypeError, ValueError) as error:
        raise SourceError(
            f"cannot read {name}: {error}; give a path, bytes or a file opened in binary mode"
        ) from error


def _next(file: BinaryIO, name: str) -> bytes:
    try:
        data: bytes | None = file.read(1 << 20)
        if data is None:  # which is not its end
            raise BlockingIOError(errno.EAGAIN, "it has nothing at the moment, and does not wait")
        return data
    except io.UnsupportedOperation:
        raise  # it was opened for writing
    except OSError as error:
        raise SourceError(f"cannot read {name}: {error.strerror or error}") from error


def _from_file(file: BinaryIO, name: str, owned: bool) -> FileSource:
    if _is_plain(file):
        return FileSource(file, name, owned)
    spool = open_spool(name)
    try:
        _copy(file, spool, name)
    except OSError as error:
        _drop(spool)
        raise _no_space(name, error) from error
    except BaseException:
        _drop(spool)
        raise
    if owned:
        file.close()
    return FileSource(spool, name, owned=True)


def _drop(spool: BinaryIO) -> None:
    # What its buffer still holds is tried once more, and fails again.
    with contextlib.suppress(OSError):
        spool.close()


def open_spool(name: str) -> BinaryIO:
    """
    Open a file without a name in temporary space, for a copy of what has this name.

    Raises:
        SourceError: there is no such space.
    """
    import tempfile  # takes 5 ms with all that it brings; what is put is mostly a file already

    try:
        return tempfile.TemporaryFile(prefix="pipegrid-")
    except OSError as error:
        raise _no_space(name, error) from error


def _no_space(name: str, error: OSError) -> SourceError:
    return SourceError(
        f"cannot copy {name} to temporary space: {error.strerror}; "
        "free some, or set TMPDIR to a larger disk"
    )
