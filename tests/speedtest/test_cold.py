"""The test of cold commands measures real processes, and says what bounds them."""

from __future__ import annotations

import json

from misc.speedtest import cold, processes
from twisted.trial.unittest import SynchronousTestCase


class ColdTests(SynchronousTestCase):
    """``misc/speedtest/cold.py``, in small; no figure is judged but those that no machine can better."""

    def test_figures(self) -> None:
        """Time and CPU of put and get, and of the floor beside them."""
        done = processes.run_module(
            "misc.speedtest.cold",
            *("--rounds", "1", "--servers", "2", "--rtt-ms", "30", "--json", "--seed", "1"),
            *("--limit-cpu-s", "100"),
        )
        report = json.loads(done)
        self.assertGreater(report["rtt_s"], 0.029)
        for name in ("put", "get", "floor"):
            self.assertGreater(report[name]["cpu_s"], 0)
        for name in ("put", "get"):
            self.assertGreater(report[name]["wall_s"], cold.ROUND_TRIPS * report["rtt_s"])

    def test_round_trips(self) -> None:
        """What is left of a process's time without its CPU."""
        self.assertAlmostEqual(cold.Run(0.65, 0.35).round_trips(0.1), 3.0)
