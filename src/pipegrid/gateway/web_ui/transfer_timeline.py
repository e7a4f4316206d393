"""
The timeline of a transfer, as pictures and tables: its progress over time, and its traffic with each server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from pipegrid.core.text import amount, counted
from pipegrid.gateway.transfer_records import ServerTraffic, TrafficBurst, joined_bursts
from pipegrid.gateway.web_ui.page_templates import shown_millis

# The content policy of pages forbids inline styles. So positions and sizes are attributes of SVG elements,
# and colours are in the style sheet. The charts of the speed test cannot be used: matplotlib draws them with
# styles.

WIDTH, HEIGHT = 640, 260
"""Size of the progress picture, in SVG units."""

LEFT, RIGHT, TOP, BOTTOM = 76, 16, 12, 36
"""Margins around the curve, in SVG units."""

_STEPS = (1, 2, 5)

# The progress of a transfer, as a curve of steps: how many bytes were acknowledged or delivered by when.


@attrs.frozen
class TimelineTick:
    """
    A mark on an axis.

    Attributes:
        at: position of the mark, in the picture's unit.
    """

    at: float
    text: str


@attrs.frozen
class ProgressCurve:
    """
    The picture of a transfer's progress.

    Attributes:
        curve, area: SVG paths.
        across, up: marks on the axes of time and of bytes.
        words: the progress in a sentence, for people who cannot see the picture.
        rows: the progress as a table: time in seconds, and bytes until then.
    """

    curve: str
    area: str
    across: list[TimelineTick]
    up: list[TimelineTick]
    words: str
    rows: list[tuple[str, str]]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


def progress_curve(
    samples: Sequence[tuple[float, float]], size: int | None
) -> ProgressCurve | None:
    """
    Return the picture of a transfer's progress; None: too little is known.

    Args:
        samples: pairs: seconds since the beginning, and the fraction done by then.
        size: size of the file in bytes; None: not known.
    """
    if len(samples) < 2 or not size or samples[-1][0] <= 0:
        return None
    end_s = samples[-1][0]
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(at_s: float) -> float:
        return round(LEFT + wide * at_s / end_s, 1)

    def y(fraction: float) -> float:
        return round(TOP + high * (1 - fraction), 1)

    curve = f"M{x(0)} {y(0)}" + "".join(f"H{x(at_s)}V{y(done)}" for at_s, done in samples)
    unit, factor = ("ms", 1000.0) if end_s < 2 else ("s", 1.0)
    across = [
        TimelineTick(x(mark / factor), f"{mark:g} {unit}") for mark in ticks(end_s * factor, 5)
    ]
    up = [TimelineTick(y(mark / size), amount(round(mark))) for mark in ticks(size, 4)]
    rows = [(f"{at_s:.3f}", amount(round(size * done))) for at_s, done in _few(samples)]
    half_s = next(at_s for at_s, done in samples if done >= samples[-1][1] / 2)
    done = amount(round(size * samples[-1][1]))
    words = f"{done} in {_duration(end_s)}, the first half of it in {_duration(half_s)}"
    return ProgressCurve(curve, f"{curve}V{y(0)}H{x(0)}Z", across, up, words, rows)


def _duration(seconds: float) -> str:
    return shown_millis(seconds) if seconds < 2 else f"{seconds:.2f} s"


def ticks(end: float, most: int) -> list[float]:
    """Return round numbers from 0 to ``end`` with equal distances, at most ``most`` in addition to 0."""
    step = 1e-9
    while True:
        for factor in _STEPS:
            if end <= step * factor * most:
                width = step * factor
                return [round(width * number, 9) for number in range(int(end / width + 1e-9) + 1)]
        step *= 10


def _few(samples: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most ten of the samples, always with the last one."""
    every = -(-len(samples) // 10)
    return list(reversed(samples[::-1][::every]))


# Traffic: which bytes passed to or from which server, and when. Each server has a row of bars; all rows share
# one axis of time.
#
# Each row is a picture whose positions are percentages of its width, so it fits on a phone while its text
# keeps its size. The width of a bar is the time that its bytes took. Its height grows with the square root of
# the bytes per second, so that slow servers are visible next to fast ones.

ROW_PX = 20
"""Height of a row, in pixels."""

LEAST_BAR_PX = 3
"""Minimum height of a bar, in pixels."""

LEAST_WIDTH = 0.004
"""Minimum width of a bar, as a fraction of its row; neighbouring bursts that fit into this share one bar."""

MOST_LISTED = 120
"""Maximum bursts in the table, for all servers together; beyond it, neighbouring bursts are joined."""


@attrs.frozen
class TrafficBar:
    """A bar: ``left`` and ``width`` in percent of the row's width, ``top`` and ``height`` in pixels."""

    left: float
    width: float
    top: float
    height: float


@attrs.frozen
class TrafficRow:
    """
    The traffic of one server.

    Attributes:
        name: the server's nickname; if other servers have the same, also the beginning of its id.
        bars: the bars, in the order of time.
        rows: rows of the table: beginning and end of a burst in seconds, and its bytes.
    """

    name: str
    size: str
    bars: list[TrafficBar]
    rows: list[tuple[str, str, str]]


@attrs.frozen
class ServerTimeline:
    """
    The picture of a transfer's traffic.

    Attributes:
        across: marks on the axis of time; positions in percent.
        words: the traffic in a sentence without names.
    """

    servers: list[TrafficRow]
    across: list[TimelineTick]
    words: str
    row_px: int = ROW_PX


def server_timeline(servers: Sequence[ServerTraffic], age_s: float) -> ServerTimeline | None:
    """
    Return the picture of a transfer's traffic; None if no bytes passed.

    Args:
        age_s: duration of the transfer, until now if it is running.
    """
    end_s = max([age_s, *(server.bursts[-1].ended_s for server in servers)])
    if not servers or end_s <= 0:
        return None
    least_s = LEAST_WIDTH * end_s
    drawn = [joined_bursts(server.bursts, least_s) for server in servers]
    fastest = max(_rate(burst, least_s) for bursts in drawn for burst in bursts)
    alike = Counter(server.nickname for server in servers)
    most = max(1, MOST_LISTED // len(servers))
    rows = [
        TrafficRow(
            f"{server.nickname} ({server.server_id[:12]})"
            if alike[server.nickname] > 1 and server.server_id
            else server.nickname,
            amount(server.size_bytes),
            [_bar(burst, end_s, least_s, fastest) for burst in bursts],
            [
                (f"{burst.began_s:.3f}", f"{burst.ended_s:.3f}", amount(burst.size_bytes))
                for burst in _at_most(server.bursts, most, end_s)
            ],
        )
        for server, bursts in zip(servers, drawn, strict=True)
    ]
    unit, factor = ("ms", 1000.0) if end_s < 2 else ("s", 1.0)
    across = [
        TimelineTick(round(100 * mark / factor / end_s, 2), f"{mark:g} {unit}")
        for mark in ticks(end_s * factor, 4)
    ]
    size = amount(sum(server.size_bytes for server in servers))
    words = f"{size} of shares, {counted(len(servers), 'server')}, {_duration(end_s)}"
    return ServerTimeline(rows, across, words)


def _rate(burst: TrafficBurst, least_s: float) -> float:
    return burst.size_bytes / max(least_s, burst.ended_s - burst.began_s)


def _bar(burst: TrafficBurst, end_s: float, least_s: float, fastest: float) -> TrafficBar:
    part = (_rate(burst, least_s) / fastest) ** 0.5 if fastest else 0.0
    height = max(LEAST_BAR_PX, round(part * (ROW_PX - 2), 1))
    width = max(least_s, burst.ended_s - burst.began_s)
    left = min(burst.began_s, end_s - width)
    return TrafficBar(
        round(100 * left / end_s, 2), round(100 * width / end_s, 2), ROW_PX - height, height
    )


def _at_most(bursts: Sequence[TrafficBurst], most: int, end_s: float) -> list[TrafficBurst]:
    """Return bursts of one server, joining neighbours until at most ``most`` are left."""
    found, within_s = list(bursts), end_s / 1024
    while len(found) > most:
        found, within_s = joined_bursts(found, within_s), 2 * within_s
    return found
