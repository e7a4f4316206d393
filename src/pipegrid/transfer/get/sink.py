"""Plaintext sink; segments already present."""

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

from pipegrid.arguments import check_has
from pipegrid.core.encoding_parameters import Geometry
from pipegrid.core.hash_tree import GROUP_LEAVES
from pipegrid.core.hashes import Buffer
from pipegrid.core.spans import Spans
from pipegrid.disk.part_file import PartFile
from pipegrid.errors import SinkError
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.get.blocking_sink import (
    BlockingSink,
    raw_file,
    unwritable,
    written_by_object,
)

# Which segments of a file are there already, as far as is known, and which have to be fetched.
#
# What an interrupted get has left is not believed: each segment counts as there only until its hash says
# otherwise, and is fetched then. They are checked in order, mostly while the others are fetched. If the first
# one is bad, perhaps all are, since the part is of another file: then some others are tried first, spread
# over the part, and if none is good all of it is forgotten, so that it is not fetched piece by piece.
#
# A segment of which only a part is wanted cannot be checked, and so it is always fetched: at most the
# first and the last of a range.
#
# Pure: told of bytes and of what was found, in segment numbers.

_PROBES = 8


class PresentBytes(bytes):
    """
    An empty piece of plaintext, which stands for bytes that are in their place already.

    Attributes:
        length: how many.
    """

    length: int

    @classmethod
    def of(cls, length: int) -> PresentBytes:
        """Return one for so many bytes."""
        piece = cls()
        piece.length = length
        return piece


