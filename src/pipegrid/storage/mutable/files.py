"""
One mutable share as a file: opening, reading, changing it, and the lock of its slot.

**The lock** of a slot is that of its directory. It works between threads as between processes, and
holds for shares that are yet to be made, too.

Source: the format reference, storage protocols, sections 7.2 and 7.3.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import attrs

from pipegrid.disk import files as disk
from pipegrid.disk.private import make_private
from pipegrid.errors import NoSpace, ServerRefused
from pipegrid.storage.leaserecords import HasRoom
from pipegrid.storage.mutable import containers
from pipegrid.storage.mutable.containers import MutableHeader, MutableLease
from pipegrid.storage.opening import damaged, open_container
from pipegrid.wire.messages import ShareChange


@attrs.frozen(eq=False)
class SlotFile:
    """
    An open mutable share.

    Attributes:
        fd: closed by ``close``.
        path: its name.
        header: as it is in the file.
        file_bytes: length of the file.
    """

    fd: int
    path: str
    header: MutableHeader
    file_bytes: int

    @property
    def data_bytes(self) -> int:
        """Length of the data that can be read."""
        return max(0, min(self.header.data_bytes, self.file_bytes - containers.DATA_OFFSET))

    def close(self) -> None:
        """Close ``fd``; to be called once, as the number may be another file's after that."""
        os.close(self.fd)

    def cut(self, offset: int, size: int) -> int:
        """Return how many bytes a read of so many bytes gives."""
        return max(0, min(size, self.data_bytes - offset))

    def read(self, offset: int, size: int) -> bytes:
        """
        Return at most size bytes; fewer, or none, past the end.

        Raises:
            OSError: the disk would not.
        """
        length = self.cut(offset, size)
        return disk.read_all(self.fd, length, containers.DATA_OFFSET + offset) if length else b""

    def equals(self, offset: int, size: int, specimen: bytes) -> bool:
        """Return whether a read gives exactly the specimen; no more is read than that takes."""
        return self.cut(offset, size) == len(specimen) and self.read(offset, size) == specimen

    def extra(self) -> bytes:
        """
        Return number and records of the extra leases.

        Nothing is synced when a lease is added: a power cut may leave more counted than the file holds. What
        is there counts, and the next lease that is added puts the number right.

        Raises:
            ValueError: the container is damaged.
        """
        at = self.header.extra_offset
        count = containers.parse_count(disk.read_all(self.fd, containers.COUNT_BYTES, at))
        records = disk.read_all(
            self.fd, count * containers.LEASE_BYTES, at + containers.COUNT_BYTES
        )
        count = len(records) // containers.LEASE_BYTES
        records = records[: count * containers.LEASE_BYTES]
        return count.to_bytes(containers.COUNT_BYTES, "big") + records

    def lacks_leases(self, extra: bytes) -> bool:
        """
        Return whether a power cut took extra leases, given what ``extra`` returned: the last one that is
        counted is not there, or zeros are. Nobody knows how long it lasts until another takes its place.
        """
        at = self.header.extra_offset
        counted = containers.parse_count(disk.read_all(self.fd, containers.COUNT_BYTES, at))
        records = extra[containers.COUNT_BYTES :]
        last = records[-containers.LEASE_BYTES :]
        return counted * containers.LEASE_BYTES > len(records) or (counted > 0 and not any(last))

    def leases(self, extra: bytes) -> bytes:
        """Return all lease records, free slots too, given what ``extra`` returned."""
        slots = containers.LEASE_SLOTS * containers.LEASE_BYTES
        head = disk.read_all(self.fd, slots, containers.LEASES_OFFSET).ljust(slots, b"\0")
        return head + extra[containers.COUNT_BYTES :]


def open_file(path: str, flags: int = os.O_RDONLY) -> SlotFile | None:
    """
    Open a mutable share, or return None if there is none: no file, or one of another kind.

    Raises:
        ServerRefused: there is one, but it is damaged, or the disk failed.
    """
    return open_container(path, flags, containers.LEASES_OFFSET, _slot_file)


def _slot_file(path: str, fd: int, start: bytes) -> SlotFile | None:
    if not containers.is_mutable(start):
        return None
    return SlotFile(fd, path, containers.parse_header(start), os.fstat(fd).st_size)


