"""The memory test measures real commands, and its limit is one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from misc.command import environment
from twisted.trial.unittest import SynchronousTestCase

ROOT = Path(__file__).resolve().parents[2]


class MemoryTests(SynchronousTestCase):
    """``misc/speedtest/memory.py`` with a small file."""

    def test_the_report_holds_all_three_peaks(self) -> None:
        """In MiB; a limit that cannot be kept makes the status 1."""
        # In a process of its own: the children of one as large as this would seem as large.
        line = ["--megabytes", "1", "--json", "--limit-mib=-1000"]
        done = subprocess.run(
            [sys.executable, "-m", "misc.speedtest.memory", *line],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            timeout=60,
        )
        self.assertEqual((done.returncode, done.stderr), (1, b""))
        report = json.loads(done.stdout)
        for name in ("status", "put", "get"):
            self.assertTrue(10 < report[name] < 1000, report)
        above = max(report["put"], report["get"]) - report["status"]
        self.assertAlmostEqual(report["above_idle"], above)
