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
        """All commands succeed within their memory, and what comes back is what was there."""
        done = subprocess.run(
            [sys.executable, "-m", "misc.soak.manyfiles", "--files", "150"],
            cwd=ROOT,
            env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "src"), "HOME": self.mktemp()},
            capture_output=True,
            timeout=120,
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stderr.decode())
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        commands = [
            *(
                "cp -r",
                "backup",
                "backup, nothing changed",
                "put -r",
                "get -r",
                "get -r, all there",
            ),
            *(
                "get -r, a third gone, and a third cut off",
                "check -r",
                "check -r --verify",
                "renew -r",
            ),
            *("ls -R", "du", "stats", "manifest", "restore", "backup, some changed"),
            *("restore, some changed", "restore --at", "restore of one file"),
        ]
        self.assertEqual([line["command"] for line in lines if "command" in line], commands)
        self.assertEqual([line["same"] for line in lines if "same" in line], [True] * 5)
