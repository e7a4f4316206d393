"""
Sources of plaintext: a path, an open file, or bytes. All methods block, so call them in a worker thread.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import stat
import time
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, Protocol, Union

from pipegrid.argument_checks import check_has
from pipegrid.core.hashes import Buffer
from pipegrid.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import AsyncIterable

    from twisted.web.iweb import IBodyProducer, IResponse

SourceLike = Union[
    str,
    "os.PathLike[str]",
    bytes,
    bytearray,
    memoryview,
    BinaryIO,
    "FileRange",
    "AsyncIterable[bytes]",
    "IBodyProducer",
    "IResponse",
]
"""A path, bytes, a binary file object, or an object whose bytes arrive via the reactor (``async_source``)."""

KINDS = "bytes, a path, a file opened in binary mode, an async iterator, an IBodyProducer or an IResponse"

_RACY_S = 2.0
"""A file opened within this many seconds after a change may change again without a new time stamp."""


class Source(Protocol):
    """
    Plaintext of a known size.

    A source of several segments is read twice, for the key and for the encoding, so it must be seekable and
    must not change between the two readings. A pipe is copied first, to memory or a temporary file.
    """

    name: str
    size: int

    def read_at(self, offset: int, length: int) -> Buffer:
        """
        Return exactly ``length`` bytes from ``offset``.

        Raises:
            SourceError: the bytes cannot be read, or the file has become shorter.
        """

    def check_unchanged(self) -> bool:
        """
        Return whether time stamps prove that the source is unchanged since it was opened.

        If the result is False, the caller must compare the content.

        Raises:
            SourceError: the source has changed.
        """

    def close(self) -> None:
        """Close the file if this object opened it; a file that the caller opened stays open."""


class BytesSource:
    """Plaintext that is in memory already."""

    def __init__(self, data: bytes | bytearray | memoryview, name: str = "the data") -> None:
        # A bytearray might change during the put, so it is copied. Bytes are never copied.
        self._view = memoryview(bytes(data))
        self.name = name
        self.size = len(self._view)

    def read_at(self, offset: int, length: int) -> memoryview:
        """Return a view of the slice."""
        return self._view[offset : offset + length]

    def check_unchanged(self) -> bool:
        """Return True: this object's bytes never change."""
        return True

    def close(self) -> None:
        """Do nothing: no file was opened."""


class FileSource:
    """
    Plaintext in a regular file, read by position: other users of the file object can seek meanwhile.

    Attributes:
        path: the absolute path by which a caller named the file; None if the caller gave a file object.
        identity: device, inode, size, and time of the last change in nanoseconds since 1970.
    """

    def __init__(self, file: BinaryIO, name: str, owned: bool) -> None:
        self._file = file
        self._fd = file.fileno()
        self._start = 0
        self._owned = owned
        self.name = name
        found = os.fstat(self._fd)
        self._opened = _signature(found)
        # A file without a name can be changed only by the process that has opened it.
        is_new = time.time() - max(found.st_mtime, found.st_ctime) < _RACY_S
        self._racy = is_new and found.st_nlink > 0
        self.size = found.st_size
        self.path: str | None = None
        self.identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    def read_at(self, offset: int, length: int) -> bytes:
        """Return the bytes, with as many reads as needed."""
        try:
            data = read_fully(self._fd, self._start + offset, length)
        except OSError as error:
            raise SourceError(f"cannot read {self.name}: {error.strerror}") from error
        if len(data) != length:
            raise SourceError(
                f"{self.name} became shorter while it was read; nothing was stored, try again when"
                f" no program writes to it"
            )
        return data

    def check_unchanged(self) -> bool:
        """Compare size, inode and time stamps with those at opening."""
        if _signature(os.fstat(self._fd)) != self._opened:
            raise SourceError(
                f"{self.name} changed while it was read; nothing was stored, try again when no "
                f"program writes to it"
            )
        return not self._racy

    def close(self) -> None:
        """Close the file if this object opened it."""
        if self._owned:
            self._file.close()


class FileRange(NamedTuple):
    """
    A range of a regular file, as a source; the file stays open.

    Attributes:
        start, size: where the range begins, and its size in bytes; the range lies within the file.
    """

    file: BinaryIO
    start: int
    size: int

    def opened(self, name: str) -> Source:
        """Return this range as a source; ``name`` appears in errors."""
        source = FileSource(self.file, name, owned=False)
        source._start, source.size = self.start, self.size
        return source


