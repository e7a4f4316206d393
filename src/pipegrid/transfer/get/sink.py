"""
Sinks, to which the plaintext of a get is written: a file, a part file, or a consumer with back-pressure.
"""

from __future__ import annotations

import io
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO, Protocol

from twisted.internet.interfaces import IConsumer, IPushProducer
from zope.interface import implementer

from pipegrid.argument_checks import check_has
from pipegrid.core.hashes import Buffer
from pipegrid.disk.part_file import PartFile
from pipegrid.errors import SinkError
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.get.blocking_sink import (
    BlockingSink,
    raw_file,
    unwritable,
    written_by_object,
)


class PresentBytes(bytes):
    """
    An empty piece of plaintext that represents bytes which are already in the part file.

    Attributes:
        length: number of those bytes.
    """

    length: int

    @classmethod
    def of(cls, length: int) -> PresentBytes:
        """Return a piece that represents this number of bytes."""
        piece = cls()
        piece.length = length
        return piece


# Where plaintext is written: a file object, a part file with segments that are present, or a Twisted consumer
# with back-pressure.
#
# A sink gets only verified plaintext, in order. The download reads ``ready`` before it decodes more segments.

SinkLike = BinaryIO | IConsumer | PartFile

CONSUMER_BYTES = 1 << 16
"""
Size of the pieces that a consumer gets, except for the last piece of a segment. Twisted's transports write to
the kernel in this size, and pause a producer at this many bytes: smaller pieces cost a call each, and larger
pieces cost memory. Joining pieces costs nothing, since a consumer needs ``bytes`` objects, for which most
pieces must be copied anyway.
"""


class IBufferConsumer(IConsumer):
    """
    A consumer whose ``write`` accepts buffers of any kind and length, so that nothing needs to be copied.
    """


class Sink(Protocol):
    """An object to which a download writes verified plaintext, in order."""

    @property
    def ready(self) -> bool:
        """Whether more may be written now."""

    @property
    def pending_bytes(self) -> int:
        """
        Number of bytes that were written to the sink but not passed on yet, because the receiver does not
        want them yet.
        """

    @property
    def handed_on(self) -> bool:
        """Whether the caller's object may have received a byte, so that the download must not be repeated."""

    def check(self) -> None:
        """
        Check that the receiver still wants data.

        Raises:
            SinkError: the receiver has gone.
        """

    def write(self, pieces: Sequence[Buffer]) -> None:
        """
        Write these pieces.

        Raises:
            SinkError: the pieces could not be written; the transfer ends.
        """

    async def flushed(self) -> None:
        """
        Wait until the caller's object has written its buffer; called after everything was passed on.

        Raises:
            SinkError: the buffer could not be written.
        """

    def finish(self) -> None:
        """
        Release the caller's object; called when everything was passed on, or when the transfer has failed.
        """


class FileSink:
    """Writes to a file object that never blocks for long, such as a regular file; the file stays open."""

    ready = True
    pending_bytes = 0

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self.handed_on = False

    def check(self) -> None:
        """Do nothing: a file always takes more."""

    def write(self, pieces: Sequence[Buffer]) -> None:
        """
        Write the pieces. A BrokenPipeError is raised unchanged: the reader of the file may have closed it on
        purpose.
        """
        self.handed_on = True
        with self._telling():
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[written_by_object(self._file, view) :]

    async def flushed(self) -> None:
        """Do nothing: ``finish`` flushes and reports errors."""

    def finish(self) -> None:
        """Flush the file, so that the caller sees all bytes or gets the error."""
        with self._telling():
            self._file.flush()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except (OSError, TypeError, ValueError) as error:
            raise unwritable(self._name, error) from error


class PartSink:
    """Writes to a part file, and skips the segments that are present in it."""

    ready = True
    pending_bytes = 0
    handed_on = False  # the part file can be rewritten from its beginning at any time

    def __init__(self, part: PartFile) -> None:
        self._part = part

    def check(self) -> None:
        """Do nothing: a file always takes more."""

    def write(self, pieces: Sequence[Buffer]) -> None:
        """
        Write the pieces. A BrokenPipeError is raised unchanged: if the path names a pipe, its reader may have
        closed it.
        """
        run: list[Buffer] = []
        try:
            for piece in pieces:
                if isinstance(piece, PresentBytes):
                    self._part.write_pieces(run)
                    self._part.skip(piece.length)
                    run = []
                else:
                    run.append(piece)
            self._part.write_pieces(run)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise unwritable(self._part.name, error) from error

    async def flushed(self) -> None:
        """Do nothing: a part file has no buffer."""

    def finish(self) -> None:
        """Do nothing: the caller that opened the part file publishes it."""


