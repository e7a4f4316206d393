"""File of an immutable share: container, leases."""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import attrs

from pipegrid.core import layout
from pipegrid.disk import files as disk
from pipegrid.errors import NoSpace, ServerRefused
from pipegrid.wire.messages import LeaseSecrets

# Finding a lease among the records of a share, of either kind, and what to do about a new one.
#
# **At most 256 leases are kept on a share**, where Tahoe-LAFS knows no bound: 2400 of them on 16 shares made
# every request for those wait until all had been read and compared, 2.9 s. A client has one lease on a share.
# So more than 256 clients would have to keep the same file, and then one lease more or less is nothing
# that the share's life depends on. Beyond that the one that ran out longest ago makes room; if none has,
# the new lease is refused. None that has not run out is ever taken from anybody. A share that came with
# more keeps them all.
#
# The lookup is a search for 32 bytes in at most 24 KiB, microseconds; nothing is unpacked for it.
#
# Source: the format reference, storage protocols, section 7.3.

MAX_LEASES = 256
NEVER_S = (1 << 32) - 1
"""A lease that has this date never ends: its real one, if any, needs more than 32 bits."""


@attrs.frozen
class Records:
    """
    How the records of a kind of container look.

    Attributes:
        record_bytes: length of one.
        renew_at, expiry_at: where in it the renew secret is, of 32 bytes, and the expiry, of 4.
    """

    record_bytes: int
    renew_at: int
    expiry_at: int

    def find(self, records: bytes, stored: bytes, hashed: bool) -> int | None:
        """
        Return the index of the lease with this renew secret, or None.

        Args:
            stored: as the container holds it.
            hashed: it is a hash, of which it does not matter how long it takes to compare. Secrets
                themselves, as old containers hold them, are compared in constant time.
        """
        if not hashed:
            for index in range(len(records) // self.record_bytes):
                if hmac.compare_digest(self._renew(records, index), stored):
                    return index
            return None
        at = records.find(stored)
        while at >= 0:
            index, rest = divmod(at - self.renew_at, self.record_bytes)
            if not rest and index >= 0:
                return index
            at = records.find(stored, at + 1)
        return None

    def expiry(self, records: bytes, index: int) -> int:
        """Return when a lease runs out, in seconds since 1970."""
        at = index * self.record_bytes + self.expiry_at
        return int.from_bytes(records[at : at + 4], "big")

    def longest_expired(self, records: bytes, now: float) -> int | None:
        """Return the index of the lease that ran out longest ago, or None if none has."""
        whole = len(records) - len(records) % self.record_bytes
        behind = self.record_bytes - self.expiry_at - 4
        expiries = struct.iter_unpack(f">{self.expiry_at}xL{behind}x", records[:whole])
        found = min(((expires, index) for index, (expires,) in enumerate(expiries)), default=None)
        return None if found is None or found[0] >= min(now, NEVER_S) else found[1]

    def _renew(self, records: bytes, index: int) -> bytes:
        at = index * self.record_bytes + self.renew_at
        return records[at : at + 32]


HasRoom = Callable[[int], bool]
"""Whether so many more bytes may go to the disk: leases count against the reserve as shares do."""


# The container that a storage server keeps an immutable share in, as bytes.
#
#     offset 0   version (4): 2 is written, 1 is read too
#     offset 4   share length, saturated at 2^32 - 1 (4): informative, not to be relied on (``sharedata``)
#     offset 8   number of leases m (4)
#     offset 12  share data
#     last 72*m  lease records: owner (4), renew secret (32), cancel secret (32), expiry (4)
#
# So the share's length follows from the file's. Version 2 holds hashes of the two secrets, version 1 the
# secrets themselves; a container keeps its version when leases are added.
#
# Files, locks and clocks are the business of ``store`` and ``leases``.
#
# Source: the format reference, storage protocols, sections 7.1 and 7.3.

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
        raise ValueError("a share file that is not an immutable container of version 1 or 2")
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


# Where in its file the data of an immutable share end, also if a lease is counted behind them and not
# there, or there and not counted.
#
# As a rule that follows from the file's length and the number of leases. But a crash can leave a number that
# became durable before the file's length did: then the last bytes of the data would be taken for a lease, and
# with them goes the share, whose last section is what proves all others. So where the header says that there
# should be more data, the share itself is asked, which says where its last section ends. A header alone
# is not believed: what Tahoe-LAFS's clients asked room for before 1.18 was some hundred bytes too much.
# But data are never longer than the room: one lease's length or less behind it is a lease that a process
# was killed before it counted. Where more stands there, the header's number means nothing: a program does
# not keep it.
#
# Source: the format reference, section 6; storage protocols, section 7.1.


def data_bytes(fd: int, header: ContainerHeader, file_bytes: int) -> int:
    """
    Return the length of the share data in an open file of so many bytes.

    Raises:
        OSError: it cannot be read.
        ValueError: the file is too short for its leases, and does not say more.
    """
    by_leases = file_bytes - container_bytes(0, header.lease_count)
    if header.is_saturated or by_leases < header.room_bytes:
        end = _last_section_end(fd)
        if (
            end is not None
            and by_leases < end <= file_bytes - HEADER_BYTES
            and header.has_room(end)
        ):
            return end
    elif 0 < by_leases - header.room_bytes <= LEASE_BYTES:
        return header.room_bytes
    return share_bytes(header, file_bytes)


def _last_section_end(fd: int) -> int | None:
    """Return how long the share says that it is; None if it has no layout that is known."""
    try:
        found = layout.parse_header(os.pread(fd, layout.MAX_HEADER_BYTES, HEADER_BYTES))
        length = os.pread(fd, found.ueb_length_bytes, HEADER_BYTES + found.uri_extension)
    except (ValueError, OverflowError):
        return None
    if len(length) < found.ueb_length_bytes:
        return None
    return found.uri_extension + found.ueb_length_bytes + int.from_bytes(length, "big")


# Leases on finished shares: renewing them in place, and removing shares whose leases have all run out.
#
# A change takes the share file's lock for the moment it lasts, so that two processes do not both append, and
# a renewal does not meet the removal. Readers take no lock: the share data never changes.
#
# A new record is appended *before* it is counted. Being killed between the two leaves a record, or a part of
# one, that is not counted: no data, as the header says how much of those there is (``sharedata``).
# Whoever adds the next lease counts it, or takes the part away. The other way round a share would lose 72
# bytes of its own.
#
# Nothing is synced here. What a power cut leaves of a record that was appended lately may be zeros, in the
# place of all that are counted; or nothing is there, in whole or in part (``sharedata``). Nobody can tell
# then when the share runs out, so it stays until a lease is added: that one lasts longer than any before
# the cut.
#
# Source: the format reference, storage protocols, sections 7.1 and 7.3.

MOST_READ = 1 << 16
"""Far more leases than any server ever kept on a share, and 4.5 MiB; what claims more is damaged."""


def renew_lease(
    path: str, owner: int, secrets: LeaseSecrets, now: float, has_room: HasRoom
) -> bool:
    """
    Renew the lease of these secrets on one share, or add it.

    Args:
        owner: the number to store in a lease that is added.
        now: seconds since 1970. An expiry is only ever moved to a later time.
        has_room: see ``leaserecords``; renewing needs none.

    Returns:
        whether there is such a share.

    Raises:
        NoSpace: there is no space for one more lease, on the disk or on this share; nothing was changed.
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
        fresh = make_lease(header.version, owner, secrets, now)
        index = RECORDS.find(records, fresh.renew, header.version > 1)
        if index is not None:
            if RECORDS.expiry(records, index) < fresh.expires:
                at = begin + index * LEASE_BYTES + EXPIRY_OFFSET
                disk.write_all(fd, fresh.pack()[EXPIRY_OFFSET:], at)
        elif header.lease_count >= MAX_LEASES:
            index = RECORDS.longest_expired(records, now)
            if index is None:
                raise NoSpace(
                    f"the share {MAX_LEASES} has {path!r} leases of other clients, which keep it"
                )
            disk.write_all(fd, fresh.pack(), begin + index * LEASE_BYTES)
        elif not has_room(LEASE_BYTES):
            raise NoSpace(f"there is no space for one more lease on {path!r}; use another server")
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
        leases = parse_leases(records)
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


def _read(fd: int) -> tuple[ContainerHeader, int, bytes]:
    """Return the header, where the lease records begin, and those; ValueError if nobody has so many."""
    file_bytes = os.fstat(fd).st_size
    header = parse_header(os.pread(fd, HEADER_BYTES, 0))
    begin = HEADER_BYTES + data_bytes(fd, header, file_bytes)
    # A number that was damaged can make gigabytes of data count as records.
    if file_bytes - begin > MOST_READ * LEASE_BYTES:
        raise ValueError(f"a share file that claims {header.lease_count} leases")
    return header, begin, os.pread(fd, file_bytes - begin, begin)


def _without_lost(
    fd: int, header: ContainerHeader, begin: int, records: bytes
) -> tuple[ContainerHeader, int, bytes]:
    """Return what was read, with the leases counted that are there; the file is made to fit first."""
    count, rest = divmod(len(records), LEASE_BYTES)
    if count == header.lease_count and not rest:
        return header, begin, records
    os.ftruncate(fd, begin + len(records) - rest)
    disk.write_all(fd, count.to_bytes(4, "big"), LEASE_COUNT_OFFSET)
    return attrs.evolve(header, lease_count=count), begin, records[: len(records) - rest]


def _append(fd: int, record: bytes, at: int, count: int) -> None:
    """Add a record at the file's end, and count it; if the disk takes a part only, it ends where it did."""
    try:
        disk.write_all(fd, record, at)
        disk.write_all(fd, count.to_bytes(4, "big"), LEASE_COUNT_OFFSET)
    except OSError:
        with suppress(OSError):
            os.ftruncate(fd, at)
        raise


# When leases count as run out, and so when a share that nobody leases any more is removed.
#
# A lease record holds when it expires; 31 days earlier it was made, or last renewed. An operator may let
# leases live longer or shorter than that, or may have all end that were not renewed since a day. All
# three come down to one time, with which the expiry of every lease is compared.


@attrs.frozen
class Expiry:
    """
    What is removed.

    Attributes:
        duration_s: a lease has run out so long after it was renewed; None: when it says so itself.
        renewed_since: instead: a lease has run out if it was not renewed since then, in seconds since 1970.
        immutable, mutable: which kinds of shares are removed at all.
    """

    duration_s: int | None = None
    renewed_since: int | None = None
    immutable: bool = True
    mutable: bool = True

    def threshold(self, now: float) -> float:
        """
        Return the time, in seconds since 1970, before which leases that have run out expire.

        It is never beyond ``NEVER_S``: no lease that has this date has run out.
        """
        return min(self._threshold(now), NEVER_S)

    def _threshold(self, now: float) -> float:
        if self.renewed_since is not None:
            return self.renewed_since + LEASE_DURATION_S
        if self.duration_s is not None:
            return now + LEASE_DURATION_S - self.duration_s
        return now


# Opening the file of a share, of either kind.

T = TypeVar("T")


def open_container(
    path: str, flags: int, start_bytes: int, understand: Callable[[str, int, bytes], T | None]
) -> T | None:
    """
    Open a file and return what it is understood to be, or None if there is none, or one of another kind.

    Args:
        understand: given the path, the descriptor and the first bytes; raises ValueError if they are damaged.

    Raises:
        ServerRefused: there is one, but it is damaged, or the disk failed.
    """
    try:
        # A named pipe in a share's place would keep the thread that opens it for ever.
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
    """Return the error to report for a share that is not understood."""
    return ServerRefused(f"cannot use the share {path!r}: {error}; use another server's")
