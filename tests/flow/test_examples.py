"""The examples in docs/ run, and show what they say they show."""

from __future__ import annotations

import io
import runpy
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

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
        self.assertIn(shown.strip(), code)
        with redirect_stdout(io.StringIO()) as printed:
            self.example["main"]()
        for line in printed.getvalue().splitlines():
            self.assertIn(f"    {line}\n", guide)
