"""The report: its figures, its drawing, and its page, before any browser has seen it."""

from __future__ import annotations

import configparser
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import attrs
from twisted.trial.unittest import SynchronousTestCase

from pipegrid.errors import UsageError
from pipegrid.speedtest import report_figures
from pipegrid.speedtest.html_report import LIBRARIES, render_report, write_report
from pipegrid.speedtest.run_results import DOWN, UP, Burst, Run, Timeline
from tests.speedtest.sample import sample_history, sample_run
from tests.speedtest.test_results import make_run

ROOT = Path(__file__).parent.parent.parent
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Outline(HTMLParser):
    """Elements are closed in order, ids are unique, and text is gathered."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.wrong: list[str] = []
        self.references: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self._note(attributes)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._note(attributes)

    def _note(self, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" and value is not None:
                self.ids.append(value)
            if name in ("href", "src", "xlink:href", "style", "clip-path") and value is not None:
                self.references.append(value)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


class FiguresTests(SynchronousTestCase):
    """Numbers as text."""

    def test_units(self) -> None:
        """Three digits, and the unit that fits."""
        self.assertEqual(report_figures.seconds(0.0112), "11.2 ms")
        self.assertEqual(report_figures.seconds(0.0000413), "41.3 µs")
        self.assertEqual(report_figures.seconds(2.5), "2.50 s")
        self.assertEqual(report_figures.seconds(3841), "64.0 min")
        self.assertEqual(report_figures.rate(24_020), "24.0 kB/s")
        self.assertEqual(report_figures.rate(6.3e9), "6.30 GB/s")
        self.assertEqual(report_figures.size(999_900), "1.00 MB")
        self.assertEqual(report_figures.digits(12345), "12 345")
        self.assertEqual(report_figures.between(0.0112, 0.0113), "11.2 to 11.3 ms")
        self.assertEqual(report_figures.between(0.0112, 0.0112), "11.2 ms")
        self.assertEqual(report_figures.between(0.9, 1.1), "900 ms to 1.10 s")

    def test_main_figures_have_spread_and_ceiling(self) -> None:
        """Each of the four says both, and how much of what is possible it is."""
        found = report_figures.main_figures(sample_run())
        self.assertEqual(
            [each.title for each in found],
            ["Store a small file", "Fetch a small file", "Store 100MB", "Fetch 100MB"],
        )
        for each in found:
            self.assertIn("in 5 rounds", each.spread)
            self.assertRegex(each.bound, "^(floor: 1 round trip|ceiling: .*/s)")
            self.assertTrue(0.5 < (each.share or 0) <= 1, each)

    def test_bounds(self) -> None:
        """The least time is a floor, the most of a rate a ceiling; what is counted stands by it."""
        small, _, large, _ = report_figures.main_figures(sample_run())
        self.assertTrue(small.bound.startswith("floor: 1 round trip, 11.2 ms; here "), small.bound)
        self.assertTrue(large.bound.startswith("ceiling: 79.8 kB/s; here "), large.bound)
        self.assertEqual(large.unit, "of raw TCP, in bytes of shares")

    def test_one_sample_makes_no_headline(self) -> None:
        """Neither above the page nor above the windows; the figures say that there was one round."""
        run = sample_run()
        first, second = report_figures.headline(run)
        self.assertIn("round trips", first)
        self.assertTrue(
            second.endswith(" raw TCP carried in the same run, counted in bytes of shares.")
        )
        once = attrs.evolve(
            run,
            measurements=tuple(
                attrs.evolve(each, samples_s=each.samples_s[:1]) for each in run.measurements
            ),
        )
        self.assertEqual(
            report_figures.headline(once), ("What a run of the speed test measured.", "")
        )
        page = render_report(once)
        self.assertIn("Throughput by window", page)
        self.assertNotIn("of the best fixed one", page)
        self.assertIn("one round, so no spread", page)

    def test_definitions(self) -> None:
        """Round trips are time ÷ files ÷ mean round trip; throughput counts shares beside plain streams."""
        run = make_run()
        up = run.find("10x 200B", UP)
        assert up is not None
        self.assertAlmostEqual(report_figures.trips(run, up)[0], 1.2 / 10 / 0.225)
        self.assertAlmostEqual(report_figures.shares(run, up)[0], 9000 / 1.2 / 200)
        down = run.find("1MB", DOWN)
        assert down is not None
        self.assertEqual(report_figures.shares(run, down), ())

    def test_knee(self) -> None:
        """It is the least window with 95 % of the best."""
        for way, expected in ((UP, 100_000), (DOWN, 200_000)):
            knee = report_figures.knee(report_figures.window_curve(sample_run(), way))
            assert knee is not None
            self.assertEqual(knee.window_bytes, expected)
        self.assertIsNone(report_figures.knee([]))

    def test_headline(self) -> None:
        """The first sentence holds the first figure."""
        first, second = report_figures.headline(sample_run())
        self.assertRegex(
            first, r"^One small file takes 1\.0\d round trips to store, 1\.0\d to fetch\.$"
        )
        self.assertRegex(
            second, r"^100MB goes up at 9\d\.\d % and comes down at 9\d\.\d % of what raw"
        )
        run = sample_run()
        near = [attrs.evolve(each, samples_s=[0.0002]) for each in run.round_trips]
        first, _ = report_figures.headline(attrs.evolve(run, round_trips=tuple(near)))
        self.assertRegex(
            first, r"^One small file takes 1\d\.\d ms to store, 1\d\.\d ms to fetch\.$"
        )
        ups = tuple(each for each in run.measurements if each.direction == UP)
        self.assertIn("to store.", report_figures.headline(attrs.evolve(run, measurements=ups))[0])


class PageTests(SynchronousTestCase):
    """The page as text."""

    def setUp(self) -> None:
        self.path = Path(self.mktemp())

    def test_the_page(self) -> None:
        """It is well-formed, says what was measured and where, and refers to nothing outside."""
        run = sample_run()
        write_report(self.path, run, sample_history(3))
        page = self.path.read_text("utf-8")
        outline = Outline(page)
        self.assertEqual((outline.open, outline.wrong), ([], []))
        self.assertEqual(len(outline.ids), len(set(outline.ids)))
        text = " ".join(outline.words)
        for word in ("c0ffee1", "3.11.7", "x86_64", "knee", "auto", "raw TCP", "1 round trip"):
            self.assertIn(word, text)
        for reference in outline.references:
            self.assertNotIn("//", reference)
            for target in re.findall(r"(?:^|url\()#([^)]+)", reference):
                self.assertIn(target, outline.ids)
        self.assertNotIn("<script", page)
        self.assertNotIn("@import", page)
        # Colours are all the page's own, or dark mode would miss them.
        for picture in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
            ElementTree.fromstring(picture)
            self.assertEqual(re.findall(r"#[0-9a-f]{6}\b", picture), [])
            self.assertRegex(picture, r'<svg class="(wide|narrow)" role="img" aria-label="[A-Z]')
        self.assertEqual([each.name for each in self.path.parent.glob(".*.new")], [])

    def test_the_same_run_gives_the_same_page(self) -> None:
        """No date and no random id is in it."""
        run = attrs.evolve(make_run(), round_trips=make_run().round_trips)
        self.assertEqual(render_report(run), render_report(run))

    def test_what_was_not_measured_is_left_out(self) -> None:
        """A gateway has no round trips, a quick run no sweep, a single round no spread."""
        full = sample_run()
        single = [attrs.evolve(each, samples_s=each.samples_s[:1]) for each in full.measurements]
        for run, missing in (
            (attrs.evolve(full, round_trips=()), "trips"),
            (attrs.evolve(full, baselines=()), "throughput"),
            (attrs.evolve(full, timeline=None), "timeline"),
            (attrs.evolve(full, measurements=()), "window"),
            (attrs.evolve(full, measurements=tuple(single)), "history"),
        ):
            bare = attrs.evolve(run, timeline=None) if missing != "timeline" else run
            outline = Outline(render_report(bare))
            self.assertNotIn(missing, outline.ids)
            self.assertIn("facts", outline.ids)
            self.assertEqual(outline.wrong, [])

    def test_names_are_text(self) -> None:
        """A name from a JSON file is no HTML, in the page or in a picture."""
        name = "<script>alert(1)</script>&\"'"
        run = sample_run(commit=name)
        changed = [attrs.evolve(each, name=name) for each in run.measurements[:1]]
        bursts = (Burst(name, 0.0, UP, 1), Burst(name, 0.01, DOWN, 1))
        hostile = attrs.evolve(
            run,
            measurements=tuple(changed),
            machine={name: name},
            timeline=Timeline(name, 0.01, 0.01, bursts),
        )
        page = render_report(hostile, [hostile])
        self.assertNotIn("<script", page)
        self.assertIn("&lt;script&gt;", page)

    def test_a_crowd(self) -> None:
        """Thousands of bursts, many servers and many runs make no endless page."""
        bursts = tuple(
            Burst(f"server with a long name {number % 40}", number * 1e-4, UP, 1000)
            for number in range(8000)
        )
        run = attrs.evolve(
            sample_run(), measurements=(), timeline=Timeline("1MB", 0.01, 0.9, bursts)
        )
        page = render_report(run)
        self.assertIn("20 servers are not shown", page)
        self.assertLess(len(page), 2_000_000)

    def test_without_the_libraries(self) -> None:
        """The sentence says what to install."""
        for name, module in LIBRARIES.items():
            absent: Any = None  # what the import system calls "not there"
            with (
                mock.patch.dict(sys.modules, {module: absent}),
                self.assertRaises(UsageError) as caught,
            ):
                render_report(sample_run())
            self.assertIn(f"needs {name}, ", str(caught.exception))
            self.assertIn("'pip install Jinja2 matplotlib'", str(caught.exception))

    def test_what_is_to_be_installed(self) -> None:
        """Is what the package says that it needs for reports."""
        setup = configparser.ConfigParser()
        setup.read(ROOT / "setup.cfg")
        lines = setup["options.extras_require"]["speedtest"].split("\n")
        self.assertEqual({line.split()[0] for line in lines if line}, set(LIBRARIES))

    def test_a_place_that_cannot_be_written(self) -> None:
        """It is a sentence, and nothing is left."""
        self.path.write_text("a file")
        with self.assertRaises(UsageError) as caught:
            write_report(self.path / "report.html", _tiny())
        self.assertIn("cannot be written", str(caught.exception))


def _tiny() -> Run:
    return attrs.evolve(make_run(), measurements=(), timeline=None)
