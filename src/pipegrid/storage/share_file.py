"""
The file of an immutable share: its container, its leases, and the expiry of leases.

Source: Tahoe-LAFS's ``file-encoding.rst``, and how 1.20 behaves.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

import attrs

from pipegrid.core import layout
from pipegrid.disk import file_system_calls as disk
from pipegrid.errors import NoSpace, ServerRefused
from pipegrid.wire.storage_messages import LeaseSecrets, Released

# At most 256 leases are kept on a share, where Tahoe-LAFS has no limit: with 2400 leases on 16 shares, every
# request for these shares took 2.9 s longer, since all leases were read and compared. A client has one lease
# on a share, so a share whose leases exceed the limit belongs to more than 256 clients and does not depend on
# one lease. At the limit a new lease replaces the one that expired longest ago; if none has expired, the new
# lease is rejected. An unexpired lease is never removed. A share that was imported with more than 256 leases
# keeps them.
#
# A lease is found by searching 32 bytes in at most 24 KiB, in microseconds, without unpacking records.

MAX_LEASES = 256
NEVER_S = (1 << 32) - 1
"""A lease with this expiry never expires: the maximum of the 32-bit field stands for all later times."""


@attrs.frozen
class Records:
    """
    The layout of lease records in one kind of container.

    Attributes:
        record_bytes: the length of a record.
        renew_at, cancel_at: the offsets of the two secrets in a record, 32 bytes each.
        expiry_at: the offset of the expiry in a record, 4 bytes.
    """

    record_bytes: int
    renew_at: int
    cancel_at: int
    expiry_at: int

    def find(self, records: bytes, stored: bytes, hashed: bool) -> int | None:
        """
        Return the index of the lease with a renew secret, or None.

        Args:
            stored: the secret in the form in which the container stores it.
            hashed: whether this form is a hash; then the time to compare it reveals nothing. Secrets in old
                containers are not hashed, and are compared in constant time.
        """
        if not hashed:
            return next(self._with_secret(records, self.renew_at, stored), None)
        at = records.find(stored)
        while at >= 0:
            index, rest = divmod(at - self.renew_at, self.record_bytes)
            if not rest and index >= 0:
                return index
            at = records.find(stored, at + 1)
        return None

    def cancelled_by(self, records: bytes, stored: bytes) -> list[int]:
        """
        Return the indexes of the leases with a cancel secret, which is compared in constant time.

        Args:
            stored: the secret in the form in which the container stores it.
        """
        return list(self._with_secret(records, self.cancel_at, stored))

    def owned(self, records: bytes, lowest: int) -> tuple[tuple[int, int], ...]:
        """
        Return owner and expiry of the leases that have an owner of at least ``lowest`` and are not released.
        """
        found = []
        for at in range(0, len(records) - self.record_bytes + 1, self.record_bytes):
            owner = int.from_bytes(records[at : at + 4], "big")
            if owner >= lowest:
                expires = self.expiry(records, at // self.record_bytes)
                found += [(owner, expires)] if expires > RELEASED_S else []
        return tuple(found)

    def expiry(self, records: bytes, index: int) -> int:
        """Return when a lease expires, in seconds since 1970."""
        at = index * self.record_bytes + self.expiry_at
        return int.from_bytes(records[at : at + 4], "big")

    def longest_expired(self, records: bytes, now: float) -> int | None:
        """Return the index of the lease that expired longest ago, or None if no lease has expired."""
        whole = len(records) - len(records) % self.record_bytes
        behind = self.record_bytes - self.expiry_at - 4
        expiries = struct.iter_unpack(f">{self.expiry_at}xL{behind}x", records[:whole])
        found = min(((expires, index) for index, (expires,) in enumerate(expiries)), default=None)
        return None if found is None or found[0] >= min(now, NEVER_S) else found[1]

    def _with_secret(self, records: bytes, secret_at: int, stored: bytes) -> Iterator[int]:
        """
        Yield the indexes of the leases with this secret at offset ``secret_at``, comparing in constant time.
        """
        for index in range(len(records) // self.record_bytes):
            at = index * self.record_bytes + secret_at
            if hmac.compare_digest(records[at : at + 32], stored):
                yield index


HasRoom = Callable[[int], bool]
"""Returns whether the disk has space for that many more bytes, without the reserved space."""


#     offset 0   version (4): new containers have version 2; version 1 is read, too
#     offset 4   share length (4), at most 2^32 - 1: not reliable (``data_bytes``)
#     offset 8   number of leases m (4)
#     offset 12  share data
#     last 72*m  lease records: owner (4), renew secret (32), cancel secret (32), expiry (4)
#
# So the length of the share data follows from the length of the file. Version 2 contains hashes of the two
# secrets, version 1 the secrets themselves. A container keeps its version when leases are added.

HEADER_BYTES = 12
LEASE_BYTES = 72
LEASE_COUNT_OFFSET = 8
EXPIRY_OFFSET = 68  # within a lease record
LEASE_DURATION_S = 31 * 24 * 3600
MAX_SHARE_BYTES = (1 << 63) - 1 - (1 << 20)  # the largest file minus 1 MiB for leases

RECORDS = Records(LEASE_BYTES, 4, 36, EXPIRY_OFFSET)

WRITTEN_VERSION = 2
OWNER_ALLOCATE = 0  # for leases of no named client; Tahoe-LAFS uses 0 and 1
OWNER_ADD_LEASE = 1

_HEADER = struct.Struct(">LLL")
_LEASE = struct.Struct(">L32s32sL")
_MAX_UINT32 = (1 << 32) - 1


@attrs.frozen
class ContainerHeader:
    """
    The first 12 bytes of an immutable share file.

    Attributes:
        space_bytes: the length that the client asked for, which may be more than that of the data. The
            maximum value stands for any larger length, too.
    """

    version: int
    lease_count: int
    space_bytes: int = _MAX_UINT32

    @property
    def is_saturated(self) -> bool:
        """Whether the length field has its maximum value, so that the real length may be larger."""
        return self.space_bytes == _MAX_UINT32

    def has_space(self, share_bytes: int) -> bool:
        """Return whether the share data may be ``share_bytes`` long according to this header."""
        return self.is_saturated or share_bytes <= self.space_bytes


@attrs.frozen
class LeaseRecord:
    """
    One stored lease.

    Attributes:
        owner: the number of a named client (``client_space``); numbers below ``FIRST_NUMBER`` have no
            meaning.
        renew, cancel: 32 bytes each: the secrets in version 1, their hashes in version 2.
        expires: seconds since 1970, less than 2^32.
    """

    owner: int
    renew: bytes = attrs.field(repr=False)
    cancel: bytes = attrs.field(repr=False)
    expires: int

    def pack(self) -> bytes:
        """Return the 72-byte record; an expiry later than 2^32 - 1 is stored as 2^32 - 1."""
        return _LEASE.pack(self.owner, self.renew, self.cancel, min(self.expires, NEVER_S))


def pack_header(share_bytes: int, lease_count: int, version: int = WRITTEN_VERSION) -> bytes:
    """Return the 12-byte header of a container for ``share_bytes`` bytes of share data."""
    return _HEADER.pack(version, min(share_bytes, _MAX_UINT32), lease_count)


def parse_header(data: bytes) -> ContainerHeader:
    """
    Parse the first 12 bytes of a share file.

    Raises:
        ValueError: there are too few bytes, or this is not an immutable container (but a mutable one, for
            example).
    """
    if len(data) < HEADER_BYTES:
        raise ValueError("a share file that ends within its header")
    version, space_bytes, lease_count = _HEADER.unpack_from(data)
    if version not in (1, 2):
        raise ValueError("a share file that is not an immutable container of version 1 or 2")
    return ContainerHeader(version, lease_count, space_bytes)


def container_bytes(share_bytes: int, lease_count: int = 1) -> int:
    """Return the length of a share file with this length of share data and this number of leases."""
    return HEADER_BYTES + share_bytes + LEASE_BYTES * lease_count


def share_bytes(header: ContainerHeader, file_bytes: int) -> int:
    """
    Return the length of the share data in a file of ``file_bytes`` bytes, according to the number of leases.

    Raises:
        ValueError: the file is too short for its leases.
    """
    length = file_bytes - container_bytes(0, header.lease_count)
    if length < 0:
        raise ValueError("a share file that is too short for its leases")
    return length


def leases_offset(header: ContainerHeader, file_bytes: int) -> int:
    """Return the offset in the file of the first lease record."""
    return HEADER_BYTES + share_bytes(header, file_bytes)


def stored_secret(version: int, secret: bytes) -> bytes:
    """Return the form in which a container of this version stores a 32-byte secret."""
    if version == 1:
        return secret
    return hashlib.blake2b(secret, digest_size=32).digest()


def lease_end(now: float) -> int:
    """
    Return when a lease that is made at ``now`` expires. Both times are in seconds since 1970.

    The stored field has 32 bits: a lease that would expire after 2106-02-07 gets ``NEVER_S``.
    """
    return min(max(int(now) + LEASE_DURATION_S, 1), NEVER_S)


def make_lease(version: int, owner: int, secrets: LeaseSecrets, now: float) -> LeaseRecord:
    """Return a lease of 31 days, which starts at ``now`` (seconds since 1970)."""
    renew, cancel = (stored_secret(version, each) for each in (secrets.renew, secrets.cancel))
    return LeaseRecord(secrets.owner or owner, renew, cancel, lease_end(now))


def pack_lease(version: int, owner: int, secrets: LeaseSecrets, now: float) -> bytes:
    """
    Return the packed record of the lease that ``make_lease`` makes, without creating the object. This is
    faster, and a bundle needs a record for every share.
    """
    renew, cancel = stored_secret(version, secrets.renew), stored_secret(version, secrets.cancel)
    return _LEASE.pack(secrets.owner or owner, renew, cancel, lease_end(now))


def parse_leases(data: bytes) -> tuple[LeaseRecord, ...]:
    """
    Return the lease records in ``data``.

    Raises:
        ValueError: data is not a whole number of records.
    """
    if len(data) % LEASE_BYTES:
        raise ValueError("lease records that end within a record")
    return tuple(LeaseRecord(*fields) for fields in _LEASE.iter_unpack(data))


# The end of the share data normally follows from the file's length and the number of leases. But after a
# crash the number may be durable while the file's length is not. Then the last bytes of the data would count
# as a lease, and the share would be lost, since its last section proves all others. So if the header gives a
# longer length, the end of the share's last section is used. The header alone is not reliable: clients of
# Tahoe-LAFS before 1.18 allocated some hundred bytes too many. But data are never longer than the header
# says. If up to 72 bytes follow that length, they are a lease that was not counted before its process was
# killed. If more bytes follow it, another program wrote the header, and its length field means nothing.


def data_bytes(fd: int, header: ContainerHeader, file_bytes: int) -> int:
    """
    Return the length of the share data in an open file of ``file_bytes`` bytes.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is too short for its leases, and the share data do not show another length.
    """
    by_leases = file_bytes - container_bytes(0, header.lease_count)
    if header.is_saturated or by_leases < header.space_bytes:
        end = _last_section_end(fd)
        if (
            end is not None
            and by_leases < end <= file_bytes - HEADER_BYTES
            and header.has_space(end)
        ):
            return end
    elif 0 < by_leases - header.space_bytes <= LEASE_BYTES:
        return header.space_bytes
    return share_bytes(header, file_bytes)


def _last_section_end(fd: int) -> int | None:
    """Return the length that the share's own sections imply; None if their layout is unknown."""
    try:
        found = layout.parse_header(os.pread(fd, layout.MAX_HEADER_BYTES, HEADER_BYTES))
        length = os.pread(fd, found.ueb_length_bytes, HEADER_BYTES + found.uri_extension)
    except (ValueError, OverflowError):
        return None
    if len(length) < found.ueb_length_bytes:
        return None
    return found.uri_extension + found.ueb_length_bytes + int.from_bytes(length, "big")


