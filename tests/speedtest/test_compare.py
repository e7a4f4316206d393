"""Comparing runs: what is flagged, what is not, and what is refused."""

from __future__ import annotations

import itertools
import json
import random

import attrs
from misc.speedtest import power
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import UsageError
from pipegrid.speedtest.run_comparison import FASTER, SAME, SLOWER, UNJUDGED, compare
from pipegrid.speedtest.run_results import DOWN, SCENARIO, UP, Measurement, Run
from tests.speedtest.sample import sample_run

QUIET, USUAL = power.MACHINES["quiet"], power.MACHINES["usual"]


def scaled(run: Run, factor: float, *names: str) -> Run:
    """Return a run with the times of some measurements, or all, multiplied."""
    changed = [
        attrs.evolve(each, samples_s=[sample * factor for sample in each.samples_s])
        if not names or each.name in names
        else each
        for each in run.measurements
    ]
    return attrs.evolve(run, measurements=tuple(changed))


def slower_path(run: Run, factor: float) -> Run:
    """Return a run on a path that is so many times slower."""
    trips = [
        attrs.evolve(each, samples_s=[sample * factor for sample in each.samples_s])
        for each in run.round_trips
    ]
    lines = [
        attrs.evolve(
            each,
            before=[rate / factor for rate in each.before],
            after=[rate / factor for rate in each.after],
        )
        for each in run.baselines
    ]
    return attrs.evolve(run, round_trips=tuple(trips), baselines=tuple(lines))


class VerdictTests(SynchronousTestCase):
    """What ``compare`` calls slower, faster, the same."""

    def test_ten_builds_that_are_the_same(self) -> None:
        """Ten runs of one build in a row, each compared with the one before: nothing is flagged."""
        for name, machine in (("quiet", QUIET), ("usual", USUAL)):
            rng = random.Random(11)
            runs = [power.made_up(rng, machine, 5) for _ in range(10)]
            for before, after in itertools.pairwise(runs):
                result = compare(before, after)
                self.assertEqual((result.slower, result.faster), ((), ()), name)
                self.assertIn("No change beyond noise in 30", result.summary)

    def test_a_build_that_was_slowed_down(self) -> None:
        """A build with a delay in it is flagged; one that got rid of it is called faster."""
        rng = random.Random(12)
        before = power.made_up(rng, USUAL, 5)
        slowed = power.made_up(rng, USUAL, 5, "all +100 %")
        result = compare(before, slowed)
        self.assertTrue(result.regressed)
        self.assertGreater(len(result.slower), 25)
        self.assertEqual(result.faster, ())
        back = compare(slowed, before)
        self.assertFalse(back.regressed)
        self.assertGreater(len(back.faster), 25)

    def test_one_scenario_among_many(self) -> None:
        """What got slower is named, and nothing else is."""
        before, after = sample_run(1), scaled(sample_run(2), 1.3, "10x 200B")
        result = compare(before, after)
        self.assertEqual(
            [(each.name, each.direction) for each in result.slower],
            [("10x 200B", UP), ("10x 200B", DOWN)],
        )
        [change, _] = result.slower
        self.assertTrue(1.25 < change.ratio < 1.35, change)
        self.assertTrue(change.low <= change.ratio <= change.high, change)
        self.assertLessEqual(change.p or 1, 0.01)

    def test_small_changes_are_noise(self) -> None:
        """Less than a tenth may be the hour of the day, however well the rounds agree."""
        result = compare(sample_run(1), scaled(sample_run(2), 1.08))
        self.assertEqual({each.verdict for each in result.changes}, {SAME})

    def test_a_slower_path_is_not_a_slower_build(self) -> None:
        """When round trips and raw TCP got slower as well, that much is not the build's."""
        before, after = sample_run(1), scaled(sample_run(2), 1.4)
        self.assertTrue(compare(before, after).regressed)
        result = compare(before, slower_path(after, 1.4))
        self.assertFalse(result.regressed)
        self.assertEqual(result.warnings, ())
        doubled = compare(before, scaled(slower_path(after, 1.4), 2))
        self.assertTrue(doubled.regressed)

    def test_a_faster_path_is_not_a_faster_build(self) -> None:
        """And it says so when the path changed very much."""
        result = compare(sample_run(1), slower_path(scaled(sample_run(2), 0.5), 0.5))
        self.assertEqual(result.faster, ())
        self.assertIn("path itself", result.warnings[0])

    def test_one_hiccup_hides_nothing_and_shows_nothing(self) -> None:
        """A round in which the machine did something else moves no verdict."""

        def hiccup(run: Run) -> Run:
            changed = [
                attrs.evolve(each, samples_s=[each.samples_s[0] * 10, *each.samples_s[1:]])
                for each in run.measurements
            ]
            return attrs.evolve(run, measurements=tuple(changed))

        before = sample_run(1)
        same, slowed = hiccup(sample_run(2)), hiccup(scaled(sample_run(2), 1.5))
        self.assertFalse(compare(before, same).regressed)
        self.assertTrue(compare(before, slowed).regressed)

    def test_several_runs_tell_how_far_runs_differ(self) -> None:
        """A change that is as large as what earlier runs of one build did is none."""
        steady = [sample_run(seed) for seed in range(1, 6)]
        restless = [scaled(run, 1 + 0.1 * index) for index, run in enumerate(steady)]
        after = scaled(sample_run(9), 1.35)
        self.assertTrue(compare(steady, after).regressed)
        self.assertFalse(compare(restless, after).regressed)

    def test_too_few_rounds(self) -> None:
        """Three rounds a side can show nothing at this level; it is said, and nothing is judged."""

        def three(run: Run) -> Run:
            few = [attrs.evolve(each, samples_s=each.samples_s[:3]) for each in run.measurements]
            return attrs.evolve(run, measurements=tuple(few))

        before, after = three(sample_run(1)), three(scaled(sample_run(2), 3))
        result = compare(before, after)
        self.assertEqual({each.verdict for each in result.changes}, {UNJUDGED})
        self.assertFalse(result.regressed)
        self.assertIn("five before", result.warnings[0])
        self.assertIn("too few rounds", result.summary)
        # Earlier runs make up for it.
        more = [three(sample_run(seed)) for seed in range(10, 16)]
        self.assertTrue(compare(more, after).regressed)

    def test_without_round_trips_and_baselines(self) -> None:
        """A gateway has neither; seconds are compared all the same."""

        def bare(run: Run) -> Run:
            return attrs.evolve(run, round_trips=(), baselines=())

        self.assertTrue(compare(bare(sample_run(1)), bare(scaled(sample_run(2), 1.5))).regressed)


