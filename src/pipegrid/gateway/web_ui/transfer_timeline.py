"""The timeline of a transfer as pictures and tables: what was done when, and what passed to which server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from pipegrid.core.text import amount, counted
from pipegrid.gateway.transfer_records import ServerTraffic, TrafficBurst, joined_bursts
from pipegrid.gateway.web_ui.page_templates import shown_millis

# The content policy of pages forbids inline styles: places and sizes are attributes of SVG, colours are in
# the style sheet. So the speed test's charts, which matplotlib draws with styles, cannot be used here.

WIDTH, HEIGHT = 640, 260
"""Of a picture, in its own units."""

LEFT, RIGHT, TOP, BOTTOM = 76, 16, 12, 36
"""Margins of the curve in it."""

_STEPS = (1, 2, 5)

# How much was acknowledged or delivered by when, as a curve of steps.


@attrs.frozen
class TimelineTick:
    """
    A mark of an axis.

    Attributes:
        at: its place in the picture.
    """

    at: float
    text: str


@attrs.frozen
class ProgressCurve:
    """
    The picture of a transfer.

    Attributes:
        curve, area: paths of SVG.
        across, up: ticks of time and of bytes.
        words: the same in a sentence, for those who do not see it.
        rows: the same as a table: time in seconds, and the amount.
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
    Return the picture of a transfer; None: too little is known for one.

    Args:
        samples: seconds since it began, and the fraction that was done.
        size: bytes of the file.
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
    """Return round numbers from 0 to an end, at most that many after the 0."""
    step = 1e-9
    while True:
        for factor in _STEPS:
            if end <= step * factor * most:
                width = step * factor
                return [round(width * number, 9) for number in range(int(end / width + 1e-9) + 1)]
        step *= 10


def _few(samples: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most ten of them, the last one always."""
    every = -(-len(samples) // 10)
    return list(reversed(samples[::-1][::every]))


# Which bytes passed to or from which server, and when: a row of bars for each server, on one axis of time.
#
# A row is a picture of its own, whose places are percentages of its width: it fits a phone, and its letters
# keep their size. A bar is as long as its bytes took, and the higher, the more bytes a second: by the root of
# that, so that a slow server is visible next to a fast one.

ROW_PX = 20
"""The height of a row."""

LEAST_BAR_PX = 3
"""The height of a bar with few bytes."""

LEAST_WIDTH = 0.004
"""The width of a short bar, as a part of its row; bursts within it are one bar."""

MOST_LISTED = 120
"""Bursts in the table, of all servers; of more, neighbours are joined."""


@attrs.frozen
class TrafficBar:
    """A bar: its place and width in percent of its row, its upper end and its height in pixels."""

    left: float
    width: float
    top: float
    height: float


@attrs.frozen
class TrafficRow:
    """
    The traffic of one server.

    Attributes:
        name: its nickname, with the beginning of its id if others have the same nickname.
        bars: in the order of time.
        rows: the same for the table: when bytes began and ended to pass, in seconds, and their number.
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
        across: ticks of time, in percent.
        words: what it shows, in a sentence without names.
    """

    servers: list[TrafficRow]
    across: list[TimelineTick]
    words: str
    row_px: int = ROW_PX


def server_timeline(servers: Sequence[ServerTraffic], age_s: float) -> ServerTimeline | None:
    """
    Return the picture of a transfer's traffic; None: there was none.

    Args:
        age_s: how long the transfer took, or has taken so far.
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
    """Return bursts of one server, with neighbours joined until there are few enough."""
    found, within_s = list(bursts), end_s / 1024
    while len(found) > most:
        found, within_s = joined_bursts(found, within_s), 2 * within_s
    return found
