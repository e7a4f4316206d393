"""What is in a storage directory: share data and leases of every share file, read with PipeGrid's parsers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import attrs

from pipegrid.storage import share_file
from pipegrid.storage.mutable import slot_file as mutable_containers

STRANGERS = 5
STRANGER = b"a client that never comes again"  # 31 bytes
EXPIRES = (1 << 32) - 2
Lease = share_file.LeaseRecord | mutable_containers.MutableLease


@attrs.frozen
class ShareRecord:
    """
    One share file.

    Attributes:
        kind: ``immutable`` or ``mutable``.
        fixed: what no lease changes: the header's fields, and a hash of the share data.
        leases: in the order of the file, free slots left out.
    """

    kind: str
    fixed: tuple[Any, ...]
    leases: tuple[Lease, ...]

    @property
    def expiries(self) -> dict[bytes, int]:
        """When each lease expires, by its renew secret as it is stored."""
        found = {lease.renew: lease.expires for lease in self.leases}
        assert len(found) == len(self.leases), "one lease for each secret"
        return found

    @property
    def strangers(self) -> list[Lease]:
        """Those leases that ``plant`` added."""
        return [lease for lease in self.leases if lease.renew.startswith(STRANGER)]


def records(node: Path) -> dict[str, ShareRecord]:
    """Return what a node's directory stores, by path."""
    shares = node / "storage/shares"
    return {
        str(path.relative_to(shares)): read_record(path)
        for path in shares.glob("[a-z2-7][a-z2-7]/*/*")
    }


def read_record(path: Path) -> ShareRecord:
    """Return what is in one share file."""
    data = path.read_bytes()
    return _read_mutable(data) if mutable_containers.is_mutable(data) else _read_immutable(data)


def _read_immutable(data: bytes) -> ShareRecord:
    header = share_file.parse_header(data)
    at = share_file.leases_offset(header, len(data))
    leases = share_file.parse_leases(data[at:])
    assert len(leases) == header.lease_count
    fixed = (header.version, _hash(data[share_file.HEADER_BYTES : at]))
    return ShareRecord("immutable", fixed, leases)


def _read_mutable(data: bytes) -> ShareRecord:
    header = mutable_containers.parse_header(data)
    begin = mutable_containers.DATA_OFFSET
    end = begin + header.data_bytes
    fixed = (header.version, header.node_id, header.write_enabler, _hash(data[begin:end]))
    leases = _mutable_leases(data, header)
    return ShareRecord("mutable", fixed, tuple(lease for lease in leases if lease.owner))


def age(path: Path, by_s: int) -> None:
    """Make the leases of a share file expire earlier, as if they were older; the planted ones stay."""
    record = read_record(path)
    data = bytearray(path.read_bytes())
    for lease in record.leases:
        if lease in record.strangers:
            continue
        old = lease.pack()
        new = attrs.evolve(lease, expires=lease.expires - by_s).pack()
        at = data.find(old)
        assert data.count(old) == 1
        data[at : at + len(old)] = new
    path.write_bytes(data)


def plant(path: Path) -> None:
    """Add leases of clients that never come, more than the slots of a mutable container hold."""
    with open(path, "r+b") as file:
        for number in range(STRANGERS):
            file.seek(0)
            for at, piece in _planting(file.read(), STRANGER + bytes([number])):
                file.seek(at)
                file.write(piece)


def _planting(data: bytes, renew: bytes) -> list[tuple[int, bytes]]:
    """Return what to write where, in a share file, to add a lease."""
    if not mutable_containers.is_mutable(data):
        count = share_file.parse_header(data).lease_count + 1
        lease = share_file.LeaseRecord(0, renew, bytes(32), EXPIRES)
        return [
            (len(data), lease.pack()),
            (share_file.LEASE_COUNT_OFFSET, count.to_bytes(4, "big")),
        ]
    header = mutable_containers.parse_header(data)
    fresh = mutable_containers.MutableLease(1, EXPIRES, renew, bytes(32), header.node_id)
    records = b"".join(lease.pack() for lease in _mutable_leases(data, header))
    plan = mutable_containers.plan_lease(
        header.extra_offset, records, fresh, header.version, lambda _: True
    )
    assert plan is not None, "there is room"
    return plan


def _mutable_leases(
    data: bytes, header: mutable_containers.MutableHeader
) -> tuple[mutable_containers.MutableLease, ...]:
    """Return all lease records, free slots too."""
    slots = data[mutable_containers.LEASES_OFFSET : mutable_containers.DATA_OFFSET]
    extra = data[header.extra_offset :]
    leases = mutable_containers.parse_leases(slots)
    leases += mutable_containers.parse_leases(extra[mutable_containers.COUNT_BYTES :])
    assert len(leases) == mutable_containers.LEASE_SLOTS + mutable_containers.parse_count(extra)
    return leases


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
