"""The README's picture: a timeline that stands by itself."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import attrs
from misc.speedtest import picture
from twisted.trial.unittest import SynchronousTestCase

from tests.speedtest.sample import sample_run

COMMITTED = Path(__file__).parents[2] / "docs" / "timeline.svg"


class PictureTests(SynchronousTestCase):
    """``misc/speedtest/picture.py``."""

    def check(self, text: str) -> None:
        """It is an image of its own: a size, a text for who sees none, and no colour left undefined."""
        root = ElementTree.fromstring(text)
        self.assertEqual(root.tag, "{http://www.w3.org/2000/svg}svg")
        self.assertIn("viewBox", root.attrib)
        self.assertRegex(root.attrib["aria-label"], "to 10 servers: all of it leaves at once")
        used = set(re.findall(r"var\((--[a-z]+)\)", text))
        self.assertEqual(used - set(re.findall(r"(--[a-z]+):", text)), set())
        self.assertNotIn("<script", text)
        words = "".join(root.itertext())
        for word in ("1 round trip", "milliseconds"):
            self.assertIn(word, words)

    def test_it_stands_by_itself(self) -> None:
        """From the file of a run."""
        run, svg = Path(self.mktemp()), Path(self.mktemp())
        run.write_text(sample_run().as_json(), "utf-8")
        self.assertEqual(picture.main([str(run), str(svg)]), 0)
        self.check(svg.read_text("utf-8"))

    def test_the_one_in_the_readme(self) -> None:
        """It was made by this."""
        self.check(COMMITTED.read_text("utf-8"))

    def test_runs_without(self) -> None:
        """A run of servers that nobody can watch has no timeline."""
        run = attrs.evolve(sample_run(), timeline=None)
        self.assertRaises(ValueError, picture.picture, run)
