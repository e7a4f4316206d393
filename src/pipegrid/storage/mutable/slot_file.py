"""
The file of a mutable share: its container and leases, and the lock of its slot.

Source: how Tahoe-LAFS 1.20 behaves.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress

import attrs

from pipegrid.core.hashes import Buffer, tagged_hash
from pipegrid.disk import file_system_calls as disk
from pipegrid.disk.private_files import make_private
from pipegrid.errors import NoSpace, ServerRefused
from pipegrid.storage.share_file import (
    LEASE_DURATION_S,
    MAX_LEASES,
    NEVER_S,
    HasRoom,
    Records,
    damaged,
    lease_end,
    open_container,
    stored_secret,
)
from pipegrid.wire.storage_messages import LeaseSecrets, Released, ShareChange

#     offset 0    magic (32) of version 1 or 2; new containers have version 2, existing ones keep theirs
#     offset 32   node id of the server that created the container (20)
#     offset 52   write enabler (32)
#     offset 84   length of the share data (8)
#     offset 92   offset E of the number of extra leases (8)
#     offset 100  four lease slots of 92 bytes; a free one has owner 0
#     offset 468  share data; there is space for E - 468 bytes
#     offset E    number x of extra leases (4)
#     offset E+4  x extra leases
#
# A lease record: owner (4), expiry (4), renew secret (32), cancel secret (32), node id (20). Version 2
# contains hashes of the two secrets, version 1 the secrets themselves.

NODE_ID_BYTES = 20
WRITE_ENABLER_BYTES = 32
LEASE_BYTES = 92
LEASE_SLOTS = 4
LENGTH_OFFSET = 84
EXTRA_OFFSET = 92
LEASES_OFFSET = 100
DATA_OFFSET = LEASES_OFFSET + LEASE_SLOTS * LEASE_BYTES
COUNT_BYTES = 4
EMPTY_BYTES = DATA_OFFSET + COUNT_BYTES  # a container with no data and no extra leases
WRITTEN_VERSION = 2
OWNER = 1
MAX_EXTRA_LEASES = 1 << 16  # far more than usual; a larger number is damage

RECORDS = Records(LEASE_BYTES, 8, 40, 4)

_TITLES = {1: b"Tahoe mutable container v1\n", 2: b"Tahoe mutable container v2\n"}
MAGICS = {
    1: _TITLES[1] + bytes.fromhex("750944038e"),
    2: _TITLES[2] + tagged_hash(b"allmydata_mutable_container_header", _TITLES[2])[:5],
}
MAGIC_BYTES = 32

Writes = Sequence[tuple[int, Buffer]]
"""Writes to a share's data: the offset and the bytes of each."""

