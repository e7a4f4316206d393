"""
Conversion of clock and file times to dates, for any number of seconds.

A time outside the calendar (years 1 to 9999) is shown as its first or last day, since a wrong clock must
not stop a server.
"""

from __future__ import annotations

from datetime import datetime, timezone

# A day less on each side, so that they are valid dates in all time zones.
_FIRST_S = datetime(1, 1, 2, tzinfo=timezone.utc).timestamp()
_LAST_S = datetime(9999, 12, 30, 23, 59, 59, tzinfo=timezone.utc).timestamp()


def within_calendar(seconds: float) -> float:
    """Return a time in seconds since 1970, or the nearest that a ``datetime`` can show."""
    return min(max(seconds, _FIRST_S), _LAST_S)


def utc(seconds: float) -> datetime:
    """Return a time in seconds since 1970 as a date in UTC, or the nearest possible date."""
    return datetime.fromtimestamp(within_calendar(seconds), timezone.utc)
