"""Charts of speed-test results: makes bars and curves, and draws them as SVG."""

from __future__ import annotations

import html
import io
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from pipegrid.speedtest import report_figures
from pipegrid.speedtest.run_results import DIRECTIONS, DOWN, UP, Burst, Measurement, Run

# Each chart is drawn twice, in a wide version and in a narrow one for phones, since letters in a scaled-down
# picture would be unreadable. Colours are CSS variables of the page, so that its dark mode applies; text
# stays text. No information depends on colour alone: up is solid, down is hatched or hollow, and every series
# is labelled.

_VARIABLES = ("ink", "muted", "line", "paper", UP, DOWN, "ceiling")
COLOURS = {name: f"#00000{number}" for number, name in enumerate(_VARIABLES, 1)}
"""The colours used for drawing; the finished SVG has the page's CSS variables of these names instead."""

INK, MUTED, LINE, PAPER, *_, CEILING = COLOURS.values()
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


def draw(name: str, label: str, paint: Callable[[bool], Figure]) -> tuple[str, str]:
    """
    Return a chart as two SVG elements, a wide one and a narrow one.

    Args:
        name: unique in the page; the ids inside the SVG start with it.
        label: the text for readers who cannot see the picture.
        paint: makes the figure; its argument says whether to make the wide one.
    """
    drawn = []
    for kind, wide in (("wide", True), ("narrow", False)):
        settings: Any = {**_SETTINGS, "svg.hashsalt": f"{name}-{kind}"}
        with matplotlib.rc_context(settings):
            drawn.append(_svg(paint(wide), f"{name}-{kind}", label))
    return drawn[0], drawn[1]


def _svg(figure: Figure, name: str, label: str) -> str:
    """Return a figure as an SVG element; several such elements may be in one page."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    FigureCanvasSVG(figure).print_svg(buffer, metadata=nothing)
    text = "<svg" + buffer.getvalue().partition("<svg")[2]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Remove this style, which would affect the whole page; the page has the same style for its charts alone.
    text = re.sub(r'<style type="text/css">.*?</style>', "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'href="#', f'href="#{name}-', text)
    text = re.sub(r"url\(#", f"url(#{name}-", text)
    text = text.replace("xlink:href", "href")
    text = re.sub(r"(font: (?:\w+ )?[\d.]+px) [^;\"]+", r"\1 var(--sans)", text)
    for variable, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{variable})")
    width, height = (72 * inches for inches in figure.get_size_inches())
    head = (
        f'<svg class="{name.rpartition("-")[2]}" role="img" aria-label="{html.escape(label)}"'
        f' viewBox="0 0 {width:g} {height:g}" xmlns="http://www.w3.org/2000/svg">'
    )
    return re.sub(r"<svg\b[^>]*>", lambda _: head, text, count=1)


def _figure(wide: bool, height: float) -> Figure:
    """Return a figure of this height in pixels, without axes."""
    width = WIDE_PX if wide else NARROW_PX
    return Figure(figsize=(width / 72, height / 72), dpi=72)


def _add_axes(figure: Figure, left: float, right: float, top: float, bottom: float) -> Axes:
    """Return new axes inside these margins, in pixels."""
    width, height = 72 * figure.get_size_inches()
    inside = (width - left - right) / width, (height - top - bottom) / height
    return figure.add_axes((left / width, bottom / height, *inside))


def _write(axes: Axes, text: str, place: tuple[float, float], aside_px: Any, **style: Any) -> None:
    """Write a text next to a place, shifted by ``aside_px`` to the right and up."""
    axes.annotate(text, place, aside_px, textcoords="offset points", **style)


# Bar charts of a run: round trips of small files, throughput compared with raw TCP, speed by encoding.


@attrs.frozen
class Bar:
    """A bar with its samples, and the label at its end."""

    direction: str
    samples: tuple[float, ...]
    label: str

    @property
    def value(self) -> float:
        """The value at which the bar ends: the median of its samples."""
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
        groups: the title and the bars of each group.
        wide: whether titles are next to their bars; otherwise above them.
        ceiling: the best value that the path allows, drawn as a line; None for no line.
        band: the range of the ceiling's own samples.
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
    top = 24.0 if ceiling is not None else 4.0
    figure = _figure(wide, y + top)
    axes = _add_axes(figure, 150 if wide else 2, 74 if wide else 66, top, 4)
    limit = _limit([bar.value for _, bar in places], ceiling)
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
    """Draw the ceiling's line, and its name on the side of the line that has space."""
    axes.axvline(ceiling, color=CEILING, linewidth=1.5, linestyle=(0, (4, 2)))
    _write(
        axes,
        label,
        (ceiling, 1),
        (4 if beyond else -2, 7),
        xycoords=("data", "axes fraction"),
        ha="right" if beyond else "left",
        color=INK,
        fontsize=11,
    )