_VERSIONS = {magic: version for version, magic in MAGICS.items()}
_HEADER = struct.Struct(">32s20s32sQQ")
_LEASE = struct.Struct(">LL32s32s20s")
_UINT32 = struct.Struct(">L")
_UINT64 = struct.Struct(">Q")
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
        extra_offset: the offset in the file of the number of extra leases.
    """

    version: int
    node_id: bytes
    write_enabler: bytes = attrs.field(repr=False)
    data_bytes: int
    extra_offset: int

    def pack(self) -> bytes:
        """Return the 100 bytes of the header, with the magic string of its version."""
        fields = self.node_id, self.write_enabler, self.data_bytes, self.extra_offset
        return _HEADER.pack(MAGICS[self.version], *fields)


@attrs.frozen
class MutableLease:
    """
    One stored lease.

    Attributes:
        owner: 0 if the slot is free.
        expires: seconds since 1970, less than 2^32.
        renew, cancel: 32 bytes each: the secrets in version 1, their hashes in version 2.
        node_id: 20 bytes, the id of the server that created the lease.
    """

    owner: int
    expires: int
    renew: bytes = attrs.field(repr=False)
    cancel: bytes = attrs.field(repr=False)
    node_id: bytes

    def pack(self) -> bytes:
        """Return the 92-byte record; an expiry later than 2^32 - 1 is stored as 2^32 - 1."""
        expires = min(self.expires, NEVER_S)
        return _LEASE.pack(self.owner, expires, self.renew, self.cancel, self.node_id)


def is_mutable(data: bytes) -> bool:
    """Return whether a file that begins with ``data`` holds a mutable share."""
    return data[:MAGIC_BYTES] in _VERSIONS


def parse_header(data: bytes) -> MutableHeader:
    """
    Parse the first 100 bytes of a mutable share file.

    Raises:
        ValueError: there are too few bytes, this is not a mutable container, or its numbers contradict each
            other.
    """
    if len(data) < _HEADER.size:
        raise ValueError("a share file that ends within its header")
    magic, node_id, write_enabler, data_bytes, extra_offset = _HEADER.unpack_from(data)
    version = _VERSIONS.get(magic)
    if version is None:
        raise ValueError("a share file that is not a mutable container of version 1 or 2")
    if extra_offset < DATA_OFFSET + data_bytes or extra_offset >= 1 << 63:
        raise ValueError("a mutable container with less space than data")
    return MutableHeader(version, node_id, write_enabler, data_bytes, extra_offset)


def pack_empty(node_id: bytes, write_enabler: bytes) -> bytes:
    """
    Return a container without data and leases.

    Raises:
        ValueError: the node id is not 20 bytes long, or the write enabler is not 32 bytes long.
    """
    if len(node_id) != NODE_ID_BYTES or len(write_enabler) != WRITE_ENABLER_BYTES:
        raise ValueError("a write enabler is 32 bytes long and a node id 20")
    header = MutableHeader(WRITTEN_VERSION, node_id, write_enabler, 0, DATA_OFFSET)
    return header.pack() + bytes(LEASE_SLOTS * LEASE_BYTES + COUNT_BYTES)


def parse_count(data: bytes) -> int:
    """
    Return the number of extra leases; 0 if the file ends before this number.

    Raises:
        ValueError: the number is above the limit.
    """
    if len(data) < COUNT_BYTES:
        return 0
    count: int = _UINT32.unpack_from(data)[0]
    if count > MAX_EXTRA_LEASES:
        raise ValueError(f"a mutable container that claims {count} extra leases")
    return count


def parse_leases(data: bytes) -> tuple[MutableLease, ...]:
    """Return the lease records in ``data``, including free slots; an incomplete last record is ignored."""
    whole = len(data) - len(data) % LEASE_BYTES
    return tuple(MutableLease(*fields) for fields in _LEASE.iter_unpack(data[:whole]))


def make_lease(version: int, secrets: LeaseSecrets, node_id: bytes, now: float) -> MutableLease:
    """Return a lease of 31 days, which starts at ``now`` (seconds since 1970)."""
    renew, cancel = (stored_secret(version, each) for each in (secrets.renew, secrets.cancel))
    return MutableLease(secrets.owner or OWNER, lease_end(now), renew, cancel, node_id)


def lease_position(extra_offset: int, index: int) -> int:
    """
    Return the offset in the file of a lease. Indexes 0 to 3 are the slots, higher ones the extra leases.
    """
    if index < LEASE_SLOTS:
        return LEASES_OFFSET + index * LEASE_BYTES
    return extra_offset + COUNT_BYTES + (index - LEASE_SLOTS) * LEASE_BYTES


def plan_lease(
    extra_offset: int, records: bytes, fresh: MutableLease, version: int, has_space: HasRoom
) -> list[tuple[int, bytes]] | None:
    """
    Return the writes, ``(file offset, bytes)`` in order, that add or renew a lease; None if it cannot be
    added.

    Args:
        records: all existing leases, including free slots: the four slots, then the extra leases.
        fresh: the new lease. An expiry is only ever changed to a later time.
        version: the version of the container.
        has_space: see ``HasRoom``; called only if the lease becomes one more extra lease.
    """
    index = RECORDS.find(records, fresh.renew, version > 1)
    if index is not None and _owner(records, index):
        if RECORDS.expiry(records, index) >= fresh.expires:
            return []
        # In the existing record, only the expiry is changed.
        at = lease_position(extra_offset, index) + RECORDS.expiry_at
        return [(at, fresh.pack()[RECORDS.expiry_at : RECORDS.expiry_at + 4])]
    count = len(records) // LEASE_BYTES
    for index in range(count):
        if not _owner(records, index):
            return [(lease_position(extra_offset, index), fresh.pack())]
    if count >= MAX_LEASES:
        index = RECORDS.longest_expired(records, fresh.expires - LEASE_DURATION_S)
        return None if index is None else [(lease_position(extra_offset, index), fresh.pack())]
    if not has_space(LEASE_BYTES):
        return None
    # The new lease is written before it is counted.
    extra = _UINT32.pack(count - LEASE_SLOTS + 1)
    return [(lease_position(extra_offset, count), fresh.pack()), (extra_offset, extra)]


def _owner(records: bytes, index: int) -> bool:
    at = index * LEASE_BYTES
    return any(records[at : at + 4])


@attrs.frozen
class Growth:
    """
    The sizes of a container after a change.

    Attributes:
        data_bytes: the final length of the data.
        written_bytes: the length of the data after the writes, before it is cut.
        extra_offset: the final offset of the number of extra leases.
    """

    data_bytes: int
    written_bytes: int
    extra_offset: int


def measure(header: MutableHeader, writes: Writes, new_length: int | None) -> Growth:
    """
    Return the sizes after writes and a cut. A write of no bytes also extends a share to the write's offset.
    """
    written = max([header.data_bytes, *(offset + len(data) for offset, data in writes)])
    cut = written if new_length is None else min(written, new_length)
    return Growth(cut, written, max(header.extra_offset, DATA_OFFSET + written))


def plan_change(
    header: MutableHeader, extra: bytes, file_bytes: int, writes: Writes, new_length: int | None
) -> Iterator[tuple[int, Buffer]]:
    """
    Yield the writes, ``(file offset, bytes)``, of a change. Afterwards the caller cuts or extends the file,
    so that it ends after its extra leases.

    After each write the container is readable and has all its leases: data is written before the length that
    includes it, and leases are at their new place before the header points to this place. Where the old and
    the new place overlap, the leases are first copied to a third place, after both.

    Args:
        extra: number and records of the extra leases, as stored.
        file_bytes: the length of the file. If a process was killed, the file may be longer than the
            container.
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
    # New bytes that no write covers must be zeros, so stale bytes of cut data or of leases are overwritten.
    # After the file's old end there are only zeros.
    stale = min(growth.written_bytes, file_bytes - DATA_OFFSET)
    yield from _zeros(header.data_bytes, stale)
    for offset, data in writes:
        yield DATA_OFFSET + offset, data
    if growth.data_bytes != header.data_bytes:
        yield LENGTH_OFFSET, _UINT64.pack(growth.data_bytes)


