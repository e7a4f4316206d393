"""The pages of transfers: those that run and those that have ended, and the timeline of one as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from pipegrid.core.text import amount
from pipegrid.gateway.http_response import HttpResponse
from pipegrid.gateway.transfer_records import TransferKind, TransferRecord, TransferRecords
from pipegrid.gateway.web_api.check_json import storage_index_text
from pipegrid.gateway.web_ui.page_templates import render_page, shown_millis

WIDTH, HEIGHT = 640, 260
"""Of a picture, in its own units."""

LEFT, RIGHT, TOP, BOTTOM = 76, 16, 12, 36
"""Margins of the curve in it."""

_STEPS = (1, 2, 5)

KIND_NAMES: dict[TransferKind, tuple[str, str]] = {
    "upload": ("up", "Upload"),
    "download": ("down", "Download"),
    "publish": ("publish", "Change"),
    "retrieve": ("retrieve", "Read"),
}
"""Of each kind the word in the path of its page, and what people call it."""

_TONES = {"running": "", "finished": "good", "failed": "bad", "cancelled": "warn"}


@attrs.frozen
class TransferLine:
    """
    A transfer as the list shows it.

    Attributes:
        url: of its page.
        took: how long, in words; empty: it runs, or its begin was not recorded.
    """

    name: str
    url: str
    size: int | None
    percent: int
    state: str
    tone: str
    problem: str
    started_s: float
    took: str


def transfers_page(records: TransferRecords) -> HttpResponse:
    """Return the page about all transfers."""
    running = _lines(records.active)
    values = {
        "title": "Transfers",
        "here": "/status",
        "running": running,
        "recent": _lines(records.recent),
    }
    return render_page("transfers.html", values)


def _lines(records: Iterable[TransferRecord]) -> list[TransferLine]:
    return [_line(record) for record in records]


def _line(record: TransferRecord) -> TransferLine:
    path, word = KIND_NAMES[record.kind]
    return TransferLine(
        f"{word} {record.number}",
        f"/status/{path}-{record.number}",
        record.size,
        round(100 * record.fraction),
        record.state,
        _TONES[record.state],
        record.problem,
        record.started_s,
        _duration(record.took_s),
    )


def _duration(seconds: float | None) -> str:
    if seconds is None or seconds < 10:
        return shown_millis(seconds)
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def transfer_page(record: TransferRecord) -> HttpResponse:
    """Return the page about one transfer, with its timeline."""
    values: dict[str, Any] = {
        "title": f"{KIND_NAMES[record.kind][1]} {record.number}",
        "line": _line(record),
        "index": storage_index_text(record.cap),
        "timeline": timeline(record.samples, record.size),
        "servers": sorted(record.servers.items()),
        "is_upload": record.kind == "upload",
    }
    return render_page("transfer.html", values)


# The timeline: how much was acknowledged or delivered by when, as a curve of steps.


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
class TransferTimeline:
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


def timeline(samples: Sequence[tuple[float, float]], size: int | None) -> TransferTimeline | None:
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
    words = f"{amount(round(size * samples[-1][1]))} in {end_s:.2f} s, the first half of it in {half_s:.2f} s"
    area = f"{curve}V{y(0)}H{x(0)}Z"
    return TransferTimeline(curve, area, across, up, words, rows)


def ticks(end: float, most: int) -> list[float]:
    """Return round numbers from 0 to an end, at most so many after the 0."""
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
