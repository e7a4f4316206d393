"""A run as text lines for people, and as JSON for other programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import attrs

from pipegrid.speedtest.link_proxies import describe
from pipegrid.speedtest.run_results import (
    DIRECTIONS,
    DOWN,
    ENCODING,
    SCENARIO,
    UP,
    WINDOW,
    Measurement,
    Run,
    spread,
)

# The classic lines come first, in unchanged form; each is followed by the spread of its samples.
#
#     TIME (10x 200B): 5.152 up, 2.045 down
#     upload per-file time: 0.515s
#     upload per-file times-avg-RTT: 77.205647
#     upload per-file times-total-RTT: 19.301412
#     upload speed (10MB): 24.02kBps
#
# Definitions:
#
# * *TIME*: the median over the rounds, in seconds, of all files of the scenario.
# * *per-file time*: the median of ``10x 200B`` (or of the series of small files that was run) ÷ the files.
# * *times-avg-RTT*: per-file time ÷ the mean round trip over all servers.
# * *times-total-RTT*: per-file time ÷ the sum of the servers' mean round trips; a client that sends to one
#   server after the other needs 1 for each request.
# * *speed*: plaintext ÷ median; kB are 1000 bytes.
# * *of raw TCP*: bytes of shares that had to pass the link ÷ median, as a share of what raw TCP streams, one
#   for each server, carry on the same path in the same run.

SMALL_BYTES = 10_000
"""Files up to this size measure round trips; larger files measure throughput."""

WORDS = {UP: "upload", DOWN: "download"}

_PER_FILE = ("10x 200B", "100x 200B", "1x 200B")
_ASIDE_COLUMN = 46


@attrs.frozen
class ReportLine:
    """
    One line of the report.

    Attributes:
        text: the figure, in the classic form.
        aside: additional values, such as spread and round trips.
    """

    text: str
    aside: str = ""

    def __str__(self) -> str:
        return f"{self.text:<{_ASIDE_COLUMN}}  {self.aside}".rstrip()


def render(run: Run) -> list[ReportLine]:
    """Return all lines about a run."""
    return [
        *_setting(run),
        *_times(run),
        *_per_file(run),
        *_speeds(run),
    ]


def of_raw_tcp(run: Run, measurement: Measurement) -> float | None:
    """
    Return a rate of share bytes as a share of what raw TCP streams carry; None if raw TCP was not measured.
    """
    streams = max((each.streams for each in run.baselines if not each.tls), default=0)
    raw = run.baseline(measurement.direction, streams, tls=False)
    if not raw or not measurement.wire_bytes:
        return None
    return measurement.wire_bytes_per_s / raw


def round_trips(run: Run, measurement: Measurement) -> float | None:
    """
    Return the median time of all files, divided by the mean round-trip time; None if round trips are unknown.
    """
    average_s = run.average_rtt_s
    return measurement.median_s / average_s if average_s else None


def rate(bytes_per_s: float) -> str:
    """Return a rate in the classic form: ``24.02kBps``."""
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if bytes_per_s >= unit:
            return f"{bytes_per_s / unit:.2f}{letter}Bps"
    return f"{bytes_per_s:.2f}Bps"


def _setting(run: Run) -> Iterator[ReportLine]:
    parameters = run.parameters
    yield ReportLine(
        f"{parameters.target}: {parameters.servers} servers, {parameters.transport},"
        f" {parameters.required_shares} of {parameters.total_shares}, window {parameters.window},"
        f" {describe(parameters.link)}"
    )
    if run.round_trips:
        samples = [sample for trip in run.round_trips for sample in trip.samples_s]
        yield ReportLine(
            f"round trip: {1000 * min(samples):.3f} ms minimum,"
            f" {1000 * (run.average_rtt_s or 0):.3f} ms average",
            f"{1000 * max(samples):.3f} ms at most; {len(samples)} samples",
        )
    for each in run.baselines:
        if each.samples:
            measured = spread(each.samples)
            kind = "TLS" if each.tls else "TCP"
            streams = f"{each.streams} stream{'s' if each.streams > 1 else ''}"
            yield ReportLine(
                f"raw {kind} {each.direction} ({streams}): {rate(measured.median)}",
                f"{rate(measured.minimum)} .. {rate(measured.maximum)} of {measured.count}",
            )


def _pairs(run: Run) -> dict[tuple[str, str], dict[str, Measurement]]:
    """Return all measurements except the window sweep by group and name, both directions together."""
    pairs: dict[tuple[str, str], dict[str, Measurement]] = {}
    for each in run.measurements:
        if each.group != WINDOW:
            pairs.setdefault((each.group, each.name), {})[each.direction] = each
    return pairs


def _times(run: Run) -> Iterator[ReportLine]:
    for (_group, name), directions in _pairs(run).items():
        measured = [directions[way] for way in DIRECTIONS if way in directions]
        figures = ", ".join(f"{each.median_s:.3f} {each.direction}" for each in measured)
        asides = "; ".join(_aside(run, each) for each in measured)
        yield ReportLine(f"TIME ({name}): {figures}", asides)


def _aside(run: Run, measured: Measurement) -> str:
    found = spread(measured.samples_s)
    text = f"{measured.direction} {found.minimum:.3f} .. {found.maximum:.3f} of {found.count}"
    trips = round_trips(run, measured)
    if trips is not None and measured.file_bytes <= SMALL_BYTES:
        files = 1 if measured.at_once else measured.files
        text += f", {trips / files:.2f} RTT" + (" a file" if files > 1 else "")
    return text


def _per_file(run: Run) -> Iterator[ReportLine]:
    for way in DIRECTIONS:
        found = (run.find(name, way) for name in _PER_FILE)
        measured = next((each for each in found if each is not None), None)
        if measured is None:
            continue
        sampled = spread([sample / measured.files for sample in measured.samples_s])
        aside = f"{sampled.minimum:.3f}s .. {sampled.maximum:.3f}s of {sampled.count}"
        word = f"{WORDS[way]} per-file"
        yield ReportLine(f"{word} time: {measured.per_file_s:.3f}s", aside)
        for kind, trip_s in (("avg", run.average_rtt_s), ("total", run.total_rtt_s)):
            if trip_s:
                yield ReportLine(
                    f"{word} times-{kind}-RTT: {measured.per_file_s / trip_s:f}",
                    f"{sampled.minimum / trip_s:.3f} .. {sampled.maximum / trip_s:.3f}"
                    f" of {sampled.count}",
                )


def _speeds(run: Run) -> Iterator[ReportLine]:
    for (group, name), directions in _pairs(run).items():
        for way in DIRECTIONS:
            measured = directions.get(way)
            if measured and group in (SCENARIO, ENCODING) and measured.file_bytes > SMALL_BYTES:
                yield _speed(run, measured, name)
    for measured in run.measurements:
        if measured.group == WINDOW:
            yield _speed(run, measured, f"window {measured.name}")


def _speed(run: Run, measured: Measurement, name: str) -> ReportLine:
    found = spread(measured.samples_s)
    total = measured.files * measured.file_bytes
    text = f"{rate(total / found.maximum)} .. {rate(total / found.minimum)} of {found.count}"
    share = of_raw_tcp(run, measured)
    if share is not None:
        text = f"{100 * share:.1f}% of raw TCP in bytes of shares; {text}"
    figure = f"{WORDS[measured.direction]} speed ({name}): {rate(measured.bytes_per_s)}"
    return ReportLine(figure, text)


# The format ``json`` is ``Run.as_json``. The formats ``github-smaller`` and ``github-bigger`` are
# github-action-benchmark's ``customSmallerIsBetter`` (times, round trips) and ``customBiggerIsBetter``
# (throughput): a list of objects with ``name``, ``unit``, ``value``, ``range`` (the standard deviation) and
# ``extra``.

TEXT = "text"
JSON = "json"
GITHUB_SMALLER = "github-smaller"
GITHUB_BIGGER = "github-bigger"


def formatted(run: Run, form: str) -> str:
    """Return a run in one of these formats, without a final line break."""
    if form == JSON:
        return run.as_json().rstrip("\n")
    if form == GITHUB_SMALLER:
        return json.dumps(list(smaller_is_better(run)), indent=1)
    if form == GITHUB_BIGGER:
        return json.dumps(list(bigger_is_better(run)), indent=1)
    assert form == TEXT, form
    return "\n".join(map(str, render(run)))


def smaller_is_better(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the median time of every measurement, and the round trips of measurements with small files."""
    for each in run.measurements:
        found = spread(each.samples_s)
        yield _entry(each, "time", "s", found.median, found.deviation, run)
        trips = round_trips(run, each)
        if trips is not None and each.file_bytes <= SMALL_BYTES:
            scale = trips / found.median
            yield _entry(each, "round trips", "RTT", trips, found.deviation * scale, run)


def bigger_is_better(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the throughput of every measurement with large files, and its share of raw TCP."""
    for each in run.measurements:
        if each.file_bytes <= SMALL_BYTES:
            continue
        total = each.files * each.file_bytes
        found = spread([total / sample for sample in each.samples_s])
        yield _entry(each, "speed", "B/s", found.median, found.deviation, run)
        share = of_raw_tcp(run, each)
        if share is not None:
            scale = 100 * share / found.median
            yield _entry(each, "of raw TCP", "%", 100 * share, found.deviation * scale, run)


def _entry(
    measured: Measurement, kind: str, unit: str, value: float, deviation: float, run: Run
) -> dict[str, Any]:
    group = "" if measured.group == "scenario" else f"{measured.group} "
    return {
        "name": f"{WORDS[measured.direction]} {kind} ({group}{measured.name})",
        "unit": unit,
        "value": value,
        "range": f"± {deviation:.4g}",
        "extra": f"median of {len(measured.samples_s)}; seed {run.parameters.seed}",
    }