# A change holds the share file's lock for a moment, so that two processes do not both append, and a share is
# not removed while a lease is renewed. Readers take no lock, since the share data never changes.
#
# A new record is appended before it is counted. If the process is killed in between, the uncounted record, or
# its beginning, does not belong to the data (``data_bytes``). The next lease that is added counts a whole
# record, or removes a partial one. If records were counted before they are appended, a share could lose 72
# bytes of its data.
#
# Nothing is synced. After a power cut a record that was appended just before may be zeros, or missing in
# whole or in part. Then the share's expiry is unknown, so the share is kept until a lease is added. That
# lease lasts longer than the lost one.

MOST_READ = 1 << 16
"""Maximum number of leases to read (4.5 MiB), far more than servers keep on a share; more means damage."""


def renew_lease(
    path: str,
    owner: int,
    secrets: LeaseSecrets,
    now: float,
    has_space: HasRoom,
    grew: Callable[[int], object] = lambda more_bytes: None,
) -> bool:
    """
    Renew the lease with these secrets on one share, or add it.

    Args:
        owner: the number to store in a lease that is added.
        now: seconds since 1970. An expiry is only ever changed to a later time.
        has_space: see ``HasRoom``. It is not called to renew a valid lease, and is called with 0 if the lease
            takes the place of an expired or released one.
        grew: called with the change of the file's length, before its lock is released.

    Returns:
        whether the share exists.

    Raises:
        NoSpace: there is no space for one more lease, on the disk or on this share; nothing was changed.
        OSError: the disk failed.
        ValueError: the file is not an immutable container.
    """
    try:
        fd = disk.open_locked(path, os.O_RDWR, wait=True)
    except FileNotFoundError:
        return False
    assert fd is not None, "waiting for a lock gives it"
    try:
        before = os.fstat(fd).st_size
        try:
            header, begin, records = _without_lost(fd, *_read(fd))
            fresh = make_lease(header.version, owner, secrets, now)
            index = RECORDS.find(records, fresh.renew, header.version > 1)
            if index is not None and RECORDS.expiry(records, index) >= min(now, NEVER_S):
                if RECORDS.expiry(records, index) < fresh.expires:
                    at = begin + index * LEASE_BYTES + EXPIRY_OFFSET
                    disk.write_all(fd, fresh.pack()[EXPIRY_OFFSET:], at)
                return True
            if index is None and header.lease_count >= MAX_LEASES:
                index = _expired_lease(path, records, now)
            if not has_space(LEASE_BYTES if index is None else 0):
                raise NoSpace(
                    f"there is no space for one more lease on {path!r}; use another server"
                )
            if index is None:
                _append(fd, fresh.pack(), begin + len(records), header.lease_count + 1)
            else:
                disk.write_all(fd, fresh.pack(), begin + index * LEASE_BYTES)
            return True
        finally:
            grew(os.fstat(fd).st_size - before)
    finally:
        os.close(fd)


