"""
A small file's shares, all of them at once and whole.

``Encoder`` makes shares of any length piece by piece, as they are sent. A file of one segment that is in
memory needs none of that: here its shares are made in one go, each in one piece, the same to the last byte.
It takes half the time.

Source: the format reference, sections 2 to 6.
"""

from __future__ import annotations

from functools import lru_cache

from pipegrid.core import hashes, hashtree, layout, ueb
from pipegrid.core.caps import ChkCap
from pipegrid.core.crypto import StreamCipher
from pipegrid.core.erasure import STRIPE_BYTES, encode_stripe
from pipegrid.core.hashes import HASH_BYTES, Buffer
from pipegrid.core.params import Geometry

MAX_BLOCK_BYTES = STRIPE_BYTES
"""Longer blocks are coded in stripes, which is ``Encoder``'s work."""


def fits(geometry: Geometry) -> bool:
    """Whether a file of these sizes can be encoded here."""
    return geometry.num_segments == 1 and geometry.block_bytes <= MAX_BLOCK_BYTES


def encode(geometry: Geometry, key: bytes, plaintext: Buffer) -> tuple[list[bytes], ChkCap]:
    """
    Return all shares in the order of their numbers, and the cap.

    Args:
        geometry: one that ``fits``.
        key: 16 bytes, from ``encoder.convergent_key`` or random.
        plaintext: exactly ``geometry.size`` bytes.
    """
    k, n, size = geometry.required_shares, geometry.total_shares, geometry.size
    assert len(plaintext) == size
    block_bytes = geometry.block_bytes
    padded = bytearray(k * block_bytes)
    view = memoryview(padded)
    ciphertext = view[:size]
    StreamCipher(key).apply(plaintext, ciphertext)
    segment_hash = hashes.CRYPTTEXT_SEGMENT.hash(ciphertext)
    primary = tuple(
        view[start : start + block_bytes] for start in range(0, len(padded), block_bytes)
    )
    blocks: list[Buffer] = [*primary, *encode_stripe(primary, _parity(k, n), k, n)]
    # The tree over one segment is its only leaf.
    leaves = [hashes.BLOCK.hash(block) for block in blocks]
    share_tree = hashtree.build(leaves)
    packed = ueb.pack(
        geometry, hashes.CRYPTTEXT.hash(ciphertext), segment_hash, hashtree.root(share_tree)
    )
    where = layout.for_geometry(geometry)
    header, end = where.pack_header(), where.pack_ueb(packed)
    middle = bytes(geometry.tree_bytes) + segment_hash
    nodes = [
        share_tree[start : start + HASH_BYTES] for start in range(0, len(share_tree), HASH_BYTES)
    ]
    shares = [
        b"".join([header, block, middle, leaf, *_chain(nodes, n, number), end])
        for number, (block, leaf) in enumerate(zip(blocks, leaves, strict=True))
    ]
    return shares, ChkCap(key, hashes.UEB.hash(packed), k, n, size)


@lru_cache(maxsize=64)
def _parity(required_shares: int, total_shares: int) -> tuple[int, ...]:
    return tuple(range(required_shares, total_shares))


def _chain(nodes: list[bytes], total_shares: int, number: int) -> list[bytes]:
    pieces: list[bytes] = []
    for node, label in _labels(total_shares, number):
        pieces += label, nodes[node]
    return pieces


@lru_cache(maxsize=1024)
def _labels(total_shares: int, number: int) -> tuple[tuple[int, bytes], ...]:
    """Return the nodes of a share's hash chain, each with its number as it is stored."""
    order = hashtree.chain_order(total_shares, number)
    return tuple((node, node.to_bytes(2, "big")) for node in order)
