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


BUSY = """
import ctypes
from pipegrid.speedtest.processes import end_on_sigterm

end_on_sigterm(1)
print("ready", flush=True)
ctypes.CDLL(None).system(b"kill -TERM $PPID; exec sleep 6 >&2")
"""

RACE = """
import os, signal, time
from pipegrid.speedtest.processes import end_on_sigterm

end_on_sigterm(60)
# As if the signal came when Python has looked for signals, and does not yet wait: no handler runs.
handler = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *_: None)
os.kill(os.getpid(), signal.SIGTERM)
signal.signal(signal.SIGTERM, handler)
print("ready", flush=True)
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

    def test_a_process_that_does_not_look(self) -> None:
        """One that is in a long call of C's ends a bounded time later, too."""
        self.assertEqual(self.end(BUSY), -signal.SIGALRM)

    def test_a_signal_just_before_a_wait(self) -> None:
        """It interrupts the wait all the same, and the process ends in good order."""
        self.assertEqual(self.end(RACE), 143)

    def end(self, program: str) -> int:
        """Run a program that tells itself to end, and return its status."""
        with subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
        ) as process:
            self.addCleanup(process.kill)
            assert process.stdout is not None
            self.assertEqual(process.stdout.readline(), "ready\n")
            try:
                return process.wait(timeout=30)
            finally:
                process.kill()
