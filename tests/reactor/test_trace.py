"""What pipegrid.reactor.trace writes, read back as a viewer would."""

from __future__ import annotations

import io
import json
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.reactor.trace import BATCH_EVENTS, Tracer


class Pipe(io.BytesIO):
    """A file that cannot seek."""

    def seekable(self) -> bool:
        return False

    def seek(self, offset: int, whence: int = 0) -> int:
        raise io.UnsupportedOperation("seek")


def spans(events: list[Any]) -> list[tuple[str, int, int, float, float]]:
    """Each complete event as name, row, lane, beginning and length in microseconds."""
    return [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]


class TracerTests(SynchronousTestCase):
    """Spans come out as events."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(1000)
        self.file = io.BytesIO()
        self.tracer = Tracer(self.clock.seconds, self.file)

    def read(self) -> list[Any]:
        events = json.loads(self.file.getvalue())
        assert isinstance(events, list)
        return events

    def test_a_block_becomes_a_complete_event(self) -> None:
        """With its row's name, its times in microseconds, and its facts."""
        with self.tracer.span("encode", row="cpu", segment=3):
            self.clock.advance(0.5)
        self.tracer.close()
        self.assertEqual(
            self.read(),
            [
                {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "cpu"}},
                {
                    "name": "encode",
                    "ph": "X",
                    "ts": 0.0,
                    "dur": 500_000.0,
                    "pid": 1,
                    "tid": 1,
                    "args": {"segment": 3},
                },
            ],
        )

    def test_overlapping_spans_lie_in_lanes(self) -> None:
        """Spans of one row that overlap never share a lane; a lane is used again when free."""
        first = self.tracer.begin("a", row="s1")
        self.clock.advance(1)
        second = self.tracer.begin("b", row="s1")
        other = self.tracer.begin("x", row="s2")
        self.clock.advance(1)
        self.tracer.end(first)
        third = self.tracer.begin("c", row="s1")
        for span in (second, third, other):
            self.tracer.end(span)
        self.tracer.end(third)
        self.tracer.close()
        self.assertEqual(
            spans(self.read()),
            [
                ("a", 1, 1, 0.0, 2e6),
                ("b", 1, 2, 1e6, 1e6),
                ("c", 1, 1, 2e6, 0.0),
                ("x", 2, 1, 1e6, 1e6),
            ],
        )

    def test_follows_a_deferred(self) -> None:
        """Results and failures pass through; a failure is a fact of the span."""
        good: Deferred[int] = Deferred()
        bad: Deferred[int] = Deferred()
        self.assertIs(self.tracer.follow(good, "write", row="s1", offset=7), good)
        self.tracer.follow(bad, "write", row="s1")
        good.callback(5)
        bad.errback(ValueError())
        self.assertEqual(self.successResultOf(good), 5)
        self.failureResultOf(bad, ValueError)
        self.tracer.close()
        facts = [event["args"] for event in self.read() if event["ph"] == "X"]
        self.assertEqual(facts, [{"offset": 7}, {"error": "ValueError"}])

    def test_an_exception_ends_the_block(self) -> None:
        """The span is there, and so is the exception."""

        def encode() -> None:
            with self.tracer.span("encode", row="cpu"):
                raise KeyError

        self.assertRaises(KeyError, encode)
        self.tracer.close()
        self.assertEqual(self.read()[1]["args"], {"error": "KeyError"})

    def test_what_is_on_disk_is_whole_after_every_batch(self) -> None:
        """A program that is killed leaves a trace that any JSON reader takes."""
        for number in range(3 * BATCH_EVENTS + 10):
            with self.tracer.span("s", row="cpu", number=number, odd=b"bytes"):
                pass
        self.assertEqual(len(self.read()), 3 * BATCH_EVENTS)
        self.tracer.close()
        numbers = [event["args"]["number"] for event in self.read() if event["ph"] == "X"]
        self.assertEqual(numbers, list(range(3 * BATCH_EVENTS + 10)))

    def test_a_pipe_is_whole_when_closed(self) -> None:
        """A file that cannot seek gets its bracket at the end, and lacks only that before."""
        pipe = Pipe()
        tracer = Tracer(self.clock.seconds, pipe)
        for _ in range(2 * BATCH_EVENTS):
            tracer.end(tracer.begin("s", row="cpu"))
        self.assertEqual(len(json.loads(pipe.getvalue() + b"]")), 2 * BATCH_EVENTS)
        tracer.close()
        self.assertEqual(len(json.loads(pipe.getvalue())), 2 * BATCH_EVENTS + 1)

    def test_an_empty_trace_is_a_trace(self) -> None:
        """Nothing happened, and a viewer may know."""
        self.tracer.close()
        self.tracer.close()
        self.assertEqual(self.read(), [])

    def test_memory_holds_the_newest(self) -> None:
        """Without a file the number of events is bounded, and what was dropped is counted."""
        tracer = Tracer(self.clock.seconds, limit_events=10)
        for number in range(25):
            tracer.end(tracer.begin(str(number), row="cpu"))
        tracer.close()
        names = [name for name, *_ in spans(tracer.events())]
        self.assertEqual(names, [str(number) for number in range(15, 25)])
        self.assertEqual(tracer.dropped, 15)
        self.assertEqual(tracer.events()[0]["args"], {"name": "cpu"})