def _expired_lease(path: str, records: bytes, now: float) -> int:
    """Return the index of the lease that expired longest ago; raise NoSpace if no lease has expired."""
    index = RECORDS.longest_expired(records, now)
    if index is None:
        raise NoSpace(
            f"the share {path!r} has {MAX_LEASES} leases, and none has expired; use another server"
        )
    return index


def remove_if_expired(path: str, now: float) -> bool:
    """
    Remove an immutable share if it has leases, and all of them have expired.

    Returns:
        whether the share was removed. It is kept if it has no lease, if its last lease was lost in a power
            cut, if its lock is in use, or if its container is unknown.
    """
    fd = disk.lock_if_free(path)
    if fd is None:
        return False
    try:
        header, _, records = _read(fd)
        leases = parse_leases(records)
        if len(leases) < header.lease_count or not leases or not leases[-1].expires:
            return False  # a power cut lost a lease, whose expiry is unknown
        known = [lease.expires for lease in leases if lease.expires]  # 0: lost in a power cut
        if not known or max(known) >= now:
            return False
        os.unlink(path)
        return True
    except (OSError, ValueError):
        return False
    finally:
        os.close(fd)


# If a share has other leases, a released lease stays in its place, with the expiry RELEASED_S. Only four
# bytes change, so after a crash the lease is either valid or released, and no other lease is affected.
# Renewing a released lease makes it valid again. If no other lease is left, the file is removed in one step.

