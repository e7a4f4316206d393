"""
The figures of a report as text, each with spread and ceiling. Pure; both the page and its charts use them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import attrs

from pipegrid.speedtest.run_results import (
    COLD_START,
    DIRECTIONS,
    DOWN,
    ENCODING,
    GROUPS,
    SCENARIO,
    UP,
    WINDOW,
    Measurement,
    Run,
    spread,
)

LARGE_BYTES = 500_000
"""Rounds with fewer bytes measure round trips; rounds with more measure bandwidth."""

NEAR_S = 1e-3
"""Round trips shorter than this are within one machine or one local network."""

MOST_BARS = 10
"""The most groups of bars in a picture."""

KNEE = 0.95
"""The knee of the window curve is the smallest window that reaches this share of the best throughput."""

TITLES = {
    SCENARIO: "Scenarios",
    WINDOW: "Windows",
    ENCODING: "Encodings",
    COLD_START: "Cold start of the command",
}

VERBS = {UP: "store", DOWN: "fetch"}


@attrs.frozen
class Figure:
    """
    One main figure.

    Attributes:
        direction: ``up`` or ``down``.
        title: such as ``Store one small file``.
        value, unit: as text, such as ``1.05`` and ``round trips``.
        spread: the spread of the samples, as text.
        bound: what the path allows, as text: for a rate the ceiling, for a time the floor.
        share: the figure as a share of what is possible, 0 to 1; None if unknown.
    """

    direction: str
    title: str
    value: str
    unit: str
    spread: str
    bound: str
    share: float | None


@attrs.frozen
class Row:
    """One measurement as a row of a table, in text."""

    name: str
    direction: str
    per_file: str
    trips: str
    rate: str
    share: str
    spread: str
    rounds: int


def seconds(value: float) -> str:
    """Return a duration as text with three digits."""
    if value >= 600:
        return f"{digits(value / 60)} min"
    for limit, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= limit:
            return f"{digits(value / limit)} {unit}"
    return f"{digits(value * 1e6)} µs"


def rate(value: float) -> str:
    """Return a rate in bytes per second as text with three digits."""
    return f"{size(value)}/s"


def round_rate(value: float) -> str:
    """Return a round rate as text for an axis: ``50 kB/s``."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= limit:
            return f"{value / limit:g} {unit}/s"
    return f"{value:g} B/s"


def between(low: float, high: float) -> str:
    """Return a range of durations as text, with the unit only once if both have the same unit."""
    first, second = seconds(low), seconds(high)
    if first == second:
        return second
    unit = second.rpartition(" ")[2]
    return f"{first.removesuffix(f' {unit}')} to {second}"


