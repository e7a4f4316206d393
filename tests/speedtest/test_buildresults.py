"""What a build step makes of a speed test's lines and JSON."""

from __future__ import annotations

import html
import json
import random

import attrs
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.speedtest import buildbot_results
from pipegrid.speedtest.buildbot_results import EarlierBuilds, Follower, judge, result_sets
from pipegrid.speedtest.run_results import Measurement, Parameters, RoundTrip, Run

LINES = """\
private grid: 10 servers, gbs, 3 of 10, window auto, link as it is
round trip: 6.000 ms minimum, 6.670 ms average
TIME (startup): 0.437 up, 0.186 down
TIME (10x 200B): 5.152 up, 2.045 down          up 5.100 .. 5.201 of 5
upload per-file time: 0.515s                   0.510s .. 0.520s of 5
upload per-file times-avg-RTT: 77.205647
upload per-file times-total-RTT: 19.301412
download per-file time: 0.204s
download per-file times-avg-RTT: 30.5
upload speed (1MB): 23.50kBps
upload speed (10MB): 24.02kBps                 97.3% of raw TCP; 23.9kBps .. 24.1kBps of 5
download speed (10MB): 1.25MBps                52.1% of raw TCP; 1.2MBps .. 1.3MBps of 5
upload speed (window 64kB): 11.00kBps
"""


class PrefixTests(SynchronousTestCase):
    """What may come before the names of a build's data, by which Buildbot finds them."""

    def test_names_that_buildbot_finds(self) -> None:
        """None at all, or letters, digits, ``_``, ``-`` and ``.``."""
        for prefix in ("", "ten-", "ten_servers.", "-", "_1", "a" * buildbot_results.MAX_PREFIX):
            self.assertIsNone(buildbot_results.prefix_problem(prefix), prefix)

    def test_names_that_end_the_second_build(self) -> None:
        """Blanks, digits and dots at the beginning, slashes, letters with accents; they are named."""
        for prefix in ("10 servers ", "ten servers", "10-", ".a", "a/b", "a\n", "süd-", "a%"):
            problem = buildbot_results.prefix_problem(prefix)
            assert problem is not None, prefix
            self.assertIn(repr(prefix), problem)
        self.assertIn("100 characters", str(buildbot_results.prefix_problem("a" * 101)))
        self.assertIn("a string", str(buildbot_results.prefix_problem(10)))


def make_run(seed: int = 1, factor: float = 1.0, *, rounds: int = 5, servers: int = 10) -> Run:
    """Return a run whose samples scatter by a few percent; ``factor`` slows uploads of 1 MB."""
    rng = random.Random(seed)

    def measured(name: str, direction: str, files: int, size: int, base_s: float) -> Measurement:
        samples = tuple(base_s * rng.uniform(0.98, 1.02) for _ in range(rounds))
        return Measurement(name, "scenario", direction, files, size, 0, samples)

    return Run(
        when="2026-11-21T10:00:00Z",
        took_s=60.0,
        commit="0123abc",
        versions={},
        machine={"system": "Linux"},
        parameters=Parameters("private grid", "gbs", servers, 3, 7, 10, rounds, seed),
        round_trips=(RoundTrip("server", (0.01, 0.01)),),
        baselines=(),
        measurements=(
            measured("10x 200B", "up", 10, 200, 1.0),
            measured("10x 200B", "down", 10, 200, 0.5),
            measured("1MB", "up", 1, 10**6, 0.4 * factor),
            measured("1MB", "down", 1, 10**6, 0.2),
        ),
    )