RELEASED_S = 1
"""The expiry of a lease that was released. An expiry of 0 means that a power cut lost the lease."""


def release_lease(path: str, cancel_secret: bytes, since: int) -> Released:
    """
    Release the leases with a cancel secret on one immutable share; remove the share if no lease is left.
    Return what was released.

    Args:
        cancel_secret: 32 bytes.
        since: seconds since 1970. If a lease with the secret was made or renewed at this time or later,
            nothing is released.

    Raises:
        OSError: the disk failed.
        ValueError: the file is not an immutable container.
    """
    try:
        fd = disk.open_locked(path, os.O_RDWR, wait=True)
    except FileNotFoundError:
        return Released()
    assert fd is not None, "waiting for a lock gives it"
    try:
        header, begin, records = _read(fd)
        ours = RECORDS.cancelled_by(records, stored_secret(header.version, cancel_secret))
        limit = since + LEASE_DURATION_S
        renewed = sum(RECORDS.expiry(records, index) >= limit for index in ours)
        if renewed or not ours:
            return Released(kept=renewed)
        count, rest = divmod(len(records), LEASE_BYTES)
        others = (RECORDS.expiry(records, index) for index in set(range(count)).difference(ours))
        # A lease that was lost in a power cut may belong to another client.
        if rest or count < header.lease_count or any(each != RELEASED_S for each in others):
            for index in ours:
                at = begin + index * LEASE_BYTES + EXPIRY_OFFSET
                disk.write_all(fd, RELEASED_S.to_bytes(4, "big"), at)
            return Released(leases=len(ours))
        size = os.fstat(fd).st_size
        os.unlink(path)
        return Released(leases=len(ours), freed_bytes=size)
    finally:
        os.close(fd)


