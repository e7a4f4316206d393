"""``misc/speedtest/builds_check.py``: what it compares, and the build that it slows down."""

from __future__ import annotations

import ast
import contextlib
import io
import json
from pathlib import Path

from misc.speedtest import builds_check, processes
from twisted.trial.unittest import SynchronousTestCase

from tests.speedtest.sample import sample_run


class BuildsCheckTests(SynchronousTestCase):
    """Equal runs must be called equal, and the slowed one slower."""

    def judge(self, slowed: float) -> list[dict[str, object]]:
        """Return the lines that are printed for four equal runs and another."""
        equal = [sample_run(seed) for seed in range(1, 5)]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            self.kept = list(builds_check.judgements(equal, sample_run(9, slowed=slowed)))
        return [json.loads(line) for line in said.getvalue().splitlines()]

    def test_a_slower_build(self) -> None:
        """Three runs beside their neighbour, two beside all before, and the slow one beside one and all."""
        lines = self.judge(2.0)
        self.assertEqual([line["runs_before"] for line in lines], [1, 1, 2, 1, 3, 1, 4])
        self.assertEqual(self.kept, [True] * 7)
        self.assertTrue(lines[-1]["slower"])
        self.assertFalse(lines[0]["slower"])

    def test_a_build_that_is_not_slower(self) -> None:
        """The check fails if what should be slower is not."""
        self.judge(1.0)
        self.assertEqual(self.kept[-2:], [False, False])

    def test_the_slowed_copy(self) -> None:
        """It is the package as it is, but for a sleep before each put."""
        source = builds_check.slowed_copy(Path(self.mktemp()), 0.5)
        text = (source / "pipegrid" / "grid" / "file_grid.py").read_text("utf-8")
        ast.parse(text)
        original = (processes.ROOT / "src" / "pipegrid" / "grid" / "file_grid.py").read_text(
            "utf-8"
        )
        self.assertEqual(text, original + builds_check.SLOWED.format(seconds=0.5))
        self.assertIn("sleep(0.5)", text)