class FollowerTests(SynchronousTestCase):
    """The classic lines become figures."""

    def follow(self, text: str) -> Follower:
        """Return a follower that has read the lines of a text."""
        follower = Follower()
        for line in text.splitlines():
            follower.line(line)
        return follower

    def test_figures(self) -> None:
        """Each line gives its property, with or without what stands beside it; rates are in kB a second."""
        self.assertEqual(
            self.follow(LINES).figures,
            {
                "upload-per-file": 0.515,
                "upload-per-file-RTT": 77.205647,
                "upload-per-file-total-RTT": 19.301412,
                "download-per-file": 0.204,
                "download-per-file-RTT": 30.5,
                "upload-1MB": 23.5,
                "upload-10MB": 24.02,
                "upload-10MB-of-TCP": 97.3,
                "download-10MB": 1250.0,
                "download-10MB-of-TCP": 52.1,
            },
        )

    def test_progress(self) -> None:
        """What was measured last is shown, and other lines change nothing."""
        follower = Follower()
        self.assertFalse(follower.line("Traceback (most recent call last):"))
        self.assertFalse(follower.line("TIME (nonsense): soon"))
        self.assertEqual(follower.last, "")
        self.assertTrue(follower.line("round 2 of 5: 1MB: 0.4 s up"))
        self.assertEqual(follower.last, "round 2 of 5: 1MB: 0.4 s up")
        self.assertTrue(follower.line("TIME (10x 200B): 5.152 up, 2.045 down   up 5 .. 6 of 5"))
        self.assertEqual(follower.last, "10x 200B: 5.152 up, 2.045 down (seconds)")
        self.assertTrue(follower.line("TIME (cold start): 5.152 up"))
        self.assertEqual(follower.last, "cold start: 5.152 up (seconds)")

    def test_summary(self) -> None:
        """The largest file and the small ones, both ways; what is missing is left out."""
        self.assertEqual(
            self.follow(LINES).summary(),
            "upload 515 ms a file (77.2 RTT), 10MB at 24.0 kB/s; "
            "download 204 ms a file (30.5 RTT), 10MB at 1.25 MB/s",
        )
        self.assertEqual(
            self.follow("upload per-file time: 1.5s\n").summary(), "upload 1.50 s a file"
        )
        self.assertEqual(Follower().summary(), "")

    def test_no_powers_of_ten(self) -> None:
        """However fast or slow it was, the summary is written as people write."""
        summary = self.follow(
            "upload per-file time: 0.00001s\n"
            "upload per-file times-avg-RTT: 123456.7\n"
            "upload speed (100MB): 18.01MBps\n"
            "download per-file time: 12345.678s\n"
            "download speed (1GB): 2.50GBps\n"
        ).summary()
        self.assertEqual(
            summary,
            "upload 10.0 µs a file (123 457 RTT), 100MB at 18.0 MB/s; "
            "download 206 min a file, 1GB at 2.50 GB/s",
        )

    def test_a_test_that_ended_early_is_noticed(self) -> None:
        """Without both per-file times the output is not that of a whole test."""
        self.assertEqual(self.follow(LINES).missing(), ())
        half = LINES.partition("download per-file")[0]
        self.assertEqual(self.follow(half).missing(), ("download-per-file",))
        self.assertEqual(len(self.follow("").missing()), 2)


class ResultSetsTests(SynchronousTestCase):
    """Measurements become sets of test results."""

    def test_units(self) -> None:
        """Seconds of everything, rates of large files, round trips of small ones."""
        sets = {each.unit: dict(each.results) for each in result_sets(make_run())}
        self.assertEqual(set(sets), {"s", "B/s", "RTT"})
        self.assertEqual(len(sets["s"]), 4)
        self.assertEqual(set(sets["B/s"]), {"1MB up", "1MB down"})
        self.assertEqual(set(sets["RTT"]), {"10x 200B up", "10x 200B down"})
        self.assertAlmostEqual(sets["RTT"]["10x 200B up"], 10.0, 0)
        self.assertAlmostEqual(sets["s"]["10x 200B up"], 0.1, 2)

    def test_unknown_round_trips(self) -> None:
        """A run without round trips has no set of them; sweeps are told apart by their group."""
        sweep = Measurement("64kB", "window", "up", 1, 10**6, 0, (1.0,))
        run = attrs.evolve(make_run(), round_trips=(), measurements=(sweep,))
        self.assertEqual(
            [(each.unit, each.results) for each in result_sets(run)],
            [("s", (("window 64kB up", 1.0),)), ("B/s", (("window 64kB up", 1e6),))],
        )