def read_leases(path: str) -> tuple[int, bytes]:
    """
    Return the length of an immutable share's file before its leases, and the lease records.

    Raises:
        OSError: the file does not exist, or the disk failed.
        ValueError: the file is not an immutable container.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _, begin, records = _read(fd)
        return begin, records
    finally:
        os.close(fd)


def _read(fd: int) -> tuple[ContainerHeader, int, bytes]:
    """
    Return the header, the offset of the lease records, and the records. Raises ValueError if there are too
    many.
    """
    file_bytes = os.fstat(fd).st_size
    header = parse_header(os.pread(fd, HEADER_BYTES, 0))
    begin = HEADER_BYTES + data_bytes(fd, header, file_bytes)
    # If the number of leases is damaged, gigabytes of data might count as records.
    if file_bytes - begin > MOST_READ * LEASE_BYTES:
        raise ValueError(f"a share file that claims {header.lease_count} leases")
    return header, begin, os.pread(fd, file_bytes - begin, begin)


def _without_lost(
    fd: int, header: ContainerHeader, begin: int, records: bytes
) -> tuple[ContainerHeader, int, bytes]:
    """Return header, offset and records without leases that are counted but lost, and correct the file."""
    count, rest = divmod(len(records), LEASE_BYTES)
    if count == header.lease_count and not rest:
        return header, begin, records
    os.ftruncate(fd, begin + len(records) - rest)
    disk.write_all(fd, count.to_bytes(4, "big"), LEASE_COUNT_OFFSET)
    return attrs.evolve(header, lease_count=count), begin, records[: len(records) - rest]


def _append(fd: int, record: bytes, at: int, count: int) -> None:
    """Append a record, and count it. If the disk is full, restore the file's length."""
    try:
        disk.write_all(fd, record, at)
        disk.write_all(fd, count.to_bytes(4, "big"), LEASE_COUNT_OFFSET)
    except OSError:
        with suppress(OSError):
            os.ftruncate(fd, at)
        raise


# A lease record contains its expiry, 31 days after the lease was made or renewed. The operator may choose a
# longer or shorter duration, or a date since which leases must have been renewed. Either setting is converted
# to one time, with which the expiry of every lease is compared.


@attrs.frozen
class Expiry:
    """
    The rules by which leases expire and shares are removed.

    Attributes:
        duration_s: a lease expires this many seconds after it was renewed; None: at its recorded expiry.
        renewed_since: if given, a lease has expired if it was last renewed before this time, in seconds since
            1970.
        immutable, mutable: whether shares of this kind are removed at all.
    """

    duration_s: int | None = None
    renewed_since: int | None = None
    immutable: bool = True
    mutable: bool = True

    def threshold(self, now: float) -> float:
        """
        Return a time in seconds since 1970. Leases with a recorded expiry before this time have expired.

        The time is never after ``NEVER_S``, since leases with that expiry never expire.
        """
        if self.renewed_since is not None:
            now = self.renewed_since + LEASE_DURATION_S
        elif self.duration_s is not None:
            now += LEASE_DURATION_S - self.duration_s
        return min(now, NEVER_S)


# Opening the file of a share of either kind.

T = TypeVar("T")


def open_container(
    path: str, flags: int, start_bytes: int, understand: Callable[[str, int, bytes], T | None]
) -> T | None:
    """
    Open a share's file and parse it; None if the file does not exist or is of another kind.

    Args:
        understand: called with the path, the descriptor and the first bytes. Returns the result, or None if
            the file is of another kind; raises ValueError if the share is damaged.

    Raises:
        ServerRefused: the share is damaged, or the disk failed.
    """
    try:
        # O_NONBLOCK: opening a named pipe in place of a share would block the thread for ever.
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise disk.disk_error(error, f"open the share {path!r}") from error
    found = None
    try:
        found = understand(path, fd, os.pread(fd, start_bytes, 0))
    except OSError as error:
        raise disk.disk_error(error, f"read the share {path!r}") from error
    except ValueError as error:
        raise damaged(path, error) from error
    finally:
        if found is None:
            os.close(fd)
    return found


def damaged(path: str, error: ValueError) -> ServerRefused:
    """Return the error for a damaged share."""
    return ServerRefused(f"cannot use the share {path!r}: {error}; use another server's")
