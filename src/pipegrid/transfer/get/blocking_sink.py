"""Writing plaintext to objects that may block forever: pipes, sockets, terminals, and other file objects."""

from __future__ import annotations

import errno
import io
import os
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import BinaryIO, cast

from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure

from pipegrid.core.hashes import Buffer
from pipegrid.disk.safe_open import own_descriptor
from pipegrid.errors import SinkError
from pipegrid.reactor.workers import BlockingCall, CpuWorkers

_PIECE_BYTES = 1 << 20
_PROMISED_BYTES = 4096
"""Number of bytes that a pipe which is ready for writing takes without blocking (PIPE_BUF of Linux)."""

_READER_POLL_S = 0.02
"""Seconds between checks whether a named pipe has a reader; the system does not report a new reader."""


def raw_file(file: object) -> io.FileIO | socket.SocketIO | None:
    """Return the raw file of one of Python's own file objects; None for other objects."""
    if type(file).__module__ == "tempfile":
        file = getattr(file, "file", file)
    if type(file) in (io.BufferedWriter, io.BufferedRandom):
        file = getattr(file, "raw", file)
    if type(file) is io.FileIO:
        return file
    # The raw file of an object that wraps a socket for TLS must not be used directly.
    if type(file) is socket.SocketIO and type(getattr(file, "_sock", None)) is socket.socket:
        return file
    return None


def is_pipe_or_device(path: str) -> bool:
    """Return whether a path names something other than a file or directory; opening such a path may block."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


async def open_pipe_or_device(path: str, workers: CpuWorkers) -> BinaryIO:
    """
    Open a path for which ``is_pipe_or_device`` holds; wait until a named pipe has a reader. The caller must
    close the file.

    Raises:
        SinkError: the path cannot be opened.
    """
    try:
        return await workers.run_blocking(_open_when_read, path)
    except OSError as error:
        raise SinkError(f"cannot write {path}: {error.strerror}") from error


def _open_when_read(call: BlockingCall, path: str) -> BinaryIO:
    while (fd := _open_if_read(path)) is None:
        call.sleep(_READER_POLL_S)
    file = io.FileIO(path, "w", opener=lambda _path, _flags: fd)
    call.undo(file.close)
    return cast("BinaryIO", file)


def _open_if_read(path: str) -> int | None:
    own = own_descriptor(path)
    if own is not None:
        return os.dup(own)
    try:
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO and stat.S_ISFIFO(os.stat(path).st_mode):
            return None
        raise


class _Target:
    """
    The caller's file object, and a separate descriptor of the same file: callers may close their descriptor
    and open another file at any time.

    ``write`` and ``flush`` are for ``run_blocking``, one call at a time.
    """

    def __init__(self, file: BinaryIO, raw: io.FileIO | socket.SocketIO | None) -> None:
        self._file = file
        self._fd: int | None = None
        self._socket: socket.socket | None = None
        self._most_bytes = _PIECE_BYTES
        self._has_flushed = isinstance(file, io.RawIOBase)
        self._lock = Lock()
        self._in_use = self._closed = False
        if raw is not None:
            self._open(raw.fileno())

    def _open(self, theirs: int) -> None:
        mode = os.fstat(theirs).st_mode
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(theirs))
            self._fd = self._socket.fileno()
            return
        if stat.S_ISFIFO(mode) and os.get_blocking(theirs):
            # Open the pipe again: the new descriptor can be non-blocking, so that one write takes many
            # bytes, while the caller's descriptor stays as it is.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC
            with suppress(OSError):  # /proc is not mounted, or the pipe has no reader
                self._fd = os.open(f"/proc/self/fd/{theirs}", flags)
                return
        self._fd = os.dup(theirs)
        if os.get_blocking(theirs) and (stat.S_ISFIFO(mode) or os.isatty(theirs)):
            self._most_bytes = _PROMISED_BYTES

    def write(self, call: BlockingCall, pieces: Sequence[Buffer]) -> None:
        """
        Write all pieces.

        Raises:
            OSError, TypeError, ValueError: raised by the file object.
        """
        with self._using(call):
            if self._fd is not None:
                self._flush_theirs(call, self._fd)
            for piece in pieces:
                view = memoryview(piece).cast("B")
                while view:
                    view = view[self._send(call, view) :]

    def flush(self, call: BlockingCall) -> None:
        """Write the bytes in the file object's buffer; raises as ``write`` does."""
        with self._using(call):
            if self._fd is None:
                self._file.flush()
            else:
                self._flush_theirs(call, self._fd)

    def _send(self, call: BlockingCall, data: memoryview) -> int:
        if self._fd is None:
            call.check()
            return written_by_object(self._file, data)
        call.wait_writable(self._fd)
        try:
            if self._socket is not None:
                return self._socket.send(data[: self._most_bytes], socket.MSG_DONTWAIT)
            return os.write(self._fd, data[: self._most_bytes])
        except BlockingIOError:  # another writer has filled the pipe
            return 0

    def _flush_theirs(self, call: BlockingCall, fd: int) -> None:
        """
        Flush the bytes that the caller has written to the file object's buffer; they come before the first
        piece.
        """
        while not self._has_flushed:
            call.wait_writable(fd)
            theirs = self._file.fileno()
            waits = os.get_blocking(theirs)
            os.set_blocking(theirs, False)
            try:
                self._file.flush()
                self._has_flushed = True
            except BlockingIOError:
                pass
            finally:
                os.set_blocking(theirs, waits)

    @contextmanager
    def _using(self, call: BlockingCall) -> Iterator[None]:
        """Keep the descriptor open while the ``with`` block runs."""
        call.check()
        with self._lock:
            self._in_use = not self._closed
        if not self._in_use:
            raise CancelledError
        try:
            yield
        finally:
            with self._lock:
                self._in_use = False
                if self._closed:
                    self._close_descriptor()

    def close(self) -> None:
        """
        Close the descriptor; if a write is running, its thread closes the descriptor when the write ends.
        Call this in the reactor thread, after the write was cancelled.
        """
        with self._lock:
            self._closed = True
            if not self._in_use:
                self._close_descriptor()

    def _close_descriptor(self) -> None:
        fd, self._fd = self._fd, None
        if self._socket is not None:
            self._socket.close()
        elif fd is not None:
            os.close(fd)


