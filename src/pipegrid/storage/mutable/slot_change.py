"""
Changing the shares of a slot so that a crash leaves each as it was or as it was to be:

==================================  ==================================================================
a share that is new, or at most     is written anew beside its slot, synced, and renamed over the
4 MiB long                          old one
a longer one                        is changed in place, and synced; copying gigabytes to change one
                                    segment would be worse
a deleted one                       is unlinked
==================================  ==================================================================

All new files are there, and synced, and the room that shares grow by in place is set aside, before the first
is renamed, so that a full disk changes nothing at all: but for one that cannot set room aside, or takes some
for what is written over, too. Nor does a failing one while copies are made. Several shares are renamed one
after the other: a crash in between leaves some of them new, as does the loss of one of several servers. A
client that finds two versions takes the newest that it can put together, and repairs.

What a crash may leave of a long share: killing the process, a container that can be read, with all its
leases, and some of the writes in the order in which they were given (see ``containers``); a power
cut, any of the writes, and if the container was growing, perhaps not the leases beyond the fourth. The
reader finds out by the share's hashes. Tahoe-LAFS changes all shares in place, and syncs none.

What was acknowledged is on the disk, unless the policy is ``none``.

Source: the format reference, storage protocols, sections 7.2, 7.3 and 8.3.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

from pipegrid.core import base32
from pipegrid.disk import files as disk
from pipegrid.disk.commit import Disk
from pipegrid.disk.private_output import PRIVATE_FILE, make_private
from pipegrid.errors import NoSpace, ServerRefused, UsageError
from pipegrid.storage.mutable import slot_file
from pipegrid.storage.mutable import slot_file as slotfiles
from pipegrid.storage.mutable.slot_file import SlotFile
from pipegrid.storage.share_file import HasRoom
from pipegrid.wire.messages import LeaseSecrets, ShareChange, SlotSecrets

COPY_LIMIT_BYTES = 4 << 20
"""Up to here a container is written anew, in some milliseconds; beyond, it is changed in place."""
COPY_SUFFIX = ".slot"


class SlotPlace(Protocol):
    """
    Where a slot lies.

    Attributes:
        incoming: the directory in which files are made that are to be renamed.
        read_only: takes no new shares.
        node_id: 20 bytes that new shares name as their server.
    """

    incoming: str
    read_only: bool
    node_id: bytes
    disk: Disk

    @property
    def has_room(self) -> HasRoom:
        """Asked whether so many more bytes may be stored."""

    def fresh_lease(self, share: SlotFile | None, secrets: LeaseSecrets) -> slot_file.MutableLease:
        """Return the lease to add to a share, or to renew there; None: one that is yet to be made."""


class SlotChange:
    """One read-test-write that has passed its tests; the slot is locked."""

    def __init__(
        self,
        place: SlotPlace,
        storage_index: bytes,
        directory: str,
        shares: dict[int, SlotFile],
        secrets: SlotSecrets,
    ) -> None:
        self._place = place
        self._name = base32.encode(storage_index)
        self._directory = directory
        self._shares = shares
        self._secrets = secrets
        self._copies: dict[int, tuple[int, str]] = {}

    def carry_out(self, changes: Mapping[int, ShareChange], durable: bool) -> None:
        """Change everything, or raise; see the module's text for what stands then."""
        deleted = sorted(n for n, each in changes.items() if each.new_length == 0)
        written = {n: changes[n] for n in sorted(changes) if n not in deleted}
        self._check_room(written)
        try:
            with slotfiles.reported(f"write to the slot {self._name}", self._directory):
                for number, change in written.items():
                    if self._is_copied(number, change):
                        self._make_copy(number, change)
                if durable:
                    for fd, _ in self._copies.values():
                        os.fsync(fd)
                in_place = {n: each for n, each in written.items() if n not in self._copies}
                slotfiles.set_aside([(self._shares[n], each) for n, each in in_place.items()])
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

    def _check_room(self, changes: Mapping[int, ShareChange]) -> None:
        """Count what the files grow by; what copies take until they are renamed shows when they are made."""
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
        if more and not self._place.has_room(more):
            raise NoSpace(
                f"there is no space for {more} more bytes in the slot {self._name}; "
                "use another server"
            )

    def _check_new(self, number: int) -> None:
        if self._place.read_only:
            raise NoSpace(
                f"this server takes no new shares, so not share {number} of {self._name}; "
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
        slotfiles.change_file(copy, change.writes, change.new_length, fresh, self._place.has_room)

    def _change_in_place(self, number: int, change: ShareChange, durable: bool) -> None:
        share = self._shares[number]
        fresh = self._place.fresh_lease(share, self._secrets.lease)
        slotfiles.change_file(share, change.writes, change.new_length, fresh, self._place.has_room)
        if durable:
            os.fsync(share.fd)

    def _sync_names(self) -> None:
        """The slot's directory, and those above, which may be as new as it is."""
        outer = os.path.dirname(self._directory)
        top = () if self._shares else (outer, os.path.dirname(outer))
        self._place.disk.sync_directories((self._directory, *top))


def _open_new(path: str) -> int:
    """Make a file, or empty one that somebody left who was killed; the slot is locked."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, PRIVATE_FILE)
    except FileNotFoundError:
        make_private(os.path.dirname(path))
        return os.open(path, flags, PRIVATE_FILE)
