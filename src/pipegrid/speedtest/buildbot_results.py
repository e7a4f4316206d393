"""
The verdict of a build step on a speed test: it reads figures from the test's lines and results from its JSON.
Pure, without Buildbot.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

import attrs

from pipegrid.core.text import counted
from pipegrid.errors import UsageError
from pipegrid.speedtest.report_figures import digits, rate
from pipegrid.speedtest.report_figures import seconds as duration
from pipegrid.speedtest.run_comparison import compare, title
from pipegrid.speedtest.run_results import Run, parse_run

_NUMBER = r"(\d+(?:\.\d+)?)"
_TIME = re.compile(rf"TIME \((.+)\): ((?:{_NUMBER} (?:up|down)(?:, )?)+)")
_PER_FILE = re.compile(rf"(upload|download) per-file time: {_NUMBER}s\b")
_PER_FILE_RTT = re.compile(rf"(upload|download) per-file times-(avg|total)-RTT: {_NUMBER}")
_SPEED = re.compile(
    rf"(upload|download) speed \((\d+[kMG]B)\): {_NUMBER}([kMG]?)Bps\b(?:.*?{_NUMBER}% of raw TCP)?"
)
_ROUND = re.compile(r"round \d+ of \d+: .+")
_KILOBYTES = {"": 0.001, "k": 1.0, "M": 1e3, "G": 1e6}

REQUIRED = ("upload-per-file", "download-per-file")
"""Figures that every complete test has; round trips may be unknown."""

MAX_PREFIX = 100
_PREFIX = re.compile(r"[a-zA-Z_-][.a-zA-Z0-9_-]*")
"""Prefixes allowed in paths of Buildbot's data API (``buildbot.util.pathmatch``), which finds old builds."""

_LEAST_RATE_BYTES = 100_000
"""Files smaller than this do not measure throughput."""


def prefix_problem(prefix: object) -> str | None:
    """Return, as a clause, why a text cannot be the prefix of a build's data; None if it can."""
    if not isinstance(prefix, str):
        return "must be a string"
    if len(prefix) > MAX_PREFIX:
        return f"must have at most {MAX_PREFIX} characters"
    if prefix and not _PREFIX.fullmatch(prefix):
        return (
            "must begin with a letter, '_' or '-', followed by these, digits or '.' (no spaces: Buildbot "
            f"finds data by this name), such as 'ten-servers-', not {prefix!r}"
        )
    return None


@attrs.define
class Follower:
    """
    Reads the lines of a speed test as they arrive: the progress of the rounds, then the figures.

    Attributes:
        figures: by property name: ``upload-per-file`` (seconds), ``upload-per-file-RTT`` and ``-total-RTT``
            (round trips), ``upload-10MB`` (kB a second) and ``upload-10MB-of-TCP`` (percent); the same for
            ``download``.
        last: the latest measurement, as text for people.
    """

    figures: dict[str, float] = attrs.field(factory=dict)
    last: str = ""

    def line(self, text: str) -> bool:
        """Process the next line of output; return whether it contained a figure or progress."""
        text = text.strip()
        if match := _TIME.match(text):
            name, times = match.group(1, 2)
            self.last = f"{name}: {times} (seconds)"
        elif _ROUND.match(text):
            self.last = text[:120]
        elif match := _PER_FILE.match(text):
            direction, seconds = match.groups()
            self.figures[f"{direction}-per-file"] = float(seconds)
            self.last = f"{direction}: {seconds} s a file"
        elif match := _PER_FILE_RTT.match(text):
            direction, kind, trips = match.groups()
            name = f"{direction}-per-file-{'' if kind == 'avg' else 'total-'}RTT"
            self.figures[name] = float(trips)
        elif match := _SPEED.match(text):
            direction, size, rate, unit, percent = match.groups()
            self.figures[f"{direction}-{size}"] = round(float(rate) * _KILOBYTES[unit], 5)
            self.last = f"{direction} of {size}: {rate} {unit}B/s"
            if percent is not None:
                self.figures[f"{direction}-{size}-of-TCP"] = float(percent)
                self.last += f", {percent} % of raw TCP"
        else:
            return False
        return True

    def missing(self) -> tuple[str, ...]:
        """Return the required figures that no line contained."""
        return tuple(name for name in REQUIRED if name not in self.figures)

    def summary(self) -> str:
        """Return the main figures as text for one line of a page."""
        parts = []
        for direction in ("upload", "download"):
            seconds = self.figures.get(f"{direction}-per-file")
            if seconds is None:
                continue
            part = f"{direction} {duration(seconds)} a file"
            trips = self.figures.get(f"{direction}-per-file-RTT")
            if trips is not None:
                part += f" ({digits(trips)} RTT)"
            sized = [name for name in self.figures if re.fullmatch(rf"{direction}-\d+[kMG]B", name)]
            if sized:  # the last size is the largest
                size = sized[-1].partition("-")[2]
                part += f", {size} at {rate(1000 * self.figures[sized[-1]])}"
            parts.append(part)
        return "; ".join(parts)


@attrs.frozen
class ResultSet:
    """Values of one unit, each with the name of its measurement."""

    description: str
    category: str
    unit: str
    results: tuple[tuple[str, float], ...]


