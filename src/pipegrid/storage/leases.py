"""
Leases on finished shares: renewing them in place, and removing shares whose leases have all run out.

A change takes the share file's lock for the moment it lasts, so that two processes do not both append, and
a renewal does not meet the removal. Readers take no lock: the share data never changes.

A new record is appended *before* it is counted. Being killed between the two leaves a record that is not
counted; a power cut may leave either without the other, or zeros in place of the record, for nothing is
synced here. Where data ends and records begin is known all the same (``containers.share_bytes``), whatever
records are there count, and whoever adds or renews a lease puts their number right. So a power cut takes
leases that were added in the last half minute, but neither data nor older leases.

Source: the format reference, storage protocols, sections 7.1 and 7.3.
"""

from __future__ import annotations

import os
from contextlib import suppress

from pipegrid.disk import files as disk
from pipegrid.errors import NoSpace
from pipegrid.storage import containers
from pipegrid.storage.leaserecords import MAX_LEASES, HasRoom
from pipegrid.wire.messages import LeaseSecrets

_LOST = bytes(containers.LEASE_BYTES)
"""What a power cut leaves of a record whose place was made, and whose bytes had not been written yet."""


def renew(path: str, owner: int, secrets: LeaseSecrets, now: float, has_room: HasRoom) -> bool:
    """
    Renew the lease of these secrets on one share, or add it.

    Args:
        owner: the number to store in a lease that is added.
        now: seconds since 1970. An expiry is only ever moved to a later time.
        has_room: see ``leaserecords``; renewing needs none.

    Returns:
        whether there is such a share.

    Raises:
        NoSpace: there is no room for one more lease, on the disk or on this share; nothing was changed.
        OSError: the disk would not.
        ValueError: the file is no immutable container.
    """
    try:
        fd = disk.open_locked(path, os.O_RDWR, wait=True)
    except FileNotFoundError:
        return False
    assert fd is not None, "waiting for a lock gives it"
    try:
        header, begin, records, file_bytes = _read(fd)
        end = begin + len(records)
        if file_bytes != end:
            os.ftruncate(fd, end)
        if header.lease_count * containers.LEASE_BYTES != len(records):
            _write_count(fd, len(records))
        fresh = containers.make_lease(header.version, owner, secrets, now)
        index = containers.RECORDS.find(records, fresh.renew, header.version > 1)
        if index is not None:
            if containers.RECORDS.expiry(records, index) < fresh.expires:
                at = begin + index * containers.LEASE_BYTES + containers.EXPIRY_OFFSET
                disk.write_all(fd, fresh.pack()[containers.EXPIRY_OFFSET :], at)
        elif len(records) >= MAX_LEASES * containers.LEASE_BYTES:
            index = containers.RECORDS.longest_expired(records, now)
            if index is None:
                raise NoSpace(f"{MAX_LEASES} others lease the share {path!r}; they keep it")
            disk.write_all(fd, fresh.pack(), begin + index * containers.LEASE_BYTES)
        elif not has_room(containers.LEASE_BYTES):
            raise NoSpace(f"there is no room for one more lease on {path!r}; use another server")
        else:
            _append(fd, fresh.pack(), begin, len(records))
        return True
    finally:
        os.close(fd)


def remove_if_expired(path: str, now: float) -> bool:
    """
    Remove an immutable share if it has leases, and all of them have run out.

    Returns:
        whether it was removed. A share without any lease, or in a container that is not
        understood, stays: what nobody understands is nobody's to delete.
    """
    fd = disk.lock_if_free(path)
    if fd is None:
        return False
    try:
        leases = containers.parse_leases(_read(fd)[2])
        if not leases or any(lease.expires >= now for lease in leases):
            return False
        os.unlink(path)
        return True
    except (OSError, ValueError):
        return False
    finally:
        os.close(fd)


def _read(fd: int) -> tuple[containers.ContainerHeader, int, bytes, int]:
    """Return header, begin of lease records, those that are there, counted or not, and the file's length."""
    file_bytes = os.fstat(fd).st_size
    header = containers.parse_header(os.pread(fd, containers.HEADER_BYTES, 0))
    begin = containers.leases_offset(header, file_bytes)
    records = os.pread(fd, file_bytes - begin, begin)
    records = records[: len(records) - len(records) % containers.LEASE_BYTES]
    while records.endswith(_LOST):
        records = records[: -len(_LOST)]
    return header, begin, records, file_bytes


def _append(fd: int, record: bytes, begin: int, records_bytes: int) -> None:
    """Add a record behind those that are there; if that fails, the file ends where it did."""
    try:
        disk.write_all(fd, record, begin + records_bytes)
    except OSError:
        with suppress(OSError):
            os.ftruncate(fd, begin + records_bytes)
        raise
    _write_count(fd, records_bytes + len(record))


def _write_count(fd: int, records_bytes: int) -> None:
    count = records_bytes // containers.LEASE_BYTES
    disk.write_all(fd, count.to_bytes(4, "big"), containers.LEASE_COUNT_OFFSET)
