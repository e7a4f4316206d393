"""The soak test of simultaneous puts runs, and finds nothing."""

from __future__ import annotations

import subprocess
import sys

from misc.command import environment
from misc.speedtest.processes import ROOT
from twisted.trial.unittest import SynchronousTestCase


class TwinsTests(SynchronousTestCase):
    """A few rounds on an embedded grid."""

    def test_a_few_rounds(self) -> None:
        """Two processes and one directory, whose put ends well in both."""
        program = [sys.executable, "-m", "misc.soak.twins"]
        done = subprocess.run(
            [*program, "--rounds", "3", "--over", "embedded", "--seed", "3"],
            capture_output=True,
            text=True,
            env=environment(),
            timeout=100,
            cwd=ROOT,
        )
        said = done.stdout + done.stderr
        self.assertEqual(done.returncode, 0, said)
        self.assertIn("6 puts\n", said)
        self.assertEqual(done.stderr, "")
