"""The durability matrix: what it computes, what it shows, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

from misc.speedtest import durability, processes
from twisted.trial.unittest import SynchronousTestCase


class DurabilityTests(SynchronousTestCase):
    """``misc/speedtest/durability.py``; no figure is judged."""

    TIMES = {
        ("small", "none"): [1.0, 2.0],
        ("small", "strict"): [3.0, 8.0],
        ("large", "none"): [5.0],
        ("large", "strict"): [5.0],
    }

    def test_policies_are_compared_within_a_round(self) -> None:
        """The quotient is that of the same round, and only then are they averaged."""
        cells = {(cell.load, cell.policy): cell.as_dict() for cell in durability.cells(self.TIMES)}
        strict = cells["small", "strict"]
        self.assertEqual(strict["ratios"], (3.0, 4.0))
        self.assertEqual((strict["mean_s"], strict["mean_ratio"]), (5.5, 3.5))
        self.assertAlmostEqual(strict["deviation_s"], 12.5**0.5)
        self.assertEqual(cells["small", "none"]["mean_ratio"], 1.0)
        self.assertEqual(cells["large", "strict"]["deviation_s"], 0.0)

    def test_table_and_chart_name_every_load_and_policy(self) -> None:
        """Nothing that was measured is left out of what is shown; the chart's words are text."""
        matrix = durability.cells(self.TIMES)
        chart = Path(self.mktemp())
        durability.draw(matrix, chart)
        drawn = chart.read_text("utf-8")
        table = durability.table(matrix)
        for word in ("small", "large", "none", "strict"):
            self.assertIn(word, table)
            self.assertIn(f">{word}</text>", drawn)
        self.assertIn("| small | strict | 5.500 ± 3.536 | 3.50 ± 0.71 |", table)
        self.assertIn("3.50 × none", drawn)

    def test_it_runs(self) -> None:
        """One tiny round stores and fetches under every policy."""
        path = Path(self.mktemp()).absolute()
        name = "misc.speedtest.durability"
        out = processes.run_module(
            name, "--tiny", "--rounds", "1", "--seed", "1", "--json", str(path)
        )
        document = json.loads(path.read_text())
        measured = {(cell["load"], cell["policy"]) for cell in document["cells"]}
        for load in durability.TINY:
            for policy in durability.POLICIES:
                if not policy.void or durability.find_preload() is not None:
                    self.assertIn((load.name, policy.name), measured)
                    self.assertIn(f"| {load.name} | {policy.name} |", out)

    def test_file_systems_are_known_by_their_mounts(self) -> None:
        """The innermost mount decides."""
        self.assertEqual(durability.file_system(Path("/proc/self")), "proc")
        self.assertNotEqual(durability.file_system(Path("/")), "unknown")
