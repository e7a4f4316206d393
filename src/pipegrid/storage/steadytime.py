"""
Whether the clock may be believed where shares would be removed for good.

Leases run out by the clock. One that is a year ahead would end all of them at once; and a server that comes
back after two months would find all of them run out, before anybody could renew one. So a note in the storage
directory says when leases were last looked at, and since when that was done regularly: only then is anything
removed. A clock that is set right again begins this anew, and has cost nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import attrs

from pipegrid.disk.reading import read_file
from pipegrid.disk.replacing import replace_file

NOTE_NAME = "lease-looks.json"
HELD_S = 7 * 24 * 3600
"""Time for clients to renew their leases, and for an operator to see what the log says."""

MOST_APART_S = HELD_S
MAX_NOTE_BYTES = 1000


@attrs.frozen
class Looks:
    """
    When it was looked at leases, in seconds since 1970.

    Attributes:
        since_s: the first time, before which nobody knows, or too long a time had passed.
        last_s: the last time.
    """

    since_s: float
    last_s: float

    @property
    def held_s(self) -> float:
        """For how long nothing is removed yet, in seconds; 0: leases are believed."""
        return max(0.0, HELD_S - (self.last_s - self.since_s))


def next_look(before: Looks | None, now: float) -> Looks:
    """
    Return what is to be noted when it is looked once more.

    Args:
        before: what was noted the last time, if anything.
        now: seconds since 1970, as far as this machine knows.
    """
    if before is None or not 0 <= now - before.last_s <= MOST_APART_S:
        return Looks(now, now)
    return Looks(before.since_s, now)


def look(storage: Path, now: float) -> Looks:
    """
    Look once more, and note that in a storage directory.

    Raises:
        OSError: it cannot be noted; nothing may be removed then.
    """
    path = storage / NOTE_NAME
    found = next_look(_read(path), now)
    replace_file(path, json.dumps(attrs.asdict(found)).encode("ascii") + b"\n")
    return found


def _read(path: Path) -> Looks | None:
    """What was noted; a note that is damaged counts as none."""
    try:
        noted = json.loads(read_file(path, MAX_NOTE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(noted, Mapping):
        return None
    since, last = noted.get("since_s"), noted.get("last_s")
    if not isinstance(since, int | float) or not isinstance(last, int | float) or since > last:
        return None
    return Looks(since, last)
