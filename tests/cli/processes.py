"""Commands run as users run them: each in a process, with a home of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

import pipegrid

TIMEOUT_S = 120


class ProcessTestCase(SynchronousTestCase):
    """A home, and commands in it."""

    def setUp(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="pg"))
        self.addCleanup(subprocess.run, ["rm", "-rf", str(self.home)], check=False)
        self.environment = {
            "HOME": str(self.home),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(Path(pipegrid.__file__).parent.parent),
            "LC_ALL": "C.UTF-8",
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a command."""
        return subprocess.Popen(
            [sys.executable, "-m", "pipegrid.cli", *arguments],
            cwd=self.home,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def run_command(self, *arguments: str, status: int = 0) -> tuple[str, str]:
        """Run one to its end; returns what it printed."""
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=TIMEOUT_S)
        self.assertEqual(process.returncode, status, err)
        self.assertNotIn("Traceback", err)
        return out.strip(), err
