"""
What has not changed since it was stored, and when it has to be looked for on the grid again; pure.

A file is unchanged if size, inode, and the times of its last change (``mtime``) and of the last change of its
inode (``ctime``) are what they were. ``ctime`` cannot be set back by programs, so neither ``touch`` nor ``cp
-p`` deceive.
One hole is left: times advance in steps, so a file that is written twice within one step, and read in
between, looks as it did when it was read. So what was **racily clean**, changed less than ``RACY_NS`` before
it was read, is read once more by the next run, as git does with its index. A ``mtime`` that was in the
future by then is no such change: a program or another machine has set it, and a write would have made it
the present.
"""

from __future__ import annotations

import hashlib
import os

import attrs

RACY_NS = 2_000_000_000
"""The coarsest steps in which file systems keep time (FAT) have two seconds; Linux' own ten milliseconds."""

_DAY_S = 86400.0

SOONEST_S = 12 * _DAY_S
LATEST_S = 24 * _DAY_S
"""
An object is checked, and its leases are renewed, when it was not for 12 to 24 days, each at an age of its
own, so that what was stored in one night is not due in one night. Tahoe-LAFS's servers keep leases for 31
days: a weekly backup renews them in time.
"""


@attrs.frozen
class Signature:
    """What tells one state of a file from another: numbers of 64 bits with a sign, as SQLite keeps them."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


@attrs.frozen
class Recorded:
    """
    A file as it was when it was stored.

    Attributes:
        read_ns: when it was read, in nanoseconds since 1970.
    """

    signature: Signature
    read_ns: int


def signature_of(found: os.stat_result) -> Signature:
    """Return what is compared of a file."""
    return Signature(
        found.st_size, _kept(found.st_mtime_ns), _kept(found.st_ctime_ns), _kept(found.st_ino)
    )


def _kept(number: int) -> int:
    """
    Return the number of 64 bits that stands for one that may have more.

    Inodes have no sign, and network and FUSE file systems use all of their bits; files may be of years that
    64 bits of nanoseconds do not reach (2262).
    """
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def is_unchanged(recorded: Recorded, found: os.stat_result) -> bool:
    """Return whether a file holds what it held when it was stored, beyond doubt."""
    signature = recorded.signature
    changed_ns = signature.ctime_ns
    if signature.mtime_ns <= recorded.read_ns + RACY_NS:
        changed_ns = max(changed_ns, signature.mtime_ns)
    return recorded.read_ns - changed_ns > RACY_NS and signature_of(found) == signature


def is_due(cap: str, checked_s: float, now_s: float) -> bool:
    """Return whether something has to be looked for, which was found whole at a time (since 1970)."""
    age_s = now_s - checked_s
    if 0 <= age_s <= SOONEST_S:
        return False  # nearly all of them, each time
    digest = hashlib.sha256(cap.encode("ascii", "replace")).digest()
    spread = int.from_bytes(digest[:4], "big") / (1 << 32)
    # A clock that was set back must not make objects fresh for years.
    return age_s < -_DAY_S or age_s > SOONEST_S + (LATEST_S - SOONEST_S) * spread
