"""A directory in which a Tahoe-LAFS node still runs is not served."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.disk.directory_claim import NAME, process_began, refuse_if_running
from pipegrid.errors import UsageError
from tests.pipes import pipe_in_place


class RunningTests(SynchronousTestCase):
    """Processes as the kernel shows them, with one that was made 100 s after the boot."""

    def setUp(self) -> None:
        self.directory = Path(self.mktemp())
        self.directory.mkdir()
        self.proc = Path(self.mktemp())
        (self.proc / "4711").mkdir(parents=True)
        (self.proc / "stat").write_text("cpu 1 2 3\nbtime 1700000000\nprocesses 9\n")
        ticks = 100 * os.sysconf("SC_CLK_TCK")
        before = "S " + " ".join(map(str, range(4, 22)))
        (self.proc / "4711/stat").write_text(f"4711 (a ) (b) {before} {ticks} 23 24\n")

    def note(self, text: str) -> None:
        """Write what a running node writes."""
        (self.directory / NAME).write_text(text)

    def test_running(self) -> None:
        """It is named, and what to do."""
        self.note("4711 1700000100.57")
        with self.assertRaises(UsageError) as caught:
            refuse_if_running(self.directory, self.proc)
        self.assertIn("4711", str(caught.exception))
        self.assertIn(str(self.directory), str(caught.exception))

    def test_gone(self) -> None:
        """A node that was killed, the same number for another process, and nonsense do not count."""
        refuse_if_running(self.directory, self.proc)
        for text in ("4712 1700000100.57", "4711 1600000000.0", "", "x y", "4711", "-1 5"):
            self.note(text)
            refuse_if_running(self.directory, self.proc)

    def test_a_named_pipe(self) -> None:
        """In its place says nothing, and holds up nobody."""
        with pipe_in_place(self.directory / NAME):
            refuse_if_running(self.directory, self.proc)

    def test_a_real_process(self) -> None:
        """This one's own beginning is known where the kernel tells, and lies in the past."""
        began_s = process_began(os.getpid())
        if sys.platform == "linux":
            assert began_s is not None
            self.assertLess(abs(began_s - Path("/proc/self").stat().st_mtime), 86400)
        self.assertIsNone(process_began(os.getpid(), Path("/nowhere")))