def _title(axes: Axes, place: float, title: str, wide: bool) -> None:
    """Write a group's title next to its bars, or above them."""
    if wide:
        _write(axes, title, (0, place), (-12, 0), ha="right", va="center")
    else:
        # The title's background covers the ceiling's line.
        paper = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5}
        axes.annotate(title, (0, place), ha="left", va="center", bbox=paper, zorder=5)


def _limit(values: Sequence[float], ceiling: float | None) -> float:
    """
    Return where the axis ends. Longer bars are cut, so that one long bar does not make the other bars tiny.
    """
    usual = min(max(values), 4 * statistics.median(values))
    return max(usual * 1.03, (ceiling or 0.0) * 1.03, 1e-9)


def _bar(
    axes: Axes,
    place: float,
    bar: Bar,
    thickness: float,
    limit: float,
    line: tuple[float, float] | None,
) -> None:
    """Draw a bar, the range of its samples, and its label, which avoids the ceiling's line."""
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
    _write(axes, text, (at, place), (6, 0), va="center", annotation_clip=False)


def trips_chart(run: Run, wide: bool) -> Figure:
    """Return a bar chart of round trips per file."""

    def bar(each: Measurement) -> Bar:
        samples = report_figures.trips(run, each)
        return Bar(each.direction, samples, report_figures.digits(statistics.median(samples)))

    return bars(_grouped(run, report_figures.small, bar), wide, 1.0, "1 round trip")


def throughput_chart(run: Run, wide: bool) -> Figure:
    """Return a bar chart of throughput as a share of raw TCP."""

    def bar(each: Measurement) -> Bar:
        samples = report_figures.shares(run, each)
        return Bar(each.direction, samples, report_figures.percent(statistics.median(samples)))

    groups = _grouped(run, report_figures.large, bar)
    raw = filter(None, (report_figures.raw(run, way) for way in DIRECTIONS))
    ceilings = [value / statistics.median(samples) for samples in raw for value in samples]
    band = min(ceilings), max(ceilings)
    return bars(groups, wide, 1.0, "raw TCP = 100 %, in bytes of shares", band)


def encoding_chart(run: Run, wide: bool) -> Figure:
    """Return a bar chart of plaintext bytes per second for each k/n."""

    def bar(each: Measurement) -> Bar:
        return Bar(each.direction, _rates(each), report_figures.rate(each.bytes_per_s))

    return bars(_grouped(run, report_figures.encodings, bar), wide, None, "")


def _grouped(
    run: Run,
    choose: Callable[[Run, str], Iterable[Measurement]],
    bar: Callable[[Measurement], Bar],
) -> list[tuple[str, list[Bar]]]:
    """Return the bars of the chosen measurements, both directions of one measurement as one group."""
    groups: dict[str, list[Bar]] = {}
    for way in DIRECTIONS:
        for each in choose(run, way):
            groups.setdefault(each.name, []).append(bar(each))
    return list(groups.items())


# Curves of a run: throughput by window, one upload over time, the main figures over many runs.

MOST_SERVERS = 20
"""The most rows (servers) in the timeline; the caption says how many servers were left out."""


def window_chart(run: Run, wide: bool) -> Figure:
    """Return a chart of the throughput by window, with one panel for each measured direction."""
    ways = [way for way in DIRECTIONS if report_figures.window_curve(run, way)]
    height = 240.0
    figure = _figure(wide, height if wide else height * len(ways))
    for index, way in enumerate(ways):
        before, after = index, len(ways) - index - 1
        if wide:  # panels side by side
            step = WIDE_PX / len(ways)
            axes = _add_axes(figure, before * step + 62, after * step + 14, 34, 44)
        else:
            axes = _add_axes(figure, 58, 10, before * height + 34, after * height + 44)
        _window_panel(axes, run, way)
    return figure


