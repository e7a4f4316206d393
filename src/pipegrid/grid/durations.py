"""How long something is kept, as people write it: ``7 days``, ``12h``, ``30 minutes``."""

from __future__ import annotations

import re

_DURATION = re.compile(r"\s*([0-9]{1,9})\s*([a-z]+)\s*\Z", re.I)
_UNITS_S = {
    unit: seconds
    for units, seconds in (
        (("s", "second", "seconds"), 1),
        (("m", "min", "minute", "minutes"), 60),
        (("h", "hour", "hours"), 3600),
        (("d", "day", "days"), 86400),
        (("w", "week", "weeks"), 7 * 86400),
    )
    for unit in units
}
MIN_KEPT_S = 60


def parse_kept(text: str) -> int:
    """
    Return seconds, a minute at least.

    Raises:
        ValueError: it is no such duration.
    """
    match = _DURATION.match(text)
    unit = _UNITS_S.get(match[2].lower()) if match else None
    seconds = 0 if match is None or unit is None else int(match[1]) * unit
    if seconds < MIN_KEPT_S:
        raise ValueError("it must be a duration such as '7 days', '12 hours' or '30 minutes'")
    return seconds
