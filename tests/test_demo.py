"""The demonstration leaves nothing behind, however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

from misc.command import environment
from twisted.trial.unittest import SynchronousTestCase

DEMO = Path(__file__).parent.parent / "misc" / "demo.sh"


class DemoTests(SynchronousTestCase):
    """``misc/demo.sh``, with servers already starting, is interrupted."""

    def setUp(self) -> None:
        home = Path(self.mktemp()).absolute()
        self.scratch = home / "tmp"
        self.scratch.mkdir(parents=True)
        program = home / "bin" / "pipegrid"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pipegrid.cli "$@"\n')
        program.chmod(0o755)
        path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**environment(), "PATH": path, "TMPDIR": str(self.scratch)}

    def begun(self) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        """Start it; returns it and what it prints, when servers are starting."""
        demo = subprocess.Popen(
            ["sh", str(DEMO)],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.addCleanup(self.end_all, demo.pid)
        assert demo.stdout is not None
        self.assertIn(b"1. ", demo.stdout.readline())
        return demo, demo.stdout

    def end_all(self, group: int) -> None:
        """End what a test that has failed would leave."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)

    def assert_nothing_left(self, demo: subprocess.Popen[bytes], status: int) -> None:
        self.assertEqual(demo.wait(30), status)
        self.assertEqual(list(self.scratch.iterdir()), [])
        self.assertRaises(ProcessLookupError, os.killpg, demo.pid, 0)

    def test_nobody_reads_it(self) -> None:
        """As when whoever has started it, such as these tests, is killed: it ends at its next line."""
        demo, printed = self.begun()
        printed.close()
        self.assert_nothing_left(demo, 128 + signal.SIGPIPE)

    def test_interrupted(self) -> None:
        """It ends with the signal's status; no file and no process is left."""
        for number, to_all in ((signal.SIGINT, True), (signal.SIGTERM, False)):
            demo, printed = self.begun()
            if to_all:  # as the terminal's Ctrl-C goes to all in the foreground
                os.killpg(demo.pid, number)
            else:
                demo.send_signal(number)
            # Until the last process that could write there is gone, or one of them has not been told.
            demo.communicate(timeout=60)
            printed.close()
            self.assert_nothing_left(demo, 128 + number)