def size(value: float) -> str:
    """Return a number of bytes as text with three digits, in decimal units."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= limit * 0.9995:
            return f"{digits(value / limit)} {unit}"
    return f"{digits(value)} B"


def digits(value: float) -> str:
    """Return a number as text with three significant digits, never in exponential notation."""
    if value >= 99.95:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def percent(share: float) -> str:
    """Return a share as text: ``97.3 %``."""
    return f"{100 * share:.1f} %"


def trips(run: Run, measured: Measurement) -> tuple[float, ...]:
    """Return the round trips per file of each round: time ÷ files ÷ mean round trip; empty if unknown."""
    average_s = run.average_rtt_s
    if not average_s:
        return ()
    return tuple(sample / measured.files / average_s for sample in measured.samples_s)


def raw(run: Run, direction: str) -> tuple[float, ...]:
    """
    Return the samples of raw TCP, in bytes per second, with which throughput is compared; empty if not
    measured.

    The streams have no TLS, and there are as many as servers; only one stream if no others were measured.
    """
    for streams in (run.parameters.servers, 1):
        for each in run.baselines:
            if (each.direction, each.streams, each.tls) == (direction, streams, False):
                return each.samples
    return ()


def shares(run: Run, measured: Measurement) -> tuple[float, ...]:
    """Return for each round the share bytes per second ÷ raw TCP; empty if unknown."""
    ceiling = raw(run, measured.direction)
    if not ceiling or not measured.wire_bytes:
        return ()
    middle = statistics.median(ceiling)
    return tuple(measured.wire_bytes / sample / middle for sample in measured.samples_s)


def group(run: Run, name: str, direction: str) -> list[Measurement]:
    """Return the measurements of a group in one direction."""
    return [each for each in run.measurements if (each.group, each.direction) == (name, direction)]


def small(run: Run, direction: str) -> list[Measurement]:
    """Return the scenarios of one direction that measure round trips, at most ``MOST_BARS``."""
    found = group(run, SCENARIO, direction)
    return [each for each in found if not _bulky(each) and trips(run, each)][:MOST_BARS]


def large(run: Run, direction: str) -> list[Measurement]:
    """Return the scenarios of one direction that measure throughput, at most ``MOST_BARS``."""
    found = group(run, SCENARIO, direction)
    return [each for each in found if _bulky(each) and shares(run, each)][:MOST_BARS]


def _bulky(measured: Measurement) -> bool:
    """Return whether rounds of a measurement measure bandwidth."""
    return measured.files * measured.file_bytes >= LARGE_BYTES


def one_small(run: Run, direction: str) -> Measurement | None:
    """
    Return the measurement with the fewest and smallest files on open connections, usually one small file;
    None if no scenario measures round trips.
    """
    found = [each for each in small(run, direction) if each.name != "startup"]
    return min(found, key=lambda each: (each.files, each.file_bytes), default=None)


def largest(run: Run, direction: str) -> Measurement | None:
    """Return the throughput measurement with the largest files; None if no scenario measures throughput."""
    return max(large(run, direction), key=lambda each: each.file_bytes, default=None)


def window_curve(run: Run, direction: str) -> list[Measurement]:
    """Return the measurements of the fixed windows, from narrow to wide."""
    found = [each for each in group(run, WINDOW, direction) if each.window_bytes is not None]
    return sorted(found, key=lambda each: each.window_bytes or 0)


def auto_window(run: Run, direction: str) -> Measurement | None:
    """Return the measurement of the automatic window; None without a window sweep."""
    return next((each for each in group(run, WINDOW, direction) if each.window_bytes is None), None)


def knee(curve: Sequence[Measurement]) -> Measurement | None:
    """Return the smallest window whose throughput is nearly the best; None without a window sweep."""
    best = max((each.bytes_per_s for each in curve), default=0.0)
    return next((each for each in curve if each.bytes_per_s >= KNEE * best), None)


def headline(run: Run) -> tuple[str, str]:
    """Return the main sentence and a second sentence; the spread is left out if there is only one sample."""
    # On a near network, round trips hardly matter.
    near = (run.average_rtt_s or 0.0) < NEAR_S
    costs: list[str] = []
    for way in DIRECTIONS:
        measured = one_small(run, way)
        if measured is not None and len(measured.samples_s) > 1:
            count = digits(statistics.median(trips(run, measured)))
            unit = "" if costs else " round trips"
            cost = seconds(measured.per_file_s) if near else f"{count}{unit}"
            costs.append(f"{cost} to {VERBS[way]}")
    first = "What a run of the speed test measured."
    if costs:
        first = f"One small file takes {', '.join(costs)}."
    said: list[str] = []
    for way in DIRECTIONS:
        measured = largest(run, way)
        if measured is not None and len(measured.samples_s) > 1:
            share = percent(statistics.median(shares(run, measured)))
            name = "" if measured.name in " ".join(said) else f"{measured.name} "
            said.append(f"{name}{'goes up' if way == UP else 'comes down'} at {share}")
    second = ""
    if said:
        second = f"{' and '.join(said)} of what raw TCP carried in the same run, counted in bytes of shares."
    return first, second


def main_figures(run: Run) -> list[Figure]:
    """Return the main figures of a run."""
    found = []
    for way in DIRECTIONS:
        measured = one_small(run, way)
        if measured is not None:
            values = spread(trips(run, measured))
            found.append(
                Figure(
                    way,
                    f"{VERBS[way].capitalize()} a small file",
                    digits(values.median),
                    "round trips",
                    _range(digits(values.minimum), digits(values.maximum), values.count),
                    f"floor: 1 round trip, {seconds(run.average_rtt_s or 0)};"
                    f" here {seconds(measured.per_file_s)}",
                    min(1 / values.median, 1.0) if values.median else None,
                )
            )
    for way in DIRECTIONS:
        measured = largest(run, way)
        if measured is not None:
            values = spread(shares(run, measured))
            found.append(
                Figure(
                    way,
                    f"{VERBS[way].capitalize()} {measured.name}",
                    percent(values.median),
                    "of raw TCP, in bytes of shares",
                    _range(percent(values.minimum), percent(values.maximum), values.count),
                    f"ceiling: {rate(statistics.median(raw(run, way)))};"
                    f" here {rate(measured.wire_bytes_per_s)} of shares",
                    min(values.median, 1.0),
                )
            )
    return found


def _range(low: str, high: str, count: int) -> str:
    if count == 1:
        return "one round, so no spread"
    return f"{low} to {high} in {count} rounds"


def rows(run: Run) -> dict[str, list[Row]]:
    """
    Return every measurement as text, by group; the rows for up and down of a measurement are consecutive.
    """
    found: dict[str, list[Row]] = {}
    for name in GROUPS:
        members = [each for each in run.measurements if each.group == name]
        order = list(dict.fromkeys(each.name for each in members))
        for each in sorted(members, key=lambda each: order.index(each.name)):
            found.setdefault(TITLES[name], []).append(_row(run, each))
    return found


def _row(run: Run, measured: Measurement) -> Row:
    values = spread(measured.samples_s)
    trip_samples, share_samples = trips(run, measured), shares(run, measured)
    bulky, command = _bulky(measured), measured.group == COLD_START
    return Row(
        name=measured.name,
        direction="" if command else measured.direction,
        per_file=seconds(measured.per_file_s),
        trips=digits(statistics.median(trip_samples))
        if trip_samples and not bulky and not command
        else "",
        rate=rate(measured.bytes_per_s) if measured.file_bytes else "",
        share=percent(statistics.median(share_samples)) if share_samples and bulky else "",
        spread=between(values.minimum, values.maximum),
        rounds=values.count,
    )


def baseline_rows(run: Run) -> list[tuple[str, str, str, str]]:
    """Return the throughput of raw streams as rows of name, direction, median and spread."""
    found = []
    for each in run.baselines:
        if each.samples:
            values = spread(each.samples)
            streams = "one stream" if each.streams == 1 else f"{each.streams} streams"
            found.append(
                (
                    f"{streams}, {'TLS' if each.tls else 'plain'}",
                    each.direction,
                    rate(values.median),
                    f"{rate(values.minimum)} to {rate(values.maximum)}",
                )
            )
    return found


def setting(run: Run) -> str:
    """Return one line that says what was measured."""
    parameters = run.parameters
    said = [
        parameters.target,
        parameters.transport,
        f"{parameters.servers} servers",
        f"{parameters.required_shares} of {parameters.total_shares} shares",
    ]
    if parameters.link is not None:
        said.append(f"emulated link “{parameters.link.name}”")
    if run.round_trips:
        average = seconds(run.average_rtt_s or 0)
        least = seconds(min(each.minimum_s for each in run.round_trips))
        said.append(f"round trip {average} on average, {least} at the least")
    return ", ".join(said)


def facts(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return parameters, machine and versions: for each title, pairs of name and value."""
    parameters = run.parameters
    asked = [
        ("target", parameters.target),
        ("transport", parameters.transport),
        ("servers", str(parameters.servers)),
        ("shares", f"{parameters.required_shares} of {parameters.total_shares}"),
        ("happiness", str(parameters.happy)),
        ("window", parameters.window),
        ("durability", parameters.durability or "the server's own"),
        ("rounds", str(parameters.rounds)),
        ("seed", str(parameters.seed)),
        ("took", seconds(run.took_s)),
    ]
    link = parameters.link
    if link is not None:
        ways = [
            f"{way} {rate(value)}"
            for way, value in (("up", link.up_bytes_per_s), ("down", link.down_bytes_per_s))
            if value is not None
        ]
        asked.append(("link", ", ".join([link.name, seconds(link.rtt_s), *ways])))
    return [
        ("Parameters", asked),
        ("Machine", list(run.machine.items())),
        ("Versions", [("commit", run.commit or "none"), *run.versions.items()]),
    ]


def encodings(run: Run, direction: str) -> list[Measurement]:
    """Return the measurements of the encoding sweep (k/n)."""
    return group(run, ENCODING, direction)
