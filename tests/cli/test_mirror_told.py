"""What people read of a mirror: the bar while it goes on, and a line for each mirror in the end."""

from __future__ import annotations

import io

from twisted.trial.unittest import SynchronousTestCase

from pipegrid.cli.console import Console
from pipegrid.cli.mirror_options import MirrorOptions, MirrorProgress, print_outcome
from pipegrid.mirror.file_scheduler import Report, Tally
from tests.cli.support import Terminal


class ToldTests(SynchronousTestCase):
    """Numbers with their words."""

    def test_the_bar(self) -> None:
        """One file is no files."""
        for files, words in ((1, "0/1 file]"), (2, "0/2 files]")):
            terminal = Terminal()
            report = Report()
            report.wanted_files, report.wanted_bytes = files, 100
            with MirrorProgress(Console(None, None, terminal)) as display:
                display.show(report)
                assert display._bar is not None
                display._bar.refresh()
            self.assertIn(words, terminal.getvalue())

    def test_mirrors(self) -> None:
        """Of each what came, and what did not, if that was anything."""
        for refused, broken, words in (
            (0, 0, "a: 0 files, nothing\n"),
            (0, 1, "a: 0 files, nothing; 1 request failed\n"),
            (1, 2, "a: 0 files, nothing; 1 file missing or wrong, 2 requests failed\n"),
        ):
            tally = Tally("a")
            tally.refused, tally.broken = refused, broken
            told = io.StringIO()
            console = Console(None, io.BytesIO(), told)
            print_outcome(console, MirrorOptions(), "there", Report([tally]), [], 0)
            self.assertEqual(told.getvalue(), words)
