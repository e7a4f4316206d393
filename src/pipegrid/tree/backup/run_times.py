"""
Times of runs, as people write them and as ``backups`` prints them. This module does no input or output.

A time without a zone is local time. It means a span, such as a day or a minute: ``--at`` uses the end of the
span, ``--newer`` its start. When clocks are set back, a local time can mean two instants: a start is the
earlier one, an end the later one. The same applies to a local time that is skipped when clocks are set
forward.
"""

from __future__ import annotations

import re
from datetime import datetime, time, timedelta, timezone, tzinfo
from typing import NamedTuple

from pipegrid.core import clamped_dates
from pipegrid.core.text import printable
from pipegrid.errors import UsageError

LATEST = "latest"
EXAMPLES = (
    "latest, 2026-11-22, 2026-11-22_18:23, 2026-11-22_18:23:31Z, yesterday, today, or 3d (ago)"
)

_HOURS = {"h": 1, "d": 24, "w": 7 * 24}
_TIME = re.compile(
    r"(?P<word>latest|now|today|yesterday)"
    r"|(?P<count>[0-9]{1,6})(?P<unit>[hdw])"
    r"|(?P<date>[0-9]{4}-[0-9]{2}-[0-9]{2})"
    r"(?:[_T ](?P<minute>[0-9]{2}:[0-9]{2})(?::(?P<second>[0-9]{2}))?)?"
    r"(?P<zone>Z|[+-][0-9]{2}:?[0-9]{2})?",
    re.IGNORECASE,
)


class TimeSpan(NamedTuple):
    """
    The span that a time means, in UTC.

    Attributes:
        first, last: the first and the last second of the span, which are equal for an instant.
    """

    first: datetime
    last: datetime


def time_at(text: str, start: int) -> int:
    """
    Return the index at which the time that begins at ``start`` ends, valid or not; ``start`` if none begins
    there.
    """
    found = _TIME.match(text, start)
    return start if found is None else found.end()


def is_latest(text: str) -> bool:
    """Return whether a text means the newest run."""
    return text.strip().lower() == LATEST


def looks_like_run(name: str) -> bool:
    """
    Return whether a name could be mistaken for ``NAME@TIME``, or for the start of such a text up to a colon
    in its time.
    """
    for found in re.finditer("@", name):
        time = _TIME.match(name, found.end())
        if found.start() and time and (time.end() == len(name) or time["date"]):
            return True
    return False


def parse_span(text: str, now: float, zone: tzinfo | None = None) -> TimeSpan:
    """
    Return the span of time that a text means.

    ``2026-11-22``, ``2026-11-22_18:23`` and ``2026-11-22_18:23:31`` are local times, unless ``Z`` or an
    offset such as ``+01:00`` follows; ``T`` or a space may replace ``_``. ``12h``, ``3d`` and ``2w`` are
    instants that long ago; a day has 24 hours. ``today`` and ``yesterday`` are local days, ``now`` is an
    instant.

    Args:
        now: seconds since 1970.
        zone: the zone of local times; None: the machine's zone.

    Raises:
        UsageError: the text is not a time.
    """
    text = text.strip()
    found = _TIME.fullmatch(text)
    if found is None or is_latest(text):
        raise _no_time(text)
    word = (found["word"] or "").lower()
    try:
        if found["count"]:
            ago_s = int(found["count"]) * _HOURS[found["unit"].lower()] * 3600
            return _instant(now - ago_s)
        if word == "now":
            return _instant(now)
        if word:
            today = clamped_dates.utc(now).astimezone(zone).date()
            day = today - timedelta(days=1) if word == "yesterday" else today
            return _span(datetime.combine(day, time()), timedelta(days=1), zone)
        return _written(found, zone)
    except (ValueError, OverflowError, OSError):  # this day, hour or year does not exist
        raise _no_time(text) from None


def run_time_text(at: datetime, zone: tzinfo | None = None) -> str:
    """
    Return the time of a run in local time with its offset, ``2026-11-22_19:23:31+01:00``; with ``Z`` if the
    zone is UTC.

    Args:
        zone: the zone of local times; None: the machine's zone.
    """
    try:
        local = clamped_dates.utc(at.timestamp()).astimezone(zone)
    except (ValueError, OverflowError, OSError):
        local = at
    offset = local.utcoffset() or timedelta()
    if not offset or offset.total_seconds() % 60:  # local mean time has odd offsets
        return at.astimezone(timezone.utc).strftime("%Y-%m-%d_%H:%M:%SZ")
    return local.replace(microsecond=0).isoformat(sep="_")


def _written(found: re.Match[str], zone: tzinfo | None) -> TimeSpan:
    """
    Return the span of a time that begins with a date: one second, one minute or one day, as far as it is
    given.
    """
    minute, second, offset = found["minute"], found["second"], found["zone"]
    start = datetime.fromisoformat(f"{found['date']}T{minute or '00:00'}:{second or '00'}")
    length = (
        timedelta(seconds=1) if second else timedelta(minutes=1) if minute else timedelta(days=1)
    )
    if offset:
        zone = _offset(offset)
    return _span(start, length, zone)


def _offset(text: str) -> timezone:
    if text in "Zz":
        return timezone.utc
    digits = text[1:].replace(":", "")
    length = timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
    return timezone(-length if text[0] == "-" else length)


def _span(start: datetime, length: timedelta, zone: tzinfo | None) -> TimeSpan:
    end = start + length - timedelta(seconds=1)
    return TimeSpan(min(_instants(start, zone)), max(_instants(end, zone)))


def _instants(local: datetime, zone: tzinfo | None) -> list[datetime]:
    """
    Return the instants that a local time may mean; these differ for times around a change of the clocks.
    """
    both = (local.replace(fold=fold, tzinfo=zone) for fold in (0, 1))
    return [each.astimezone(timezone.utc) for each in both]


def _instant(seconds: float) -> TimeSpan:
    at = clamped_dates.utc(seconds)
    return TimeSpan(at, at)


def _no_time(text: str) -> UsageError:
    return UsageError(f"'{printable(text[:40])}' is not a time; give one such as {EXAMPLES}")
