"""
Dates of clocks and files that may be far off: a machine may be set to any year, and a calendar has 9999.

What is beyond a calendar is shown as its first or last day, since a date in a log must not stop a server.
"""

from __future__ import annotations

from datetime import datetime, timezone

# A day less than there are, so that they are dates in all time zones.
_FIRST_S = datetime(1, 1, 2, tzinfo=timezone.utc).timestamp()
_LAST_S = datetime(9999, 12, 30, 23, 59, 59, tzinfo=timezone.utc).timestamp()


def within_calendar(seconds: float) -> float:
    """Return a time, in seconds since 1970, or the nearest that a ``datetime`` can show."""
    return min(max(seconds, _FIRST_S), _LAST_S)


def utc(seconds: float) -> datetime:
    """Return a time, in seconds since 1970, as a date in UTC; the nearest if no calendar has it."""
    return datetime.fromtimestamp(within_calendar(seconds), timezone.utc)
