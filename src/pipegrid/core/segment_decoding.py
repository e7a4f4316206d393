"""
Decoding of one segment as a job without side effects, for any thread: verify k blocks, decode, verify,
decrypt. Also decoding of a file of one segment from whole shares, the counterpart of
``encoder.encode_whole``.

Source: Tahoe-LAFS's ``file-encoding.rst``, and how 1.20 behaves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from pipegrid.core import erasure, layout, ueb
from pipegrid.core.caps import ChkCap
from pipegrid.core.encoding_parameters import Geometry, Params
from pipegrid.core.erasure import cut
from pipegrid.core.hashes import BLOCK, CRYPTTEXT_SEGMENT, HASH_BYTES, UEB, Buffer
from pipegrid.core.layout import ShareLayout
from pipegrid.core.received_share import BadPart, prove_leaf
from pipegrid.core.stream_cipher import StreamCipher


class Block(NamedTuple):
    """One share's part of a segment, in the pieces in which it arrived, and the hash that it must have."""

    share_number: int
    pieces: list[memoryview]
    expected_hash: bytes

    def is_good(self) -> bool:
        """Return whether the bytes match the hash."""
        return BLOCK.hash_pieces(self.pieces) == self.expected_hash


class SegmentResult(NamedTuple):
    """
    The outcome of a job.

    Attributes:
        plaintext: the requested part of the segment, in pieces.
        bad_shares: the shares whose blocks did not match their hashes; if there are any, nothing was decoded.
        consistent: False if good blocks do not belong together: they give another segment than the one whose
            hash the author stored, or have different salts (in MDMF).
    """

    segment: int
    plaintext: list[Buffer]
    bad_shares: tuple[int, ...] = ()
    consistent: bool = True

    def __repr__(self) -> str:
        """Return a short form without the plaintext, since logs may contain it."""
        return f"SegmentResult({self.segment}, ..., {self.bad_shares}, {self.consistent})"


class SegmentJob(NamedTuple):
    """
    The input to turn k blocks into plaintext.

    Attributes:
        key: None to return the ciphertext.
        blocks: exactly k blocks, of different shares.
        crypttext_hash: the verified hash of the segment's ciphertext without padding.
        start: the first plaintext byte to return, counted from the start of the segment.
        end: the byte after the last byte to return.
    """

    segment: int
    geometry: Geometry
    key: bytes | None
    blocks: tuple[Block, ...]
    crypttext_hash: bytes
    start: int
    end: int

    def __repr__(self) -> str:
        """Return a short form without the key, since logs may contain it."""
        return f"SegmentJob({self.segment}, ...)"

    def run(self) -> SegmentResult:
        """Run the job, in any thread; the same job may run more than once."""
        bad = tuple(block.share_number for block in self.blocks if not block.is_good())
        if bad:
            return SegmentResult(self.segment, [], bad_shares=bad)
        ciphertext = self._decode()
        if CRYPTTEXT_SEGMENT.hash_pieces(ciphertext) != self.crypttext_hash:
            return SegmentResult(self.segment, [], consistent=False)
        wanted = cut(ciphertext, self.start, self.end)
        if self.key is None:
            return SegmentResult(self.segment, wanted)
        first_byte = self.segment * self.geometry.segment_bytes + self.start
        return SegmentResult(self.segment, decrypted(wanted, StreamCipher(self.key, first_byte)))

    def _decode(self) -> list[Buffer]:
        length = self.geometry.segment_length(self.segment)
        pieces = {block.share_number: block.pieces for block in self.blocks}
        return joined(pieces, self.geometry.required_shares, self.geometry.total_shares, length)


def decrypted(ciphertext: Iterable[Buffer], cipher: StreamCipher) -> list[Buffer]:
    """Return the plaintext of the pieces of ciphertext, in new buffers."""
    plaintext: list[Buffer] = []
    for piece in ciphertext:
        output = erasure.uninitialised(len(piece))
        cipher.apply(piece, output)
        plaintext.append(output)
    return plaintext


def joined(
    blocks: Mapping[int, Sequence[Buffer]], required_shares: int, total_shares: int, length: int
) -> list[Buffer]:
    """Return a segment of ``length`` bytes in pieces, made from at least k of its blocks."""
    if all(number in blocks for number in range(required_shares)):
        # The primary blocks together are the segment, so nothing is computed or joined.
        return cut([piece for n in range(required_shares) for piece in blocks[n]], 0, length)
    whole = {n: parts[0] if len(parts) == 1 else b"".join(parts) for n, parts in blocks.items()}
    return erasure.decode(whole, required_shares, total_shares, length)


# Decoding files of one segment from whole shares.

