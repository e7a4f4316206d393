"""
The container that a storage server keeps a mutable share in, as bytes.

    offset 0    magic (32), of version 2, which is written, or 1, which is read and kept
    offset 32   node id of the server that made it (20)
    offset 52   write enabler (32)
    offset 84   length of the share data (8)
    offset 92   offset E of the number of extra leases (8)
    offset 100  four lease slots of 92 bytes; a free one has owner 0
    offset 468  share data; there is room for E - 468 bytes
    offset E    number x of extra leases (4)
    offset E+4  x extra leases

A lease record: owner (4), expiry (4), renew secret (32), cancel secret (32), node id (20). Version 2 holds
hashes of the two secrets, version 1 the secrets themselves.

``plan_change`` turns a change into steps that write a file in place such that a process that is killed
between two of them leaves a container that can be read. Files, locks and clocks are the business of
``files`` and ``slots``.

Source: the format reference, storage protocols, sections 7.2, 7.3 and 8.3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import attrs

from pipegrid.core.hashes import Buffer, tagged_hash
from pipegrid.storage.containers import LEASE_DURATION_S, lease_end, stored_secret
from pipegrid.storage.leaserecords import MAX_LEASES, NEVER_S, HasRoom, Records
from pipegrid.wire.messages import LeaseSecrets

NODE_ID_BYTES = 20
WRITE_ENABLER_BYTES = 32
LEASE_BYTES = 92
LEASE_SLOTS = 4
LENGTH_OFFSET = 84
EXTRA_OFFSET = 92
LEASES_OFFSET = 100
DATA_OFFSET = LEASES_OFFSET + LEASE_SLOTS * LEASE_BYTES
COUNT_BYTES = 4
EMPTY_BYTES = DATA_OFFSET + COUNT_BYTES  # a container without data or extra leases
WRITTEN_VERSION = 2
OWNER = 1
MAX_EXTRA_LEASES = 1 << 16  # far more than anybody has; what claims more is damaged

RECORDS = Records(LEASE_BYTES, 8, 4)

_TITLES = {1: b"Tahoe mutable container v1\n", 2: b"Tahoe mutable container v2\n"}
MAGICS = {
    1: _TITLES[1] + bytes.fromhex("750944038e"),
    2: _TITLES[2] + tagged_hash(b"allmydata_mutable_container_header", _TITLES[2])[:5],
}
MAGIC_BYTES = 32

Writes = Sequence[tuple[int, Buffer]]
"""Where bytes go among a share's data, and which."""

_VERSIONS = {magic: version for version, magic in MAGICS.items()}
_HEADER = struct.Struct(">32s20s32sQQ")
_LEASE = struct.Struct(">LL32s32s20s")
_UINT32 = struct.Struct(">L")
_UINT64 = struct.Struct(">Q")
_MAX_UINT32 = (1 << 32) - 1
_ZEROS = bytes(64 * 1024)


@attrs.frozen
class MutableHeader:
    """
    The first 100 bytes of a mutable share file.

    Attributes:
        version: 1 or 2.
        node_id: 20 bytes.
        write_enabler: 32 bytes.
        data_bytes: length of the share data.
        extra_offset: where in the file the number of extra leases stands.
    """

    version: int
    node_id: bytes
    write_enabler: bytes = attrs.field(repr=False)
    data_bytes: int
    extra_offset: int

    def pack(self) -> bytes:
        """Return the 100 bytes, with the magic string of their version."""
        fields = self.node_id, self.write_enabler, self.data_bytes, self.extra_offset
        return _HEADER.pack(MAGICS[self.version], *fields)


@attrs.frozen
class MutableLease:
    """
    One lease as it is stored.

    Attributes:
        owner: 0 if the slot is free.
        expires: seconds since 1970, less than 2^32.
        renew, cancel: 32 bytes each: the secrets in version 1, their hashes in version 2.
        node_id: 20 bytes, of the server that made it.
    """

    owner: int
    expires: int
    renew: bytes = attrs.field(repr=False)
    cancel: bytes = attrs.field(repr=False)
    node_id: bytes

    def pack(self) -> bytes:
        """Return the 92-byte record; what expires after 2^32 - 1 is stored as expiring then."""
        expires = min(self.expires, NEVER_S)
        return _LEASE.pack(self.owner, expires, self.renew, self.cancel, self.node_id)


def is_mutable(data: bytes) -> bool:
    """Return whether a file that begins so holds a mutable share."""
    return data[:MAGIC_BYTES] in _VERSIONS


def parse_header(data: bytes) -> MutableHeader:
    """
    Return what the first 100 bytes of a mutable share file say.

    Raises:
        ValueError: too few bytes, no mutable container, or numbers that contradict each other.
    """
    if len(data) < _HEADER.size:
        raise ValueError("a share file that ends within its header")
    magic, node_id, write_enabler, data_bytes, extra_offset = _HEADER.unpack_from(data)
    version = _VERSIONS.get(magic)
    if version is None:
        raise ValueError("a share file that is no mutable container of version 1 or 2")
    if extra_offset < DATA_OFFSET + data_bytes or extra_offset >= 1 << 63:
        raise ValueError("a mutable container with less room than data")
    return MutableHeader(version, node_id, write_enabler, data_bytes, extra_offset)


def pack_empty(node_id: bytes, write_enabler: bytes) -> bytes:
    """
    Return a container without data and leases.

    Raises:
        ValueError: a node id that is not 20 bytes long, or a write enabler that is not 32.
    """
    if len(node_id) != NODE_ID_BYTES or len(write_enabler) != WRITE_ENABLER_BYTES:
        raise ValueError("a write enabler is 32 bytes long and a node id 20")
    header = MutableHeader(WRITTEN_VERSION, node_id, write_enabler, 0, DATA_OFFSET)
    return header.pack() + bytes(LEASE_SLOTS * LEASE_BYTES + COUNT_BYTES)


