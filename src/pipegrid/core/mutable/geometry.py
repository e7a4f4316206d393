"""
The sizes of one version of a mutable file, in either format.

SDMF has one segment, MDMF as many as it takes; an empty file has none.

Source: the format reference for mutable files, section 2.
"""

from __future__ import annotations

import enum

import attrs

from pipegrid.arguments import check_whole
from pipegrid.core.caps import MutableCap
from pipegrid.core.hashes import HASH_BYTES
from pipegrid.core.hashtree import num_nodes, padded_leaves
from pipegrid.core.layout import CHAIN_ENTRY_BYTES
from pipegrid.core.params import round_up
from pipegrid.errors import UsageError

MDMF_SEGMENT_BYTES = 1 << 17
"""What every writer of MDMF uses, rounded up to a multiple of k."""

SMALL_SEGMENT_BYTES = 1 << 12
MAX_SMALL_SEGMENTS = 1 << 12
"""
A file of more segments than these is not read if they are smaller: each costs a third of a millisecond,
however few bytes it has.
"""

MAX_MUTABLE_SHARES = 255
"""k and n have one byte each."""

MAX_MUTABLE_BYTES = 1 << 60
"""No file is longer; arithmetic with its offsets then stays below 2^63."""

SALT_BYTES = 16


class Format(enum.Enum):
    """The two formats; the value is the first byte of a share."""

    SDMF = 0
    MDMF = 1

    @classmethod
    def of(cls, cap: MutableCap) -> Format:
        """Return the format that a cap's kind names."""
        return cls.MDMF if cap.kind == "MDMF" else cls.SDMF

    @property
    def cap_kind(self) -> str:
        """``SSK`` or ``MDMF``: the kind in ``MutableCap``."""
        return "MDMF" if self is Format.MDMF else "SSK"


def usual_segment_bytes(format: Format, size: int, required_shares: int) -> int:
    """Return the S that every writer uses for a file of this size."""
    if format is Format.MDMF:
        return round_up(MDMF_SEGMENT_BYTES, required_shares)
    return round_up(size, required_shares)


@attrs.frozen
class MutableGeometry:
    """
    Sizes of one version; all in bytes unless the name says otherwise.

    Attributes:
        size: of the plaintext, 0 and more.
        segment_bytes: S; by default ``usual_segment_bytes``.
        num_segments: 0 for an empty file.
        num_salts: what a writer draws: one for SDMF (also of an empty file), one a segment for MDMF.
        tail_bytes: plaintext in the last segment, 0 if there is none.
        salt_bytes: stored in front of each block: 16 for MDMF, 0 for SDMF.
        block_bytes: one share's part of a full segment, without the salt.
        tail_block_bytes: one share's part of the last segment, without the salt.
        data_bytes: all blocks of one share, with their salts.
        tree_bytes: the stored block hash tree.
        chain_bytes: the stored share hash chain: the sibling path, without the leaf.

    Raises:
        UsageError: there can be no such file.
    """

    format: Format
    size: int
    required_shares: int
    total_shares: int
    segment_bytes: int = attrs.field()

    num_segments: int = attrs.field(init=False)
    num_salts: int = attrs.field(init=False)
    tail_bytes: int = attrs.field(init=False)
    salt_bytes: int = attrs.field(init=False)
    block_bytes: int = attrs.field(init=False)
    tail_block_bytes: int = attrs.field(init=False)
    data_bytes: int = attrs.field(init=False)
    tree_bytes: int = attrs.field(init=False)
    chain_bytes: int = attrs.field(init=False)

    @segment_bytes.default
    def _usual(self) -> int:
        if self.required_shares < 1:
            return 0  # refused below
        return usual_segment_bytes(self.format, self.size, self.required_shares)

    def __attrs_post_init__(self) -> None:
        k, n = self.required_shares, self.total_shares
        check_whole(k, "the number of required shares")
        check_whole(n, "the number of total shares")
        if not 1 <= k <= n <= MAX_MUTABLE_SHARES:
            raise UsageError(
                f"cannot encode a mutable file as {k} of {n}: choose "
                f"1 <= required shares <= total shares <= {MAX_MUTABLE_SHARES}"
            )
        if not 0 <= self.size <= MAX_MUTABLE_BYTES:
            raise UsageError(f"a mutable file cannot have {self.size} bytes")
        sdmf = self.format is Format.SDMF
        s = self.segment_bytes
        if s % k or s < 0 or (sdmf and s != round_up(self.size, k)) or (not sdmf and s < 1):
            raise UsageError(
                f"a mutable file of {self.size} bytes cannot have segments of {s} bytes in {k} blocks"
            )
        num_segments = -(-self.size // s) if s else 0
        tail = self.size - (num_segments - 1) * s if num_segments else 0
        salt = 0 if sdmf else SALT_BYTES
        block, tail_block = s // k, -(-tail // k)
        derive = object.__setattr__  # attrs: the way to finish a frozen instance
        derive(self, "num_segments", num_segments)
        derive(self, "num_salts", 1 if sdmf else num_segments)
        derive(self, "tail_bytes", tail)
        derive(self, "salt_bytes", salt)
        derive(self, "block_bytes", block)
        derive(self, "tail_block_bytes", tail_block)
        full = max(num_segments - 1, 0)
        data = full * (salt + block) + (salt + tail_block if num_segments else 0)
        derive(self, "data_bytes", data)
        derive(self, "tree_bytes", HASH_BYTES * num_nodes(num_segments))
        derive(self, "chain_bytes", CHAIN_ENTRY_BYTES * (padded_leaves(n).bit_length() - 1))

    @property
    def is_too_fine(self) -> bool:
        """Whether there are so many small segments that they cost far more than their bytes."""
        return self.segment_bytes < SMALL_SEGMENT_BYTES and self.num_segments > MAX_SMALL_SEGMENTS

    def segment_length(self, segment: int) -> int:
        """Return the plaintext bytes in a segment."""
        return self.tail_bytes if segment == self.num_segments - 1 else self.segment_bytes

    def block_length(self, segment: int) -> int:
        """Return the bytes that one share holds of a segment, without the salt."""
        return self.tail_block_bytes if segment == self.num_segments - 1 else self.block_bytes

    def stored_range(self, first: int, end: int) -> tuple[int, int]:
        """Return where the salts and blocks of segments [first, end) are, from the first one's salt on."""
        step = self.salt_bytes + self.block_bytes
        return first * step, self.data_bytes if end == self.num_segments else end * step
