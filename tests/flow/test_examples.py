"""The examples in docs/ run, and show what they say they show."""

from __future__ import annotations

import io
import runpy
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.flow.pipeline import Pipeline
from pipegrid.flow.window import AutoWindow

DOCS = Path(__file__).parent.parent.parent / "docs"


class PipelineExampleTests(SynchronousTestCase):
    """docs/examples/pipeline_callremote.py."""

    def setUp(self) -> None:
        self.example: dict[str, Any] = runpy.run_path(
            str(DOCS / "examples" / "pipeline_callremote.py")
        )

    def test_seven_writes_share_one_round_trip(self) -> None:
        """One by one they take seven; either way the server has all bytes."""
        whole = b"".join(self.example["PIECES"])
        trips, data = self.example["round_trips"](self.example["store_one_by_one"])
        self.assertAlmostEqual(trips, 7)
        self.assertEqual(data, whole)
        trips, data = self.example["round_trips"](self.example["store_pipelined"])
        self.assertAlmostEqual(trips, 1)
        self.assertEqual(data, whole)

    def test_the_how_to_shows_the_same_code(self) -> None:
        """The guide's central lines stand in the example word for word, and so does its output."""
        code = (DOCS / "examples" / "pipeline_callremote.py").read_text("utf-8")
        guide = (DOCS / "how-to-pipeline.md").read_text("utf-8")
        shown = guide.split("```python\n")[1].split("```")[0]
        _imports, _, function = shown.partition("\n\n\n")
        self.assertIn(function.strip(), code)
        with redirect_stdout(io.StringIO()) as printed:
            self.example["main"]()
        for line in printed.getvalue().splitlines():
            self.assertIn(f"    {line}\n", guide)


class LettingGoExampleTests(SynchronousTestCase):
    """The lines of docs/how-to-pipeline.md about messages that need not be kept."""

    def test_what_is_sent_is_not_held(self) -> None:
        """They run as they stand, beside a connection that has sent but heard nothing yet."""
        guide = (DOCS / "how-to-pipeline.md").read_text("utf-8")
        section = guide.split("## Release what was sent\n")[1].split("\n## ")[0]
        lines = [line for line in section.splitlines() if line.startswith("    ")]
        sent: list[Callable[[], None]] = []

        class Connection:
            def send(self, piece: bytes, when_sent: Callable[[], None]) -> Deferred[None]:
                sent.append(when_sent)
                return Deferred()

        names: dict[str, Any] = {
            "AutoWindow": AutoWindow,
            "Pipeline": Pipeline,
            "reactor": Clock(),
            "connection": Connection(),
            "piece": bytes(1000),
            "Callable": Callable,
            "Deferred": Deferred,
        }
        exec("async def example():\n" + "\n".join(lines) + "\n    return pipeline\n", names)
        pipeline = self.successResultOf(Deferred.fromCoroutine(names["example"]()))
        self.assertEqual((pipeline.bytes_in_flight, pipeline.bytes_held), (1000, 1000))
        sent[0]()
        self.assertEqual((pipeline.bytes_in_flight, pipeline.bytes_held), (1000, 0))
