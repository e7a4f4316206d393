"""Our introducer between servers and clients of both kinds, in small."""

from __future__ import annotations

import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

from tests.interop import introducer_grid
from tests.interop.processes import Node, Process, introducer_furl, until


class FewServersTests(introducer_grid.IntroducerTurnsTests):
    """Two servers of each kind."""

    of_each_kind = 2


class NewDirectoryTests(SynchronousTestCase):
    """A directory that our introducer has made."""

    def test_given_to_tahoe(self) -> None:
        """Tahoe-LAFS runs it, at the same fURL."""
        directory = Path(self.mktemp()).absolute()
        port = "tcp:0:interface=127.0.0.1"
        command = sys.executable, "-m", "pipegrid.cli", "-d", str(directory), "introducer"
        ours = Process(directory, *command, "--port", port)
        self.addCleanup(ours.stop)
        furl = directory / "private/introducer.furl"
        until(lambda: furl.exists() and furl.read_text().strip() in ours.log(), "the fURL", ours)
        known = furl.read_text().strip()
        ours.stop()
        theirs = Node(directory)
        self.addCleanup(theirs.stop)
        until(lambda: (directory / "running.process").exists(), "its start", theirs)
        until(lambda: "introducer running" in theirs.log().lower(), "its start", theirs)
        self.assertEqual(introducer_furl(theirs), known)


del introducer_grid
