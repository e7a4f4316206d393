"""
Copy plaintext that can be read only once, from a pipe or another file object, since a put reads its source
twice.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO

from pipegrid.argument_checks import shown
from pipegrid.errors import SourceError, UsageError
from pipegrid.reactor.workers import BlockingCall
from pipegrid.transfer.put.source import (
    BytesSource,
    FileSource,
    Source,
    UncopiedSource,
    cannot_read,
    next_piece,
    no_space,
    open_spool,
)

_IN_MEMORY_BYTES = 64 << 10
"""Copies up to this size stay in memory: there may be many at a time, and each would need a file."""

_READ_BYTES = 1 << 20


class SourceCopy:
    """
    A copy of the bytes received so far. ``add`` may be called in any thread, but not in two at the same time.

    A copy up to ``_IN_MEMORY_BYTES`` is in memory; a larger copy is in a temporary file without a name.
    """

    def __init__(self, name: str, most_bytes: int | None) -> None:
        self._name = name
        self._most_bytes = most_bytes
        self._head: list[bytes] = []
        self._size = 0
        self._spool: BinaryIO | None = None
        self._dropped = False

    @property
    def in_memory(self) -> bool:
        """Whether the copy is still in memory."""
        return self._spool is None

    def add(self, piece: Any) -> None:
        """
        Add a piece to the copy.

        Raises:
            SourceError: the piece is not bytes, or there is no space for it.
            UsageError: the copy exceeds ``most_bytes``.
        """
        if not isinstance(piece, (bytes, bytearray, memoryview)):
            raise SourceError(
                f"cannot read {self._name}: it gave {shown(piece)} in place of bytes; "
                "open files in binary mode"
            )
        data = bytes(piece)
        self._size += len(data)
        if self._most_bytes is not None and self._size > self._most_bytes:
            raise UsageError(
                f"{self._name} has more than {self._most_bytes} bytes, too many for a mutable file that is "
                "written whole; store it as an immutable one"
            )
        if self._spool is None and self._size <= _IN_MEMORY_BYTES:
            self._head.append(data)
            return
        try:
            self._spooled().write(data)
        except OSError as error:
            raise no_space(self._name, error) from error

    def _spooled(self) -> BinaryIO:
        if self._spool is None:
            self._spool = open_spool(self._name)
            if self._dropped:  # ``drop`` was called while the spool was opened
                self._spool.close()
            for piece in self._head:
                self._spool.write(piece)
            self._head = []
        return self._spool

    def finish(self) -> Source:
        """Return the copy as a source; the caller must close it."""
        if self._spool is None:
            return BytesSource(b"".join(self._head), self._name)
        try:
            self._spool.flush()
        except OSError as error:
            raise no_space(self._name, error) from error
        return FileSource(self._spool, self._name, owned=True)

    def drop(self) -> None:
        """Free the memory or the file. May be called in any thread."""
        self._dropped = True
        if self._spool is not None:
            with suppress(OSError):  # closing flushes the buffer again, and fails again
                self._spool.close()


def copy_file(call: BlockingCall, unread: UncopiedSource, most_bytes: int | None = None) -> Source:
    """
    Copy the bytes of a file object from its position to its end. Call this by ``run_blocking``: the thread
    may wait for another program, and cancelling the put ends the wait.

    Raises:
        SourceError: the file cannot be read, or there is no space for the copy.
        UsageError: the file has more than ``most_bytes``.
    """
    file, name = unread.file, unread.name
    copy = SourceCopy(name, most_bytes)
    try:
        call.undo(copy.drop)
        for piece in _pieces_of(call, file, name):
            call.check()
            copy.add(piece)
        return copy.finish()
    except BaseException as error:
        copy.drop()
        call.check()  # if the call was cancelled, raise CancelledError in place of this error
        if isinstance(error, (TypeError, ValueError)):
            raise SourceError(
                f"cannot read {name}: {error}; give a path, bytes or a file opened in binary mode"
            ) from error
        raise
    finally:
        if unread.owned:
            file.close()


def _pieces_of(call: BlockingCall, file: BinaryIO, name: str) -> Iterator[bytes]:
    fd = _pollable_descriptor(file)
    if fd is None:
        while data := next_piece(file, name):
            yield data
        return
    # Use a separate descriptor: after a cancelled put the caller may close the file and open another one.
    own = os.dup(fd)
    try:
        yield _buffered(file)
        while True:
            call.wait_readable(own)
            try:
                data = os.read(own, _READ_BYTES)
            except BlockingIOError:  # another process took the bytes
                continue
            if not data:
                return
            yield data
    except OSError as error:
        raise cannot_read(name, error) from error
    finally:
        os.close(own)


def _pollable_descriptor(file: BinaryIO) -> int | None:
    """
    Return the descriptor of a pipe, socket, terminal or device that a file object reads directly; else None.
    """
    raw: object = file.raw if type(file) is io.BufferedReader else file
    if type(raw) is not io.FileIO or not raw.readable():
        return None
    mode = os.fstat(raw.fileno()).st_mode
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else raw.fileno()


def _buffered(file: BinaryIO) -> bytes:
    """Return the bytes in the object's buffer, without waiting for more."""
    if not isinstance(file, io.BufferedReader):
        return b""
    fd = file.fileno()
    waits = os.get_blocking(fd)
    os.set_blocking(fd, False)
    try:
        return file.read1(_READ_BYTES) or b""
    except BlockingIOError:
        return b""
    finally:
        os.set_blocking(fd, waits)