def read_fully(fd: int, offset: int, length: int) -> bytes:
    """Return ``length`` bytes from an offset on, fewer at the end of the file; read as often as needed."""
    data = os.pread(fd, length, offset)
    while 0 < len(data) < length:
        more = os.pread(fd, length - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def _signature(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def open_source(source: SourceLike, name: str | None = None) -> Source:
    """
    Return the source for the object that the caller passed.

    Args:
        source: bytes; a path; or a binary file object, which is read from its beginning if it is a regular
            file and from its position otherwise. The file object stays open.
        name: name of the source in errors.

    Raises:
        SourceError: the source cannot be opened or read, or is a directory.
        UsageError: the object is of no supported type.
    """
    opened = open_at_once(source, name)
    return opened.copied() if isinstance(opened, UncopiedSource) else opened


class UncopiedSource(NamedTuple):
    """
    A source that must be copied before it is stored: it can be read only once, and reading it may block
    forever.

    Attributes:
        owned: whether this module opened the file, so that it must be closed after reading.
    """

    file: BinaryIO
    name: str
    owned: bool

    def copied(self) -> Source:
        """Copy the source to its end, blocking this thread; see ``open_source``."""
        try:
            # Wait for data: a named pipe that no program has opened for writing would seem to be at its end.
            if self.owned:
                poll = select.poll()
                poll.register(self.file, select.POLLIN)
                poll.poll()
                os.set_blocking(self.file.fileno(), True)
            return _spooled(self.file, self.name)
        finally:
            if self.owned:
                self.file.close()


def as_repeatable(source: Source) -> SourceLike:
    """Return an open source in a form that can be stored several times, until the source is closed."""
    if isinstance(source, FileSource):
        return FileRange(source._file, source._start, source.size)
    return bytes(source.read_at(0, source.size))


def open_at_once(source: SourceLike, name: str | None = None) -> Source | UncopiedSource:
    """
    Return the source for the object that the caller passed, or an ``UncopiedSource``; never wait for other
    programs.

    ``open_source`` does the same, but also copies.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        return BytesSource(source, name or "the data")
    if isinstance(source, (str, os.PathLike)):
        return _open_path(os.fspath(source), name)
    if isinstance(source, FileRange):
        return source.opened(name or _name_of(source.file))
    check_has(source, ("read",), "what is stored", KINDS)
    file: BinaryIO = source  # type: ignore[assignment]
    name = name or _name_of(file)
    if getattr(file, "closed", False) is True:
        raise SourceError(f"cannot read {name}: it is closed; give a file that is open")
    return (
        FileSource(file, name, owned=False)
        if _is_plain(file)
        else UncopiedSource(file, name, False)
    )


def _open_path(path: str, name: str | None) -> Source | UncopiedSource:
    try:
        # Without O_NONBLOCK, opening a named pipe would block until another program opens it for writing.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if str(path).startswith("URI:"):  # do not show the cap, which is secret
            raise SourceError(
                "what is stored is bytes, a path or a file opened in binary mode; this is a capability, "
                "and there is no file of that name; 'get' fetches what it names"
            ) from None
        raise SourceError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise SourceError(f"{path!r} is not a path: {error}; give another") from error
    try:
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
        file: BinaryIO = os.fdopen(fd, "rb", buffering=-1 if regular else 0)
    except OSError as error:
        os.close(fd)
        raise SourceError(f"cannot read {path}: {error.strerror}") from error
    if not _is_plain(file):
        return UncopiedSource(file, name or path, True)
    opened = FileSource(file, name or path, owned=True)
    opened.path = os.fsdecode(os.path.abspath(path))
    return opened


def _name_of(file: BinaryIO) -> str:
    name = getattr(file, "name", "the file object")
    return "standard input" if name in ("<stdin>", 0) else str(name)


def size_of(source: SourceLike) -> int | None:
    """
    Return the probable size of a source in bytes, without opening it; None if the size is known only after
    reading, 0 if the source cannot be opened.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        return memoryview(source).nbytes
    if isinstance(source, FileRange):
        return source.size
    if not isinstance(source, (str, os.PathLike)):
        return None
    try:
        found = os.stat(source)
    except (OSError, ValueError):
        return 0  # opening the source will fail at once
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _is_plain(file: BinaryIO) -> bool:
    """Return whether the object is a non-empty regular file, so that it can be read by position."""
    raw = getattr(file, "raw", file)  # a decompressor wraps a file, but is not a raw file
    if not isinstance(raw, io.FileIO) or not raw.readable():
        return False
    if not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
        return False
    if file.writable():
        file.flush()  # otherwise the put would miss buffered bytes
    return os.fstat(file.fileno()).st_size > 0


def next_piece(file: BinaryIO, name: str) -> bytes:
    """
    Return the next bytes of a file object; b"" at its end.

    Raises:
        SourceError: the file cannot be read, or is non-blocking and has no bytes now.
    """
    try:
        data: bytes | None = file.read(1 << 20)
        if data is None:  # None means no bytes now, not the end of the file
            raise BlockingIOError(errno.EAGAIN, "it has nothing at the moment, and does not wait")
        return data
    except io.UnsupportedOperation:
        raise  # the file was opened for writing
    except OSError as error:
        raise cannot_read(name, error) from error


def _spooled(file: BinaryIO, name: str) -> FileSource:
    spool = open_spool(name)
    try:
        while data := next_piece(file, name):
            spool.write(data)
        spool.flush()
    except BaseException as error:
        with contextlib.suppress(OSError):  # closing flushes the buffer again, and fails again
            spool.close()
        if isinstance(error, (TypeError, ValueError)):
            raise SourceError(
                f"cannot read {name}: {error}; give a path, bytes or a file opened in binary mode"
            ) from error
        if isinstance(error, OSError):
            raise no_space(name, error) from error
        raise
    return FileSource(spool, name, owned=True)


def open_spool(name: str) -> BinaryIO:
    """
    Open a file without a name in temporary space, for a copy of the source ``name``.

    Raises:
        SourceError: no temporary space is available.
    """
    import tempfile  # the import takes 5 ms, and most sources are regular files

    try:
        return tempfile.TemporaryFile(prefix="pipegrid-")
    except OSError as error:
        raise no_space(name, error) from error


def cannot_read(name: str, error: OSError) -> SourceError:
    """Return the error for a source that cannot be read."""
    return SourceError(f"cannot read {name}: {error.strerror or error}")


def no_space(name: str, error: OSError) -> SourceError:
    """Return the error for a copy that could not be written."""
    return SourceError(
        f"cannot copy {name} to temporary space: {error.strerror}; "
        "free some, or set TMPDIR to a larger disk"
    )
