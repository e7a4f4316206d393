"""The server's speed test runs, checks what it measures, and reports what it promises."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout

from misc.speedtest import server
from twisted.trial.unittest import SynchronousTestCase


class ServerTests(SynchronousTestCase):
    """``misc/speedtest/server.py`` in its tiny mode; no figure is judged."""

    def test_one_line_a_scenario(self) -> None:
        """Every scenario gives one object with a median and its spread."""
        out = io.StringIO()
        with redirect_stdout(out):
            server.main(["--rounds", "1", "--scale", "0.02", "--seed", "1"])
        results = [json.loads(line) for line in out.getvalue().splitlines()]
        self.assertEqual([result["scenario"] for result in results], list(server.SCENARIOS))
        for result in results:
            low, high = result["spread"]
            self.assertTrue(0 < low <= result["median"] <= high)
