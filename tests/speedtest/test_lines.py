"""The lines of the speed test, to the letter, and the forms for other programs."""

from __future__ import annotations

import json

import attrs
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.speedtest import output_formats
from pipegrid.speedtest.run_results import (
    DOWN,
    SCENARIO,
    UP,
    WINDOW,
    Baseline,
    Measurement,
    Parameters,
    RoundTrip,
    Run,
    parse_run,
)

RTT_S = 0.5152 / 77.205647


def measurement(
    name: str, direction: str, files: int, size: int, samples: list[float], wire_bytes: int = 0
) -> Measurement:
    """Return one of the classic kind."""
    return Measurement(name, SCENARIO, direction, files, size, wire_bytes, samples)


def classic_run() -> Run:
    """Return what the oldest records of such a test say: four servers, 6.67 ms away on the average."""
    return Run(
        when="2026-11-21T10:00:00Z",
        took_s=60.0,
        commit=None,
        versions={},
        machine={},
        parameters=Parameters("grid", "gbs", 4, 3, 4, 4, 3, 7),
        round_trips=tuple(RoundTrip(name, [RTT_S - 0.001, RTT_S + 0.001]) for name in "abcd"),
        baselines=(Baseline(4, False, UP, [80e3], [82e3, 84e3]),),
        measurements=(
            measurement("startup", UP, 1, 200, [0.5, 0.437, 0.4]),
            measurement("startup", DOWN, 1, 200, [0.186]),
            measurement("10x 200B", UP, 10, 200, [5.152]),
            measurement("10x 200B", DOWN, 10, 200, [2.045]),
            measurement("10MB", UP, 1, 10**7, [416.32], wire_bytes=33_217_842),
            attrs.evolve(measurement("auto", UP, 1, 10**7, [5.0, 4.0]), group=WINDOW),
        ),
    )


class LinesTests(SynchronousTestCase):
    """``render``."""

    def setUp(self) -> None:
        self.lines = output_formats.render(classic_run())
        self.texts = [line.text for line in self.lines]

    def aside(self, text: str) -> str:
        """Return what stands beside a line."""
        return self.lines[self.texts.index(text)].aside

    def test_the_classic_lines(self) -> None:
        """To the letter."""
        for text in (
            "TIME (startup): 0.437 up, 0.186 down",
            "TIME (10x 200B): 5.152 up, 2.045 down",
            "upload per-file time: 0.515s",
            "upload per-file times-avg-RTT: 77.205647",
            "upload per-file times-total-RTT: 19.301412",
            "download per-file time: 0.204s",
            "upload speed (10MB): 24.02kBps",
        ):
            self.assertIn(text, self.texts)

    def test_no_line_without_its_spread(self) -> None:
        """Each figure stands between its least and its most."""
        for line in self.lines[1:]:
            self.assertRegex(line.aside, r" \.\. | at most; ", line)
        self.assertIn("0.400 .. 0.500 of 3", self.aside("TIME (startup): 0.437 up, 0.186 down"))

    def test_throughput_stands_beside_raw_tcp(self) -> None:
        """In bytes of shares on the wire, by the plain streams of the same run."""
        self.assertTrue(self.aside("upload speed (10MB): 24.02kBps").startswith("97.3% of raw TCP"))
        bare = attrs.evolve(classic_run(), baselines=())
        self.assertNotIn("raw TCP", "\n".join(map(str, output_formats.render(bare))))

    def test_unknown_round_trips_leave_lines_out(self) -> None:
        """Rather than a figure that nobody measured."""
        bare = attrs.evolve(classic_run(), round_trips=())
        texts = [line.text for line in output_formats.render(bare)]
        self.assertIn("upload per-file time: 0.515s", texts)
        self.assertFalse([text for text in texts if "RTT" in text])

    def test_rates(self) -> None:
        """In thousands."""
        for bytes_per_s, text in (
            (12.0, "12.00Bps"),
            (24_020.0, "24.02kBps"),
            (1.42e6, "1.42MBps"),
            (6.3e9, "6.30GBps"),
        ):
            self.assertEqual(output_formats.rate(bytes_per_s), text)


class FormatsTests(SynchronousTestCase):
    """``formatted``."""

    def test_text_and_json(self) -> None:
        """Lines, or the whole run."""
        run = classic_run()
        text = output_formats.formatted(run, output_formats.TEXT)
        self.assertEqual(text.splitlines(), [str(line) for line in output_formats.render(run)])
        self.assertEqual(parse_run(output_formats.formatted(run, output_formats.JSON), "it"), run)

    def test_github_action_benchmark(self) -> None:
        """Each entry has the fields that the action wants, and a spread."""
        run = classic_run()
        for form in (output_formats.GITHUB_SMALLER, output_formats.GITHUB_BIGGER):
            entries = json.loads(output_formats.formatted(run, form))
            self.assertTrue(entries)
            self.assertEqual(len({each["name"] for each in entries}), len(entries))
            for each in entries:
                self.assertEqual(set(each), {"name", "unit", "value", "range", "extra"})
                self.assertIsInstance(each["value"], float)
        values = {each["name"]: each["value"] for each in output_formats.smaller_is_better(run)}
        self.assertEqual(values["upload time (startup)"], 0.437)
        bigger = {each["name"]: each for each in output_formats.bigger_is_better(run)}
        self.assertAlmostEqual(bigger["upload of raw TCP (10MB)"]["value"], 97.3, 1)
        self.assertAlmostEqual(bigger["upload speed (window auto)"]["value"], 2.25e6)
