"""
The heavy work on one segment: check k blocks, decode, check the result, decrypt.

A job is a value with one pure method, so that it can run in any thread. It says what it
found and decides nothing; that is ``decoder``'s business.

Source: the format reference, section 7.1, steps 4 to 6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from pipegrid.core import erasure
from pipegrid.core.crypto import StreamCipher
from pipegrid.core.hashes import BLOCK, CRYPTTEXT_SEGMENT, Buffer
from pipegrid.core.params import Geometry


@attrs.frozen(eq=False)
class Block:
    """One share's part of a segment, as the pieces it came in, and the hash it must have."""

    share_number: int
    pieces: list[memoryview] = attrs.field(repr=False)
    expected_hash: bytes = attrs.field(repr=False)

    def is_good(self) -> bool:
        """Say whether the bytes have the hash."""
        return BLOCK.hash_pieces(self.pieces) == self.expected_hash


@attrs.frozen(eq=False)
class SegmentResult:
    """
    What became of a segment.

    Attributes:
        bad_shares: those whose blocks did not match; if there are any, nothing was decoded.
        consistent: False if good blocks made a segment that is not the one its author hashed.
        plaintext: the asked part of the segment, in pieces.
    """

    segment: int
    bad_shares: tuple[int, ...] = ()
    consistent: bool = True
    plaintext: list[Buffer] = attrs.field(factory=list, repr=False)


@attrs.frozen(eq=False)
class SegmentJob:
    """
    Everything that is needed to turn k blocks into plaintext.

    Attributes:
        key: None for the ciphertext as it is.
        blocks: exactly k, of different shares.
        crypttext_hash: of the segment's ciphertext without padding, proven.
        start: first plaintext byte that is wanted, counted from the segment's first.
        end: the byte after the last one that is wanted.
    """

    segment: int
    geometry: Geometry
    key: bytes | None = attrs.field(repr=False)
    blocks: tuple[Block, ...]
    crypttext_hash: bytes = attrs.field(repr=False)
    start: int
    end: int

    def run(self) -> SegmentResult:
        """Do the work; any thread will do, and the same job may run more than once."""
        bad = tuple(block.share_number for block in self.blocks if not block.is_good())
        if bad:
            return SegmentResult(self.segment, bad_shares=bad)
        ciphertext = self._decode()
        if CRYPTTEXT_SEGMENT.hash_pieces(ciphertext) != self.crypttext_hash:
            return SegmentResult(self.segment, consistent=False)
        if self.key is None:
            return SegmentResult(self.segment, plaintext=cut(ciphertext, self.start, self.end))
        return SegmentResult(self.segment, plaintext=self._decrypt(ciphertext, self.key))

    def _decode(self) -> list[Buffer]:
        length = self.geometry.segment_length(self.segment)
        pieces = {block.share_number: block.pieces for block in self.blocks}
        return joined(pieces, self.geometry.required_shares, self.geometry.total_shares, length)

    def _decrypt(self, ciphertext: list[Buffer], key: bytes) -> list[Buffer]:
        first_byte = self.segment * self.geometry.segment_bytes + self.start
        cipher = StreamCipher(key, first_byte)
        plaintext: list[Buffer] = []
        for piece in cut(ciphertext, self.start, self.end):
            output = bytearray(len(piece))
            cipher.apply(piece, output)
            plaintext.append(output)
        return plaintext


def joined(
    blocks: Mapping[int, Sequence[Buffer]], required_shares: int, total_shares: int, length: int
) -> list[Buffer]:
    """Return a segment of so many bytes in pieces, made of as many of its blocks as that takes."""
    if all(number in blocks for number in range(required_shares)):
        # The blocks one behind the other are the segment: nothing to compute or to join.
        return cut([piece for n in range(required_shares) for piece in blocks[n]], 0, length)
    whole = {n: parts[0] if len(parts) == 1 else b"".join(parts) for n, parts in blocks.items()}
    return erasure.decode(whole, required_shares, total_shares, length)


def cut(pieces: list[Buffer] | list[memoryview], start: int, end: int) -> list[Buffer]:
    """Return bytes [start, end) of the pieces as if they were joined, without copying."""
    kept: list[Buffer] = []
    position = 0
    for piece in pieces:
        first, last = max(start - position, 0), min(end - position, len(piece))
        if first < last:
            kept.append(memoryview(piece)[first:last])
        position += len(piece)
    return kept