def is_mutable(path: str) -> bool:
    """Return whether a file holds a mutable share, damaged or not; False if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return containers.is_mutable(os.pread(fd, containers.MAGIC_BYTES, 0))
    except OSError:
        return False
    finally:
        os.close(fd)


@contextmanager
def reported(what: str, path: str) -> Iterator[None]:
    """Turn errors of the disk and of containers into ours."""
    try:
        yield
    except OSError as error:
        raise disk.disk_error(error, what) from error
    except ValueError as error:
        raise damaged(path, error) from error


def set_aside(changes: Sequence[tuple[SlotFile, ShareChange]]) -> None:
    """
    Have the disk set aside what changes in place make shares longer by, since one that is full halfway,
    which neither quotas nor other writers let anybody know before, would leave them neither old nor new.

    Gaps between writes stay holes: else a byte far behind the end would cost all that lies before it.

    Raises:
        OSError: there is no room; all is as it was.
    """
    try:
        for share, change in changes:
            header = share.header
            growth = containers.measure(header, change.writes, change.new_length)
            if growth.extra_offset == header.extra_offset:
                continue
            for offset, data in change.writes:
                begin = max(offset, header.data_bytes)
                if offset + len(data) > begin:
                    size = offset + len(data) - begin
                    disk.allocate(share.fd, containers.DATA_OFFSET + begin, size)
            # Leases go by way of a third place, and there may be one more.
            leases_bytes = 3 * len(share.extra()) + containers.LEASE_BYTES
            disk.allocate(share.fd, growth.extra_offset, leases_bytes)
    except OSError:
        for share, _ in changes:
            os.ftruncate(share.fd, share.file_bytes)
        raise


def change_file(
    share: SlotFile,
    writes: containers.Writes,
    new_length: int | None,
    fresh: MutableLease,
    has_room: HasRoom,
) -> None:
    """
    Carry out a change, and add or renew a lease, if that has a place.

    Args:
        share: the container as it is; the slot is locked.

    Raises:
        OSError, ValueError: the disk failed; the container is damaged.
    """
    extra = share.extra()
    leases = share.leases(extra)
    header = share.header
    growth = containers.measure(header, writes, new_length)
    if writes or growth.data_bytes != header.data_bytes:
        plan = containers.plan_change(header, extra, share.file_bytes, writes, new_length)
        for at, data in plan:
            disk.write_all(share.fd, data, at)
        os.ftruncate(share.fd, growth.extra_offset + len(extra))
    end = growth.extra_offset
    for at, data in containers.plan_lease(end, leases, fresh, header.version, has_room) or ():
        disk.write_all(share.fd, data, at)


def renew(share: SlotFile, fresh: MutableLease, has_room: HasRoom) -> None:
    """
    Add or renew a lease in place; the slot is locked.

    Raises:
        NoSpace: there is no room for one more, on the disk or on this share.
        OSError, ValueError: the disk failed; the container is damaged.
    """
    leases = share.leases(share.extra())
    header = share.header
    plan = containers.plan_lease(header.extra_offset, leases, fresh, header.version, has_room)
    if plan is None:
        raise NoSpace(f"there is no room for one more lease on the share {share.path!r}")
    for at, data in plan:
        disk.write_all(share.fd, data, at)


def remove_if_expired(path: str, now: float) -> bool:
    """
    Remove a mutable share if it has leases, and all of them have run out.

    Returns:
        whether it was removed. A share without any lease, or of which a power cut took one, or in a
        container that is not understood, stays.
    """
    try:
        lock = lock_slot(os.path.dirname(path), create=False)
    except OSError:
        return False
    if lock is None:
        return False
    try:
        share = open_file(path)
        if share is None:
            return False
        try:
            extra = share.extra()
            if share.lacks_leases(extra):
                return False
            records = containers.parse_leases(share.leases(extra))
            leases = [lease for lease in records if lease.owner]
        finally:
            share.close()
        if not leases or any(lease.expires >= now for lease in leases):
            return False
        os.unlink(path)
        disk.remove_empty(os.path.dirname(path))
        return True
    except (OSError, ValueError, ServerRefused):
        return False
    finally:
        os.close(lock)


def lock_slot(directory: str, create: bool) -> int | None:
    """
    Wait for the lock of a slot; return what to close to let it go, or None if there is no such directory.

    It is held while files are written and synced: milliseconds, unless the disk is sick.

    Args:
        create: make the directory if it is missing.

    Raises:
        OSError: the disk would not.
    """
    for _ in range(8):  # somebody else may remove the directory while it is empty
        with suppress(FileNotFoundError, NotADirectoryError):
            return disk.open_locked(directory, os.O_RDONLY | os.O_DIRECTORY, wait=True)
        if not create:
            return None
        make_private(directory)
    raise FileNotFoundError(errno.ENOENT, "the directory vanishes", directory)