SMALL_FILE_BYTES = 128 << 10
"""The size up to which a file is one segment, no matter whether a present or an earlier writer stored it."""


class Unexpected(Exception):
    """
    A share is damaged, or laid out differently from the default of writers.

    ``Decoder`` finds out which, and reads the file in both cases.
    """


class WholeShareForm(NamedTuple):
    """
    The parts of a small file's shares that follow from its cap.

    Attributes:
        header: the first bytes of every share.
        share_bytes: the length of every share.
        ueb_parts: the last section of every share (the UEB with its length) without its three hashes: the
            bytes before each of the hashes, and the bytes after the last hash. The hashes are that of the
            ciphertext, the root of the crypttext hash tree, and the root of the share hash tree.
    """

    geometry: Geometry
    where: ShareLayout
    header: bytes
    share_bytes: int
    ueb_parts: tuple[bytes, bytes, bytes, bytes]


def whole_share_form(cap: ChkCap) -> WholeShareForm | None:
    """
    Return the form of a file's shares; None if ``decode_whole`` cannot decode the file, which is empty or
    longer than ``SMALL_FILE_BYTES``.
    """
    return _form(cap.required_shares, cap.total_shares, cap.size)


@lru_cache(maxsize=1024)
def _form(required_shares: int, total_shares: int, size: int) -> WholeShareForm | None:
    if not 0 < size <= SMALL_FILE_BYTES:
        return None
    geometry = Params(required_shares, total_shares).geometry(size)
    where = layout.for_geometry(geometry)
    # Marks in place of the hashes: no number in a UEB contains such bytes.
    marks = [bytes([number + 1]) * HASH_BYTES for number in range(3)]
    rest, parts = where.pack_ueb(ueb.pack(geometry, *marks)), []
    for mark in marks:
        part, rest = rest.split(mark, 1)
        parts.append(part)
    return WholeShareForm(
        geometry,
        where,
        where.pack_header(),
        layout.share_length(geometry, where),
        (parts[0], parts[1], parts[2], rest),
    )


def decode_whole(cap: ChkCap, form: WholeShareForm, shares: Mapping[int, bytes]) -> bytes:
    """
    Return the plaintext of a file; the cap proves every byte of it.

    This checks everything that ``Decoder`` checks, and also that nothing in the shares differs from what
    writers store.

    Args:
        form: what ``whole_share_form`` returned for the cap.
        shares: by share number, exactly k whole shares.

    Raises:
        Unexpected: a share is not as expected.
    """
    geometry, where = form.geometry, form.where
    length = geometry.segment_length(0)
    end = next(iter(shares.values()))[where.uri_extension :]
    crypttext_root_hash, share_root_hash = _read_ueb(cap, form, end)
    blocks: dict[int, bytes] = {}
    proven: dict[int, bytes] = {}
    for number, share in shares.items():
        block = share[where.data : where.unused]
        block_hash = BLOCK.hash(block)
        # The tree over one segment consists of one leaf, so the share's leaf of the share hash tree is the
        # hash of its block.
        if (
            len(share) != form.share_bytes
            or not share.startswith(form.header)
            or not share.endswith(end)
            or share[where.crypttext_hash_tree : where.share_hashes]
            != crypttext_root_hash + block_hash
        ):
            raise Unexpected
        chain = share[where.share_hashes : where.uri_extension]
        try:
            leaf = prove_leaf(chain, number, geometry.total_shares, share_root_hash, 0, proven)
        except BadPart:
            raise Unexpected from None
        if leaf != block_hash:
            raise Unexpected
        blocks[number] = block
    pieces = erasure.decode(blocks, geometry.required_shares, geometry.total_shares, length)
    ciphertext = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    if CRYPTTEXT_SEGMENT.hash(ciphertext) != crypttext_root_hash:
        raise Unexpected
    plaintext = bytearray(length)
    StreamCipher(cap.key).apply(ciphertext, plaintext)
    return bytes(plaintext)


def _read_ueb(cap: ChkCap, form: WholeShareForm, end: bytes) -> tuple[bytes, bytes]:
    """
    Return the roots of the crypttext hash tree and of the share hash tree, from the last section of a share.
    """
    first, second, third, last = form.ueb_parts
    root = len(first) + HASH_BYTES + len(second)
    share_root = root + HASH_BYTES + len(third)
    if (
        UEB.hash(end[form.where.ueb_length_bytes :]) != cap.ueb_hash
        or not end.startswith(first)
        or end[root - len(second) : root] != second
        or end[root + HASH_BYTES : share_root] != third
        or end[share_root + HASH_BYTES :] != last
    ):
        raise Unexpected
    return end[root : root + HASH_BYTES], end[share_root : share_root + HASH_BYTES]