class PresentSegments:
    """
    The segments of one range that may be there.

    Args:
        start, end: of the range, in bytes of the file.
        found_bytes: how many bytes of it are there, from its start on.

    Attributes:
        good, bad: how many were found to be so.
        good_bytes: of the range, in those that were found to be good.
    """

    def __init__(self, geometry: Geometry, start: int, end: int, found_bytes: int) -> None:
        self._geometry = geometry
        size = geometry.segment_bytes
        until = min(start + found_bytes, end)
        first = -(-start // size)
        # The last segment of the file is whole where the file ends.
        last = geometry.num_segments if until == geometry.size else until // size
        self._here = Spans([(first, last)] if first < last else [])
        self._unchecked = Spans(self._here)
        self._probes = self._spread(first, last) if first < last else []
        self.good = 0
        self.bad = 0
        self.good_bytes = 0

    def _spread(self, first: int, last: int) -> list[int]:
        # Within those whose hashes are read at first: of a huge file not all are.
        count = min(last - first, GROUP_LEAVES)
        return sorted({first + count * i // _PROBES for i in range(_PROBES)} - {first})

    def __bool__(self) -> bool:
        """Whether any may be there."""
        return len(self._here) > 0

    def has(self, segment: int) -> bool:
        """Whether it may be there, or is."""
        return self._here.contains(segment, segment + 1)

    def missing(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return the runs [first, end) of segments that have to be fetched."""
        return self._here.gaps(first, end)

    def to_check(self, segment: int) -> list[int]:
        """
        Return what to check now, when it is this segment's turn.

        While all that is known is that the first was bad, it is the probes; the segment waits.
        """
        if self.bad and not self.good and self._probes:
            return self._probes
        return [segment]

    def unchecked_bytes(self, first: int, end: int) -> int:
        """Return about how many bytes of segments [first, end) have to be checked yet."""
        runs = self._unchecked.overlap(first, end)
        return sum(b - a for a, b in runs) * self._geometry.segment_bytes

    def is_unchecked(self, segment: int) -> bool:
        """Whether nothing is known of it but that it may be there."""
        return self._unchecked.contains(segment, segment + 1)

    def checked(self, segment: int, good: bool) -> bool:
        """
        A segment was looked at.

        Returns:
            whether all that was thought to be there has just been forgotten.
        """
        was_unchecked = self.is_unchecked(segment)
        self._unchecked.remove(segment, segment + 1)
        if segment in self._probes:
            self._probes.remove(segment)
        if good:
            if was_unchecked:
                self.good += 1
                self.good_bytes += self._geometry.segment_length(segment)
            return False
        self.bad += 1
        self._here.remove(segment, segment + 1)
        if self.good or self._probes:
            return False
        was_any = len(self._here) > 0
        self._here, self._unchecked = Spans(), Spans()
        return was_any


# Where plaintext goes: a file object, a part file of which some may be there, or a Twisted consumer with
# back-pressure.
#
# Only verified plaintext gets here, in order. The download asks ``ready`` before it decodes more.

SinkLike = BinaryIO | IConsumer | PartFile

CONSUMER_BYTES = 1 << 16
"""
What a consumer gets in one piece, but for the last of a segment. It is what Twisted's transports hand to the
kernel at a time, and their mark for asking to pause: smaller pieces cost a call each and larger ones memory
that nobody has asked for. Joining costs nothing, since a consumer is to have bytes and most pieces are copied
for that anyway.
"""


class Sink(Protocol):
    """Where a download puts plaintext, in order, once it is verified."""

    @property
    def ready(self) -> bool:
        """Whether more may be written now."""

    @property
    def pending_bytes(self) -> int:
        """What was written and has not been handed on, since nobody wants it yet."""

    @property
    def handed_on(self) -> bool:
        """Whether the caller's object may have got a byte, so that it must not get it again."""

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

    async def flushed(self) -> None:
        """
        Fire when the caller's object keeps nothing back; for when all has been handed on.

        Raises:
            SinkError: as ``write`` does.
        """

    def finish(self) -> None:
        """All has been handed on, or nothing more will be; let go of the caller's object."""


class FileSink:
    """Writes to a file object that takes all at once, as a regular file does; it stays open."""

    ready = True
    pending_bytes = 0

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self.handed_on = False

    def check(self) -> None:
        """A file always wants more."""

    def write(self, pieces: Sequence[Buffer]) -> None:
        """Write the pieces; a BrokenPipeError passes as it is, since readers may leave."""
        self.handed_on = True
        with self._telling():
            for piece in pieces:
                view = memoryview(piece)
                while view:
                    view = view[written_by_object(self._file, view) :]

    async def flushed(self) -> None:
        """Do nothing: its ``finish`` tells of errors, and does not wait."""

    def finish(self) -> None:
        """Flush, so that the caller sees all bytes or the error."""
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
    """Writes to a part file, and leaves alone what is in its place there."""

    ready = True
    pending_bytes = 0
    handed_on = False  # it begins anew at any time

    def __init__(self, part: PartFile) -> None:
        self._part = part

    def check(self) -> None:
        """A file always wants more."""

    def write(self, pieces: Sequence[Buffer]) -> None:
        """Write the pieces; a BrokenPipeError passes as it is: it may be a pipe after all."""
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
        """Whoever opened the part publishes it."""


@implementer(IPushProducer)
class ConsumerSink:
    """
    Writes to a consumer in pieces of a fair size, and hands it nothing more once it has paused us.

    What it does not want yet waits here: at most the segments that were finished when it paused.
    """

    def __init__(self, consumer: IConsumer, changed: Callable[[], None]) -> None:
        self._consumer = consumer
        self._changed = changed
        self._waiting: deque[Buffer] = deque()
        self._paused = False
        self._stopped = False
        self._finished = False
        self._handing_on = False
        self._error: Exception | None = None  # the consumer's own, while no transfer listened
        self.pending_bytes = 0
        self.handed_on = False
        consumer.registerProducer(self, True)

    @property
    def ready(self) -> bool:
        """Whether it wants more; if it has gone the transfer must come and see."""
        gone = self._stopped or self._error is not None
        return gone or not (self._paused or self.pending_bytes)

    def check(self) -> None:
        """Complain if the consumer has gone, or has failed."""
        if self._error is not None:
            raise self._error
        if self._stopped:
            raise SinkError("the consumer of the file went away before all of it had arrived")

    def write(self, pieces: Sequence[Buffer]) -> None:
        """Hand the pieces over, as far as they are wanted."""
        self.check()
        self._waiting.extend(piece for piece in pieces if len(piece))
        self.pending_bytes += sum(map(len, pieces))
        self._hand_on()

    def _hand_on(self) -> None:
        if self._handing_on:
            return  # a consumer may pause and resume us while it is written to
        self._handing_on = True
        try:
            while self.pending_bytes and not (self._paused or self._stopped or self._finished):
                data = self._next_piece()
                self.handed_on = True
                self._consumer.write(data)
                self.pending_bytes -= len(data)  # what was not taken stays, so that nobody is done
        finally:
            self._handing_on = False

    def _next_piece(self) -> bytes:
        first = self._waiting.popleft()
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
        """Do nothing: what is pending waits for the consumer."""

    def finish(self) -> None:
        if not self._finished:
            self._finished = True
            self._consumer.unregisterProducer()

    def pauseProducing(self) -> None:
        """The consumer has enough for now."""
        self._paused = True

    def resumeProducing(self) -> None:
        """The consumer wants more. If it fails at that, the transfer does: whoever resumed it cannot know."""
        self._paused = False
        if self._finished or self._error is not None:
            return
        try:
            self._hand_on()
        except Exception as error:
            self._error = error
        self._changed()

    def stopProducing(self) -> None:
        """The consumer wants nothing any more; the transfer ends."""
        self._stopped = True
        self._changed()


def open_sink(
    sink: SinkLike, changed: Callable[[], None], workers: CpuWorkers | None = None
) -> Sink:
    """
    Return the sink for whatever the caller gave.

    Args:
        changed: tells that it is ready again.
        workers: write to what may have to wait for another program; None: the caller itself waits.

    Raises:
        SinkError: it is a file that cannot be written.
        UsageError: it is nothing of the kind.
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
    """Whether writing waits for no other program, or is to be done in this thread whatever it takes."""
    if type(file) is io.BytesIO or getattr(file, "written_in_reactor", False) is True:
        return True
    raw = raw_file(file)
    if raw is None:
        return False
    try:
        return not raw.writable() or stat.S_ISREG(os.fstat(raw.fileno()).st_mode)
    except (OSError, ValueError):
        return True  # it is closed, and so the first write fails
