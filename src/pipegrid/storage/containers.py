"""
The container that a storage server keeps an immutable share in, as bytes.

    offset 0   version (4): 2 is written, 1 is read too
    offset 4   share length, saturated at 2^32 - 1 (4): informative, not to be relied on (``sharedata``)
    offset 8   number of leases m (4)
    offset 12  share data
    last 72*m  lease records: owner (4), renew secret (32), cancel secret (32), expiry (4)

So the share's length follows from the file's. Version 2 holds hashes of the two secrets, version 1 the
secrets themselves; a container keeps its version when leases are added.

Files, locks and clocks are the business of ``store`` and ``leases``.

Source: the format reference, storage protocols, sections 7.1 and 7.3.
"""

from __future__ import annotations

import hashlib
import struct

import attrs

from pipegrid.storage.leaserecords import NEVER_S, Records
from pipegrid.wire.messages import LeaseSecrets

HEADER_BYTES = 12
LEASE_BYTES = 72
LEASE_COUNT_OFFSET = 8
EXPIRY_OFFSET = 68  # within a lease record
LEASE_DURATION_S = 31 * 24 * 3600
MAX_SHARE_BYTES = (1 << 63) - 1 - (1 << 20)  # what a file can hold, and room for many leases

RECORDS = Records(LEASE_BYTES, 4, EXPIRY_OFFSET)

WRITTEN_VERSION = 2
OWNER_ALLOCATE = 0  # the owner number means nothing, but both values are customary
OWNER_ADD_LEASE = 1

_HEADER = struct.Struct(">LLL")
_LEASE = struct.Struct(">L32s32sL")
_MAX_UINT32 = (1 << 32) - 1


@attrs.frozen
class ContainerHeader:
    """
    The first 12 bytes of an immutable share file.

    Attributes:
        room_bytes: what its client had asked room for, which may be more than the data; saturated.
    """

    version: int
    lease_count: int
    room_bytes: int = _MAX_UINT32

    @property
    def is_saturated(self) -> bool:
        """Whether the room was so much that its number does not say how much."""
        return self.room_bytes == _MAX_UINT32

    def has_room(self, share_bytes: int) -> bool:
        """Return whether so many bytes of data can have been meant."""
        return self.is_saturated or share_bytes <= self.room_bytes


@attrs.frozen
class LeaseRecord:
    """
    One lease as it is stored.

    Attributes:
        owner: a number without meaning.
        renew, cancel: 32 bytes each: the secrets in version 1, their hashes in version 2.
        expires: seconds since 1970, less than 2^32.
    """

    owner: int
    renew: bytes = attrs.field(repr=False)
    cancel: bytes = attrs.field(repr=False)
    expires: int

    def pack(self) -> bytes:
        """Return the 72-byte record; what expires after 2^32 - 1 is stored as expiring then."""
        return _LEASE.pack(self.owner, self.renew, self.cancel, min(self.expires, NEVER_S))


def pack_header(share_bytes: int, lease_count: int, version: int = WRITTEN_VERSION) -> bytes:
    """Return the 12-byte header of a container for ``share_bytes`` bytes of share data."""
    return _HEADER.pack(version, min(share_bytes, _MAX_UINT32), lease_count)


def parse_header(data: bytes) -> ContainerHeader:
    """
    Return what the first 12 bytes of a share file say.

    Raises:
        ValueError: too few bytes, or not an immutable container (a mutable one's magic, for one).
    """
    if len(data) < HEADER_BYTES:
        raise ValueError("a share file that ends within its header")
    version, room_bytes, lease_count = _HEADER.unpack_from(data)
    if version not in (1, 2):
        raise ValueError("a share file that is no immutable container of version 1 or 2")
    return ContainerHeader(version, lease_count, room_bytes)


def container_bytes(share_bytes: int, lease_count: int = 1) -> int:
    """Return the size of the file that holds so many bytes of share data and so many leases."""
    return HEADER_BYTES + share_bytes + LEASE_BYTES * lease_count


def share_bytes(header: ContainerHeader, file_bytes: int) -> int:
    """
    Return the length of the share data in a file of ``file_bytes`` bytes.

    Raises:
        ValueError: the file is too short for its leases.
    """
    length = file_bytes - container_bytes(0, header.lease_count)
    if length < 0:
        raise ValueError("a share file that is too short for its leases")
    return length


def leases_offset(header: ContainerHeader, file_bytes: int) -> int:
    """Return where in the file the first lease record stands."""
    return HEADER_BYTES + share_bytes(header, file_bytes)


def stored_secret(version: int, secret: bytes) -> bytes:
    """Return the form in which a container of this version holds a 32-byte secret."""
    if version == 1:
        return secret
    return hashlib.blake2b(secret, digest_size=32).digest()


def lease_end(now: float) -> int:
    """
    Return when a lease ends that is made ``now``; both in seconds since 1970.

    A lease has 32 bits for that: what would end after 2106-02-07 never ends, and has ``NEVER_S`` there.
    """
    return min(max(int(now) + LEASE_DURATION_S, 1), NEVER_S)


def make_lease(version: int, owner: int, secrets: LeaseSecrets, now: float) -> LeaseRecord:
    """Return a lease of 31 days from ``now``, in seconds since 1970."""
    renew, cancel = (stored_secret(version, each) for each in (secrets.renew, secrets.cancel))
    return LeaseRecord(owner, renew, cancel, lease_end(now))


def pack_lease(version: int, owner: int, secrets: LeaseSecrets, now: float) -> bytes:
    """Return the record of the same lease, without an object for it: every share of a bundle has one."""
    renew, cancel = stored_secret(version, secrets.renew), stored_secret(version, secrets.cancel)
    return _LEASE.pack(owner, renew, cancel, lease_end(now))


def parse_leases(data: bytes) -> tuple[LeaseRecord, ...]:
    """
    Return the lease records in ``data``.

    Raises:
        ValueError: data is not a whole number of records.
    """
    if len(data) % LEASE_BYTES:
        raise ValueError("lease records that end within a record")
    return tuple(LeaseRecord(*fields) for fields in _LEASE.iter_unpack(data))
