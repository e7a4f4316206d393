"""
Conversion of clock times and file times to dates, for any number of seconds.

A time before year 1 or after year 9999 becomes the first or the last date of the calendar, since a wrong
clock must not stop a server.
"""

from __future__ import annotations

from datetime import datetime, timezone

# One day inside the calendar on each side, so that these dates are valid in all time zones.
_FIRST_S = datetime(1, 1, 2, tzinfo=timezone.utc).timestamp()
_LAST_S = datetime(9999, 12, 30, 23, 59, 59, tzinfo=timezone.utc).timestamp()


def within_calendar(seconds: float) -> float:
    """
    Return a time in seconds since 1970 if a ``datetime`` can show it, otherwise the nearest time that it can
    show.
    """
    return min(max(seconds, _FIRST_S), _LAST_S)


def utc(seconds: float) -> datetime:
    """Return a time in seconds since 1970 as a date in UTC, or the nearest possible date."""
    return datetime.fromtimestamp(within_calendar(seconds), timezone.utc)
