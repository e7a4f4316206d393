"""
The questions and answers of a storage server as plain values, whatever their form on the wire.

Both ends share them: a server's share store answers with them, and every transport hands them on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import attrs

from pipegrid.core.hashes import Buffer
from pipegrid.errors import ServerError

UNKNOWN_PROTOCOL = (
    "no version of the storage protocol that is known here, though perhaps to a newer PipeGrid"
)
"""What is wrong with a server's version that names others only; "it answered with ..."."""


@attrs.frozen
class ServerIdentity:
    """
    Who a server is, before and apart from any connection.

    Attributes:
        server_id: stable text, ``v0-`` and 52 characters of base32 on a real grid.
        nickname: what a person calls it.
        permutation_seed: bytes that place it on every file's ring.
        lease_seed: 20 bytes (the tub id) that make its secrets differ from other servers'.
    """

    server_id: str
    nickname: str
    permutation_seed: bytes
    lease_seed: bytes


@attrs.frozen
class ServerVersion:
    """
    What a server says of itself.

    Attributes:
        max_share_bytes: the largest immutable share that it takes now; 0 if it is read-only or full.
        available_bytes: room for shares, or None if unknown.
        application: name and version of the software.
    """

    max_share_bytes: int
    available_bytes: int | None
    application: str


@attrs.frozen
class LeaseSecrets:
    """The two 32-byte secrets that claim a share on one server."""

    renew: bytes = attrs.field(repr=False)
    cancel: bytes = attrs.field(repr=False)


@attrs.frozen
class UploadSecrets:
    """All secrets of one upload to one server; ``upload`` is 1 to 64 bytes, 32 by custom."""

    lease: LeaseSecrets
    upload: bytes = attrs.field(repr=False)


@attrs.frozen
class Allocation:
    """
    The answer to ``allocate``.

    Attributes:
        already_have: all complete shares of the storage index, also those not asked for.
        allocated: the shares that may be written now. Whatever was asked for and is in neither
            set was refused: no room, or an unfinished upload of it exists (perhaps one's own).
    """

    already_have: frozenset[int]
    allocated: frozenset[int]


@attrs.frozen
class WriteAnswer:
    """
    The answer to ``write``.

    Attributes:
        complete: whether this write completed the share.
        required: half-open ranges ``(begin, end)`` that are still missing.
    """

    complete: bool
    required: tuple[tuple[int, int], ...] = ()


@attrs.frozen
class Stored:
    """
    The answer to ``store_whole``.

    Attributes:
        allocation: as if it had been asked for alone.
        failed: shares that were sent and are not there now, each with why.
    """

    allocation: Allocation
    failed: Mapping[int, ServerError] = attrs.field(factory=dict)


Numbers = AbstractSet[int]
"""Of shares."""

Shares = Mapping[int, bytes]
"""Whole ones, by number."""

Pieces = Sequence[Buffer]
"""What is written, one piece behind the other."""

Reads = Sequence[tuple[int, int]]
"""What is to be read of each share of a slot: offsets and lengths."""

SlotData = dict[int, tuple[bytes, ...]]
"""What was read, by share number: for each read what there was of it."""


@attrs.frozen
class SlotSecrets:
    """All secrets of one change to a slot of mutable shares; the write enabler is 32 bytes by custom."""

    lease: LeaseSecrets
    write_enabler: bytes = attrs.field(repr=False)


@attrs.frozen
class ShareChange:
    """
    What read-test-write is to test and to change in one mutable share.

    Attributes:
        tests: ``(offset, size, specimen)``: the bytes ``[offset, offset + size)``, cut at the share's end,
            must equal the specimen. A share that is not there reads as empty.
        writes: ``(offset, data)``, applied in this order.
        new_length: 0 deletes the share; less than its length after the writes cuts it; more, or None, does
            nothing.
    """

    tests: tuple[tuple[int, int, bytes], ...] = ()
    writes: tuple[tuple[int, Buffer], ...] = ()
    new_length: int | None = None


Changes = Mapping[int, ShareChange]
"""Of a slot, by share number."""

MAX_SLOT_SHARES = 256
MAX_SHARE_TESTS = 30
"""Of one share in one call: what Tahoe-LAFS's server takes over HTTPS."""
MAX_SMALL_WRITES = 30
"""
Of one share besides those of blocks. Tahoe-LAFS's client sends eight: keys, signature, hash trees, and three
parts of the header.
"""
MAX_BLOCK_WRITES = 262_144
"""
Tahoe-LAFS's client writes all of an MDMF share in one call, a write for each segment of 128 KiB, however
small the blocks are: that many are a file of 32 GiB, all of whose shares it holds in memory.
"""
BLOCK_WRITE_BYTES = 512
"""
The smallest such write: with k = 255 a block is 515 bytes, and its salt 16. So what a call costs, beyond what
small writes cost, is in proportion to its bytes.
"""
MAX_CALL_VECTORS = MAX_SLOT_SHARES * (MAX_SHARE_TESTS + MAX_SMALL_WRITES) + MAX_BLOCK_WRITES
"""Tests and writes of one call."""


@attrs.frozen
class SlotResult:
    """
    The answer to read-test-write.

    Attributes:
        success: whether all tests passed, and everything was written.
        data: for every share that was there before, what the read vector asked for, as it was before.
        repeated: it was asked for more than once, since connections were lost; what is not written now may
            have been the first time.
    """

    success: bool
    data: SlotData
    repeated: bool = attrs.field(default=False, eq=False)
