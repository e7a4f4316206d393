"""The report in a real browser: read, measured and photographed; on phone and desk, by day and by night."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs
from PIL import Image
from twisted.internet import reactor
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from pipegrid.speedtest.html_report import write_report
from tests.browser import Page, browser
from tests.speedtest.sample import SERVERS, sample_history, sample_run

PHONE, DESK = 360, 900
SETTINGS = tuple((width, dark) for width in (PHONE, DESK) for dark in (False, True))
WIDTHS = (320, 360, 520, 800, 1400)
LONG_NAMES = (
    "storage-of-the-library-in-the-old-town-hall",
    "Where the shares of all of us are kept, second floor",
    "WWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWW",
    "s4",
)
LEAST_CONTRAST = 4.5
"""Of text, as the Web Content Accessibility Guidelines ask for at level AA."""

# What a reader sees of the pictures and of the text around them; boxes in pixels from the page's corner.
LOOK = """
(() => {
  const box = (element) => {
    const {left, top, width, height} = element.getBoundingClientRect();
    return {x: left + scrollX, y: top + scrollY, width, height};
  };
  const seen = (element) => element.getClientRects().length > 0;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)].filter(seen);
  return {
    scrollWidth: document.documentElement.scrollWidth,
    loaded: performance.getEntriesByType("resource").map((each) => each.name),
    headline: document.querySelector("h1").innerText,
    text: document.body.innerText,
    sections: all("section").map((each) => each.id),
    values: all(".figures li").map((each) => each.innerText),
    words: all("h1, .lead, .setting, .value, .note, section > p, .key li, td, dd")
      .filter((each) => each.innerText.trim()).map(box),
    charts: all("svg").map((drawing) => ({
      name: drawing.closest("section").id,
      kind: drawing.getAttribute("class"),
      label: drawing.getAttribute("aria-label"),
      box: box(drawing),
      texts: all("text", drawing).map((each) => ({text: each.textContent, box: box(each)})),
      solid: all("path[style*='fill: var(--up)']", drawing).map(box),
      hatched: all("path[style*='fill: url(']", drawing).map(box),
    })),
  };
})()
"""

EXPECTED_SECTIONS = [
    "trips",
    "throughput",
    "timeline",
    "window",
    "encoding",
    "history",
    "numbers",
    "facts",
]


@cache
def luminance(colour: tuple[int, ...]) -> float:
    """Return the relative luminance, 0 to 1, of a colour in sRGB."""
    parts = [value / 255 for value in colour]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """Return the contrast of two colours, 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def colours(picture: Image.Image) -> Counter[tuple[int, ...]]:
    """Return how often each colour is in a picture."""
    counted = picture.getcolors(picture.width * picture.height) or []
    return Counter({colour: count for count, colour in counted if isinstance(colour, tuple)})


def cut(picture: Image.Image, box: dict[str, float], scale: float) -> Image.Image:
    """Return what lies in a box that is given in pixels of CSS."""
    left, top = box["x"] * scale, box["y"] * scale
    right, bottom = left + box["width"] * scale, top + box["height"] * scale
    return picture.crop((round(left), round(top), round(right), round(bottom)))


def text_contrast(picture: Image.Image) -> float:
    """Return the contrast of what is written on a ground: the ground is most of it."""
    counted = colours(picture)
    [(ground, _)] = counted.most_common(1)
    # Single pixels may be anything; what is written has some of its own colour.
    return max(contrast(ground, colour) for colour, count in counted.items() if count >= 3)


def overlap(one: dict[str, float], other: dict[str, float]) -> float:
    """Return the area that two boxes share."""
    width = min(one["x"] + one["width"], other["x"] + other["width"]) - max(one["x"], other["x"])
    height = min(one["y"] + one["height"], other["y"] + other["height"]) - max(one["y"], other["y"])
    return max(width, 0.0) * max(height, 0.0)


