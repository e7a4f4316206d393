"""
Records how long operations take, as spans in Chrome's trace-event format, for Perfetto or
``chrome://tracing``.

Source: "Trace Event Format", the JSON array format, events "X" and "M".
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import BinaryIO, Protocol, TypeVar

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

T = TypeVar("T")

BATCH_EVENTS = 256
"""How many events are written at once, some 30 kB."""

LIMIT_EVENTS = 100_000
"""The most events in memory without a file, some 50 MB: an upload of 100 GB has as many requests of 1 MiB."""


class TraceSpan:
    """An operation that has begun. Call ``end`` once."""

    __slots__ = ("began", "ended", "facts", "name", "row", "track")

    def __init__(
        self,
        name: str,
        row: str,
        track: int,
        began: float,
        facts: dict[str, object],
    ) -> None:
        self.name = name
        self.row = row
        self.track = track
        self.began = began
        self.facts = facts
        self.ended = False


class Tracing(Protocol):
    """The methods of a ``Tracer`` that traced code uses."""

    def span(self, name: str, row: str, **facts: object) -> AbstractContextManager[object]:
        """Return a context manager that traces a block of code that does not wait."""

    def begin(self, name: str, row: str, **facts: object) -> TraceSpan:
        """Begin a span; call ``end`` with it later."""

    def end(self, span: TraceSpan, **facts: object) -> None:
        """End a span, and add further facts to it. A second call has no effect."""

    def follow(self, deferred: Deferred[T], name: str, row: str, **facts: object) -> Deferred[T]:
        """Trace the time from now until a Deferred fires or fails; return the Deferred."""

    def close(self) -> None:
        """Write the remaining events. Spans that have not ended are lost."""


class _Row:
    """One row of the viewer: its number, and which of its lanes are in use."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tracks: list[bool] = []

    def take_track(self) -> int:
        for track, taken in enumerate(self.tracks):
            if not taken:
                self.tracks[track] = True
                return track
        self.tracks.append(True)
        return len(self.tracks) - 1


class Tracer:
    """
    Collects spans.

    A span has a name, a row, a beginning, an end and facts. A viewer shows each row (a server, ``cpu``,
    ``window``) as a process. Pipelined requests overlap, but complete events ("X") of one thread may only
    nest; so each span gets the first free lane of its row, and the viewer shows lanes as threads. The number
    of lanes of a server thus shows the depth of its pipeline.

        tracer = Tracer(reactor.seconds, open("put.trace", "wb"))
        with tracer.span("encode", row="cpu", segment=3):
            ...
        tracer.follow(server.write(...), "write", row=server.nickname, offset=0)
        tracer.close()

    With a file, only a few hundred events are in memory. If the file can seek, it is complete JSON after
    every batch; otherwise it lacks the final bracket after an interruption, which viewers accept. Without a
    file the newest events stay in memory, up to a limit.

    Attributes:
        dropped: how many events were dropped because of the limit; only without a file.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        output: BinaryIO | None = None,
        limit_events: int = LIMIT_EVENTS,
    ) -> None:
        """
        Args:
            clock: returns seconds; the trace begins at time zero with the first value.
            output: the file to write; the caller closes it after ``close``.
            limit_events: without output, how many events to keep.
        """
        self._clock = clock
        self._zero = clock()
        self._output = output
        self._limit_events = limit_events
        self._rows: dict[str, _Row] = {}
        self._events: deque[dict[str, object]] = deque()
        self._tail_bytes = 0  # bytes at the end of the file that the next batch overwrites
        self._wrote = False
        self.dropped = 0

    @contextmanager
    def span(self, name: str, row: str, **facts: object) -> Iterator[TraceSpan]:
        """Return a context manager that traces a block of code; an exception ends the span, too."""
        span = self.begin(name, row, **facts)
        try:
            yield span
        except BaseException as error:
            self.end(span, error=type(error).__name__)
            raise
        else:
            self.end(span)

    def begin(self, name: str, row: str, **facts: object) -> TraceSpan:
        """Begin a span in the first free lane of its row."""
        place = self._rows.get(row)
        if place is None:
            place = self._rows[row] = _Row(len(self._rows) + 1)
            if self._output is not None:
                self._note(self._row_name(row))
        return TraceSpan(name, row, place.take_track(), self._clock(), facts)

    def end(self, span: TraceSpan, **facts: object) -> None:
        """End a span and record it."""
        if span.ended:
            return
        span.ended = True
        place = self._rows[span.row]
        place.tracks[span.track] = False
        self._note(
            {
                "name": span.name,
                "ph": "X",
                "ts": self._microseconds(span.began - self._zero),
                "dur": self._microseconds(self._clock() - span.began),
                "pid": place.number,
                "tid": span.track + 1,
                "args": span.facts | facts,
            }
        )

    def follow(self, deferred: Deferred[T], name: str, row: str, **facts: object) -> Deferred[T]:
        """Trace a Deferred; a failure is recorded with the name of its exception class, and passed on."""
        span = self.begin(name, row, **facts)

        def fired(result: T) -> T:
            self.end(span)
            return result

        def failed(failure: Failure) -> Failure:
            self.end(span, error=failure.type.__name__ if failure.type else "unknown")
            return failure

        return deferred.addCallbacks(fired, failed)

    def close(self) -> None:
        """Write the last batch and complete the file."""
        if self._output is None:
            return
        self._write_batch()
        if not self._wrote:
            self._output.write(b"[\n]\n")
        elif not self._tail_bytes:
            self._output.write(b"\n]\n")
        self._output.flush()
        self._output = None

    def events(self) -> list[dict[str, object]]:
        """Return the events in memory, with the names of the rows, in the format of the file."""
        return [*map(self._row_name, self._rows), *self._events]

    def _microseconds(self, seconds: float) -> float:
        return round(seconds * 1e6, 1)

    def _row_name(self, row: str) -> dict[str, object]:
        return {
            "name": "process_name",
            "ph": "M",
            "pid": self._rows[row].number,
            "args": {"name": row},
        }

    def _note(self, event: dict[str, object]) -> None:
        self._events.append(event)
        if self._output is not None:
            if len(self._events) >= BATCH_EVENTS:
                self._write_batch()
        elif len(self._events) > self._limit_events:
            self._events.popleft()
            self.dropped += 1

    def _write_batch(self) -> None:
        if self._output is None or not self._events:
            return
        text = ",\n".join(json.dumps(event, default=str) for event in self._events)
        self._events.clear()
        tail = "\n]\n" if self._output.seekable() else ""
        if self._tail_bytes:
            self._output.seek(-self._tail_bytes, 1)
        self._output.write(((",\n" if self._wrote else "[\n") + text + tail).encode("utf-8"))
        self._output.flush()
        self._wrote = True
        self._tail_bytes = len(tail)