def _window_panel(axes: Axes, run: Run, way: str) -> None:
    curve = report_figures.window_curve(run, way)
    # The fixed windows are equally spaced; the last position is for the automatic window.
    places = [float(index) for index in range(len(curve))]
    labels = [_short(each.window_bytes or 0) for each in curve]
    axes.set_title(
        f"{ARROWS[way]} {report_figures.VERBS[way]}", loc="left", fontsize=12, color=INK, pad=14
    )
    top = _fixed_windows(axes, curve, places, way)
    auto = report_figures.auto_window(run, way)
    if auto is not None:
        places.append(len(curve) + 0.4)
        labels.append("auto")
        top = max(top, _automatic_window(axes, auto, places[-1]))
    ceiling = _plaintext_ceiling(run, way, curve[-1])
    if ceiling is not None and ceiling < 3 * top:
        top = max(top, ceiling)
        axes.axhline(ceiling, color=CEILING, linewidth=1.5, linestyle=(0, (4, 2)))
        across = ("axes fraction", "data")
        _write(axes, "raw TCP", (0, ceiling), (2, 4), xycoords=across, fontsize=11)
    _window_ticks(axes, places, labels)
    axes.set_ylim(0, top * 1.12)
    _rule(axes, lambda value: report_figures.round_rate(value) if value else "0")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("window for each server", fontsize=11)


def _fixed_windows(
    axes: Axes, curve: Sequence[Measurement], places: Sequence[float], way: str
) -> float:
    """Draw the fixed windows, and mark the knee of their curve; return the highest rate."""
    colour = COLOURS[way]
    rates = [_rates(each) for each in curve]
    middles = [statistics.median(samples) for samples in rates]
    for place, samples in zip(places, rates, strict=True):
        axes.plot([place, place], [min(samples), max(samples)], color=colour, linewidth=1.4)
    _line(axes, way, places, middles, 2)
    knee = report_figures.knee(curve)
    if knee is not None:
        at = curve.index(knee)
        axes.plot(at, middles[at], "o", markersize=15, markerfacecolor="none", color=INK, mew=1.4)
        _write(axes, "knee", (at, middles[at]), (4, -26), ha="left", va="center")
    return max(middles)


def _automatic_window(axes: Axes, auto: Measurement, place: float) -> float:
    """Draw the automatic window; return its rate."""
    samples = _rates(auto)
    value = statistics.median(samples)
    axes.axhline(value, color=MUTED, linewidth=1, linestyle=(0, (1, 2)))
    axes.plot([place, place], [min(samples), max(samples)], color=INK, linewidth=1.4)
    axes.plot(place, value, "D", color=INK, markersize=8)
    return value


def _window_ticks(axes: Axes, places: Sequence[float], labels: Sequence[str]) -> None:
    """Label the positions, or every second one if there are many. The automatic window is always labelled."""
    axes.set_xticks(places, labels, fontsize=11)
    has_auto = labels[-1] == "auto"
    for number, tick in enumerate(axes.get_xticklabels()):
        beside_auto = has_auto and number == len(labels) - 2
        crowded = len(labels) > 6 and (number % 2 == 1 or beside_auto)
        tick.set_visible(not crowded or labels[number] == "auto")
    axes.set_xlim(-0.5, places[-1] + 0.6)


def _rates(measured: Measurement) -> tuple[float, ...]:
    """Return the plaintext bytes per second of each sample."""
    return tuple(measured.files * measured.file_bytes / sample for sample in measured.samples_s)


def _short(value: int) -> str:
    """Return a window's size as ``50k`` or ``2M``."""
    return f"{value / 1e6:g}M" if value >= 10**6 else f"{value / 1e3:g}k"


def _plaintext_ceiling(run: Run, way: str, measured: Measurement) -> float | None:
    """
    Return the rate of raw TCP, converted from bytes of shares to plaintext bytes per second; None if unknown.
    """
    ceiling = report_figures.raw(run, way)
    if not ceiling or not measured.wire_bytes:
        return None
    return statistics.median(ceiling) * measured.files * measured.file_bytes / measured.wire_bytes


