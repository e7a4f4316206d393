"""
Writes the HTML report of a run, a single self-contained file. The libraries needed come with
``pipegrid[speedtest]``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from pipegrid.errors import UsageError
from pipegrid.speedtest import report_figures
from pipegrid.speedtest.run_results import DIRECTIONS, DOWN, UP, Run, Timeline

MOST_HISTORY = 50
"""The most earlier runs in a picture; the latest ones are shown."""


LIBRARIES = {"Jinja2": "jinja2", "matplotlib": "matplotlib"}
"""The packages of ``pipegrid[speedtest]`` that a report needs, each with its module."""


@attrs.frozen
class Section:
    """
    A picture with its title and text.

    Attributes:
        name: of the HTML element; ``title`` and ``text`` are above the picture.
        wide, narrow: two versions of the picture, as SVG elements.
        key: whether the picture needs the explanation of bars.
    """

    name: str
    title: str
    text: str
    wide: str
    narrow: str
    key: bool = False


def write_report(path: Path | str, run: Run, history: Sequence[Run] = ()) -> None:
    """
    Write one self-contained HTML file about a run.

    Args:
        path: the file; it is replaced atomically.
        run: the run to report.
        history: earlier runs with the same parameters, oldest first.

    Raises:
        UsageError: the libraries for drawing are not installed, or the file cannot be written.
    """
    text = render_report(run, history)
    target = Path(path)
    beside = target.with_name(f".{target.name}.new")
    try:
        beside.write_text(text, "utf-8")
        os.replace(beside, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise UsageError(
            f"the report {target} cannot be written ({error.strerror}); give another path"
        ) from None


def check_libraries() -> None:
    """
    Check whether the libraries for a report are installed, without importing them.

    Raises:
        UsageError: a library for drawing is not installed.
    """
    for name, module in LIBRARIES.items():
        if find_spec(module) is None:
            raise UsageError(
                f"a report needs {name}, which is not installed; 'pip install {' '.join(LIBRARIES)}' "
                "installs all that it needs"
            )


def render_report(run: Run, history: Sequence[Run] = ()) -> str:
    """Return the HTML page; arguments and errors as for ``write_report``."""
    check_libraries()
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pipegrid.speedtest"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    headline, lead = report_figures.headline(run)
    return environment.get_template("report.html").render(
        title=f"PipeGrid speed test{f', {run.commit}' if run.commit else ''}",
        run=run,
        when=run.when.replace("T", " ").replace("Z", " UTC"),
        headline=headline,
        lead=lead,
        setting=report_figures.setting(run),
        figures=report_figures.main_figures(run),
        sections=_sections(run, history),
        tables=report_figures.rows(run),
        baselines=report_figures.baseline_rows(run),
        facts=report_figures.facts(run),
    )


_THROUGHPUT_WORDS = (
    "Bytes of shares on the wire, as a part of what bare TCP streams carried on the same path in the"
    " same run. The grey band is how far raw TCP itself varied."
)

_HISTORY_WORDS = (
    "Each point is a run's median, its line from the fastest to the slowest round; filled circles are"
    " stores, hollow squares fetches. The dashed line is the least time, or the most that raw TCP"
    " carries. This run is the last."
)


def _sections(run: Run, history: Sequence[Run]) -> list[Section]:
    """Return the pictures for which this run has data."""
    from pipegrid.speedtest import charts

    runs = [*history[-MOST_HISTORY:], run]
    found = []

    def add(
        name: str, title: str, text: str, paint: Callable[[bool], Any], key: bool = False
    ) -> None:
        found.append(Section(name, title, text, *charts.draw(name, f"{title} {text}", paint), key))

    if any(report_figures.small(run, way) for way in DIRECTIONS):
        add(
            "trips",
            "Round trips for each small file",
            "Time for a file, divided by the round trip. One is the least for a file by itself; files that go"
            " at once share it.",
            lambda wide: charts.trips_chart(run, wide),
            key=True,
        )
    if any(report_figures.large(run, way) for way in DIRECTIONS):
        add(
            "throughput",
            "Throughput compared with raw TCP",
            _THROUGHPUT_WORDS,
            lambda wide: charts.throughput_chart(run, wide),
            key=True,
        )
    if run.timeline is not None and run.timeline.bursts:
        add(
            "timeline",
            *_timeline_words(run.timeline, charts.MOST_SERVERS),
            lambda wide: charts.timeline_chart(run, wide),
        )
    if any(report_figures.window_curve(run, way) for way in DIRECTIONS):
        add(
            "window",
            _window_title(run),
            "Plaintext a second over the bytes that may be unacknowledged for each server. The knee, circled,"
            f" is the least window with {100 * report_figures.KNEE:.0f} % of the best; the diamond is the"
            " window that sizes itself.",
            lambda wide: charts.window_chart(run, wide),
        )
    if any(report_figures.encodings(run, way) for way in DIRECTIONS):
        add(
            "encoding",
            "Speed by encoding",
            "Plaintext a second for k needed of n shares: an upload carries n/k times the file.",
            lambda wide: charts.encoding_chart(run, wide),
            key=True,
        )
    if len(runs) > 1:
        add(
            "history",
            f"The last {len(runs)} runs",
            _HISTORY_WORDS,
            lambda wide: charts.history_chart(runs, wide),
        )
    return found


def _timeline_words(timeline: Timeline, most_servers: int) -> tuple[str, str]:
    """Return the title and the text of the picture of one upload."""
    taken = timeline.took_s / timeline.rtt_s if timeline.rtt_s else 0.0
    servers = len({burst.server for burst in timeline.bursts})
    left_out = servers - most_servers
    return (
        f"One upload, from the wire: {report_figures.digits(taken)} round trips",
        f"{timeline.name} to {servers} servers. Filled circles are sent, hollow squares come back;"
        f" the larger, the more bytes. It took {report_figures.seconds(timeline.took_s)}"
        + (f", the median of {timeline.samples}." if timeline.samples > 1 else ".")
        + (f" {left_out} servers are not shown." if left_out > 0 else ""),
    )


def _window_title(run: Run) -> str:
    """
    Return a title that compares the automatic window with the best fixed one, if more than one sample was
    measured.
    """
    said: list[str] = []
    for way in (UP, DOWN):
        curve, auto = report_figures.window_curve(run, way), report_figures.auto_window(run, way)
        if curve and auto is not None and len(auto.samples_s) > 1:
            best = max(each.bytes_per_s for each in curve)
            share = report_figures.percent(auto.bytes_per_s / best)
            said.append(f"{share} {'of the best fixed one ' if not said else ''}{way}")
    if not said:
        return "Throughput by window"
    return f"The automatic window reaches {', '.join(said)}"
