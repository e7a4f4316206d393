"""
Rate limits by direction and time of the week: ``1M``, ``1M:2M``, ``08:00,1M:2M 19:00,off``.

The spelling is that of rclone's ``--bwlimit``. These functions read no clock: callers pass the local time.
Only the local time decides which rates are in effect, so a jump of the clock, as at the end of summer time,
counts at the next comparison (``LOOK_S``).
"""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

MINUTES_A_DAY = 24 * 60
MINUTES_A_WEEK = 7 * MINUTES_A_DAY
MAX_ENTRIES = 1000
"""The most entries of a timetable: more than one for each quarter of an hour of a week."""

LOOK_S = 1.0
"""How often the time of day is compared with a timetable, in seconds."""

_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_TIME = re.compile(r"(?:(?P<day>[A-Za-z]{3,9})-)?(?P<hour>[0-9]{1,2}):(?P<minute>[0-9]{2})\Z")


class Rates(NamedTuple):
    """
    Limits in bytes per second; None: no limit.

    Attributes:
        sent: the limit for sending, over all connections together.
        received: the limit for receiving, over all connections together.
    """

    sent: int | None
    received: int | None


NO_LIMIT = Rates(None, None)


class RateTimetable(NamedTuple):
    """
    The rates at each time of the week.

    Attributes:
        begins: the minutes of the week at which rates change, from Monday 00:00, ascending; at least one.
        rates: the rates that begin at each of these minutes; the last ones also hold before the first minute.
    """

    begins: tuple[int, ...]
    rates: tuple[Rates, ...]

    def at(self, minute: int) -> Rates:
        """Return the rates at a minute of the week."""
        return self.rates[bisect_right(self.begins, minute) - 1]


RateLimit = int | RateTimetable
"""One rate for both directions, or rates by direction and time."""


def minute_of_week(now: time.struct_time) -> int:
    """Return the minute of the week at a local time, such as ``time.localtime()``."""
    return now.tm_wday * MINUTES_A_DAY + now.tm_hour * 60 + now.tm_min


def as_timetable(limit: RateLimit) -> RateTimetable:
    """Return a limit as a timetable that has the same effect."""
    if isinstance(limit, RateTimetable):
        return limit
    return RateTimetable((0,), (Rates(limit, limit),))


def parse_rate_limit(text: str, parse_rate: Callable[[str], int]) -> RateLimit | None:
    """
    Parse a limit: ``RATE``, ``UP:DOWN``, or a timetable with entries ``[DAY-]HH:MM,RATE``.

    A rate may be ``off``. Blanks or semicolons separate entries; an entry without a day is for every day. Of
    two entries for the same minute, the later one counts.

    Args:
        parse_rate: returns bytes per second; raises ValueError.

    Returns:
        The limit, or None if there is no limit at any time.

    Raises:
        ValueError: the text is not a limit; the message is a sentence for the user.
    """
    entries = re.split(r"[\s;]+", text.strip(" \t\n;"), maxsplit=MAX_ENTRIES)
    if len(entries) > MAX_ENTRIES:
        raise ValueError(f"a timetable has at most {MAX_ENTRIES} entries")
    slots: dict[int, Rates] = {}
    if "," not in text:
        slots[0] = _rates(text.strip(), parse_rate)
    else:
        for entry in entries:
            when, comma, rate = entry.partition(",")
            if not comma:
                raise ValueError(
                    f"{entry!r} has no time; an entry of a timetable is like 08:00,1M:2M"
                )
            for minute in _minutes(when):
                slots[minute] = _rates(rate, parse_rate)
    if all(rates == NO_LIMIT for rates in slots.values()):
        return None
    begins = tuple(sorted(slots))
    rates = tuple(slots[minute] for minute in begins)
    only = rates[0]
    if len(rates) == 1 and only.sent == only.received:
        return only.sent
    return RateTimetable(begins, rates)


def _minutes(text: str) -> list[int]:
    """Return the minutes of the week at which an entry begins."""
    match = _TIME.match(text)
    day = None if match is None else (match["day"] or "").lower()
    days = [number for number, name in enumerate(_DAYS) if day in ("", name, name[:3])]
    if match is None or not days or int(match["hour"]) > 23 or int(match["minute"]) > 59:
        raise ValueError(f"{text!r} is not a time such as 08:00 or Mon-08:00")
    minute = int(match["hour"]) * 60 + int(match["minute"])
    return [number * MINUTES_A_DAY + minute for number in days]


def _rates(text: str, parse_rate: Callable[[str], int]) -> Rates:
    sent, colon, received = text.partition(":")
    first = _rate(sent, parse_rate)
    return Rates(first, _rate(received, parse_rate) if colon else first)


def _rate(text: str, parse_rate: Callable[[str], int]) -> int | None:
    return None if text.strip().lower() == "off" else parse_rate(text)
