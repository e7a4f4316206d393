"""
Changes of a slot's shares. A crash leaves each share of at most 4 MiB in its old or its new state.

Source: how Tahoe-LAFS 1.20 behaves.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

import attrs

from pipegrid.disk import file_system_calls as disk
from pipegrid.disk.durability import Disk
from pipegrid.disk.private_files import PRIVATE_FILE, make_private
from pipegrid.errors import NoSpace, ServerRefused, UsageError
from pipegrid.storage.mutable import slot_file
from pipegrid.storage.mutable.slot_file import SlotFile
from pipegrid.storage.share_file import HasRoom
from pipegrid.wire.storage_messages import LeaseSecrets, ShareChange, SlotSecrets

COPY_LIMIT_BYTES = 4 << 20
"""Containers up to this size are copied with the changes (milliseconds); longer ones change in place."""
COPY_SUFFIX = ".slot"


class SlotPlace(Protocol):
    """
    The storage directory of a slot.

    Attributes:
        incoming: the directory in which new files are created, before they are renamed.
        read_only: whether new shares are rejected.
        node_id: 20 bytes, the server's id, which is stored in new shares.
    """

    incoming: str
    read_only: bool
    node_id: bytes
    disk: Disk

    def fresh_lease(self, share: SlotFile | None, secrets: LeaseSecrets) -> slot_file.MutableLease:
        """
        Return a lease that starts now, to be added to a share, or to renew the share's lease with the same
        secrets. ``share`` is None if it does not exist yet.
        """


@attrs.define(eq=False, repr=False)
class SlotChange:
    """
    One read-test-write whose tests were successful; the slot is locked.

    * A new share, or one of at most 4 MiB, is written to a new file, synced, and renamed over the old file.
    * A longer share is changed in place, and synced: copying gigabytes to change one segment would take too
      long.
    * A deleted share is unlinked.

    Before the first rename, all new files are written and synced, and space is reserved for shares that grow
    in place. So if the disk is full or fails, nothing at all is changed, unless the file system cannot
    reserve space, or needs space to overwrite. Shares are renamed one after the other. If a crash interrupts
    the renames, only some shares are new; the loss of one of several servers has the same effect. A client
    that finds two versions uses the newest recoverable version, and repairs the file.

    After a crash, a long share is in an intermediate state. If only the process was killed, the share is a
    readable container with all its leases, and has the first writes, in their order. After a power cut, it
    may have any of the writes; if the container was growing, the leases after the fourth may be missing.
    Readers detect such states by the share's hashes. Tahoe-LAFS changes all shares in place, and syncs none.
    Acknowledged changes are durable, unless the policy is ``none``.

    Args:
        name: the storage index in base32.
        has_space: takes a number of bytes; returns whether the shares may grow by that many.
    """

    _place: SlotPlace
    _name: str
    _directory: str
    _shares: dict[int, SlotFile]
    _secrets: SlotSecrets
    _has_space: HasRoom
    _copies: dict[int, tuple[int, str]] = attrs.field(factory=dict)

    def carry_out(self, changes: Mapping[int, ShareChange], durable: bool) -> None:
        """
        Change all shares, or raise an error; the class documentation describes the state after an error.
        """
        deleted = sorted(n for n, each in changes.items() if each.new_length == 0)
        written = {n: changes[n] for n in sorted(changes) if n not in deleted}
        self._check_space(written)
        try:
            with slot_file.reported(f"write to the slot {self._name}", self._directory):
                for number, change in written.items():
                    if self._is_copied(number, change):
                        self._make_copy(number, change)
                if durable:
                    for fd, _ in self._copies.values():
                        os.fsync(fd)
                in_place = {n: each for n, each in written.items() if n not in self._copies}
                slot_file.set_aside([(self._shares[n], each) for n, each in in_place.items()])
                for number, (_, path) in self._copies.items():
                    os.rename(path, f"{self._directory}/{number:d}")
                for number, change in in_place.items():
                    self._change_in_place(number, change, durable)
                for number in deleted:
                    if number in self._shares:
                        disk.remove(f"{self._directory}/{number:d}")
                if durable:
                    self._sync_names()
        finally:
            for fd, path in self._copies.values():
                os.close(fd)
                with suppress(OSError):
                    disk.remove(path)

    def _check_space(self, changes: Mapping[int, ShareChange]) -> None:
        """
        Check that there is space for the growth of the files. The space for copies is checked when they are
        written.
        """
        more = 0
        for number, change in changes.items():
            share = self._shares.get(number)
            if share is None:
                self._check_new(number)
                header = slot_file.MutableHeader(2, b"", b"", 0, slot_file.DATA_OFFSET)
                more += slot_file.EMPTY_BYTES
            else:
                header = share.header
            growth = slot_file.measure(header, change.writes, change.new_length)
            more += growth.extra_offset - header.extra_offset
        if more and not self._has_space(more):
            raise NoSpace(
                f"there is no space for {more} more bytes in the slot {self._name}; "
                "use another server"
            )

    def _check_new(self, number: int) -> None:
        if self._place.read_only:
            raise NoSpace(
                f"this server is read-only and does not accept share {number} of {self._name}; "
                "use another server"
            )
        if len(self._secrets.write_enabler) != slot_file.WRITE_ENABLER_BYTES:
            raise UsageError("a write enabler is 32 bytes long; derive it from the write cap")
        if os.path.lexists(f"{self._directory}/{number:d}"):
            raise ServerRefused(
                f"share {number} of {self._name} is immutable; use another storage index"
            )

    def _is_copied(self, number: int, change: ShareChange) -> bool:
        share = self._shares.get(number)
        if share is None:
            return True
        length = change.new_length
        cuts = length is not None and length < share.header.data_bytes
        return (bool(change.writes) or cuts) and share.file_bytes <= COPY_LIMIT_BYTES

    def _make_copy(self, number: int, change: ShareChange) -> None:
        path = f"{self._place.incoming}/{self._name}.{number:d}{COPY_SUFFIX}"
        fd = _open_new(path)
        self._copies[number] = fd, path
        share = self._shares.get(number)
        if share is None:
            content = slot_file.pack_empty(self._place.node_id, self._secrets.write_enabler)
            header = slot_file.parse_header(content)
        else:
            content = disk.read_all(share.fd, share.file_bytes, 0)
            header = share.header
        disk.write_all(fd, content, 0)
        fresh = self._place.fresh_lease(share, self._secrets.lease)
        copy = SlotFile(fd, path, header, len(content))
        slot_file.change_file(copy, change.writes, change.new_length, fresh, self._has_space)

    def _change_in_place(self, number: int, change: ShareChange, durable: bool) -> None:
        share = self._shares[number]
        fresh = self._place.fresh_lease(share, self._secrets.lease)
        slot_file.change_file(share, change.writes, change.new_length, fresh, self._has_space)
        if durable:
            os.fsync(share.fd)

    def _sync_names(self) -> None:
        """Sync the slot's directory, and the two directories above it if they may be new."""
        outer = os.path.dirname(self._directory)
        top = () if self._shares else (outer, os.path.dirname(outer))
        self._place.disk.sync_directories((self._directory, *top))


def _open_new(path: str) -> int:
    """Create a file, or truncate one that a killed process has left. The slot is locked."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, PRIVATE_FILE)
    except FileNotFoundError:
        make_private(os.path.dirname(path))
        return os.open(path, flags, PRIVATE_FILE)