class BrowserTests(TestCase):
    """What `write_report` wrote, as Chromium shows it."""

    timeout = 110

    def setUp(self) -> None:
        self.path = Path(self.mktemp()).with_suffix(".html").resolve()

    def show(self, look: Any, settings: Sequence[tuple[int, bool]] = SETTINGS) -> Deferred[None]:
        """Open the page in these settings and pass what is there to a function."""

        async def run() -> None:
            async with browser(reactor) as page:
                for width, dark in settings:
                    await page.show(self.path.as_uri(), width, 800, dark, scale=SCALE)
                    await look(page, await page.evaluate(LOOK), width, dark)

        return Deferred.fromCoroutine(run())

    def test_it_is_all_there_and_fits(self) -> Deferred[None]:
        """
        Main figures and every picture are shown, nothing is loaded, and nothing is cut off or collides.

        And it needs no colour: the same browser shows that, for two of the settings.
        """
        write_report(self.path, sample_run(), sample_history())

        async def look(page: Page, seen: dict[str, Any], width: int, dark: bool) -> None:
            self.assertLessEqual(seen["scrollWidth"], width)
            self.assertEqual(seen["loaded"], [])
            self.assertIn("round trips", seen["headline"])
            self.assertEqual(seen["sections"], EXPECTED_SECTIONS)
            self.assertEqual(len(seen["values"]), 4)
            for value in seen["values"]:
                self.assertIn("in 5 rounds", value)
                self.assertRegex(value, "floor: 1 round trip|ceiling: ")
            for word in ("c0ffee1", "x86_64", "3.11.7", "3 of 10", "100x 200B at once"):
                self.assertIn(word, seen["text"])
            charts = {each["name"]: each for each in seen["charts"]}
            self.assertEqual(list(charts), EXPECTED_SECTIONS[:6])
            self.assertEqual(len(seen["charts"]), 6)
            for name, words in (
                ("trips", ("1 round trip", "startup", "1x 200B")),
                ("throughput", ("raw TCP", "10MB", "↑ 98.0 %")),
                ("timeline", ("1 round trip", "server 10", "milliseconds")),
                ("window", ("knee", "auto", "raw TCP")),
                ("encoding", ("3/10",)),
                ("history", ("0abc000", "c0ffee1")),
            ):
                texts = [each["text"] for each in charts[name]["texts"]]
                for word in words:
                    self.assertTrue(any(word in text for text in texts), (name, word, texts))
            for chart in seen["charts"]:
                self.assertEqual(chart["kind"], "narrow" if width == PHONE else "wide")
                self._texts_have_room(chart, width)
            if (width, dark) in ((PHONE, False), (DESK, True)):
                await self._needs_no_colour(page, seen, (width, dark))

        return self.show(look)

    def _texts_have_room(self, chart: dict[str, Any], width: int) -> None:
        """Letters are large enough, inside the picture, and not on other letters."""
        frame = chart["box"]
        self.assertGreater(frame["width"], 0.8 * min(width - 40, 700))
        shown = [each for each in chart["texts"] if each["text"].strip()]
        for index, each in enumerate(shown):
            box = each["box"]
            where = (chart["name"], width, each)
            self.assertGreater(box["height"], 10, where)
            self.assertGreaterEqual(box["x"], frame["x"] - 1, where)
            self.assertLessEqual(box["x"] + box["width"], frame["x"] + frame["width"] + 1, where)
            self.assertGreaterEqual(box["y"], frame["y"] - 2, where)
            for other in shown[:index]:
                shared = overlap(box, other["box"])
                small = min(
                    box["width"] * box["height"], other["box"]["width"] * other["box"]["height"]
                )
                self.assertLess(shared, 0.25 * small, (*where, other))

    async def _needs_no_colour(self, page: Page, seen: dict[str, Any], where: Any) -> None:
        """Without any colour vision bars that store are smooth, and bars that fetch are striped."""
        await page.call("Emulation.setEmulatedVisionDeficiency", type="achromatopsia")
        [chart] = [each for each in seen["charts"] if each["name"] == "throughput"]
        frame = chart["box"]
        picture = await page.screenshot(frame)
        await page.call("Emulation.setEmulatedVisionDeficiency", type="none")
        self.assertEqual((len(chart["solid"]), len(chart["hatched"])), (4, 4))
        for kind, striped in (("solid", False), ("hatched", True)):
            for box in chart[kind]:
                # From the first half: the other end bears the range.
                inner = {
                    "x": box["x"] - frame["x"] + 4,
                    "y": box["y"] - frame["y"] + 4,
                    "width": box["width"] / 2,
                    "height": box["height"] - 8,
                }
                part = cut(picture, inner, SCALE)
                for red, green, blue in colours(part):
                    self.assertLess(max(red, green, blue) - min(red, green, blue), 8)
                counted = colours(part)
                [(ground, _)] = counted.most_common(1)
                others = sum(count for each, count in counted.items() if contrast(each, ground) > 2)
                share = others / sum(counted.values())
                self.assertEqual(share > 0.15, striped, (kind, where, share))

    def test_long_names_at_any_width(self) -> Deferred[None]:
        """No name of a server is cut, however long it is and however narrow the page."""
        run = sample_run()
        assert run.timeline is not None
        names = dict(zip(SERVERS, LONG_NAMES, strict=False))
        bursts = tuple(
            attrs.evolve(each, server=names.get(each.server, each.server))
            for each in run.timeline.bursts
        )
        write_report(
            self.path, attrs.evolve(run, timeline=attrs.evolve(run.timeline, bursts=bursts)), ()
        )

        async def look(page: Page, seen: dict[str, Any], width: int, dark: bool) -> None:
            self.assertLessEqual(seen["scrollWidth"], width)
            for chart in seen["charts"]:
                self._texts_have_room(chart, width)
            [timeline] = [each for each in seen["charts"] if each["name"] == "timeline"]
            letters = "".join(each["text"] for each in timeline["texts"]).replace(" ", "")
            for name in LONG_NAMES:
                self.assertIn(name.replace(" ", ""), letters)
            for value in seen["values"]:
                self.assertNotIn("…", value)

        return self.show(look, tuple((width, False) for width in WIDTHS))

    def test_it_can_be_read_and_pictures_are_not_empty(self) -> Deferred[None]:
        """In the photograph text stands out from its ground, and every picture has both colours in it."""
        write_report(self.path, sample_run(), sample_history())

        async def look(page: Page, seen: dict[str, Any], width: int, dark: bool) -> None:
            picture = await page.screenshot()
            [(ground, _)] = colours(cut(picture, MARGIN, SCALE)).most_common(1)
            self.assertEqual(luminance(ground) < 0.1, dark, ground)
            for box in seen["words"]:
                # Tables may be wider than the page, and scroll.
                if box["x"] + box["width"] < width - 20:
                    part = cut(picture, box, SCALE)
                    self.assertGreater(text_contrast(part), LEAST_CONTRAST, (width, dark, box))
            up, down = await page.evaluate(COLOURS)
            for chart in seen["charts"]:
                where = (chart["name"], width, dark)
                drawn = colours(cut(picture, chart["box"], SCALE))
                empty = drawn.most_common(1)[0][1] / sum(drawn.values())
                self.assertLess(empty, 0.98, where)
                for colour in (up, down):
                    self.assertGreater(drawn[tuple(colour)], 100, (*where, colour))
                for each in chart["texts"]:
                    if each["text"].strip():
                        part_text = cut(picture, each["box"], SCALE)
                        self.assertGreater(text_contrast(part_text), LEAST_CONTRAST, (*where, each))

        return self.show(look)


SCALE = 2.0
"""Pixels of the photograph for one of CSS, as phones have them; letters are whole then."""

MARGIN = {"x": 0.0, "y": 0.0, "width": 16.0, "height": 400.0}
"""Where nothing is but the page's ground."""

COLOURS = """
["--up", "--down"].map((name) => {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16));
})
"""
