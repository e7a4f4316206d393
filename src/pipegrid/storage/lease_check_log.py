"""
The record of lease checks, which shows whether the clock is reliable enough to remove shares; and a date for
new leases that never decreases.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path

import attrs

from pipegrid.core import clamped_dates
from pipegrid.disk.atomic_write import replace_file
from pipegrid.disk.safe_open import read_file
from pipegrid.reactor.process_settings import wall_time
from pipegrid.storage.share_file import LEASE_DURATION_S, NEVER_S

# Leases expire by the clock. With a clock that is a year fast, all leases would expire at once; after two
# months without power, all would have expired before a client could renew one. So a note in the storage
# directory records when leases were last checked, and when the current period of regular checks (at most
# ``MOST_APART_S`` apart) began. Shares are removed only after ``HELD_S`` of regular checks. When a clock is
# set back or jumps further ahead, this period starts again.
#
# If a clock is set back for a minute, or shows 1970 until NTP has answered, leases made meanwhile would be
# expired as soon as the clock is right again. So no lease starts before a date that is known to have passed.

NOTE_NAME = "lease-looks.json"
HELD_S = 7 * 24 * 3600
"""How long checks must be regular before shares are removed: time to renew leases, and to read the log."""

MOST_APART_S = HELD_S
MAX_NOTE_BYTES = 1000
_RELEASED_S = 1_735_689_600.0  # 2025-01-01, before PipeGrid's first release


@attrs.frozen
class LeaseCheckLog:
    """
    When leases were checked, in seconds since 1970.

    Attributes:
        since_s: the first check of the current period of regular checks.
        last_s: the last check.
        believed_s: the last check after which expired shares could be removed; None if there was none.
    """

    since_s: float
    last_s: float
    believed_s: float | None = None

    @property
    def held_s(self) -> float:
        """For how many more seconds no share is removed; 0 if expired shares are removed."""
        return max(0.0, HELD_S - (self.last_s - self.since_s))

    @property
    def reached_s(self) -> float | None:
        """A date that has passed for certain, whatever the clock shows; None if none is known."""
        return self.believed_s if self.held_s else self.last_s


def next_look(before: LeaseCheckLog | None, now: float) -> LeaseCheckLog:
    """
    Return the record after another check.

    Args:
        before: the previous record, if any.
        now: the machine's clock, in seconds since 1970.
    """
    if before is None:
        return LeaseCheckLog(now, now)
    regular = 0 <= now - before.last_s <= MOST_APART_S
    found = LeaseCheckLog(before.since_s if regular else now, now, before.reached_s)
    return attrs.evolve(found, believed_s=found.reached_s)


def look(storage: Path, now: float) -> LeaseCheckLog:
    """
    Record another check in the note of a storage directory; return the new record.

    Raises:
        OSError: the note cannot be written; then nothing may be removed.
    """
    path = storage / NOTE_NAME
    found = next_look(_read(path), now)
    replace_file(path, json.dumps(attrs.asdict(found)).encode("ascii") + b"\n")
    return found


def _read(path: Path) -> LeaseCheckLog | None:
    """Return the last record; None if the note is missing or damaged."""
    try:
        noted = json.loads(read_file(path, MAX_NOTE_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(noted, Mapping):
        return None
    since, last = noted.get("since_s"), noted.get("last_s")
    if not isinstance(since, int | float) or not isinstance(last, int | float) or since > last:
        return None
    believed = noted.get("believed_s")  # older versions did not record this
    known = isinstance(believed, int | float) and 0 <= believed <= NEVER_S
    return LeaseCheckLog(since, last, believed if known else None)


def why_wrong(now: float) -> str | None:
    """
    Return a message for the log that says why a clock that shows ``now`` is wrong; None if it may be right.
    """
    shown = f"the clock of this machine is wrong, it shows {clamped_dates.utc(now):%Y-%m-%d}"
    if now < _RELEASED_S:
        return f"{shown}: leases made now may be expired once it is right; set it"
    if now + LEASE_DURATION_S > NEVER_S:
        return f"{shown}: leases made now never expire; set it"
    return None


class NonDecreasingDate:
    """
    The start date of new leases: the clock's date, but never before a date that has passed for certain.

    Args:
        storage: the directory with the record of checks.
        clock: seconds since 1970.
        monotonic: seconds of a clock that cannot be set.
    """

    def __init__(
        self,
        storage: Path,
        clock: Callable[[], float] = wall_time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._reached = -inf, 0.0  # a past date, and the monotonic time then
        found = _read(storage / NOTE_NAME)
        if found is not None:
            self.looked(found)

    def __call__(self) -> float:
        """Return the date in seconds since 1970. May be called in any thread."""
        reached_s, at = self._reached
        return max(self._clock(), reached_s + self._monotonic() - at)

    def looked(self, looks: LeaseCheckLog) -> None:
        """Use the record of a newer check."""
        if looks.reached_s is not None:
            self._reached = looks.reached_s, self._monotonic()
