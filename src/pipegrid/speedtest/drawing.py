"""
How a figure of matplotlib becomes a picture in a page.

Each is drawn twice, wide, and narrow for a phone, because a picture that shrinks has letters that nobody can
read. Colours are names of the page's own (CSS variables), so that the page's dark mode reaches them; text
stays text. Nothing is told by colour alone: up is solid, down is hatched or hollow, and every series is
labelled where it is.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from typing import Any

import attrs
import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from pipegrid.speedtest.results import DOWN, UP

INK = "#000001"
MUTED = "#000002"
LINE = "#000003"
PAPER = "#000004"
UP_COLOUR = "#000005"
DOWN_COLOUR = "#000006"
CEILING = "#000007"
_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    LINE: "--line",
    PAPER: "--paper",
    UP_COLOUR: "--up",
    DOWN_COLOUR: "--down",
    CEILING: "--ceiling",
}
COLOURS = {UP: UP_COLOUR, DOWN: DOWN_COLOUR}
MARKERS = {UP: "o", DOWN: "s"}
ARROWS = {UP: "↑", DOWN: "↓"}

WIDE_PX = 700
NARROW_PX = 330

_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 12,
    "font.family": "DejaVu Sans",
    "hatch.linewidth": 1.6,
    "axes.edgecolor": LINE,
    "axes.linewidth": 1,
    "axes.labelcolor": MUTED,
    "text.color": INK,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
}


@attrs.frozen
class Chart:
    """
    One picture, twice.

    Attributes:
        wide, narrow: SVG elements.
    """

    wide: str
    narrow: str


def draw(name: str, label: str, paint: Callable[[bool], Figure]) -> Chart:
    """
    Return a chart.

    Args:
        name: unique in the page; starts the ids inside the SVG.
        label: what a reader who sees no picture is told.
        paint: makes the figure; its argument says whether it is the wide one.
    """
    drawn = []
    for kind, wide in (("wide", True), ("narrow", False)):
        settings: Any = {**_SETTINGS, "svg.hashsalt": f"{name}-{kind}"}
        with matplotlib.rc_context(settings):
            figure = paint(wide)
            drawn.append(_svg(figure, f"{name}-{kind}", label))
    return Chart(*drawn)


def _svg(figure: Figure, name: str, label: str) -> str:
    """Return a figure as an SVG element that can stand in a page beside others."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    FigureCanvasSVG(figure).print_svg(buffer, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # It would reach the whole page; the page says the same for its charts alone.
    text = re.sub(r'<style type="text/css">.*?</style>', "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = text.replace("xlink:href", "href")
    text = re.sub(r"(font: (?:\w+ )?[\d.]+px) [^;\"]+", r"\1 var(--sans)", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    width, height = (72 * inches for inches in figure.get_size_inches())
    head = (
        f'<svg class="{name.rpartition("-")[2]}" role="img" aria-label="{html.escape(label)}"'
        f' viewBox="0 0 {width:g} {height:g}" xmlns="http://www.w3.org/2000/svg">'
    )
    return re.sub(r"<svg\b[^>]*>", lambda _: head, text, count=1)


def panel(
    width: float, height: float, left: float, right: float, top: float, bottom: float
) -> tuple[Figure, Axes]:
    """Return a figure of so many pixels, with one set of axes inside these margins."""
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    axes = add_axes(figure, (width, height), left, right, top, bottom)
    return figure, axes


def add_axes(
    figure: Figure,
    area: tuple[float, float],
    left: float,
    right: float,
    top: float,
    bottom: float,
) -> Axes:
    width, height = area
    return figure.add_axes(
        (
            left / width,
            bottom / height,
            (width - left - right) / width,
            (height - top - bottom) / height,
        )
    )
