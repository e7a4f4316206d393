"""Results of the speed test, and their JSON."""

from __future__ import annotations

import json

import attrs
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import UsageError
from pipegrid.speedtest.run_results import (
    DOWN,
    SCENARIO,
    UP,
    Baseline,
    Burst,
    EmulatedLink,
    Measurement,
    Parameters,
    RoundTrip,
    Run,
    Timeline,
    parse_run,
    spread,
)


def make_run(scale: float = 1.0, commit: str | None = "c0ffee") -> Run:
    """Return a run with something of everything; times are multiplied by ``scale``."""
    up = Measurement("10x 200B", SCENARIO, UP, 10, 200, 9000, [s * scale for s in (1.2, 1.0, 1.1)])
    down = Measurement("1MB", SCENARIO, DOWN, 1, 10**6, 10**6, [s * scale for s in (2.0, 2.5, 3.0)])
    return Run(
        when="2026-11-21T10:00:00Z",
        took_s=12.5,
        commit=commit,
        versions={"pipegrid": "1", "python": "3.11"},
        machine={"system": "Linux", "cores": "2"},
        parameters=Parameters(
            "private grid", "gbs", 2, 3, 7, 10, 3, 7, link=EmulatedLink("dsl", 0.011)
        ),
        round_trips=(RoundTrip("a", [0.1, 0.2]), RoundTrip("b", [0.3])),
        baselines=(Baseline(1, False, UP, [100.0, 200.0], [300.0]),),
        measurements=(up, down),
        timeline=Timeline("1x 200B", 0.1, 0.11, (Burst("a", 0.0, UP, 900),)),
    )


class ResultsTests(SynchronousTestCase):
    """What is written is what is read."""

    def test_there_and_back(self) -> None:
        """A run comes back from its JSON as it was."""
        run = make_run()
        self.assertEqual(parse_run(run.as_json(), "a.json"), run)
        bare = attrs.evolve(run, timeline=None, commit=None)
        self.assertEqual(parse_run(bare.as_json(), "a.json"), bare)

    def test_medians_and_spreads_are_there_to_read(self) -> None:
        """Readers of the JSON find every sample, and the middle and spread of each figure."""
        document = json.loads(make_run().as_json())
        measured = document["measurements"][0]
        self.assertEqual(measured["samples_s"], [1.2, 1.0, 1.1])
        self.assertEqual(measured["seconds"]["median"], 1.1)
        self.assertEqual(measured["seconds"]["count"], 3)
        self.assertEqual(document["baselines"][0]["bytes_per_s"]["maximum"], 300)

    def test_figures(self) -> None:
        """What follows from the samples."""
        run = make_run()
        up = run.find("10x 200B", UP)
        assert up is not None
        self.assertAlmostEqual(up.per_file_s, 0.11)
        self.assertAlmostEqual(up.bytes_per_s, 2000 / 1.1)
        self.assertAlmostEqual(up.wire_bytes_per_s, 9000 / 1.1)
        self.assertAlmostEqual(run.average_rtt_s or 0, 0.225)
        self.assertAlmostEqual(run.total_rtt_s or 0, 0.45)
        self.assertEqual(run.baseline(UP, 1, False), 200)
        self.assertIsNone(run.baseline(DOWN, 1, False))
        self.assertIsNone(run.find("10x 200B", DOWN))
        self.assertEqual(spread([1.0]).deviation, 0)

    def test_what_is_no_run(self) -> None:
        """A sentence each for what cannot be read."""
        good = json.loads(make_run().as_json())
        for text, words in (
            ("{", "not JSON"),
            ("[]", "no results"),
            (json.dumps({"format": "other"}), "no results"),
            (json.dumps({**good, "version": 2}), "version 2"),
            (json.dumps({**good, "measurements": [{"name": "x"}]}), "damaged"),
            (json.dumps({**good, "parameters": None}), "damaged"),
            (json.dumps({**good, "round_trips": [{"server": "a", "samples_s": []}]}), "damaged"),
        ):
            with self.assertRaises(UsageError) as caught:
                parse_run(text, "a.json")
            self.assertIn(words, str(caught.exception))
            self.assertIn("a.json", str(caught.exception))
