"""The speed test as a process: real servers, real connections, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from misc.speedtest import links_check
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.speedtest.processes import environment
from pipegrid.speedtest.results import COLD_START, DIRECTIONS, UP, WINDOW, Run, parse_run


class CommandTests(SynchronousTestCase):
    """``pipegrid speedtest``, with real servers; no figure is judged."""

    def pipegrid(self, *arguments: str) -> str:
        """Run the command; return what it prints."""
        done = subprocess.run(
            [sys.executable, "-m", "pipegrid.cli", *arguments],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=100,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def measure(self, *arguments: str) -> Run:
        """Measure; return the run."""
        return parse_run(self.pipegrid(*arguments, "--quick", "--format", "json"), "the run")

    def test_a_private_grid_over_https_behind_a_link(self) -> None:
        """Round trips, raw TCP and the timeline are there, and the link is felt in all of them."""
        names = ("--only", "1x 200B", "--only", "window auto")
        run = self.measure("speedtest", "--servers", "2", "--rtt", "20ms", *names)
        self.assertEqual([trip.server for trip in run.round_trips], ["server00", "server01"])
        self.assertGreater(run.average_rtt_s or 0, 0.019)
        kinds = {(each.streams, each.tls, each.direction) for each in run.baselines}
        self.assertEqual(len(kinds), 8)
        self.assertTrue(all(each.before and each.after for each in run.baselines))
        for way in DIRECTIONS:
            found = run.find("1x 200B", way)
            assert found is not None
            self.assertGreater(found.median_s, 0.019)
        self.assertIsNotNone(run.find("auto", UP, WINDOW))
        assert run.timeline is not None
        servers = {burst.server for burst in run.timeline.bursts}
        self.assertEqual(servers, {"server00", "server01"})
        first, last = run.timeline.bursts[0], run.timeline.bursts[-1]
        self.assertEqual((first.direction, last.direction), ("up", "down"))
        self.assertGreater(last.at_s - first.at_s, 0.019)

    def test_a_private_grid_over_foolscap(self) -> None:
        """The same, with requests for a timeline."""
        names = ("--transport", "foolscap", "--only", "1x 200B", "--window", "50kB")
        run = self.measure("speedtest", "--servers", "1", "--link", "none", *names)
        parameters = run.parameters
        self.assertEqual((parameters.transport, parameters.window), ("foolscap", "50000"))
        assert run.timeline is not None
        self.assertTrue(run.timeline.bursts)

    def test_the_grid_of_a_directory(self) -> None:
        """The command itself is measured with it, too."""
        directory = str(Path(self.mktemp()).absolute())
        self.pipegrid("-d", directory, "init")
        run = self.measure("-d", directory, "speedtest", "--only", "1x 200B", "--only", "command")
        self.assertEqual((run.parameters.target, run.parameters.servers), ("grid", 10))
        self.assertIsNotNone(run.find("command 200B", UP, COLD_START))


class LinksCheckTests(SynchronousTestCase):
    """``misc/speedtest/links_check.py``."""

    def test_figures_are_held_against_what_was_promised(self) -> None:
        """A limit that is kept, and one that is not."""
        from tests.speedtest.test_lines import classic_run

        run = classic_run()
        kept = {
            (each.name, each.unit): each.kept
            for figures in (links_check.trips, links_check.throughput)
            for each in figures("check", run)
        }
        self.assertIs(kept["10MB up", "of raw TCP"], True)
        self.assertIs(kept["10x 200B up", "round trips"], False)
