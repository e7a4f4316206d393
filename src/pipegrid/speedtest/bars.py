"""Bars of a run: round trips of small files, throughput beside raw TCP, speed by encoding."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

import attrs
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pipegrid.speedtest import figures
from pipegrid.speedtest.drawing import (
    ARROWS,
    CEILING,
    COLOURS,
    INK,
    NARROW_PX,
    PAPER,
    WIDE_PX,
    panel,
)
from pipegrid.speedtest.results import DIRECTIONS, UP, Measurement, Run


@attrs.frozen
class Bar:
    """A bar with its range: samples, and the label at its end."""

    direction: str
    samples: tuple[float, ...]
    label: str

    @property
    def value(self) -> float:
        """Where the bar ends: the median of its samples."""
        return statistics.median(self.samples)


def bars(
    groups: Sequence[tuple[str, Sequence[Bar]]],
    wide: bool,
    ceiling: float | None,
    ceiling_label: str,
    band: tuple[float, float] | None = None,
) -> Figure:
    """
    Return horizontal bars, in groups, from the top down.

    Args:
        groups: title and bars of each.
        wide: titles stand beside their bars; otherwise above them.
        ceiling: where a line is drawn, if any.
        band: what the ceiling's own samples span.
    """
    thickness, gap = 17.0, 14.0
    above = 0.0 if wide else 19.0
    places: list[tuple[float, Bar]] = []
    titles: list[tuple[float, str]] = []
    y = 0.0
    for title, members in groups:
        titles.append((y + (len(members) * thickness / 2 if wide else above / 2), title))
        y += above
        for bar in members:
            places.append((y + thickness / 2, bar))
            y += thickness
        y += gap
    width = WIDE_PX if wide else NARROW_PX
    top = 24.0 if ceiling is not None else 4.0
    figure, axes = panel(width, y + top, 150 if wide else 2, 74 if wide else 66, top, 4)
    values = [bar.value for _, bar in places]
    limit = _limit(values, ceiling)
    axes.set_xlim(0, limit)
    axes.set_ylim(y - gap + 4, -4)
    if band is not None:
        axes.axvspan(*band, color=CEILING, alpha=0.16, linewidth=0)
    line = None if ceiling is None else (ceiling, max(ceiling, band[1] if band else 0.0))
    for place, bar in places:
        _bar(axes, place, bar, thickness - 3, limit, line)
    if ceiling is not None and ceiling <= limit:
        _ceiling(axes, ceiling, ceiling_label, beyond=ceiling > limit / 2)
    for place, title in titles:
        _title(axes, place, title, wide)
    axes.set_axis_off()
    return figure


def _ceiling(axes: Axes, ceiling: float, label: str, *, beyond: bool) -> None:
    """Draw the line that nothing crosses, with its name on the side where there is room."""
    axes.axvline(ceiling, color=CEILING, linewidth=1.5, linestyle=(0, (4, 2)))
    axes.annotate(
        label,
        (ceiling, 1),
        (4 if beyond else -2, 7),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right" if beyond else "left",
        color=INK,
        fontsize=11,
    )


def _title(axes: Axes, place: float, title: str, wide: bool) -> None:
    """Write a group's title beside its bars, or above them."""
    if wide:
        axes.annotate(
            title, (0, place), (-12, 0), textcoords="offset points", ha="right", va="center"
        )
    else:
        # The line of the ceiling makes way for it.
        paper = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5}
        axes.annotate(title, (0, place), ha="left", va="center", bbox=paper, zorder=5)


def _limit(values: Sequence[float], ceiling: float | None) -> float:
    """Return where the axis ends: longer bars are cut, so that one of them does not hide all others."""
    usual = 4 * statistics.median(values)
    greatest = max(values)
    return max(min(greatest, usual) * 1.03, (ceiling or 0.0) * 1.03, 1e-9)


def _bar(
    axes: Axes,
    place: float,
    bar: Bar,
    thickness: float,
    limit: float,
    line: tuple[float, float] | None,
) -> None:
    """Draw a bar, its range, and its label: behind both, and not on the line of the ceiling, if any."""
    end = min(bar.value, limit)
    solid = bar.direction == UP
    axes.barh(
        place,
        end,
        thickness,
        facecolor=COLOURS[bar.direction] if solid else PAPER,
        edgecolor=COLOURS[bar.direction],
        hatch=None if solid else "////",
        linewidth=1.2,
        zorder=3,
    )
    low, high = min(bar.samples), min(max(bar.samples), limit)
    if bar.value <= limit and high > low:
        axes.plot([low, high], [place, place], color=PAPER, linewidth=3.4, zorder=4)
        axes.plot([low, high], [place, place], color=INK, linewidth=1.4, zorder=4)
        axes.plot([low, high], [place, place], "|", color=INK, markersize=7, zorder=4)
    cut = "▸▸ " if bar.value > limit else ""
    text = f"{cut}{ARROWS[bar.direction]} {bar.label}"
    at = max(end, high if bar.value <= limit else end)
    pixel = limit / axes.get_window_extent().width
    if line is not None and at - 2 * pixel < line[1] and at + 8 * pixel * len(text) > line[0]:
        at = line[1]
    axes.annotate(
        text,
        (at, place),
        (6, 0),
        textcoords="offset points",
        va="center",
        annotation_clip=False,
    )


def trips_chart(run: Run, wide: bool) -> Figure:
    """Return bars of round trips a file."""

    def bar(way: str, each: Measurement) -> Bar:
        samples = figures.trips(run, each)
        return Bar(way, samples, figures.digits(statistics.median(samples)))

    return bars(_grouped(run, figures.small, bar), wide, 1.0, "1 round trip")


def throughput_chart(run: Run, wide: bool) -> Figure:
    """Return bars of throughput as a share of raw TCP."""

    def bar(way: str, each: Measurement) -> Bar:
        samples = figures.shares(run, each)
        return Bar(way, samples, figures.percent(statistics.median(samples)))

    groups = _grouped(run, figures.large, bar)
    spans = []
    for way in DIRECTIONS:
        ceiling = figures.raw(run, way)
        if ceiling:
            middle = statistics.median(ceiling)
            spans += [min(ceiling) / middle, max(ceiling) / middle]
    return bars(groups, wide, 1.0, "raw TCP = 100 %, in bytes of shares", (min(spans), max(spans)))


def encoding_chart(run: Run, wide: bool) -> Figure:
    """Return bars of plaintext a second for each k/n."""

    def bar(way: str, each: Measurement) -> Bar:
        samples = tuple(each.files * each.file_bytes / sample for sample in each.samples_s)
        return Bar(way, samples, figures.rate(each.bytes_per_s))

    return bars(_grouped(run, figures.encodings, bar), wide, None, "")


def _grouped(
    run: Run,
    choose: Callable[[Run, str], Iterable[Measurement]],
    bar: Callable[[str, Measurement], Bar],
) -> list[tuple[str, list[Bar]]]:
    """Return the bars of what is chosen for each direction, by the name of what was measured."""
    groups: dict[str, list[Bar]] = {}
    for way in DIRECTIONS:
        for each in choose(run, way):
            groups.setdefault(each.name, []).append(bar(way, each))
    return list(groups.items())
