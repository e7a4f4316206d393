"""
Finding a lease among the records of a share, of either kind, and what to do about a new one.

**At most 256 leases are kept on a share**, where Tahoe-LAFS knows no bound: 2400 of them on 16 shares made
every request for those wait until all had been read and compared, 2.9 s. A client has one lease on a share.
So more than 256 clients would have to keep the same file, and then one lease more or less is nothing that the
share's life depends on. Beyond that the one that ran out longest ago makes room; if none has, the new lease
is refused. None that has not run out is ever taken from anybody. A share that came with more keeps them all.

The lookup is a search for 32 bytes in at most 24 KiB, microseconds; nothing is unpacked for it.

Source: the format reference, storage protocols, section 7.3.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable

import attrs

MAX_LEASES = 256
NEVER_S = (1 << 32) - 1
"""A lease that has this date never ends: its real one, if any, needs more than 32 bits."""


@attrs.frozen
class Records:
    """
    How the records of a kind of container look.

    Attributes:
        record_bytes: length of one.
        renew_at, expiry_at: where in it the renew secret is, of 32 bytes, and the expiry, of 4.
    """

    record_bytes: int
    renew_at: int
    expiry_at: int

    def find(self, records: bytes, stored: bytes, hashed: bool) -> int | None:
        """
        Return the index of the lease with this renew secret, or None.

        Args:
            stored: as the container holds it.
            hashed: it is a hash, of which it does not matter how long it takes to compare. Secrets
                themselves, as old containers hold them, are compared in constant time.
        """
        if not hashed:
            for index in range(len(records) // self.record_bytes):
                if hmac.compare_digest(self._renew(records, index), stored):
                    return index
            return None
        at = records.find(stored)
        while at >= 0:
            index, rest = divmod(at - self.renew_at, self.record_bytes)
            if not rest and index >= 0:
                return index
            at = records.find(stored, at + 1)
        return None

    def expiry(self, records: bytes, index: int) -> int:
        """Return when a lease runs out, in seconds since 1970."""
        at = index * self.record_bytes + self.expiry_at
        return int.from_bytes(records[at : at + 4], "big")

    def longest_expired(self, records: bytes, now: float) -> int | None:
        """Return the index of the lease that ran out longest ago, or None if none has."""
        whole = len(records) - len(records) % self.record_bytes
        behind = self.record_bytes - self.expiry_at - 4
        expiries = struct.iter_unpack(f">{self.expiry_at}xL{behind}x", records[:whole])
        found = min(((expires, index) for index, (expires,) in enumerate(expiries)), default=None)
        return None if found is None or found[0] >= min(now, NEVER_S) else found[1]

    def _renew(self, records: bytes, index: int) -> bytes:
        at = index * self.record_bytes + self.renew_at
        return records[at : at + 32]


HasRoom = Callable[[int], bool]
"""Whether so many more bytes may go to the disk: leases count against the reserve as shares do."""
