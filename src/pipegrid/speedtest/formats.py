"""
A run in the forms that other programs read.

``json`` is ``results.Run.as_json``. ``github-smaller`` and ``github-bigger`` are what github-action-benchmark
calls ``customSmallerIsBetter`` (times, round trips) and ``customBiggerIsBetter`` (throughput): a list of
``name``, ``unit``, ``value``, ``range`` (the standard deviation) and ``extra``.
"""

from __future__ import annotations

import json
from typing import Any

from pipegrid.speedtest.lines import SMALL_BYTES, WORDS, of_raw_tcp, render, round_trips
from pipegrid.speedtest.results import Measurement, Run, spread

TEXT = "text"
JSON = "json"
GITHUB_SMALLER = "github-smaller"
GITHUB_BIGGER = "github-bigger"


def formatted(run: Run, form: str) -> str:
    """Return a run in one of these forms, without a final line break."""
    if form == JSON:
        return run.as_json().rstrip("\n")
    if form == GITHUB_SMALLER:
        return json.dumps(smaller_is_better(run), indent=1)
    if form == GITHUB_BIGGER:
        return json.dumps(bigger_is_better(run), indent=1)
    assert form == TEXT, form
    return "\n".join(map(str, render(run)))


def smaller_is_better(run: Run) -> list[dict[str, Any]]:
    """Return the median time of every measurement, and the round trips of those with small files."""
    entries: list[dict[str, Any]] = []
    for each in run.measurements:
        found = spread(each.samples_s)
        entries.append(_entry(each, "time", "s", found.median, found.deviation, run))
        trips = round_trips(run, each)
        if trips is not None and each.file_bytes <= SMALL_BYTES:
            scale = trips / found.median
            entries.append(_entry(each, "round trips", "RTT", trips, found.deviation * scale, run))
    return entries


def bigger_is_better(run: Run) -> list[dict[str, Any]]:
    """Return the throughput of every measurement with large files, and its share of raw TCP."""
    entries: list[dict[str, Any]] = []
    for each in run.measurements:
        if each.file_bytes <= SMALL_BYTES:
            continue
        total = each.files * each.file_bytes
        found = spread([total / sample for sample in each.samples_s])
        entries.append(_entry(each, "speed", "B/s", found.median, found.deviation, run))
        share = of_raw_tcp(run, each)
        if share is not None:
            scale = 100 * share / found.median
            deviation = found.deviation * scale
            entries.append(_entry(each, "of raw TCP", "%", 100 * share, deviation, run))
    return entries


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
