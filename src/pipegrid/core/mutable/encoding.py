"""
From plaintext to the shares of a new version.

``encode`` does all of it in one call, for a worker thread. Whoever has many segments codes them where it
likes (``segments.code_segment``) and then calls ``assemble``, which hashes, signs and lays out.

Blocks are never joined or copied: a share's write is a list of buffers.

Source: the format reference for mutable files, sections 2 to 4.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import attrs

from pipegrid.core import hashtree
from pipegrid.core.encoder import ShareWrite
from pipegrid.core.hashes import Buffer
from pipegrid.core.mutable.geometry import SALT_BYTES, Format, MutableGeometry
from pipegrid.core.mutable.keys import SigningKey
from pipegrid.core.mutable.sections import Header, new_sections
from pipegrid.core.mutable.segments import MutableSegment, code_segment
from pipegrid.core.mutable.versions import Version
from pipegrid.core.segmentjob import cut


@attrs.frozen(eq=False)
class EncodedVersion:
    """
    A version that is ready to be written.

    Attributes:
        version: with its root hash.
        writes: for each share asked for, what to write, in ascending order of offsets, disjoint. Of a whole
            share (``encode``) this is everything from byte 0 on, but for MDMF's gap in front of the blocks.
            Of an update only what changes. All belong into one read-test-write.
        share_bytes: where each share ends; older bytes behind that are of no consequence.
    """

    version: Version
    writes: dict[int, tuple[ShareWrite, ...]] = attrs.field(repr=False)
    share_bytes: int

    def share(self, share_number: int) -> bytes:
        """Return a whole share, joined; for small ones and tests."""
        data = bytearray(self.share_bytes)
        for write in self.writes[share_number]:
            at = write.offset
            for piece in write.pieces:
                data[at : at + len(piece)] = piece
                at += len(piece)
        return bytes(data)


def encode(
    content: Buffer | Sequence[Buffer],
    geometry: MutableGeometry,
    sequence_number: int,
    key: SigningKey,
    salts: Sequence[bytes],
    shares: Set[int] | None = None,
) -> EncodedVersion:
    """
    Encrypt, code, hash and sign a whole file; pure but for the signature, which is different each time.

    Args:
        content: exactly ``geometry.size`` bytes, whole or in pieces; read, never changed.
        sequence_number: 1 for a new file, else ``versions.next_sequence_number(highest seen)``.
        salts: ``geometry.num_salts`` fresh random values of 16 bytes.
        shares: those that are to be written, by default all n.
    """
    pieces = [content] if isinstance(content, (bytes, bytearray, memoryview)) else list(content)
    assert sum(map(len, pieces)) == geometry.size, "content of another size"
    assert len(salts) == geometry.num_salts, "a salt too many or too few"
    coded = []
    for index in range(geometry.num_segments):
        start = index * geometry.segment_bytes
        plaintext = cut(pieces, start, start + geometry.segment_length(index))
        coded.append(code_segment(geometry, index, plaintext, salts[index], key.readkey, shares))
    salt = salts[0] if geometry.format is Format.SDMF else b""
    return assemble(coded, geometry, sequence_number, key, salt, shares)


def assemble(
    coded: Sequence[MutableSegment],
    geometry: MutableGeometry,
    sequence_number: int,
    key: SigningKey,
    salt: bytes,
    shares: Set[int] | None = None,
) -> EncodedVersion:
    """
    Hash, sign and lay out segments that were coded, all of them and in order.

    Args:
        salt: the version's own for SDMF, b"" for MDMF.
        shares: as for ``encode``; blocks of these are in the coded segments.
    """
    n = geometry.total_shares
    assert [segment.index for segment in coded] == list(range(geometry.num_segments))
    assert len(salt) == (SALT_BYTES if geometry.format is Format.SDMF else 0)
    trees: dict[int, bytes] = {}
    roots = []
    for number in range(n):
        tree = hashtree.build([segment.block_hashes[number] for segment in coded])
        roots.append(hashtree.root(tree))
        if shares is None or number in shares:
            trees[number] = tree
    version, signature, chains = sign_version(roots, geometry, sequence_number, key, salt)
    sections = new_sections(geometry, len(key.public_der), len(key.encrypted))
    header = Header(version, sections).pack()
    writes = {}
    for number, tree in trees.items():
        parts: list[tuple[int, Sequence[Buffer]]] = [
            (0, [header]),
            (sections.public_key[0], [key.public_der]),
            (sections.signature[0], [signature]),
            (sections.chain[0], [chains[number]]),
            (sections.tree[0], [tree]),
            (sections.data[0], [p for segment in coded for p in segment.blocks[number]]),
            (sections.private_key[0], [key.encrypted]),
        ]
        writes[number] = joined_writes(number, parts)
    return EncodedVersion(version, writes, sections.end)


def sign_version(
    block_roots: Sequence[bytes],
    geometry: MutableGeometry,
    sequence_number: int,
    key: SigningKey,
    salt: bytes,
) -> tuple[Version, bytes, list[bytes]]:
    """
    Return the version whose n shares have these roots of their block hash trees, its signature, and the
    share hash chain of each share.
    """
    n = geometry.total_shares
    share_tree = hashtree.build(block_roots)
    counts = geometry.required_shares, n, geometry.segment_bytes, geometry.size
    version = Version(geometry.format, sequence_number, hashtree.root(share_tree), salt, *counts)
    chains = [
        b"".join(
            node.to_bytes(2, "big") + hashtree.node(share_tree, node)
            for node in sorted(hashtree.sibling_path(n, number))
        )
        for number in range(n)
    ]
    return version, key.sign(version.signed_prefix), chains


def joined_writes(
    number: int, parts: Sequence[tuple[int, Sequence[Buffer]]]
) -> tuple[ShareWrite, ...]:
    """Return writes of these parts, (offset, pieces), in order, those that touch each other joined."""
    joined: list[tuple[int, list[Buffer]]] = []
    end = -1
    for offset, pieces in sorted(parts, key=lambda part: part[0]):
        kept = [piece for piece in pieces if len(piece)]
        if not kept:
            continue
        if offset == end:
            joined[-1][1].extend(kept)
        else:
            joined.append((offset, kept))
        end = offset + sum(map(len, kept))
    return tuple(ShareWrite(number, offset, tuple(pieces)) for offset, pieces in joined)
