"""The start-up test alternates, judges the median, and needs the console script."""

from __future__ import annotations

import io
import json
import sys

from misc.speedtest import startup
from twisted.trial.unittest import SynchronousTestCase


class StartupTests(SynchronousTestCase):
    """``misc/speedtest/startup.py``."""

    def run_main(self, *arguments: str, script: str | None = sys.executable) -> tuple[int, str]:
        self.patch(startup, "console_script", lambda: script)
        out = io.StringIO()
        return startup.main(arguments, out), out.getvalue()

    def test_the_report_has_median_and_spread(self) -> None:
        """Here of ``python --version``, which is surely faster than the import of click."""
        status, text = self.run_main("--pairs", "3", "--json")
        report = json.loads(text)
        self.assertEqual((status, report["pairs"]), (0, 3))
        ratio = report["ratio"]
        self.assertTrue(0 < ratio["low"] <= ratio["median"] <= ratio["high"], ratio)

    def test_the_limit_is_the_medians(self) -> None:
        """One slow run proves nothing; two of three do."""
        fast, slow = startup.Pair(0.1, 0.1), startup.Pair(0.2, 0.1)
        for pairs, expected in (([fast, slow, fast], 0), ([slow, fast, slow], 1)):
            self.patch(startup, "measure", lambda *_, pairs=pairs: pairs)
            status, text = self.run_main()
            self.assertEqual(status, expected)
            self.assertIn("1.00 to 2.00", text)

    def test_without_the_console_script_nothing_is_measured(self) -> None:
        """It says so, and fails."""
        self.assertEqual(self.run_main(script=None), (1, ""))