def parse_count(data: bytes) -> int:
    """
    Return the number of extra leases; 0 if the file ends before it.

    Raises:
        ValueError: more than anybody has.
    """
    if len(data) < COUNT_BYTES:
        return 0
    count: int = _UINT32.unpack_from(data)[0]
    if count > MAX_EXTRA_LEASES:
        raise ValueError(f"a mutable container that claims {count} extra leases")
    return count


def parse_leases(data: bytes) -> tuple[MutableLease, ...]:
    """Return the lease records in ``data``, free slots too; what is left behind the last is ignored."""
    whole = len(data) - len(data) % LEASE_BYTES
    return tuple(MutableLease(*fields) for fields in _LEASE.iter_unpack(data[:whole]))


def make_lease(version: int, secrets: LeaseSecrets, node_id: bytes, now: float) -> MutableLease:
    """Return a lease of 31 days from ``now``, in seconds since 1970."""
    renew, cancel = (stored_secret(version, each) for each in (secrets.renew, secrets.cancel))
    return MutableLease(OWNER, lease_end(now), renew, cancel, node_id)


def lease_position(extra_offset: int, index: int) -> int:
    """Return where in the file the lease of this index stands: 0 to 3 are the slots."""
    if index < LEASE_SLOTS:
        return LEASES_OFFSET + index * LEASE_BYTES
    return extra_offset + COUNT_BYTES + (index - LEASE_SLOTS) * LEASE_BYTES


def plan_lease(
    extra_offset: int, records: bytes, fresh: MutableLease, version: int, has_room: HasRoom
) -> list[tuple[int, bytes]] | None:
    """
    Return the writes, ``(file offset, bytes)`` in order, that add or renew a lease; None: it has no place.

    Args:
        records: all that are there, free slots too: the four slots, then the extra ones.
        fresh: the lease as it is to be. An expiry is only ever moved to a later time.
        version: of the container.
        has_room: see ``leaserecords``; only one more extra lease needs any.
    """
    index = RECORDS.find(records, fresh.renew, version > 1)
    if index is not None and _owner(records, index):
        if RECORDS.expiry(records, index) >= fresh.expires:
            return []
        # The record with its expiry alone changed.
        at = lease_position(extra_offset, index) + RECORDS.expiry_at
        return [(at, fresh.pack()[RECORDS.expiry_at : RECORDS.expiry_at + 4])]
    count = len(records) // LEASE_BYTES
    for index in range(count):
        if not _owner(records, index):
            return [(lease_position(extra_offset, index), fresh.pack())]
    if count >= MAX_LEASES:
        index = RECORDS.longest_expired(records, fresh.expires - LEASE_DURATION_S)
        return None if index is None else [(lease_position(extra_offset, index), fresh.pack())]
    if not has_room(LEASE_BYTES):
        return None
    # Counted only when it is there.
    extra = _UINT32.pack(count - LEASE_SLOTS + 1)
    return [(lease_position(extra_offset, count), fresh.pack()), (extra_offset, extra)]


def _owner(records: bytes, index: int) -> bool:
    at = index * LEASE_BYTES
    return any(records[at : at + 4])


@attrs.frozen
class Growth:
    """
    What a change does to the sizes of a container.

    Attributes:
        data_bytes: length of the data in the end.
        written_bytes: length of the data before it is cut.
        extra_offset: of the number of extra leases in the end.
    """

    data_bytes: int
    written_bytes: int
    extra_offset: int


def measure(header: MutableHeader, writes: Writes, new_length: int | None) -> Growth:
    """Return the sizes after writes and a cut. An empty write, too, makes a share reach its offset."""
    written = max([header.data_bytes, *(offset + len(data) for offset, data in writes)])
    cut = written if new_length is None else min(written, new_length)
    return Growth(cut, written, max(header.extra_offset, DATA_OFFSET + written))


def plan_change(
    header: MutableHeader, extra: bytes, file_bytes: int, writes: Writes, new_length: int | None
) -> Iterator[tuple[int, Buffer]]:
    """
    Yield the writes, ``(file offset, bytes)``, that carry out a change; the file is then to be cut, or
    extended, to end behind its extra leases.

    They are in an order such that the container can be read after each, and has all its leases: data is there
    before the length that counts it, and leases are at their new place before the header leads there. Where
    the old place and the new one overlap, they go by way of a third, behind both.

    Args:
        extra: number and records of the extra leases, as they stand in the file.
        file_bytes: length of the file, which may go on behind those if somebody was killed.
    """
    growth = measure(header, writes, new_length)
    at = header.extra_offset
    if growth.extra_offset > at:
        if growth.extra_offset < at + len(extra):
            hop = max(growth.extra_offset, at) + 2 * len(extra)
            yield hop, extra
            yield EXTRA_OFFSET, _UINT64.pack(hop)
        yield growth.extra_offset, extra
        yield EXTRA_OFFSET, _UINT64.pack(growth.extra_offset)
    # What is new and not written is zero, whatever stood there: old data that was cut, or old leases.
    # Behind the file's old end there is nothing but zeros.
    stale = min(growth.written_bytes, file_bytes - DATA_OFFSET)
    yield from _zeros(header.data_bytes, stale)
    for offset, data in writes:
        yield DATA_OFFSET + offset, data
    if growth.data_bytes != header.data_bytes:
        yield LENGTH_OFFSET, _UINT64.pack(growth.data_bytes)


def _zeros(begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield writes of zeros to ``[begin, end)`` of the data."""
    while begin < end:
        piece = _ZEROS[: end - begin]
        yield DATA_OFFSET + begin, piece
        begin += len(piece)