def timeline_chart(run: Run, wide: bool) -> Figure:
    """Return a chart of the bytes sent to and received from each server, over time."""
    timeline = run.timeline
    assert timeline is not None
    servers = list(dict.fromkeys(burst.server for burst in timeline.bursts))[:MOST_SERVERS]
    rows = {server: row for row, server in enumerate(servers)}
    width = WIDE_PX if wide else NARROW_PX
    names, left, row_px = _names(servers, width)
    figure = _figure(wide, row_px * len(servers) + 34 + 44)
    axes = _add_axes(figure, left, 16, 34, 44)
    unit = 1e-3 if timeline.took_s < 2 else 1.0
    end = max(timeline.took_s, timeline.rtt_s) / unit
    span = end * 1.04
    for row in rows.values():
        axes.axhline(row, color=LINE, linewidth=1, zorder=1)
    columns = (width - left - 16) / 9
    for way in DIRECTIONS:
        bursts = [each for each in timeline.bursts if each.direction == way]
        joined = _joined(bursts, rows, span * unit / columns)
        most = max((amount for _, _, amount in joined), default=1)
        for row, at_s, amount in joined:
            axes.plot(
                at_s / unit,
                row,
                marker=MARKERS[way],
                markersize=5 + 5 * (amount / most) ** 0.5,
                color=COLOURS[way],
                markerfacecolor=COLOURS[way] if way == UP else PAPER,
                markeredgewidth=1.8,
                linestyle="none",
                zorder=3,
            )
    lines: list[tuple[float, str, Any, str]] = [
        (timeline.rtt_s / unit, "1 round trip", (0, (4, 2)), CEILING)
    ]
    if timeline.took_s > 1.6 * timeline.rtt_s:
        lines.append((timeline.took_s / unit, "stored", "solid", INK))
    for at, label, style, colour in lines:
        axes.axvline(at, color=colour, linewidth=1.5, linestyle=style, zorder=2)
        _write(
            axes,
            label,
            (at, 1),
            (4, 6),
            xycoords=("data", "axes fraction"),
            ha="right" if at > span / 3 else "left",
            fontsize=11,
        )
    axes.set_xlim(-span * 0.03, span)
    axes.set_ylim(len(servers) - 0.4, -0.7)
    axes.set_yticks(range(len(servers)), names)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.tick_params(length=0, labelsize=11, labelcolor=MUTED)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_xlabel("milliseconds" if unit < 1 else "seconds", fontsize=11)
    return figure


def _names(servers: Sequence[str], width: float) -> tuple[list[str], float, float]:
    """
    Break the names of servers into lines, so that no name is cut.

    Returns:
        the names, the width of their column, and the height of a row, in pixels.
    """
    room_px = min(max(sum(map(_letter_px, each)) for each in servers), 0.4 * width)
    broken = [_broken(each, room_px) for each in servers]
    lines = max(map(len, broken))
    return ["\n".join(each) for each in broken], room_px + 22, 20.0 + (lines - 1) * 14


def _broken(name: str, room_px: float) -> list[str]:
    """Break a name into lines that fit, after a hyphen or space if the line does not become too short."""
    lines, line, line_px = [], "", 0.0
    for letter in name:
        if line and line_px + _letter_px(letter) > room_px:
            end = 1 + max(line.rfind(" "), line.rfind("-"))
            end = end if end > len(line) / 2 else len(line)
            lines.append(line[:end])
            line = line[end:]
            line_px = sum(map(_letter_px, line))
        line, line_px = line + letter, line_px + _letter_px(letter)
    return [*lines, line]


def _letter_px(letter: str) -> float:
    """Return an upper bound for the width of a letter in labels, in any font."""
    if letter in "WMmw@%—" or ord(letter) > 0x2E80:
        return 11.5
    return 9.0 if letter.isupper() else 7.5


def _joined(
    bursts: Sequence[Burst], rows: dict[str, int], apart_s: float
) -> list[tuple[int, float, int]]:
    """
    Join bursts of a server that would look like one; return row, time of the first burst, and bytes of each.
    """
    found: list[tuple[int, float, int]] = []
    last: dict[int, int] = {}
    for each in sorted(bursts, key=lambda each: each.at_s):
        row = rows.get(each.server)
        if row is None:
            continue
        index = last.get(row)
        if index is not None and each.at_s - found[index][1] < apart_s:
            found[index] = (row, found[index][1], found[index][2] + each.size_bytes)
        else:
            last[row] = len(found)
            found.append((row, each.at_s, each.size_bytes))
    return found