def written_by_object(file: BinaryIO, piece: memoryview) -> int:
    """
    Write a piece to a file object; return how many bytes of the piece were taken.

    Raises:
        BlockingIOError: the object is non-blocking and took nothing.
    """
    written: int | None = file.write(piece)
    if written is None and isinstance(file, io.RawIOBase):
        raise BlockingIOError(errno.EAGAIN, "it takes no more at the moment")
    # Some file-like objects return None and have taken everything; an unbuffered file may take less than the
    # whole piece.
    return len(piece) if written is None else written


def unwritable(name: str, error: Exception) -> Exception:
    """
    Return the SinkError for an error that a file object raises when it is written; return any other exception
    unchanged.
    """
    if isinstance(error, ConnectionError):
        return SinkError(f"cannot write {name}: its reader has gone; start the reader again")
    if isinstance(error, io.UnsupportedOperation):  # raised by a file object that cannot be written
        return SinkError(f"cannot write {name}: {error}; give a file that is open for writing")
    if isinstance(error, OSError):
        why = error.strerror or error
        return SinkError(f"cannot write {name}: {why}; free some space or choose another place")
    if isinstance(error, (TypeError, ValueError)):  # the file was opened for text, or is closed
        why = str(error).rstrip(".")
        return SinkError(f"cannot write {name}: {why}; give a file that is open in binary mode")
    return error


class BlockingSink:
    """
    Writes to a file object in threads, and does not close the object; see ``Sink``.

    One write at a time runs, in its own thread; the download pauses until that write has ended. Ending the
    download cancels the write. A pipe, socket or terminal that was opened by Python's own classes is written
    by its descriptor, in pieces that do not block, so that the thread can end at any moment. The ``write`` of
    any other object cannot be interrupted: the thread ends when the call returns.
    """

    def __init__(
        self, file: BinaryIO, name: str, workers: CpuWorkers, changed: Callable[[], None]
    ) -> None:
        self._name = name
        self._workers = workers
        self._changed = changed
        self._waiting: list[Buffer] = []
        self._writing: Deferred[None] | None = None
        self._error: BaseException | None = None
        self._finished = self.handed_on = False
        self.pending_bytes = 0
        try:
            self._target = _Target(file, raw_file(file))
        except OSError as error:
            raise unwritable(name, error) from error

    @property
    def ready(self) -> bool:
        """
        Whether no write is running; also True if a write has failed, so that the transfer calls
        ``check``.
        """
        return self._error is not None or not self.pending_bytes

    def check(self) -> None:
        """Raise if a write has failed."""
        if self._error is not None:
            raise self._error

    def write(self, pieces: Sequence[Buffer]) -> None:
        """Write the pieces after all earlier ones."""
        self.check()
        self._waiting.extend(piece for piece in pieces if len(piece))
        self.pending_bytes += sum(map(len, pieces))
        self._write_next()

    def _write_next(self) -> None:
        if self._writing is not None or not self._waiting or self._finished:
            return
        pieces, self._waiting = self._waiting, []
        self.handed_on = True
        size = sum(map(len, pieces))
        writing = self._writing = self._workers.run_blocking(self._target.write, pieces)
        writing.addCallbacks(self._written, self._failed, callbackArgs=(size,))

    def _written(self, _result: None, size: int) -> None:
        self._writing = None
        self.pending_bytes -= size
        self._write_next()
        self._changed()

    def _failed(self, failure: Failure) -> None:
        self._writing = None
        error = failure.value
        self._error = self._described(error) if isinstance(error, Exception) else error
        self._changed()

    def _described(self, error: Exception) -> Exception:
        told = unwritable(self._name, error)
        if told is not error:
            told.__cause__ = error
        return told

    async def flushed(self) -> None:
        """Flush, so that the reader sees all bytes or the caller gets the error."""
        try:
            await self._workers.run_blocking(self._target.flush)
        except Exception as error:
            told = self._described(error)
            if told is error:
                raise
            raise told from error

    def finish(self) -> None:
        self._finished = True
        if self._writing is not None:
            self._writing.cancel()
        self._target.close()
