"""
When leases count as run out, and so when a share that nobody leases any more is removed.

A lease record holds when it expires; 31 days earlier it was made, or last renewed. An operator may let
leases live longer or shorter than that, or may have all end that were not renewed since a day. All three come
down to one time, with which the expiry of every lease is compared.
"""

from __future__ import annotations

import attrs

from pipegrid.storage.containers import LEASE_DURATION_S
from pipegrid.storage.leaserecords import NEVER_S


@attrs.frozen
class Expiry:
    """
    What is removed.

    Attributes:
        duration_s: a lease has run out so long after it was renewed; None: when it says so itself.
        renewed_since: instead: a lease has run out if it was not renewed since then, in seconds since 1970.
        immutable, mutable: which kinds of shares are removed at all.
    """

    duration_s: int | None = None
    renewed_since: int | None = None
    immutable: bool = True
    mutable: bool = True

    def threshold(self, now: float) -> float:
        """
        Return the time, in seconds since 1970, before which leases that have run out expire.

        It is never beyond ``NEVER_S``: no lease that has this date has run out.
        """
        return min(self._threshold(now), NEVER_S)

    def _threshold(self, now: float) -> float:
        if self.renewed_since is not None:
            return self.renewed_since + LEASE_DURATION_S
        if self.duration_s is not None:
            return now + LEASE_DURATION_S - self.duration_s
        return now
