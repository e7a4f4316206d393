"""
Where plaintext goes: a file object, or a Twisted consumer with back-pressure.

Only verified plaintext gets here, in order. The download asks ``ready`` before it decodes more.
"""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Sequence
from typing import BinaryIO, Protocol, cast

from twisted.internet.interfaces import IConsumer, IPushProducer
from zope.interface import implementer

from pipegrid.core.hashes import Buffer
from pipegrid.errors import SinkError

SinkLike = BinaryIO | IConsumer


class Sink(Protocol):
    """Takes plaintext."""

    @property
    def ready(self) -> bool:
        """Whether more may be written now."""

    def check(self) -> None:
        """
        Do nothing if more is wanted.

        Raises:
            SinkError: whoever takes the plaintext has gone.
        """

    def write(self, pieces: Sequence[Buffer]) -> None:
        """
        Take these pieces.

        Raises:
            SinkError: they could not be written; the transfer ends.
        """

    def finish(self) -> None:
        """All has been written, or nothing more will be; let go of the caller's object."""


class FileSink:
    """Writes to a file object, which stays open."""

    ready = True

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._name = str(getattr(file, "name", "the output"))

    def check(self) -> None:
        """A file always wants more."""

    def write(self, pieces: Sequence[Buffer]) -> None:
        """Write the pieces; a BrokenPipeError passes as it is, since readers may leave."""
        try:
            for piece in pieces:
                self._write_all(memoryview(piece))
        except BrokenPipeError:
            raise
        except OSError as error:
            raise SinkError(
                f"cannot write {self._name}: {error.strerror}; free some space or choose "
                "another place"
            ) from error

    def _write_all(self, piece: memoryview) -> None:
        while piece:
            written = cast("int | None", self._file.write(piece))
            if written is None and isinstance(self._file, io.RawIOBase):
                raise BlockingIOError(errno.EAGAIN, "it takes no more at the moment")
            if written is None:
                return  # some file-like objects do not tell, and take all
            piece = piece[written:]  # an unbuffered file may take less than it was given

    def finish(self) -> None:
        """Flush, so that the caller sees all bytes or the error."""
        try:
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise SinkError(f"cannot write {self._name}: {error.strerror}") from error


@implementer(IPushProducer)
class ConsumerSink:
    """Writes to a consumer, and holds still while it asks to."""

    def __init__(self, consumer: IConsumer, changed: Callable[[], None]) -> None:
        self._consumer = consumer
        self._changed = changed
        self._stopped = False
        self._finished = False
        self.ready = True
        consumer.registerProducer(self, True)

    def check(self) -> None:
        """Complain if the consumer has gone."""
        if self._stopped:
            raise SinkError("the consumer of the file went away before all of it had arrived")

    def write(self, pieces: Sequence[Buffer]) -> None:
        """Hand the pieces over."""
        self.check()
        for piece in pieces:
            self._consumer.write(piece if isinstance(piece, bytes) else bytes(piece))

    def finish(self) -> None:
        """Unregister from the consumer."""
        if not self._finished:
            self._finished = True
            self._consumer.unregisterProducer()

    def pauseProducing(self) -> None:
        """The consumer has enough for now."""
        self.ready = False

    def resumeProducing(self) -> None:
        """The consumer wants more."""
        self.ready = True
        self._changed()

    def stopProducing(self) -> None:
        """The consumer wants nothing any more; the transfer ends."""
        self._stopped = True
        self.ready = True
        self._changed()


def open_sink(sink: SinkLike, changed: Callable[[], None]) -> Sink:
    """Return the sink for whatever the caller gave; ``changed`` tells that it is ready again."""
    if IConsumer.providedBy(sink):
        return ConsumerSink(sink, changed)
    return FileSink(sink)
