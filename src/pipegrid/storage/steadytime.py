"""
Whether the clock may be believed where shares would be removed for good.

Leases run out by the clock. One that is a year ahead would end all of them at once; and a server that comes
back after two months would find all of them run out, before anybody could renew one. So a note in the storage
directory says when leases were last looked at, and since when that was done regularly: only then is anything
removed. A clock that is set right again begins this anew, and has cost nothing.

A clock that is set back for a minute, or shows 1970 until a time server has answered, would give leases that
have run out long ago as soon as it is right again, and the next look would remove what was stored in that
minute. So no lease is made with a date before one that was believed already.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path

import attrs

from pipegrid.core import dates
from pipegrid.disk.reading import read_file
from pipegrid.disk.replacing import replace_file
from pipegrid.storage.containers import LEASE_DURATION_S
from pipegrid.storage.leaserecords import NEVER_S

NOTE_NAME = "lease-looks.json"
HELD_S = 7 * 24 * 3600
"""Time for clients to renew their leases, and for an operator to see what the log says."""

MOST_APART_S = HELD_S
MAX_NOTE_BYTES = 1000
_RELEASED_S = 1_735_689_600.0  # 2025-01-01, before which nobody had this program


@attrs.frozen
class Looks:
    """
    When it was looked at leases, in seconds since 1970.

    Attributes:
        since_s: the first time, before which nobody knows, or too long a time had passed.
        last_s: the last time.
        believed_s: the last time that leases were believed; None: they never were.
    """

    since_s: float
    last_s: float
    believed_s: float | None = None

    @property
    def held_s(self) -> float:
        """For how long nothing is removed yet, in seconds; 0: leases are believed."""
        return max(0.0, HELD_S - (self.last_s - self.since_s))

    @property
    def reached_s(self) -> float | None:
        """A date that has been reached, whatever the clock shows; None: nobody knows one."""
        return self.believed_s if self.held_s else self.last_s


def next_look(before: Looks | None, now: float) -> Looks:
    """
    Return what is to be noted when it is looked once more.

    Args:
        before: what was noted the last time, if anything.
        now: seconds since 1970, as far as this machine knows.
    """
    if before is None:
        return Looks(now, now)
    regular = 0 <= now - before.last_s <= MOST_APART_S
    found = Looks(before.since_s if regular else now, now, before.reached_s)
    return attrs.evolve(found, believed_s=found.reached_s)


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
    believed = noted.get("believed_s")  # older versions noted none
    known = isinstance(believed, int | float) and 0 <= believed <= NEVER_S
    return Looks(since, last, believed if known else None)


def why_wrong(now: float) -> str | None:
    """Return, as a sentence for the log, why a clock is wrong that shows ``now``; None: it may be right."""
    shown = f"the clock of this machine is wrong, it shows {dates.utc(now):%Y-%m-%d}"
    if now < _RELEASED_S:
        return f"{shown}: leases made now may have run out once it is right; set it"
    if now + LEASE_DURATION_S > NEVER_S:
        return f"{shown}: leases made now never end; set it"
    return None


class SteadyDate:
    """
    The date by which leases are made: what the clock shows, but never before a date that has been reached.

    Args:
        storage: the directory with the note of what was believed.
        clock: seconds since 1970, as far as this machine knows.
        monotonic: seconds since some moment, whatever the clock is set to.
    """

    def __init__(
        self,
        storage: Path,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._reached = -inf, 0.0  # a date, and when that was, by the other clock
        found = _read(storage / NOTE_NAME)
        if found is not None:
            self.looked(found)

    def __call__(self) -> float:
        """Return seconds since 1970. Any thread may ask."""
        reached_s, at = self._reached
        return max(self._clock(), reached_s + self._monotonic() - at)

    def looked(self, looks: Looks) -> None:
        """It was looked at leases once more."""
        if looks.reached_s is not None:
            self._reached = looks.reached_s, self._monotonic()
