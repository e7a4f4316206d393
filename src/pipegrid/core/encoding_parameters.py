"""
Encoding parameters, and the sizes that follow from the parameters and a file's size.

Source: Tahoe-LAFS's ``file-encoding.rst``, and how 1.20 behaves.
"""

from __future__ import annotations

import attrs

from pipegrid.argument_checks import check_whole
from pipegrid.core.hash_tree import chain_entries, num_nodes
from pipegrid.core.hashes import HASH_BYTES
from pipegrid.core.text import counted
from pipegrid.errors import SegmentTooLarge, UsageError

DEFAULT_SEGMENT_BYTES = 1 << 20
"""The maximum segment size that writers have used since 2023; older writers used 128 KiB."""

OLD_SEGMENT_BYTES = 1 << 17

MAX_SEGMENT_BYTES = 16 << 20
"""
Files with larger segments are not read unless the caller allows it. A cap may come from an untrusted source,
and a reader holds a whole segment and the following ones in memory. Writers have used 128 KiB and 1 MiB; with
this limit a reader needs about 100 MB.
"""

MAX_LITERAL_BYTES = 55
"""The size in bytes up to which a file is stored in its cap, as a literal cap."""


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is >= value."""
    return -(-value // multiple) * multiple


def _check_counts(required_shares: int, total_shares: int) -> None:
    check_whole(required_shares, "the number of required shares")
    check_whole(total_shares, "the number of total shares")
    if not 1 <= required_shares <= total_shares <= 256:
        raise UsageError(
            f"cannot encode {required_shares} of {total_shares}: choose "
            "1 <= required shares <= total shares <= 256"
        )


def check_segment_bytes(segment_bytes: int, size: int, allowed_bytes: int) -> None:
    """
    Raise SegmentTooLarge if the segments of a file of ``size`` bytes need more memory than is allowed.
    """
    largest = min(segment_bytes, size)
    if largest > allowed_bytes:
        raise SegmentTooLarge(largest, allowed_bytes)


@attrs.frozen
class Params:
    """
    How files are encoded: any ``required_shares`` of ``total_shares`` restore a file.

    Raises:
        UsageError: unless 1 <= required_shares <= total_shares <= 256 and max_segment_bytes >= 1.
    """

    required_shares: int = 3
    total_shares: int = 10
    max_segment_bytes: int = DEFAULT_SEGMENT_BYTES

    def __attrs_post_init__(self) -> None:
        _check_counts(self.required_shares, self.total_shares)
        if check_whole(self.max_segment_bytes, "the segment size") < 1:
            raise UsageError("the segment size must be at least one byte")

    def geometry(self, size: int) -> Geometry:
        """Return the sizes for a file of ``size`` bytes; size is at least 1."""
        segment_bytes = round_up(min(self.max_segment_bytes, size), self.required_shares)
        return Geometry(size, self.required_shares, self.total_shares, segment_bytes)


@attrs.frozen
class Geometry:
    """
    Sizes of one encoded file, in bytes unless the name says otherwise.

    Attributes:
        size: the length of the plaintext, and of the ciphertext.
        segment_bytes: the segment size (S), rounded up to a multiple of required_shares.
        num_segments: the number of segments, at least 1.
        tail_bytes: ciphertext bytes in the last segment, 1 to segment_bytes.
        padded_tail_bytes: the last segment padded to a multiple of required_shares.
        block_bytes: one share's part of a full segment.
        tail_block_bytes: one share's part of the last segment.
        share_data_bytes: all blocks of one share.
        tree_bytes: one stored hash tree over the segments (H).
        chain_bytes: the stored share hash chain.
    """

    size: int
    required_shares: int
    total_shares: int
    segment_bytes: int

    num_segments: int = attrs.field(init=False)
    tail_bytes: int = attrs.field(init=False)
    padded_tail_bytes: int = attrs.field(init=False)
    block_bytes: int = attrs.field(init=False)
    tail_block_bytes: int = attrs.field(init=False)
    share_data_bytes: int = attrs.field(init=False)
    tree_bytes: int = attrs.field(init=False)
    chain_bytes: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        _check_counts(self.required_shares, self.total_shares)
        if self.size < 1:
            raise UsageError("an empty file has no shares; it is stored in its cap")
        if self.segment_bytes < 1 or self.segment_bytes % self.required_shares:
            raise UsageError(
                f"a segment of {self.segment_bytes} bytes cannot be cut into "
                f"{self.required_shares} equal blocks"
            )
        k = self.required_shares
        num_segments = -(-self.size // self.segment_bytes)
        tail = self.size - (num_segments - 1) * self.segment_bytes
        derive = object.__setattr__  # how attrs documents setting frozen fields
        derive(self, "num_segments", num_segments)
        derive(self, "tail_bytes", tail)
        derive(self, "padded_tail_bytes", round_up(tail, k))
        derive(self, "block_bytes", self.segment_bytes // k)
        derive(self, "tail_block_bytes", -(-tail // k))
        data = (num_segments - 1) * self.block_bytes + self.tail_block_bytes
        derive(self, "share_data_bytes", data)
        derive(self, "tree_bytes", HASH_BYTES * num_nodes(num_segments))
        derive(self, "chain_bytes", 34 * chain_entries(self.total_shares))

    def segment_length(self, segment: int) -> int:
        """Return the number of ciphertext bytes in a segment, without padding."""
        return self.tail_bytes if segment == self.num_segments - 1 else self.segment_bytes

    def block_length(self, segment: int) -> int:
        """Return how many bytes of a segment one share holds."""
        return self.tail_block_bytes if segment == self.num_segments - 1 else self.block_bytes


def too_many_shares(total_shares: int, servers: int) -> str | None:
    """
    Return the warning that there are more shares than servers; None if each server gets at most one share.
    """
    if total_shares <= servers or not servers:
        return None
    return (
        f"{total_shares} shares of a file on {counted(servers, 'server')}: some servers hold several, "
        f"which are lost together with the server; choose a total of at most {servers} shares"
    )
