"""The speed test as a process: real servers, real connections, and nothing left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import attrs
from misc.speedtest import links_check
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.speedtest.child_processes import environment
from pipegrid.speedtest.link_proxies import PROFILES
from pipegrid.speedtest.run_results import (
    COLD_START,
    DIRECTIONS,
    UP,
    WINDOW,
    Measurement,
    Run,
    parse_run,
)
from pipegrid.speedtest.targets import PrivateGrid


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

    def knee(self, **samples: list[float]) -> links_check.Figure:
        """Return what is said of these windows; ``auto`` is the last."""
        from tests.speedtest.sample import sample_run

        windows = {"small": 10_000, "large": 4_000_000, "auto": None}
        measured = tuple(
            Measurement(name, WINDOW, UP, 1, 10**6, 10**6, times, window_bytes=windows[name])
            for name, times in samples.items()
        )
        [figure] = links_check.knee("check", attrs.evolve(sample_run(), measurements=measured))
        return figure

    def test_auto_beside_the_best_window(self) -> None:
        """The best window is the one of the other half of the rounds, and a lucky round does not make one."""
        figure = self.knee(small=[9.0, 9.0], large=[1.0] * 4, auto=[1.04] * 4)
        self.assertEqual(
            (figure.name, figure.median, figure.kept), ("auto beside large", 1.04, True)
        )
        lucky = self.knee(small=[0.5, 2.0, 0.5, 2.0], large=[1.0] * 4, auto=[1.0] * 4)
        self.assertEqual(lucky.name, "auto beside large and small")
        self.assertEqual((lucky.low, lucky.high), (0.5, 1.0))

    def test_windows_that_cannot_be_the_best(self) -> None:
        """On a link with a rate, those that fill less than half of it; without one, none is known to be."""
        for name, hopeless in (("lfn", 6), ("wan", 1), ("colo", 0)):
            target = PrivateGrid(None, link=PROFILES[name])
            swept = links_check.sweep(target)
            self.assertEqual([each.most_rounds for each in swept].count(2), hopeless, name)
