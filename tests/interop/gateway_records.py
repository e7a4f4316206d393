"""What is in a storage directory: share data and leases of every share file, read with PipeGrid's parsers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import attrs

from pipegrid.storage import containers, mutable_containers

Lease = containers.LeaseRecord | mutable_containers.MutableLease


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
    header = containers.parse_header(data)
    at = containers.leases_offset(header, len(data))
    leases = containers.parse_leases(data[at:])
    assert len(leases) == header.lease_count
    fixed = (header.version, _hash(data[containers.HEADER_BYTES : at]))
    return ShareRecord("immutable", fixed, leases)


def _read_mutable(data: bytes) -> ShareRecord:
    header = mutable_containers.parse_header(data)
    begin = mutable_containers.DATA_OFFSET
    end = begin + header.data_bytes
    fixed = (header.version, header.node_id, header.write_enabler, _hash(data[begin:end]))
    extra = data[header.extra_offset :]
    leases = mutable_containers.parse_leases(data[mutable_containers.LEASES_OFFSET : begin])
    leases += mutable_containers.parse_leases(extra[mutable_containers.COUNT_BYTES :])
    count = mutable_containers.parse_count(extra)
    assert len(leases) == mutable_containers.LEASE_SLOTS + count
    return ShareRecord("mutable", fixed, tuple(lease for lease in leases if lease.owner))


def age(path: Path, by_s: int) -> None:
    """Make all leases of a share file expire earlier, as if they were that much older."""
    record = read_record(path)
    data = bytearray(path.read_bytes())
    for lease in record.leases:
        old = lease.pack()
        new = attrs.evolve(lease, expires=lease.expires - by_s).pack()
        at = data.find(old)
        assert data.count(old) == 1
        data[at : at + len(old)] = new
    path.write_bytes(data)


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
