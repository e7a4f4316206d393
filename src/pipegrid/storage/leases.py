"""
Leases on finished shares: renewing them in place, and removing shares whose leases have all run out.

A change takes the share file's lock for the moment it lasts, so that two processes do not both append, and
a renewal does not meet the removal. Readers take no lock: the share data never changes.

A new record is appended *before* it is counted. Being killed between the two leaves a record, or a part of
one, that is not counted: no data, as the header says how much of those there is (``sharedata``). Whoever adds
the next lease counts it, or takes the part away. The other way round a share would lose 72 bytes of its own.

Nothing is synced here. What a power cut leaves of a record that was appended lately may be zeros, in the
place of all that are counted; or nothing is there, in whole or in part (``sharedata``). Nobody can tell then
when the share runs out, so it stays until a lease is added: that one lasts longer than any before the cut.

Source: the format reference, storage protocols, sections 7.1 and 7.3.
"""

from __future__ import annotations

import os
from contextlib import suppress

import attrs

from pipegrid.disk import files as disk
from pipegrid.errors import NoSpace
from pipegrid.storage import containers
from pipegrid.storage.leaserecords import MAX_LEASES, HasRoom
from pipegrid.storage.sharedata import data_bytes
from pipegrid.wire.messages import LeaseSecrets

MOST_READ = 1 << 16
"""Far more leases than any server ever kept on a share, and 4.5 MiB; what claims more is damaged."""


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
        header, begin, records = _without_lost(fd, *_read(fd))
        fresh = containers.make_lease(header.version, owner, secrets, now)
        index = containers.RECORDS.find(records, fresh.renew, header.version > 1)
        if index is not None:
            if containers.RECORDS.expiry(records, index) < fresh.expires:
                at = begin + index * containers.LEASE_BYTES + containers.EXPIRY_OFFSET
                disk.write_all(fd, fresh.pack()[containers.EXPIRY_OFFSET :], at)
        elif header.lease_count >= MAX_LEASES:
            index = containers.RECORDS.longest_expired(records, now)
            if index is None:
                raise NoSpace(f"{MAX_LEASES} others lease the share {path!r}; they keep it")
            disk.write_all(fd, fresh.pack(), begin + index * containers.LEASE_BYTES)
        elif not has_room(containers.LEASE_BYTES):
            raise NoSpace(f"there is no room for one more lease on {path!r}; use another server")
        else:
            _append(fd, fresh.pack(), begin + len(records), header.lease_count + 1)
        return True
    finally:
        os.close(fd)


def remove_if_expired(path: str, now: float) -> bool:
    """
    Remove an immutable share if it has leases, and all of them have run out.

    Returns:
        whether it was removed. A share without any lease, or of which a power cut took the last one, or in
        a container that is not understood, stays: what nobody understands is nobody's to delete.
    """
    fd = disk.lock_if_free(path)
    if fd is None:
        return False
    try:
        header, _, records = _read(fd)
        leases = containers.parse_leases(records)
        if len(leases) < header.lease_count or not leases or not leases[-1].expires:
            return False  # of what was added last nobody knows how long it lasts
        known = [lease.expires for lease in leases if lease.expires]  # zeros: a power cut took it
        if not known or max(known) >= now:
            return False
        os.unlink(path)
        return True
    except (OSError, ValueError):
        return False
    finally:
        os.close(fd)


def _read(fd: int) -> tuple[containers.ContainerHeader, int, bytes]:
    """Return the header, where the lease records begin, and those; ValueError if nobody has so many."""
    file_bytes = os.fstat(fd).st_size
    header = containers.parse_header(os.pread(fd, containers.HEADER_BYTES, 0))
    begin = containers.HEADER_BYTES + data_bytes(fd, header, file_bytes)
    # A number that was damaged can make gigabytes of data count as records.
    if file_bytes - begin > MOST_READ * containers.LEASE_BYTES:
        raise ValueError(f"a share file that claims {header.lease_count} leases")
    return header, begin, os.pread(fd, file_bytes - begin, begin)


def _without_lost(
    fd: int, header: containers.ContainerHeader, begin: int, records: bytes
) -> tuple[containers.ContainerHeader, int, bytes]:
    """Return what was read, with the leases counted that are there; the file is made to fit first."""
    count, rest = divmod(len(records), containers.LEASE_BYTES)
    if count == header.lease_count and not rest:
        return header, begin, records
    os.ftruncate(fd, begin + len(records) - rest)
    disk.write_all(fd, count.to_bytes(4, "big"), containers.LEASE_COUNT_OFFSET)
    return attrs.evolve(header, lease_count=count), begin, records[: len(records) - rest]


def _append(fd: int, record: bytes, at: int, count: int) -> None:
    """Add a record at the file's end, and count it; if the disk takes a part only, it ends where it did."""
    try:
        disk.write_all(fd, record, at)
        disk.write_all(fd, count.to_bytes(4, "big"), containers.LEASE_COUNT_OFFSET)
    except OSError:
        with suppress(OSError):
            os.ftruncate(fd, at)
        raise