class RefusalTests(SynchronousTestCase):
    """What cannot be compared gets a sentence."""

    def test_other_parameters(self) -> None:
        """The first parameter that differs is named; seed and rounds may differ."""
        run = sample_run(1)
        for changes, words in (
            ({"servers": 5}, "servers differs (10 and 5)"),
            ({"window": "50000"}, "window differs"),
            ({"link": None}, "link differs (dsl 11 ms 80 kB/s 520 kB/s and none)"),
        ):
            other = attrs.evolve(run, parameters=attrs.evolve(run.parameters, **changes))
            with self.assertRaises(UsageError) as caught:
                compare(run, other)
            self.assertIn(words, str(caught.exception))
            self.assertIn("measure both", str(caught.exception))
        same = attrs.evolve(run.parameters, seed=99, rounds=6)
        compare(run, attrs.evolve(run, parameters=same))

    def test_other_machines(self) -> None:
        """They can be compared anyway; then it is a warning."""
        run = sample_run(1)
        other = attrs.evolve(run, machine={**run.machine, "cores": "64", "new": "x"})
        with self.assertRaises(UsageError) as caught:
            compare(run, other)
        self.assertIn("the machine's cores differs (2 and 64)", str(caught.exception))
        result = compare(run, other, anyway=True)
        self.assertIn("the machine's cores differs (2 and 64)", result.warnings)
        self.assertFalse(result.regressed)

    def test_nothing_in_common(self) -> None:
        """Neither no runs, nor runs of other scenarios."""
        run = sample_run(1)
        self.assertRaises(UsageError, compare, run, [])
        self.assertRaises(UsageError, compare, [], run)
        other = Measurement("other", SCENARIO, UP, 1, 1, 1, [1.0])
        self.assertRaises(UsageError, compare, run, attrs.evolve(run, measurements=(other,)))


class TextTests(SynchronousTestCase):
    """What a person and a program read."""

    def test_lines(self) -> None:
        """The summary first, then what changed with its interval, then how it was judged."""
        before, after = sample_run(1), scaled(sample_run(2), 1.5, "1x 200B")
        after = attrs.evolve(after, measurements=after.measurements[1:])
        result = compare(before, after)
        text = result.as_text()
        lines = text.splitlines()
        self.assertRegex(lines[0], r"Of \d+ measurements 2 slower, beyond noise\.")
        [line] = [each for each in lines if each.startswith("1x 200B up")]
        self.assertRegex(
            line, r"11\.\d ms +1[78](\.\d)? ms  \+5\d % \(\+4\d to \+5\d\)  0\.00\d  slower$"
        )
        self.assertIn("Only before: startup up.", lines)
        self.assertNotIn("100MB", text)
        self.assertIn("relabelling", lines[-1])
        self.assertIn("100MB", result.as_text(everything=True))
        self.assertIn(SAME, result.as_text(everything=True))

    def test_json(self) -> None:
        """Everything is there for a program."""
        result = compare(sample_run(1), scaled(sample_run(2), 0.5, "1x 200B"))
        document = json.loads(json.dumps(result.as_dict()))
        self.assertFalse(document["regressed"])
        self.assertEqual(sum(change["verdict"] == FASTER for change in document["changes"]), 2)
        self.assertEqual(sum(change["verdict"] == SLOWER for change in document["changes"]), 0)


class PowerTests(SynchronousTestCase):
    """``misc/speedtest/power.py`` stays alive."""

    def test_one_line_a_case(self) -> None:
        """Its lines say how often anything was flagged."""
        rng = random.Random(5)
        self.assertEqual(power.flagged(rng, QUIET, (1, 1), 5, "all +100 %"), (True, False))
        self.assertEqual(power.flagged(rng, QUIET, (2, 1), 5, "none"), (False, False))
