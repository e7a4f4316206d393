"""The requests and answers of a storage server as simple values, for the share store and all transports."""

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
    "only storage protocol versions that are unknown here; a newer PipeGrid may know them"
)
"""Error for a server's version message that lists only unknown protocols; follows "it answered with"."""


class ServerIdentity(NamedTuple):
    """
    The identity of a server, independent of any connection.

    Attributes:
        server_id: stable text; on a real grid ``v0-`` and 52 characters of base32.
        nickname: the server's name for people.
        permutation_seed: bytes that determine the server's position on every file's permuted ring.
        lease_seed: 20 bytes (the tub id) from which secrets are derived, so that secrets for two servers
            differ.
    """

    server_id: str
    nickname: str
    permutation_seed: bytes
    lease_seed: bytes


class ServerVersion(NamedTuple):
    """
    What a server reports about itself.

    Attributes:
        max_share_bytes: the largest immutable share that the server accepts now; 0 if it is read-only or
            full.
        available_bytes: space for shares, or None if unknown.
        application: name and version of the server's software.
    """

    max_share_bytes: int
    available_bytes: int | None
    application: str


class LeaseSecrets(NamedTuple):
    """
    The two 32-byte secrets of a lease on one server.

    Attributes:
        owner: the number of the named client to which the server counts the lease; 0: no named client. Only a
            server sets this number.
    """

    renew: bytes
    cancel: bytes
    owner: int = 0

    def __repr__(self) -> str:
        """Return only the class name, since logs may contain it."""
        return "LeaseSecrets(...)"


class UploadSecrets(NamedTuple):
    """All secrets of one upload to one server; ``upload`` is 1 to 64 bytes, usually 32."""

    lease: LeaseSecrets
    upload: bytes

    def __repr__(self) -> str:
        """Return only the class name, since logs may contain it."""
        return "UploadSecrets(...)"


class Released(NamedTuple):
    """
    The result of releasing a client's leases on the shares of one storage index.

    Attributes:
        leases: how many leases were released.
        kept: how many leases were kept, since they were made or renewed too recently.
        freed_bytes: total length of the share files that were removed because no lease was left.
    """

    leases: int = 0
    kept: int = 0
    freed_bytes: int = 0

    def plus(self, other: Released) -> Released:
        """Return the sums of both results, field by field."""
        return Released(*map(add, self, other))


MAX_RELEASES = 64
"""Maximum releases per request. Each takes up to a millisecond; other clients are served in between."""


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
        """Return only the class name, since logs may contain it."""
        return "LeaseRelease(...)"


class LeaseReleases(NamedTuple):
    """
    A request to release leases.

    Attributes:
        since: leases that were made or renewed at this time or later stay; in seconds since 1970, by the
            server's clock.
        releases: at most ``MAX_RELEASES``; if there are none, the client only asks for the server's time.
    """

    since: int
    releases: tuple[LeaseRelease, ...]


class ReleaseAnswers(NamedTuple):
    """
    A server's answer to a request to release leases.

    Attributes:
        now: the server's time, in seconds since 1970, by the clock that its leases use.
        results: in the order of the request; an HTTP status if the release failed.
    """

    now: int
    results: tuple[Released | int, ...]


class Allocation(NamedTuple):
    """
    The answer to ``allocate``.

    Attributes:
        already_have: all complete shares of the storage index, even those not asked for.
        allocated: the shares that may be written now. Shares in neither set were rejected: there is no space,
            or an unfinished upload exists (perhaps the client's own).
    """

    already_have: frozenset[int]
    allocated: frozenset[int]


class WriteAnswer(NamedTuple):
    """
    The answer to ``write``.

    Attributes:
        complete: whether this write completed the share.
        required: half-open ranges ``(begin, end)`` of the share that are still missing.
    """

    complete: bool
    required: tuple[tuple[int, int], ...] = ()


class Stored(NamedTuple):
    """
    The answer to ``store_whole``.

    Attributes:
        allocation: the answer that a separate ``allocate`` would have.
        failed: by share number, the errors of shares that were sent and are not stored.
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
"""Ranges to read from each share of a slot: offsets and lengths."""

SlotData = dict[int, tuple[bytes, ...]]
"""The bytes read, by share number: one string for each range, shorter if the share ends earlier."""


class SlotSecrets(NamedTuple):
    """All secrets of one change to a slot of mutable shares; the write enabler usually has 32 bytes."""

    lease: LeaseSecrets
    write_enabler: bytes

    def __repr__(self) -> str:
        """Return only the class name, since logs may contain it."""
        return "SlotSecrets(...)"


class ShareChange(NamedTuple):
    """
    The tests and changes of one mutable share in a read-test-write.

    Attributes:
        tests: ``(offset, size, specimen)``: the bytes ``[offset, offset + size)``, cut at the share's end,
            must equal the specimen. A missing share counts as empty.
        writes: ``(offset, data)``, applied in this order.
        new_length: 0 deletes the share. A number below the share's length after the writes truncates the
            share. A larger number, or None, changes nothing.
    """

    tests: tuple[tuple[int, int, bytes], ...] = ()
    writes: tuple[tuple[int, Buffer], ...] = ()
    new_length: int | None = None


Changes = Mapping[int, ShareChange]
"""The changes of a slot's shares, by share number."""

MAX_SLOT_SHARES = 256
MAX_SHARE_TESTS = 30
"""The maximum number of tests of one share in one call: the limit of Tahoe-LAFS's server over HTTPS."""
MAX_SMALL_WRITES = 30
"""
The maximum number of writes to one share in one call, without those of blocks. Tahoe-LAFS's client sends
eight: keys, signature, hash trees, and three parts of the header.
"""
MAX_BLOCK_WRITES = 262_144
"""
The maximum number of block writes in one call. Tahoe-LAFS's client writes all of an MDMF share in one call,
with a write for each segment of 128 KiB. So this number allows a file of 32 GiB, all of whose shares that
client holds in memory.
"""
MAX_FOOLSCAP_WRITES = 65_536
"""Maximum number of block writes in one Foolscap call, which is all in memory: enough for a file of 8 GiB."""
BLOCK_WRITE_BYTES = 512
"""
The minimum size of a block write: with k = 255 a block has 515 bytes, and its salt 16. So the cost of a call
is proportional to its bytes, apart from small writes.
"""
MAX_CALL_VECTORS = MAX_SLOT_SHARES * (MAX_SHARE_TESTS + MAX_SMALL_WRITES) + MAX_BLOCK_WRITES
"""The maximum number of tests and writes in one call."""


@attrs.frozen
class SlotResult:
    """
    The answer to read-test-write.

    Attributes:
        success: whether all tests passed, and everything was written.
        data: for every share that existed before the writes, the ranges read, as they were before the writes.
        repeated: whether the request was sent more than once, since connections were lost. Then an earlier
            attempt may have succeeded even if the last one did not.
    """

    success: bool
    data: SlotData
    repeated: bool = attrs.field(default=False, eq=False)
