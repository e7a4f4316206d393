"""
The requests and answers of a storage server as plain values, shared by the share store and all transports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import add
from types import MappingProxyType
from typing import NamedTuple

import attrs

from pipegrid.core.hashes import Buffer
from pipegrid.errors import ServerError

UNKNOWN_PROTOCOL = (
    "no version of the storage protocol that is known here, though perhaps to a newer PipeGrid"
)
"""The error for a server's version message that lists other protocols only; follows "it answered with"."""


class ServerIdentity(NamedTuple):
    """
    The identity of a server, independent of any connection.

    Attributes:
        server_id: stable text; on a real grid ``v0-`` and 52 characters of base32.
        nickname: its name for people.
        permutation_seed: bytes that determine its position on every file's ring.
        lease_seed: 20 bytes (the tub id) that make its secrets differ from those for other servers.
    """

    server_id: str
    nickname: str
    permutation_seed: bytes
    lease_seed: bytes


class ServerVersion(NamedTuple):
    """
    What a server reports about itself.

    Attributes:
        max_share_bytes: the largest immutable share that it accepts now; 0 if it is read-only or full.
        available_bytes: space for shares, or None if unknown.
        application: name and version of the software.
    """

    max_share_bytes: int
    available_bytes: int | None
    application: str


class LeaseSecrets(NamedTuple):
    """
    The two 32-byte secrets of a lease on one server.

    Attributes:
        owner: the number of the server's named client whose lease it is; 0: of none. Only a server knows it.
    """

    renew: bytes
    cancel: bytes
    owner: int = 0

    def __repr__(self) -> str:
        """Return its name alone, since logs may contain it."""
        return "LeaseSecrets(...)"


class UploadSecrets(NamedTuple):
    """All secrets of one upload to one server; ``upload`` is 1 to 64 bytes, usually 32."""

    lease: LeaseSecrets
    upload: bytes

    def __repr__(self) -> str:
        """Return its name alone, since logs may contain it."""
        return "UploadSecrets(...)"


class Released(NamedTuple):
    """
    The result of releasing a client's leases on the shares of one storage index.

    Attributes:
        leases: those that do not exist any more.
        kept: those that were made or renewed too recently.
        freed_bytes: lengths of the share files that were removed, as no lease was left.
    """

    leases: int = 0
    kept: int = 0
    freed_bytes: int = 0

    def plus(self, other: Released) -> Released:
        """Return the sums of both, field by field."""
        return Released(*map(add, self, other))


MAX_RELEASES = 64
"""The limit for one request: each takes up to a millisecond, and the server serves others in between."""


class LeaseRelease(NamedTuple):
    """
    A lease to be released on all shares of a storage index.

    Attributes:
        storage_index: 16 bytes.
        cancel_secret: 32 bytes.
    """

    storage_index: bytes
    cancel_secret: bytes

    def __repr__(self) -> str:
        """Return its name alone, since logs may contain it."""
        return "LeaseRelease(...)"


class LeaseReleases(NamedTuple):
    """
    A request.

    Attributes:
        since: by the server's clock, in seconds since 1970; leases made or renewed then or later stay.
        releases: at most ``MAX_RELEASES``; none: the client only asks for the server's time.
    """

    since: int
    releases: tuple[LeaseRelease, ...]


class ReleaseAnswers(NamedTuple):
    """
    A server's answer.

    Attributes:
        now: the server's time, in seconds since 1970, as leases have it.
        results: in the order of the request; an HTTP status where the release failed.
    """

    now: int
    results: tuple[Released | int, ...]


class Allocation(NamedTuple):
    """
    The answer to ``allocate``.

    Attributes:
        already_have: all complete shares of the storage index, including those not asked for.
        allocated: the shares that may be written now. Shares in neither set were rejected: no space, or an
            unfinished upload exists (perhaps one's own).
    """

    already_have: frozenset[int]
    allocated: frozenset[int]


class WriteAnswer(NamedTuple):
    """
    The answer to ``write``.

    Attributes:
        complete: whether this write completed the share.
        required: half-open ranges ``(begin, end)`` that are still missing.
    """

    complete: bool
    required: tuple[tuple[int, int], ...] = ()


class Stored(NamedTuple):
    """
    The answer to ``store_whole``.

    Attributes:
        allocation: as for a separate allocation.
        failed: shares that were sent and are not stored, each with its error.
    """

    allocation: Allocation
    failed: Mapping[int, ServerError] = MappingProxyType({})


Numbers = AbstractSet[int]
"""Share numbers."""

Shares = Mapping[int, bytes]
"""Whole shares, by number."""

Pieces = Sequence[Buffer]
"""Consecutive pieces to write."""

Reads = Sequence[tuple[int, int]]
"""Ranges to read of each share of a slot: offsets and lengths."""

SlotData = dict[int, tuple[bytes, ...]]
"""The bytes read, by share number: one string for each range, shorter beyond the end."""


class SlotSecrets(NamedTuple):
    """All secrets of one change to a slot of mutable shares; the write enabler usually has 32 bytes."""

    lease: LeaseSecrets
    write_enabler: bytes

    def __repr__(self) -> str:
        """Return its name alone, since logs may contain it."""
        return "SlotSecrets(...)"


class ShareChange(NamedTuple):
    """
    The tests and changes of one mutable share in a read-test-write.

    Attributes:
        tests: ``(offset, size, specimen)``: the bytes ``[offset, offset + size)``, cut at the share's end,
            must equal the specimen. A missing share counts as empty.
        writes: ``(offset, data)``, applied in this order.
        new_length: 0 deletes the share; less than its length after the writes cuts it; more, or None, does
            nothing.
    """

    tests: tuple[tuple[int, int, bytes], ...] = ()
    writes: tuple[tuple[int, Buffer], ...] = ()
    new_length: int | None = None


Changes = Mapping[int, ShareChange]
"""The largest shares of a slot, in bytes."""

MAX_SLOT_SHARES = 256
MAX_SHARE_TESTS = 30
"""For one share in one call: the limit of Tahoe-LAFS's server over HTTPS."""
MAX_SMALL_WRITES = 30
"""
For one share in addition to those of blocks. Tahoe-LAFS's client sends eight: keys, signature, hash trees,
and three parts of the header.
"""
MAX_BLOCK_WRITES = 262_144
"""
Tahoe-LAFS's client writes all of an MDMF share in one call, with a write for each segment of 128 KiB: this
number is a file of 32 GiB, all of whose shares it holds in memory.
"""
MAX_FOOLSCAP_WRITES = 65_536
"""The same over Foolscap, where all of a call is in memory: a file of 8 GiB."""
BLOCK_WRITE_BYTES = 512
"""
The smallest such write: with k = 255 a block is 515 bytes, and its salt 16. So the cost of a call is
proportional to its bytes, apart from small writes.
"""
MAX_CALL_VECTORS = MAX_SLOT_SHARES * (MAX_SHARE_TESTS + MAX_SMALL_WRITES) + MAX_BLOCK_WRITES
"""Limit of tests and writes in one call."""


@attrs.frozen
class SlotResult:
    """
    The answer to read-test-write.

    Attributes:
        success: whether all tests passed, and everything was written.
        data: for every share that existed before, the ranges read, as they were before.
        repeated: the request was sent more than once, since connections were lost; an unsuccessful last
            attempt does not mean that no earlier one was.
    """

    success: bool
    data: SlotData
    repeated: bool = attrs.field(default=False, eq=False)
