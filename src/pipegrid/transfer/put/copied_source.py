"""
Plaintext that comes once, from a pipe or any other file object: it is copied, for a put reads it twice.

Up to ``_IN_MEMORY_BYTES`` the copy is in memory, beyond that in a temporary file without a name, which goes
with the put. What may wait for another program waits in a thread of its own; cancelling the put ends it.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO

from pipegrid.arguments import shown
from pipegrid.errors import SourceError, UsageError
from pipegrid.reactor.blocking_calls import BlockingCall
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
"""Of so many copies there may be many at a time, and each would take a file."""

_READ_BYTES = 1 << 20


class SourceCopy:
    """What has come so far. ``add`` may be called in a thread, by one at a time."""

    def __init__(self, name: str, most_bytes: int | None) -> None:
        self._name = name
        self._most_bytes = most_bytes
        self._head: list[bytes] = []
        self._size = 0
        self._spool: BinaryIO | None = None
        self._dropped = False

    @property
    def in_memory(self) -> bool:
        """Whether no file has been needed so far."""
        return self._spool is None

    def add(self, piece: Any) -> None:
        """
        Keep one more piece.

        Raises:
            SourceError: it is not bytes, or there is no space for it.
            UsageError: that is more than is wanted.
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
            if self._dropped:  # while it was opened
                self._spool.close()
            for piece in self._head:
                self._spool.write(piece)
            self._head = []
        return self._spool

    def finish(self) -> Source:
        """Return what was copied; it belongs to the caller, who closes it."""
        if self._spool is None:
            return BytesSource(b"".join(self._head), self._name)
        try:
            self._spool.flush()
        except OSError as error:
            raise no_space(self._name, error) from error
        return FileSource(self._spool, self._name, owned=True)

    def drop(self) -> None:
        """Give the space back. From any thread."""
        self._dropped = True
        if self._spool is not None:
            with suppress(OSError):  # what its buffer holds is tried once more, and fails again
                self._spool.close()


def copy_file(call: BlockingCall, unread: UncopiedSource, most_bytes: int | None = None) -> Source:
    """
    Copy what a file object gives, from its position to its end. For ``run_blocking``.

    Raises:
        SourceError: it cannot be read, or there is no space.
        UsageError: it has more than ``most_bytes``.
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
        call.check()  # what it was given up for is no error of the file
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
    # Its own descriptor: the caller may close the file, and open another, when the put has been cancelled.
    own = os.dup(fd)
    try:
        yield _buffered(file)
        while True:
            call.wait_readable(own)
            try:
                data = os.read(own, _READ_BYTES)
            except BlockingIOError:  # another reader was quicker
                continue
            if not data:
                return
            yield data
    except OSError as error:
        raise cannot_read(name, error) from error
    finally:
        os.close(own)


def _pollable_descriptor(file: BinaryIO) -> int | None:
    """Return the descriptor of a pipe, socket, terminal or device that a file object reads as it is."""
    if type(file) is io.BufferedReader:
        raw: object = file.raw
    else:
        raw = file
    if type(raw) is not io.FileIO or not raw.readable():
        return None
    mode = os.fstat(raw.fileno()).st_mode
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else raw.fileno()


def _buffered(file: BinaryIO) -> bytes:
    """Return what a buffer has read already, without waiting for more."""
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
