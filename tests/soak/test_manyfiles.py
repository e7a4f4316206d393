"""The measurement of many small files stays alive."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

ROOT = Path(__file__).parents[2]


class ManyFilesTests(SynchronousTestCase):
    """A tiny run."""

    def test_run(self) -> None:
        """Four commands, all of which succeed within their memory."""
        done = subprocess.run(
            [sys.executable, str(ROOT / "misc/soak/manyfiles.py"), "--files", "250"],
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src"), "HOME": self.mktemp()},
            capture_output=True,
            timeout=120,
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stderr.decode())
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        self.assertEqual(
            [line["command"] for line in lines], ["backup", "backup", "put", "restore"]
        )