def result_sets(run: Run) -> tuple[ResultSet, ...]:
    """
    Return the medians of all measurements, as three sets: seconds per file, round trips per file, plaintext
    bytes per second.
    """
    measured = [(title((each.group, each.direction, each.name)), each) for each in run.measurements]
    rtt_s = run.average_rtt_s
    sets = [
        ResultSet(
            "speed test: seconds a file",
            "time",
            "s",
            tuple((name, each.per_file_s) for name, each in measured),
        ),
        ResultSet(
            "speed test: bytes a second",
            "throughput",
            "B/s",
            tuple(
                (name, each.bytes_per_s)
                for name, each in measured
                if each.file_bytes >= _LEAST_RATE_BYTES and each.median_s
            ),
        ),
        ResultSet(
            "speed test: round trips a file",
            "round trips",
            "RTT",
            tuple(
                (name, each.per_file_s / rtt_s)
                for name, each in measured
                if rtt_s and each.file_bytes < _LEAST_RATE_BYTES
            ),
        ),
    ]
    return tuple(each for each in sets if each.results)


class EarlierBuilds:
    """
    Chooses the earlier builds with which a run is compared: the last few good builds with the same
    parameters.

    A build that was slower than the builds before it is left out; otherwise a second slow build in a row
    would pass. If the slowness of a build was accepted, that build is used, and all builds before it are left
    out.

    Attributes:
        runs: the chosen runs, the latest first.
        unlike: how many runs were left out because their machine or parameters differ.
    """

    def __init__(self, run: Run, limit: int) -> None:
        self._run = run
        self._limit = limit
        self._closed = limit <= 0
        self.runs: list[Run] = []
        self.unlike = 0

    def offer(self, document: bytes, regressed: bool, accepted: bool) -> None:
        """
        Examine the next earlier build, given as the JSON of its run; builds must come latest first.

        A build is skipped if it became slower and that was not accepted, or if this version cannot read its
        JSON.

        Args:
            regressed: whether the build was slower than the builds before it.
            accepted: whether its speed was accepted; then all builds before it are left out.
        """
        if self._closed:
            return
        self._closed = accepted
        if regressed and not accepted:
            return
        try:
            run = parse_run(document, "an earlier build")
        except UsageError:
            return
        if not alike(run, self._run):
            self.unlike += 1
            return
        self.runs.append(run)
        self._closed = accepted or len(self.runs) >= self._limit


def alike(one: Run, other: Run) -> bool:
    """
    Return whether two runs were measured on the same machine with the same parameters, except seed and number
    of rounds.
    """
    ours, theirs = (attrs.evolve(run.parameters, seed=0, rounds=0) for run in (one, other))
    shared = one.machine.keys() & other.machine.keys()
    return ours == theirs and all(one.machine[name] == other.machine[name] for name in shared)


@attrs.frozen
class Verdict:
    """
    The result of a build step.

    Attributes:
        sentence: for the build's summary.
        text: the whole comparison, for a log.
        regressed: whether any measurement became slower.
    """

    sentence: str
    text: str
    regressed: bool


def judge(run: Run, baseline: Sequence[Run], unlike: int = 0) -> Verdict:
    """
    Compare a run with earlier runs. This takes about a second, so call it in a worker thread.

    Args:
        baseline: the runs that ``EarlierBuilds`` chose.
        unlike: how many runs ``EarlierBuilds`` left out.
    """
    if not baseline:
        sentence = "nothing to compare with yet"
        if unlike:
            sentence = f"not compared: the last {unlike} builds had other parameters or machines"
        return Verdict(sentence, f"{sentence}\n", False)
    try:
        comparison = compare(list(reversed(baseline)), run)
    except UsageError as error:
        return Verdict(f"not compared: {error}", f"{error}\n", False)
    beside = f"compared with {counted(len(baseline), 'build')}"
    slower = [f"{each.name} {each.direction} {_percent(each.ratio)}" for each in comparison.slower]
    if slower:
        more = f" and {len(slower) - 3} more" if len(slower) > 3 else ""
        sentence = f"slower {beside}: {', '.join(slower[:3])}{more}"
    elif comparison.faster:
        sentence = f"{counted(len(comparison.faster), 'measurement')} faster {beside}"
    else:
        sentence = f"no change {beside}"
    return Verdict(sentence, comparison.as_text(everything=True), comparison.regressed)


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.0f} %"


def last_words(lines: Iterable[str]) -> str:
    """Return the last line of output that is not empty, which usually gives the reason of a failure."""
    said = [line.strip() for line in lines if line.strip()]
    return said[-1][:500] if said else ""


def framed(report: str) -> str:
    """
    Return an HTML page that shows another page in a frame.

    A build master shows HTML logs inside its own page. A report comes from a worker and may contain styles
    and scripts: in the frame they cannot affect the master's page.
    """
    return (
        '<iframe sandbox="allow-scripts" title="speed test report"'
        ' style="width:100%;height:85vh;border:0;background:Canvas" srcdoc="\n'
        f'{html.escape(report, quote=True)}"></iframe>\n'
    )
