"""
A slow, obviously correct encoder for tests, written from Tahoe-LAFS's ``file-encoding.rst`` alone.

It shares no code with what it helps to test: hashes, trees and layout are spelled out here once
more, naively. Only zfec and the cipher are borrowed. ``test_decoder`` checks it against the
recorded vectors.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping

import attrs
import zfec
from Crypto.Cipher import AES

from pipegrid.core.caps import ChkCap
from pipegrid.core.hash_tree import chain_order


def netstring(value: bytes) -> bytes:
    """Return value as a netstring."""
    return b"%d:%s," % (len(value), value)


def sha256d(data: bytes) -> bytes:
    """Return SHA-256 of SHA-256."""
    return hashlib.sha256(hashlib.sha256(data).digest()).digest()


def tagged(tag: bytes, value: bytes) -> bytes:
    """Return the tagged hash."""
    return sha256d(netstring(tag) + value)


def merkle(leaves: list[bytes]) -> list[bytes]:
    """Return all nodes, root first."""
    width = 1
    while width < len(leaves):
        width *= 2
    level = leaves + [
        tagged(b"Merkle tree empty leaf", b"%d" % i) for i in range(len(leaves), width)
    ]
    nodes = level
    while len(level) > 1:
        level = [
            sha256d(netstring(b"Merkle tree internal node") + netstring(a) + netstring(b))
            for a, b in zip(level[::2], level[1::2], strict=True)
        ]
        nodes = level + nodes
    return nodes


@attrs.frozen
class Section:
    """A part of a share: where it is and what it is called."""

    name: str
    start: int
    end: int


@attrs.frozen
class Encoded:
    """A file, encoded."""

    cap: ChkCap
    ueb: bytes
    shares: list[bytes]
    sections: list[Section]
    segment_bytes: int
    plaintext: bytes

    def section(self, offset: int) -> Section:
        """Return the part of every share that an offset lies in."""
        return next(s for s in self.sections if s.start <= offset < s.end)


def convergent_key(plaintext: bytes, k: int, n: int, segment_bytes: int, secret: bytes) -> bytes:
    """Return the key of the normal mode."""
    tag = b"allmydata_immutable_content_to_key_with_added_secret_v1+"
    tag += netstring(secret) + netstring(b"%d,%d,%d" % (k, n, segment_bytes))
    return tagged(tag, plaintext)[:16]


def encode(
    plaintext: bytes,
    k: int = 3,
    n: int = 10,
    max_segment_bytes: int = 1 << 20,
    *,
    key: bytes | None = None,
    secret: bytes = b"",
    version: int = 1,
    spoil_ciphertext_tree: bool = False,
    replace_ueb: Mapping[bytes, bytes] | None = None,
    gap: int = 0,
) -> Encoded:
    """
    Encode a file.

    Args:
        spoil_ciphertext_tree: play a malicious writer whose tree of segment hashes is sound in
            itself but belongs to another file.
        replace_ueb: other values for fields of the UEB, which the cap then seals.
        gap: bytes between any two sections, as a foreign writer might leave.
    """
    size = len(plaintext)
    segment_bytes = -(-min(max_segment_bytes, size) // k) * k
    if key is None:
        key = convergent_key(plaintext, k, n, segment_bytes, secret)
    ciphertext = AES.new(key, AES.MODE_CTR, nonce=b"", initial_value=0).encrypt(plaintext)
    segments = [ciphertext[i : i + segment_bytes] for i in range(0, size, segment_bytes)]
    tag = b"allmydata_crypttext_segment_v1"
    crypttext_leaves = [tagged(tag, segment) for segment in segments]
    if spoil_ciphertext_tree:
        crypttext_leaves = [tagged(tag, b"other" + segment) for segment in segments]
    crypttext_tree = merkle(crypttext_leaves)

    blocks: list[list[bytes]] = [[] for _ in range(n)]
    for segment in segments:
        padded = segment + bytes(-len(segment) % k)
        width = len(padded) // k
        pieces = [padded[i * width : (i + 1) * width] for i in range(k)]
        for j, block in enumerate(zfec.Encoder(k, n).encode(pieces)):
            blocks[j].append(bytes(block))
    block_trees = [
        merkle([tagged(b"allmydata_encoded_subshare_v1", block) for block in of_share])
        for of_share in blocks
    ]
    share_tree = merkle([tree[0] for tree in block_trees])

    padded_tail = -(-len(segments[-1]) // k) * k
    fields = {
        b"codec_name": b"crs",
        b"codec_params": b"%d-%d-%d" % (segment_bytes, k, n),
        b"crypttext_hash": tagged(b"allmydata_crypttext_v1", ciphertext),
        b"crypttext_root_hash": crypttext_tree[0],
        b"needed_shares": b"%d" % k,
        b"num_segments": b"%d" % len(segments),
        b"segment_size": b"%d" % segment_bytes,
        b"share_root_hash": share_tree[0],
        b"size": b"%d" % size,
        b"tail_codec_params": b"%d-%d-%d" % (padded_tail, k, n),
        b"total_shares": b"%d" % n,
    }
    fields.update(replace_ueb or {})
    packed = b"".join(name + b":" + netstring(fields[name]) for name in sorted(fields))
    cap = ChkCap(key, tagged(b"allmydata_uri_extension_v1", packed), k, n, size)

    shares = []
    sections: list[Section] = []
    for j in range(n):
        chain = b"".join(
            number.to_bytes(2, "big") + share_tree[number] for number in chain_order(n, j)
        )
        width = 4 if version == 1 else 8
        bodies = [
            ("data", b"".join(blocks[j])),
            ("unused", bytes(32 * len(crypttext_tree))),
            ("crypttext_hash_tree", b"".join(crypttext_tree)),
            ("block_hashes", b"".join(block_trees[j])),
            ("share_hashes", chain),
            ("uri_extension", len(packed).to_bytes(width, "big") + packed),
        ]
        position = 4 + 8 * width
        sections = [Section("header", 0, position)]
        offsets = []
        share = b""
        for name, body in bodies:
            gap_here = 0 if name in ("data", "share_hashes", "uri_extension") else gap
            if gap_here:
                sections.append(Section("gap", position, position + gap_here))
            share += b"\xee" * gap_here + body
            position += gap_here
            offsets.append(position)
            sections.append(Section(name, position, position + len(body)))
            position += len(body)
        form = ">LLLLLLLLL" if version == 1 else ">LQQQQQQQQ"
        numbers = (segment_bytes // k, len(bodies[0][1]), *offsets)
        shares.append(struct.pack(form, version, *numbers) + share)
    return Encoded(cap, packed, shares, sections, segment_bytes, plaintext)