class BaselineTests(SynchronousTestCase):
    """Which earlier builds count."""

    def offered(self, *builds: tuple[Run, bool, bool], limit: int = 3) -> EarlierBuilds:
        """Return what was chosen for a run of these (run, regressed, accepted)."""
        baseline = EarlierBuilds(make_run(), limit)
        for run, regressed, accepted in builds:
            baseline.offer(run.as_json().encode(), regressed, accepted)
        return baseline

    def seeds(self, baseline: EarlierBuilds) -> list[int]:
        """Return the seeds of the runs that were chosen."""
        return [run.parameters.seed for run in baseline.runs]

    def test_the_last_few(self) -> None:
        """As many as are wanted, and then no more."""
        builds = [(make_run(seed), False, False) for seed in range(2, 9)]
        baseline = self.offered(*builds)
        self.assertEqual(self.seeds(baseline), [2, 3, 4])

    def test_regressions_do_not_become_normal(self) -> None:
        """A build that had regressed is no measure for the next one."""
        baseline = self.offered((make_run(2), True, False), (make_run(3), False, False))
        self.assertEqual(self.seeds(baseline), [3])

    def test_until_they_are_accepted(self) -> None:
        """An accepted regression counts, and nothing before it does."""
        baseline = self.offered(
            (make_run(2), False, False), (make_run(3), True, True), (make_run(4), False, False)
        )
        self.assertEqual(self.seeds(baseline), [2, 3])

    def test_what_is_not_alike_is_counted_and_left_out(self) -> None:
        """Other parameters or machines; another seed or number of rounds is no difference."""
        elsewhere = attrs.evolve(make_run(3), machine={"system": "Hurd"})
        baseline = self.offered(
            (make_run(2, servers=5), False, False),
            (elsewhere, False, False),
            (make_run(4, rounds=7), False, False),
        )
        self.assertEqual(self.seeds(baseline), [4])
        self.assertEqual(baseline.unlike, 2)

    def test_documents_that_cannot_be_read_are_passed_over(self) -> None:
        """Those of another version, and garbage."""
        baseline = EarlierBuilds(make_run(), 3)
        old = json.loads(make_run().as_json()) | {"version": 0}
        baseline.offer(json.dumps(old).encode(), False, False)
        baseline.offer(b"\x00", False, False)
        self.assertEqual(baseline.runs, [])
        self.assertEqual(baseline.unlike, 0)


class JudgeTests(SynchronousTestCase):
    """The verdict, in a sentence."""

    HISTORY = [make_run(seed) for seed in range(2, 7)]

    def test_slower(self) -> None:
        """What became half as fast again is named, and by how much."""
        verdict = judge(make_run(9, 1.5), self.HISTORY)
        self.assertTrue(verdict.regressed)
        self.assertRegex(
            verdict.sentence, r"^slower compared with 5 builds: 1MB up \+(49|50|51) %$"
        )
        self.assertIn("10x 200B down", verdict.text)

    def test_same_and_faster(self) -> None:
        """Neither noise nor progress is a regression."""
        verdict = judge(make_run(9), self.HISTORY)
        self.assertEqual(
            (verdict.sentence, verdict.regressed), ("no change compared with 5 builds", False)
        )
        verdict = judge(make_run(9, 0.5), self.HISTORY)
        self.assertEqual(verdict.sentence, "1 measurement faster compared with 5 builds")
        self.assertFalse(verdict.regressed)

    def test_nothing_to_compare_with(self) -> None:
        """The first build is good; so is the first of another kind, and the sentence says which it is."""
        self.assertEqual(judge(make_run(), []).sentence, "nothing to compare with yet")
        self.assertIn("the last 3 builds had other", judge(make_run(), [], 3).sentence)
        self.assertFalse(judge(make_run(), [], 3).regressed)

    def test_runs_that_cannot_be_compared(self) -> None:
        """What the comparison says to that becomes the sentence, not a traceback."""
        verdict = judge(make_run(), [make_run(servers=4)])
        self.assertTrue(verdict.sentence.startswith("not compared: "), verdict.sentence)
        self.assertFalse(verdict.regressed)


class PageTests(SynchronousTestCase):
    """What is shown beside the verdict."""

    def test_the_report_stays_in_its_frame(self) -> None:
        """Whatever the report holds, it is text of the frame's attribute."""
        report = '<p title="x">\'"></iframe><script>alert(1)</script>\n'
        page = buildbot_results.framed(report)
        self.assertEqual(page.count("<"), 2)
        inner = page.partition('srcdoc="\n')[2].partition('"></iframe>')[0]
        self.assertEqual(html.unescape(inner), report)

    def test_last_words(self) -> None:
        """The last line that says something, at a length that fits a page."""
        self.assertEqual(buildbot_results.last_words(["a", " b ", "", "  "]), "b")
        self.assertEqual(buildbot_results.last_words([]), "")
        self.assertEqual(len(buildbot_results.last_words(["x" * 1000])), 500)
