"""Processes that measure, and how they end."""

from __future__ import annotations

import signal
import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

STUBBORN = """
import time
from pipegrid.speedtest.processes import end_on_sigterm

end_on_sigterm(1)
try:
    print("ready", flush=True)
    time.sleep(60)
except SystemExit:
    pass  # as a reactor may do
time.sleep(60)
"""


class EndTests(SynchronousTestCase):
    """SIGTERM."""

    def test_a_process_that_swallows_it(self) -> None:
        """It ends all the same, a bounded time later."""
        with subprocess.Popen(
            [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            self.assertEqual(process.stdout.readline(), "ready\n")
            process.terminate()
            self.assertEqual(process.wait(timeout=30), -signal.SIGALRM)
