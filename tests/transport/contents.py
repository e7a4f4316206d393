"""What a server in memory holds: shares, uploads, leases, slots; and what operations do to that."""

from __future__ import annotations

import attrs

from pipegrid.core.spans import Spans
from pipegrid.errors import NoSpace, NoSuchShare, WrongSecret
from pipegrid.wire.storage_messages import Changes, LeaseSecrets, Reads, ShareChange, SlotData

Key = tuple[bytes, int]
"""A storage index and a share number."""


@attrs.define
class MemoryUpload:
    """An unfinished share."""

    secret: bytes = attrs.field(repr=False)
    data: bytearray = attrs.field(repr=False)
    received: Spans = attrs.field(factory=Spans)


@attrs.define
class MemoryStorage:
    """
    What a server holds; two ``MemoryServer`` on one of these are two connections to one server.

    Attributes:
        capacity_bytes: room for all shares together, or None for any.
        shares: complete ones; tests may change them.
        uploads: unfinished ones.
        leases: the renew secrets of the leases on each storage index.
        advisories: complaints about corrupt shares.
        slots: mutable shares, by storage index and number; tests may change them.
        write_enablers: of each slot that has shares.
    """

    capacity_bytes: int | None = None
    shares: dict[Key, bytes] = attrs.field(factory=dict, repr=False)
    uploads: dict[Key, MemoryUpload] = attrs.field(factory=dict, repr=False)
    leases: dict[bytes, set[bytes]] = attrs.field(factory=dict, repr=False)
    advisories: list[tuple[bytes, int, str]] = attrs.field(factory=list)
    slots: dict[bytes, dict[int, bytes]] = attrs.field(factory=dict, repr=False)
    write_enablers: dict[bytes, bytes] = attrs.field(factory=dict, repr=False)

    def available_bytes(self) -> int | None:
        """Return the room that is neither used nor promised."""
        if self.capacity_bytes is None:
            return None
        used = sum(map(len, self.shares.values()))
        used += sum(len(share) for slot in self.slots.values() for share in slot.values())
        promised = sum(len(upload.data) for upload in self.uploads.values())
        return max(0, self.capacity_bytes - used - promised)

    def numbers(self, storage_index: bytes) -> frozenset[int]:
        """Return the numbers of the complete shares of an index."""
        return frozenset(number for index, number in self.shares if index == storage_index)

    def lease(self, storage_index: bytes, lease: LeaseSecrets) -> None:
        """Note a lease, by what renews it."""
        self.leases.setdefault(storage_index, set()).add(lease.renew)

    def begin(self, key: Key, share_bytes: int, secret: bytes) -> bool:
        """Begin an upload, or let its owner go on with it; returns whether it may be written."""
        there = self.uploads.get(key)
        if there is not None:
            return (there.secret, len(there.data)) == (secret, share_bytes)
        room = self.available_bytes()
        if room is not None and room < share_bytes:
            return False
        self.uploads[key] = MemoryUpload(secret, bytearray(share_bytes))
        return True

    def upload(self, key: Key, secret: bytes) -> MemoryUpload:
        """Return the unfinished upload of this key and secret."""
        if key not in self.uploads:
            raise NoSuchShare(f"there is no unfinished upload of share {key[1]}; allocate it")
        if self.uploads[key].secret != secret:
            raise WrongSecret(f"share {key[1]} is being uploaded under another secret; wait")
        return self.uploads[key]

    def share(self, key: Key) -> bytes:
        """Return a complete share."""
        if key not in self.shares:
            raise NoSuchShare(f"there is no share {key[1]} here; use another server's")
        return self.shares[key]

    def slot_share(self, key: Key) -> bytes:
        """Return a mutable share."""
        shares = self.slots.get(key[0], {})
        if key[1] not in shares:
            raise NoSuchShare(f"there is no mutable share {key[1]} here; use another server's")
        return shares[key[1]]

    def read_slot(self, storage_index: bytes, reads: Reads) -> SlotData:
        """Read from all shares of a slot."""
        return {
            number: tuple(share[offset : offset + length] for offset, length in reads)
            for number, share in self.slots.get(storage_index, {}).items()
        }

    def change_slot(self, storage_index: bytes, changes: Changes) -> bool:
        """Change shares of a slot if all tests pass; returns whether they did."""
        shares = self.slots.get(storage_index, {})
        for number, change in changes.items():
            share = shares.get(number, b"")
            for offset, length, specimen in change.tests:
                if share[offset : offset + length] != specimen:
                    return False
        changed = {
            number: changed_by(shares.get(number, b""), change)
            for number, change in changes.items()
        }
        room = self.available_bytes()
        grown = sum(len(share or b"") - len(shares.get(n, b"")) for n, share in changed.items())
        if room is not None and grown > room:
            raise NoSpace("there is no room for that; use another server")
        for number, new in changed.items():
            if new is not None:
                shares[number] = new
            else:
                shares.pop(number, None)
        self.slots[storage_index] = shares
        if not shares:
            del self.slots[storage_index]
        return True


def changed_by(share: bytes, change: ShareChange) -> bytes | None:
    """Return what a share becomes; None: it is deleted."""
    if change.new_length == 0:
        return None
    new = bytearray(share)
    for offset, data in change.writes:
        new.extend(bytes(max(0, offset - len(new))))
        new[offset : offset + len(data)] = data
    if change.new_length is not None:
        del new[change.new_length :]
    return bytes(new)