@implementer(IPushProducer)
class ConsumerSink:
    """
    Writes to a consumer in pieces of suitable size, and writes nothing while the consumer has paused this
    producer.

    Bytes that the consumer does not want yet are kept here: at most the segments that were finished when the
    consumer paused.
    """

    def __init__(self, consumer: IConsumer, changed: Callable[[], None]) -> None:
        self._consumer = consumer
        self._changed = changed
        self._takes_buffers = IBufferConsumer.providedBy(consumer)
        self._waiting: deque[Buffer] = deque()
        self._paused = False
        self._stopped = False
        self._finished = False
        self._handing_on = False
        self._error: Exception | None = (
            None  # raised by the consumer's ``write`` outside a transfer step
        )
        self.pending_bytes = 0
        self.handed_on = False
        consumer.registerProducer(self, True)

    @property
    def ready(self) -> bool:
        """
        Whether the consumer wants more; also True if the consumer has gone, so that the transfer calls
        ``check``.
        """
        gone = self._stopped or self._error is not None
        return gone or not (self._paused or self.pending_bytes)

    def check(self) -> None:
        """Raise if the consumer has gone, or has failed."""
        if self._error is not None:
            raise self._error
        if self._stopped:
            raise SinkError("the consumer of the file went away before all of it had arrived")

    def write(self, pieces: Sequence[Buffer]) -> None:
        """Pass the pieces on, as far as the consumer wants them."""
        self.check()
        self._waiting.extend(piece for piece in pieces if len(piece))
        self.pending_bytes += sum(map(len, pieces))
        self._hand_on()

    def _hand_on(self) -> None:
        if self._handing_on:
            return  # a consumer may pause and resume this producer in its ``write``
        self._handing_on = True
        try:
            while self.pending_bytes and not (self._paused or self._stopped or self._finished):
                data = self._next_piece()
                self.handed_on = True
                self._consumer.write(data)  # type: ignore[arg-type]  # bytes, or an IBufferConsumer's
                # subtract only after ``write``: the transfer does not end while bytes are pending
                self.pending_bytes -= len(data)
        finally:
            self._handing_on = False

    def _next_piece(self) -> Buffer:
        first = self._waiting.popleft()
        if self._takes_buffers:
            return first
        if len(first) == CONSUMER_BYTES and isinstance(first, bytes):
            return first
        joined, missing = [], CONSUMER_BYTES
        while True:
            joined.append(memoryview(first)[:missing])
            if len(first) > missing:
                self._waiting.appendleft(memoryview(first)[missing:])
            missing -= len(joined[-1])
            if not (missing and self._waiting):
                return b"".join(joined)
            first = self._waiting.popleft()

    async def flushed(self) -> None:
        """Do nothing: pending bytes wait for the consumer."""

    def finish(self) -> None:
        if not self._finished:
            self._finished = True
            self._waiting.clear()
            self._consumer.unregisterProducer()

    def pauseProducing(self) -> None:
        """Stop writing to the consumer, which has enough for now."""
        self._paused = True

    def resumeProducing(self) -> None:
        """
        Continue writing to the consumer. If the consumer's ``write`` raises, the transfer fails: the caller
        of this method cannot handle the error.
        """
        self._paused = False
        if self._finished or self._error is not None:
            return
        try:
            self._hand_on()
        except Exception as error:
            self._error = error
        self._changed()

    def stopProducing(self) -> None:
        """End the transfer, since the consumer wants nothing more."""
        self._stopped = True
        self._changed()


def open_sink(
    sink: SinkLike, changed: Callable[[], None], workers: CpuWorkers | None = None
) -> Sink:
    """
    Return the sink for the object that the caller passed.

    Args:
        changed: called when the sink is ready again.
        workers: threads for writes that may wait for another program; None: such writes block the caller.

    Raises:
        SinkError: the file cannot be written.
        UsageError: the object is of no supported type.
    """
    if isinstance(sink, PartFile):
        return PartSink(sink)
    if IConsumer.providedBy(sink):
        return ConsumerSink(sink, changed)
    check_has(
        sink,
        ("write", "flush"),
        "where a file goes",
        "a file opened in binary mode or an IConsumer",
    )
    name = getattr(sink, "name", "the output")
    name = f"the descriptor {name}" if isinstance(name, int) else str(name)
    if workers is None or _takes_all_at_once(sink):
        return FileSink(sink, name)
    return BlockingSink(sink, name, workers, changed)


def _takes_all_at_once(file: BinaryIO) -> bool:
    """
    Return whether to write in this thread, because writing waits for no other program or cannot be done in
    another thread.
    """
    if type(file) is io.BytesIO or getattr(file, "written_in_reactor", False) is True:
        return True
    raw = raw_file(file)
    if raw is None:
        return False
    try:
        return not raw.writable() or stat.S_ISREG(os.fstat(raw.fileno()).st_mode)
    except (OSError, ValueError):
        return True  # the file is closed, so the first write fails
