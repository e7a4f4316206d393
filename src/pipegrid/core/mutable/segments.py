"""
The heavy work on one segment of a version, as values with one pure method: any thread will do.

There is no hash of the whole segment as immutable files have it: k good blocks make what the signature
vouches for, as far as it goes. A writer who signs shares that do not belong together is not found out,
unless the salts differ.

Source: the format reference for mutable files, sections 2 and 5.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import attrs

from pipegrid.core import erasure
from pipegrid.core.buffers import fresh
from pipegrid.core.crypto import StreamCipher
from pipegrid.core.hashes import BLOCK, Buffer
from pipegrid.core.mutable.geometry import MutableGeometry
from pipegrid.core.mutable.keys import data_key
from pipegrid.core.segmentjob import Block, SegmentResult, cut, joined


@attrs.frozen(eq=False)
class MutableSegment:
    """
    One segment after encryption and erasure coding.

    Attributes:
        index: its number in the file.
        block_hashes: 32 bytes for each of the n blocks (with their salts, for MDMF).
        blocks: for each share asked for, what is stored: the salt (MDMF) and the block, in pieces.
    """

    index: int
    block_hashes: tuple[bytes, ...] = attrs.field(repr=False)
    blocks: dict[int, tuple[Buffer, ...]] = attrs.field(repr=False)


def code_segment(
    geometry: MutableGeometry,
    index: int,
    plaintext: Buffer | Sequence[Buffer],
    salt: bytes,
    readkey: bytes,
    shares: Set[int] | None = None,
) -> MutableSegment:
    """
    Encrypt, erasure-code and hash one segment; pure, any thread, any order.

    Args:
        plaintext: exactly ``geometry.segment_length(index)`` bytes, whole or in pieces; not kept.
        salt: 16 fresh random bytes; the whole version's own for SDMF.
        shares: those whose blocks are kept, by default all; all hashes are computed in any case.
    """
    k, n = geometry.required_shares, geometry.total_shares
    length, block_bytes = geometry.segment_length(index), geometry.block_length(index)
    pieces = (plaintext,) if isinstance(plaintext, (bytes, bytearray, memoryview)) else plaintext
    assert sum(map(len, pieces)) == length, "a segment of another length"
    padded = memoryview(fresh(k * block_bytes))
    padded[length:] = bytes(len(padded) - length)
    cipher = StreamCipher(data_key(salt, readkey))
    position = 0
    for piece in pieces:
        cipher.apply(piece, padded[position : position + len(piece)])
        position += len(piece)
    padded = padded.toreadonly()
    primary = [padded[j * block_bytes : (j + 1) * block_bytes] for j in range(k)]
    stored = (salt,) if geometry.salt_bytes else ()
    blocks: dict[int, list[Buffer]] = {number: [*stored] for number in range(n)}
    for number in range(k):
        blocks[number].append(primary[number])
    parity = tuple(range(k, n))
    for start, end in erasure.stripes(block_bytes) if parity else ():
        stripe = tuple(block[start:end] for block in primary)
        made = erasure.encode_stripe(stripe, parity, k, n)
        for number, piece in zip(parity, made, strict=True):
            blocks[number].append(piece)
    return MutableSegment(
        index,
        tuple(BLOCK.hash_pieces(blocks[number]) for number in range(n)),
        {
            number: tuple(pieces)
            for number, pieces in blocks.items()
            if shares is None or number in shares
        },
    )


@attrs.frozen(eq=False)
class MutableSegmentJob:
    """
    Everything that is needed to turn k stored blocks into plaintext.

    Attributes:
        readkey: None for the ciphertext as it is.
        salt: the version's, for SDMF; b"" for MDMF, where the stored blocks begin with it.
        blocks: exactly k, of different shares, each with its salt if there is one, and its proven hash.
        start, end: which plaintext bytes of the segment are wanted.
    """

    segment: int
    geometry: MutableGeometry
    readkey: bytes | None = attrs.field(repr=False)
    salt: bytes
    blocks: tuple[Block, ...]
    start: int
    end: int

    def run(self) -> SegmentResult:
        """Do the work; any thread will do, and the same job may run more than once."""
        bad = tuple(block.share_number for block in self.blocks if not block.is_good())
        if bad:
            return SegmentResult(self.segment, bad_shares=bad)
        skip = self.geometry.salt_bytes
        salts = {self.salt}
        if skip:
            salts = {b"".join(cut(block.pieces, 0, skip)) for block in self.blocks}
        if len(salts) > 1:
            return SegmentResult(self.segment, consistent=False)
        ciphertext = cut(self._decode(skip), self.start, self.end)
        if self.readkey is None:
            return SegmentResult(self.segment, plaintext=ciphertext)
        cipher = StreamCipher(data_key(salts.pop(), self.readkey), self.start)
        plaintext: list[Buffer] = []
        for piece in ciphertext:
            output = fresh(len(piece))
            cipher.apply(piece, output)
            plaintext.append(output)
        return SegmentResult(self.segment, plaintext=plaintext)

    def _decode(self, skip: int) -> list[Buffer]:
        geometry = self.geometry
        k, length = geometry.required_shares, geometry.segment_length(self.segment)
        stored_bytes = skip + geometry.block_length(self.segment)
        pieces = {
            block.share_number: cut(block.pieces, skip, stored_bytes) for block in self.blocks
        }
        return joined(pieces, k, geometry.total_shares, length)
