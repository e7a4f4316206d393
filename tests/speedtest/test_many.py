"""The measurement of many small files stores files in processes of its own."""

from __future__ import annotations

import json

from misc.speedtest import processes
from twisted.trial.unittest import SynchronousTestCase


class ManyTests(SynchronousTestCase):
    """``misc/speedtest/many.py``, in small; no figure is judged."""

    def test_figures(self) -> None:
        """Files a second, and processor time of both sides."""
        done = processes.run_module(
            "misc.speedtest.many",
            *("--files", "20", "--rounds", "1", "--servers", "3", "--rtt-ms", "5", "--json"),
        )
        report = json.loads(done)
        (run,) = report["runs"]
        stored = {"files_per_s", "client_ms", "servers_ms"}
        fetched = {"gets_per_s", "get_client_ms", "get_servers_ms"}
        self.assertEqual(set(run), stored | fetched)
        for name in ("files_per_s", "client_ms", "gets_per_s", "get_client_ms"):
            self.assertGreater(run[name], 0)