def _zeros(begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield writes that fill ``[begin, end)`` of the data with zeros."""
    while begin < end:
        piece = _ZEROS[: end - begin]
        yield DATA_OFFSET + begin, piece
        begin += len(piece)


# The lock of a slot is the lock of its directory. It excludes both threads and processes, even for shares
# that do not exist yet.


@attrs.frozen(eq=False)
class SlotFile:
    """
    An open mutable share.

    Attributes:
        fd: the file descriptor; ``close`` closes it.
        path: the path of the file.
        header: the header, as stored.
        file_bytes: the length of the file.
    """

    fd: int
    path: str
    header: MutableHeader
    file_bytes: int

    @property
    def data_bytes(self) -> int:
        """The length of the data that can be read."""
        return max(0, min(self.header.data_bytes, self.file_bytes - DATA_OFFSET))

    def close(self) -> None:
        """Close ``fd``. Call this only once, since the number may belong to another file afterwards."""
        os.close(self.fd)

    def cut(self, offset: int, size: int) -> int:
        """Return how many bytes a read of ``size`` bytes at ``offset`` returns."""
        return max(0, min(size, self.data_bytes - offset))

    def read(self, offset: int, size: int) -> bytes:
        """
        Return at most size bytes; fewer, or none, if the data ends before.

        Raises:
            OSError: the disk failed.
        """
        length = self.cut(offset, size)
        return disk.read_all(self.fd, length, DATA_OFFSET + offset) if length else b""

    def equals(self, offset: int, size: int, specimen: bytes | disk.FilePart) -> bool:
        """
        Return whether a read returns exactly the specimen. No more bytes are read than needed to find out.
        """
        if self.cut(offset, size) != len(specimen):
            return False
        if not isinstance(specimen, disk.FilePart):
            return self.read(offset, size) == specimen
        for piece in specimen.pieces():
            if self.read(offset, len(piece)) != piece:
                return False
            offset += len(piece)
        return True

    def extra(self) -> bytes:
        """
        Return the number and the records of the extra leases, as a container stores them.

        Adding a lease syncs nothing, so after a power cut more leases may be counted than the file holds.
        Then this returns the existing ones, and the next lease that is added corrects the stored number.

        Raises:
            ValueError: the container is damaged.
        """
        at = self.header.extra_offset
        count = parse_count(disk.read_all(self.fd, COUNT_BYTES, at))
        records = disk.read_all(self.fd, count * LEASE_BYTES, at + COUNT_BYTES)
        count = len(records) // LEASE_BYTES
        records = records[: count * LEASE_BYTES]
        return count.to_bytes(COUNT_BYTES, "big") + records

    def lacks_leases(self, extra: bytes) -> bool:
        """
        Return whether a power cut removed extra leases: whether the last counted lease is missing, or is
        zeros. Then the share's expiry is unknown until a lease is added.

        Args:
            extra: the result of ``extra``.
        """
        at = self.header.extra_offset
        counted = parse_count(disk.read_all(self.fd, COUNT_BYTES, at))
        records = extra[COUNT_BYTES:]
        last = records[-LEASE_BYTES:]
        return counted * LEASE_BYTES > len(records) or (counted > 0 and not any(last))

    def leases(self, extra: bytes) -> bytes:
        """
        Return all lease records, including free slots.

        Args:
            extra: the result of ``extra``.
        """
        slots = LEASE_SLOTS * LEASE_BYTES
        head = disk.read_all(self.fd, slots, LEASES_OFFSET).ljust(slots, b"\0")
        return head + extra[COUNT_BYTES:]


def open_file(path: str, flags: int = os.O_RDONLY) -> SlotFile | None:
    """
    Open a mutable share, or return None if the file does not exist or is of another kind.

    Raises:
        ServerRefused: the share is damaged, or the disk failed.
    """
    return open_container(path, flags, LEASES_OFFSET, _slot_file)


def _slot_file(path: str, fd: int, start: bytes) -> SlotFile | None:
    if not is_mutable(start):
        return None
    return SlotFile(fd, path, parse_header(start), os.fstat(fd).st_size)


def is_mutable_file(path: str) -> bool:
    """Return whether a file holds a mutable share, damaged or not. False if the file cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return is_mutable(os.pread(fd, MAGIC_BYTES, 0))
    except OSError:
        return False
    finally:
        os.close(fd)


@contextmanager
def reported(what: str, path: str) -> Iterator[None]:
    """Convert errors of the disk and of damaged containers to PipeGrid's errors."""
    try:
        yield
    except OSError as error:
        raise disk.disk_error(error, what) from error
    except ValueError as error:
        raise damaged(path, error) from error


def set_aside(changes: Sequence[tuple[SlotFile, ShareChange]]) -> None:
    """
    Reserve disk space for shares that grow in place. Otherwise the disk could become full during a change, by
    a quota or other writers, and leave shares in neither the old nor the new state.

    Gaps between writes stay holes. Otherwise one byte far beyond the end would take space for all bytes
    before it.

    Raises:
        OSError: there is not enough space; nothing was changed.
    """
    try:
        for share, change in changes:
            header = share.header
            growth = measure(header, change.writes, change.new_length)
            if growth.extra_offset == header.extra_offset:
                continue
            for offset, data in change.writes:
                begin = max(offset, header.data_bytes)
                if offset + len(data) > begin:
                    size = offset + len(data) - begin
                    disk.allocate(share.fd, DATA_OFFSET + begin, size)
            # Space for copying the leases to a third place, and for one more lease.
            leases_bytes = 3 * len(share.extra()) + LEASE_BYTES
            disk.allocate(share.fd, growth.extra_offset, leases_bytes)
    except OSError:
        for share, _ in changes:
            os.ftruncate(share.fd, share.file_bytes)
        raise


def change_file(
    share: SlotFile,
    writes: Writes,
    new_length: int | None,
    fresh: MutableLease,
    has_space: HasRoom,
) -> None:
    """
    Carry out a change, and add or renew a lease if possible.

    Args:
        share: the container before the change; its slot is locked.

    Raises:
        OSError: the disk failed.
        ValueError: the container is damaged.
    """
    extra = share.extra()
    leases = share.leases(extra)
    header = share.header
    growth = measure(header, writes, new_length)
    if writes or growth.data_bytes != header.data_bytes:
        plan = plan_change(header, extra, share.file_bytes, writes, new_length)
        for at, data in plan:
            disk.write_all(share.fd, data, at)
        os.ftruncate(share.fd, growth.extra_offset + len(extra))
    end = growth.extra_offset
    for at, data in plan_lease(end, leases, fresh, header.version, has_space) or ():
        disk.write_all(share.fd, data, at)


def held_until(share: SlotFile, fresh: MutableLease) -> int | None:
    """
    Return when the lease that ``fresh`` would renew expires, in seconds since 1970; None if the share has no
    such lease.

    Raises:
        OSError: the disk failed.
        ValueError: the container is damaged.
    """
    records = share.leases(share.extra())
    index = RECORDS.find(records, fresh.renew, share.header.version > 1)
    return None if index is None or not _owner(records, index) else RECORDS.expiry(records, index)


def renew(share: SlotFile, fresh: MutableLease, has_space: HasRoom) -> None:
    """
    Add or renew a lease in place. The slot is locked.

    Raises:
        NoSpace: there is no space for one more lease, on the disk or on this share.
        OSError: the disk failed.
        ValueError: the container is damaged.
    """
    leases = share.leases(share.extra())
    header = share.header
    plan = plan_lease(header.extra_offset, leases, fresh, header.version, has_space)
    if plan is None:
        raise NoSpace(f"there is no space for one more lease on the share {share.path!r}")
    for at, data in plan:
        disk.write_all(share.fd, data, at)


def release(share: SlotFile, cancel_secret: bytes, since: int) -> Released:
    """
    Release the leases with a cancel secret, by freeing their places. Remove the share if no lease is left.

    The slot is locked. For the other arguments and the result see ``share_file.release_lease``.

    Raises:
        OSError: the disk failed.
        ValueError: the container is damaged.
    """
    header = share.header
    extra = share.extra()
    records = share.leases(extra)
    ours = RECORDS.cancelled_by(records, stored_secret(header.version, cancel_secret))
    valid = [index for index in ours if _owner(records, index)]
    limit = since + LEASE_DURATION_S
    renewed = sum(RECORDS.expiry(records, index) >= limit for index in valid)
    if renewed or not ours:
        return Released(kept=renewed)
    others = set(range(len(records) // LEASE_BYTES)).difference(ours)
    if share.lacks_leases(extra) or any(_owner(records, index) for index in others):
        for index in valid:
            disk.write_all(share.fd, bytes(4), lease_position(header.extra_offset, index))
        return Released(leases=len(valid))
    os.unlink(share.path)
    return Released(leases=len(valid), freed_bytes=share.file_bytes)


def remove_if_expired(path: str, now: float) -> bool:
    """
    Remove a mutable share if it has leases, and all of them have expired.

    Returns:
        whether the share was removed. It is kept if it has no lease, if a power cut removed one, or if its
            container is unknown.
    """
    directory = os.path.dirname(path)
    with suppress(OSError, ValueError, ServerRefused), ExitStack() as stack:
        lock = lock_slot(directory, create=False)
        if lock is None:
            return False
        stack.callback(os.close, lock)
        share = open_file(path)
        if share is None:
            return False
        with closing(share):
            extra = share.extra()
            if share.lacks_leases(extra):
                return False
            records = parse_leases(share.leases(extra))
        leases = [lease for lease in records if lease.owner]
        if leases and all(lease.expires < now for lease in leases):
            os.unlink(path)
            disk.remove_empty(directory)
            return True
    return False


def lock_slot(directory: str, create: bool) -> int | None:
    """
    Wait for the lock of a slot. Return the descriptor, which the caller closes to release the lock; None if
    the directory does not exist.

    The lock is held while files are written and synced, which takes milliseconds unless the disk is failing.

    Args:
        create: create the directory if it is missing.

    Raises:
        OSError: the disk failed.
    """
    for _ in range(8):  # another process may remove the empty directory
        with suppress(FileNotFoundError, NotADirectoryError):
            return disk.open_locked(directory, os.O_RDONLY | os.O_DIRECTORY, wait=True)
        if not create:
            return None
        make_private(directory)
    raise FileNotFoundError(errno.ENOENT, "the directory vanishes", directory)
