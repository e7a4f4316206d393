"""
Decoding of a file of one segment from whole shares, the counterpart of ``encoder.encode_whole``.

Source: the format reference, sections 6 and 7.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import attrs

from pipegrid.core import erasure, layout, ueb
from pipegrid.core.caps import ChkCap
from pipegrid.core.encoding_parameters import Geometry, Params
from pipegrid.core.hashes import BLOCK, CRYPTTEXT_SEGMENT, HASH_BYTES, UEB
from pipegrid.core.layout import ShareLayout
from pipegrid.core.received_share import BadPart, prove_leaf
from pipegrid.core.stream_cipher import StreamCipher

SMALL_FILE_BYTES = 128 << 10
"""Files up to this size are one segment, whichever of today's and earlier writers stored them."""


class Unexpected(Exception):
    """
    A share is damaged, or is laid out in another way than writers do by default.

    ``Decoder`` tells which, and reads the file in both cases.
    """


@attrs.frozen
class WholeShareForm:
    """
    What the cap of a small file says of each of its shares.

    Attributes:
        header: the first bytes of every share.
        share_bytes: the length of every share.
    """

    geometry: Geometry
    where: ShareLayout
    header: bytes
    share_bytes: int


def whole_share_form(cap: ChkCap) -> WholeShareForm | None:
    """Return the form of a file's shares; None if the file is too large to be decoded at once."""
    return _form(cap.required_shares, cap.total_shares, cap.size)


@lru_cache(maxsize=1024)
def _form(required_shares: int, total_shares: int, size: int) -> WholeShareForm | None:
    if not 0 < size <= SMALL_FILE_BYTES:
        return None
    geometry = Params(required_shares, total_shares).geometry(size)
    where = layout.for_geometry(geometry)
    return WholeShareForm(
        geometry, where, where.pack_header(), layout.share_length(geometry, where)
    )


def decode_whole(cap: ChkCap, form: WholeShareForm, shares: Mapping[int, bytes]) -> bytes:
    """
    Return the plaintext of a file, every byte of it proven by the cap.

    All that readers check is checked, and also that nothing in the shares differs from what writers store.

    Args:
        form: what ``whole_share_form`` returned for the cap.
        shares: exactly k whole shares, by share number.

    Raises:
        Unexpected: some share is not as expected.
    """
    geometry, where = form.geometry, form.where
    length = geometry.segment_length(0)
    known = _read_ueb(cap, form, next(iter(shares.values())))
    ends = {share[where.uri_extension :] for share in shares.values()}
    if len(ends) != 1:
        raise Unexpected
    blocks: dict[int, bytes] = {}
    proven: dict[int, bytes] = {}
    for number, share in shares.items():
        block = share[where.data : where.data + geometry.block_bytes]
        block_hash = BLOCK.hash(block)
        middle = share[where.unused : where.share_hashes]
        # The tree over one segment is its only leaf, and so the share's leaf is the hash of its block.
        if (
            len(share) != form.share_bytes
            or not share.startswith(form.header)
            or middle[HASH_BYTES:] != known.crypttext_root_hash + block_hash
        ):
            raise Unexpected
        chain = share[where.share_hashes : where.uri_extension]
        try:
            leaf = prove_leaf(
                chain, number, geometry.total_shares, known.share_root_hash, 0, proven
            )
        except BadPart:
            raise Unexpected from None
        if leaf != block_hash:
            raise Unexpected
        blocks[number] = block
    pieces = erasure.decode(blocks, geometry.required_shares, geometry.total_shares, length)
    ciphertext = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    if CRYPTTEXT_SEGMENT.hash(ciphertext) != known.crypttext_root_hash:
        raise Unexpected
    plaintext = bytearray(length)
    StreamCipher(cap.key).apply(ciphertext, plaintext)
    return bytes(plaintext)


def _read_ueb(cap: ChkCap, form: WholeShareForm, share: bytes) -> ueb.Ueb:
    start = form.where.uri_extension
    packed = share[start + form.where.ueb_length_bytes :]
    if share[start:] != form.where.pack_ueb(packed) or UEB.hash(packed) != cap.ueb_hash:
        raise Unexpected
    try:
        known = ueb.parse(packed)
    except ValueError:
        raise Unexpected from None
    if known.segment_bytes != form.geometry.segment_bytes or ueb.contradiction(cap, known):
        raise Unexpected
    return known
