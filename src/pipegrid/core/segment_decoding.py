"""
Decoding of one segment as a pure job for any thread: verify k blocks, decode, verify, decrypt.

Source: the format reference, section 7.1, steps 4 to 6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipegrid.core import erasure
from pipegrid.core.encoding_parameters import Geometry
from pipegrid.core.hashes import BLOCK, CRYPTTEXT_SEGMENT, Buffer
from pipegrid.core.stream_cipher import StreamCipher


class Block(NamedTuple):
    """One share's part of a segment, in the pieces in which it arrived, and the hash it must have."""

    share_number: int
    pieces: list[memoryview]
    expected_hash: bytes

    def is_good(self) -> bool:
        """Return whether the bytes match the hash."""
        return BLOCK.hash_pieces(self.pieces) == self.expected_hash


class SegmentResult:
    """
    The outcome of a job.

    Attributes:
        bad_shares: those whose blocks did not match; if there are any, nothing was decoded.
        consistent: False if good blocks made a segment that is not the one its author hashed.
        plaintext: the requested part of the segment, in pieces.
    """

    __slots__ = ("bad_shares", "consistent", "plaintext", "segment")

    def __init__(
        self,
        segment: int,
        bad_shares: tuple[int, ...] = (),
        consistent: bool = True,
        plaintext: list[Buffer] | None = None,
    ) -> None:
        self.segment = segment
        self.bad_shares = bad_shares
        self.consistent = consistent
        self.plaintext = [] if plaintext is None else plaintext


class SegmentJob:
    """
    The input to turn k blocks into plaintext.

    Attributes:
        key: None to return the ciphertext.
        blocks: exactly k, of different shares.
        crypttext_hash: of the segment's ciphertext without padding, verified.
        start: first plaintext byte to return, counted from the start of the segment.
        end: the byte after the last one to return.
    """

    __slots__ = ("blocks", "crypttext_hash", "end", "geometry", "key", "segment", "start")

    def __init__(
        self,
        segment: int,
        geometry: Geometry,
        key: bytes | None,
        blocks: tuple[Block, ...],
        crypttext_hash: bytes,
        start: int,
        end: int,
    ) -> None:
        self.segment = segment
        self.geometry = geometry
        self.key = key
        self.blocks = blocks
        self.crypttext_hash = crypttext_hash
        self.start = start
        self.end = end

    def run(self) -> SegmentResult:
        """Run the job, in any thread; the same job may run more than once."""
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
    """Return a segment of ``length`` bytes in pieces, from as many of its blocks as needed."""
    if all(number in blocks for number in range(required_shares)):
        # The primary blocks are the segment: nothing to compute or to join.
        return cut([piece for n in range(required_shares) for piece in blocks[n]], 0, length)
    whole = {n: parts[0] if len(parts) == 1 else b"".join(parts) for n, parts in blocks.items()}
    return erasure.decode(whole, required_shares, total_shares, length)


def cut(pieces: list[Buffer] | list[memoryview], start: int, end: int) -> list[Buffer]:
    """Return bytes [start, end) of the joined pieces, without copying."""
    result: list[Buffer] = []
    position = 0
    for piece in pieces:
        first, last = max(start - position, 0), min(end - position, len(piece))
        if first < last:
            result.append(memoryview(piece)[first:last])
        position += len(piece)
    return result