def history_chart(runs: Sequence[Run], wide: bool) -> Figure:
    """Return a chart of the main figures over time, from the oldest run to this one."""
    panels: list[tuple[str, _Reader]] = [
        ("round trips for a small file", _trips_of),
        ("throughput of the largest file, of raw TCP", _shares_of),
    ]
    panels = [
        panel for panel in panels if any(panel[1](run, way) for run in runs for way in (UP, DOWN))
    ]
    each_px = 190.0
    height = each_px * len(panels) + 22
    figure = _figure(wide, height)
    for index, (title, read) in enumerate(panels):
        below = height - (index + 1) * each_px + 10
        axes = _add_axes(figure, 46, 62, index * each_px + 30, below)
        _history_panel(axes, runs, title, read)
        if index == len(panels) - 1:
            names = [(run.commit or run.when[:10])[:7] for run in runs]
            shown = sorted({0, len(runs) - 1})
            axes.set_xticks(shown, [names[place] for place in shown], fontsize=11)
            axes.tick_params(labelbottom=True)
    return figure


_Reader = Callable[[Run, str], tuple[float, ...]]


def _trips_of(run: Run, way: str) -> tuple[float, ...]:
    measured = report_figures.one_small(run, way)
    return () if measured is None else report_figures.trips(run, measured)


def _shares_of(run: Run, way: str) -> tuple[float, ...]:
    measured = report_figures.largest(run, way)
    return () if measured is None else report_figures.shares(run, measured)


def _history_panel(axes: Axes, runs: Sequence[Run], title: str, read: _Reader) -> None:
    percents, ceiling = read is _shares_of, 1.0
    axes.set_title(title, loc="left", fontsize=12, color=INK, pad=12)
    ends: list[tuple[float, str]] = []
    values = [ceiling]
    for way, aside in ((UP, -0.07), (DOWN, 0.07)):
        points = [(place, read(run, way)) for place, run in enumerate(runs)]
        points = [(place, samples) for place, samples in points if samples]
        if not points:
            continue
        middles = [statistics.median(samples) for _, samples in points]
        places = [place + aside for place, _ in points]
        for place, (_, samples) in zip(places, points, strict=True):
            axes.plot([place] * 2, [min(samples), max(samples)], color=COLOURS[way], linewidth=1.4)
            values += samples
        _line(axes, way, places, middles, 1.6)
        ends.append((middles[-1], way))
    low, high = min(values), max(values)
    room = (high - low) * 0.15 or 0.05
    axes.set_ylim(low - room, high + room)
    axes.set_xlim(-0.5, len(runs) - 0.5)
    axes.axhline(ceiling, color=CEILING, linewidth=1.5, linestyle=(0, (4, 2)), zorder=1)
    _label_ends(axes, ends, len(runs) - 0.5, 0.1 * (high - low + 2 * room), percents)
    _rule(axes, lambda value: f"{100 * value:g} %" if percents else f"{value:.3g}")
    axes.xaxis.set_major_locator(NullLocator())
    axes.tick_params(labelbottom=False)
    axes.spines[["left", "bottom"]].set_visible(False)


def _line(
    axes: Axes, way: str, places: Sequence[float], values: Sequence[float], width: float
) -> None:
    """Draw the curve of one direction through its medians."""
    axes.plot(
        places,
        values,
        marker=MARKERS[way],
        color=COLOURS[way],
        markerfacecolor=COLOURS[way] if way == UP else PAPER,
        markersize=6,
        linewidth=width,
        linestyle="-" if way == UP else (0, (5, 1.5)),
    )


def _rule(axes: Axes, text: Callable[[float], str]) -> None:
    """Draw a few horizontal lines, each with its value."""
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))
    axes.tick_params(length=0, labelsize=11, labelcolor=MUTED)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)


def _label_ends(
    axes: Axes, ends: Sequence[tuple[float, str]], place: float, apart: float, percents: bool
) -> None:
    """Write the name and last value of each series at its end; move names apart that would overlap."""
    if len(ends) == 2 and abs(ends[0][0] - ends[1][0]) < 1.4 * apart:
        middle = (ends[0][0] + ends[1][0]) / 2
        first = 1 if ends[0][0] >= ends[1][0] else -1
        heights = [middle + first * 0.7 * apart, middle - first * 0.7 * apart]
    else:
        heights = [value for value, _ in ends]
    for (value, way), height in zip(ends, heights, strict=True):
        text = f"{100 * value:.1f} %" if percents else report_figures.digits(value)
        label = f"{ARROWS[way]} {text}"
        _write(axes, label, (place, height), (4, 0), va="center", annotation_clip=False)
