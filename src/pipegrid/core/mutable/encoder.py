"""
Encoder that turns a new version of a mutable file into shares, segment by segment or in one call.

Source: Tahoe-LAFS's ``mutable.rst``, and how 1.20 behaves.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

from pipegrid.core import erasure, hash_tree
from pipegrid.core.encoder import ShareWrite, encrypted
from pipegrid.core.erasure import cut
from pipegrid.core.hashes import BLOCK, Buffer
from pipegrid.core.mutable.keys import SigningKey, data_key
from pipegrid.core.mutable.mutable_share import Header, new_sections
from pipegrid.core.mutable.versions import SALT_BYTES, Format, MutableGeometry, Version
from pipegrid.core.stream_cipher import StreamCipher

# Unlike in immutable files, a segment as a whole has no hash. If the writer signed shares that do not belong
# together, readers notice this only if the salts differ.


class MutableSegment(NamedTuple):
    """
    One segment after encryption and erasure coding.

    Attributes:
        number: the segment's number in the file, from 0.
        block_hashes: 32 bytes for each of the n blocks; for MDMF, over salt and block.
        blocks: by share number, for each requested share, the stored bytes in pieces: the salt (MDMF only)
            and the block.
    """

    number: int
    block_hashes: tuple[bytes, ...]
    blocks: dict[int, tuple[Buffer, ...]]

    def __repr__(self) -> str:
        """Return a short form without the blocks, which are long."""
        return f"MutableSegment({self.number}, ...)"


def code_segment(
    geometry: MutableGeometry,
    index: int,
    plaintext: Buffer | Sequence[Buffer],
    salt: bytes,
    readkey: bytes,
    shares: Set[int] | None = None,
) -> MutableSegment:
    """
    Encrypt, erasure-code and hash one segment. Has no side effects, so it may run in any thread and order.

    Args:
        plaintext: exactly ``geometry.segment_length(index)`` bytes, whole or in pieces; not kept.
        salt: 16 new random bytes; for SDMF the salt of the version.
        shares: the share numbers whose blocks are kept, by default all. The hashes of all blocks are computed
            in any case.
    """
    k, n = geometry.required_shares, geometry.total_shares
    length, block_bytes = geometry.segment_length(index), geometry.block_length(index)
    pieces = (plaintext,) if isinstance(plaintext, (bytes, bytearray, memoryview)) else plaintext
    assert sum(map(len, pieces)) == length, "a segment of another length"
    padded = encrypted(pieces, k * block_bytes, StreamCipher(data_key(salt, readkey)))
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


# ``encode`` makes a whole version in one call, for a worker thread. For many segments, call ``code_segment``
# in any threads, and then ``assemble``, which hashes, signs and lays out the segments. Blocks are never
# joined or copied: the write of a share is a list of buffers.


class EncodedVersion(NamedTuple):
    """
    A version that is ready to be written.

    Attributes:
        version: the version, with its root hash.
        writes: for each requested share, its writes, disjoint and in ascending order of offsets; a share's
            writes go into one read-test-write. From ``encode`` they are everything from byte 0 on, except
            MDMF's gap before the blocks; from an update, only the changes.
        share_bytes: where each share ends; any older bytes after that are ignored.
    """

    version: Version
    writes: dict[int, tuple[ShareWrite, ...]]
    share_bytes: int

    def share(self, share_number: int) -> bytes:
        """Return the bytes of a whole share. For small shares and tests."""
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
    Encrypt, code, hash and sign a whole file. Has no side effects; only the signature differs from call to
    call.

    Args:
        content: exactly ``geometry.size`` bytes, whole or in pieces; only read.
        sequence_number: 1 for a new file, else ``versions.next_sequence_number(highest seen)``.
        salts: ``geometry.num_salts`` new random values of 16 bytes.
        shares: the share numbers to write, by default all n.
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
    Hash, sign and lay out coded segments.

    Args:
        coded: all segments, in order.
        salt: the version's salt for SDMF, b"" for MDMF.
        shares: the share numbers to write, by default all n; the coded segments must contain their blocks.
    """
    n = geometry.total_shares
    assert [segment.number for segment in coded] == list(range(geometry.num_segments))
    assert len(salt) == (SALT_BYTES if geometry.format is Format.SDMF else 0)
    trees: dict[int, bytes] = {}
    roots = []
    for number in range(n):
        tree = hash_tree.build([segment.block_hashes[number] for segment in coded])
        roots.append(hash_tree.root(tree))
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
    Return the version, its signature, and the share hash chain of each share.

    Args:
        block_roots: the root hashes of the n block hash trees.
    """
    n = geometry.total_shares
    share_tree = hash_tree.build(block_roots)
    counts = geometry.required_shares, n, geometry.segment_bytes, geometry.size
    version = Version(geometry.format, sequence_number, hash_tree.root(share_tree), salt, *counts)
    chains = [
        b"".join(
            node.to_bytes(2, "big") + hash_tree.node(share_tree, node)
            for node in sorted(hash_tree.sibling_path(n, number))
        )
        for number in range(n)
    ]
    return version, key.sign(version.signed_prefix), chains


def joined_writes(
    number: int, parts: Sequence[tuple[int, Sequence[Buffer]]]
) -> tuple[ShareWrite, ...]:
    """
    Return the writes of these parts, ordered by offset; adjacent parts become one write.

    Args:
        parts: the offset and the pieces of each part.
    """
    joined: list[tuple[int, list[Buffer]]] = []
    end = -1
    for offset, pieces in sorted(parts, key=lambda part: part[0]):
        nonempty = [piece for piece in pieces if len(piece)]
        if not nonempty:
            continue
        if offset == end:
            joined[-1][1].extend(nonempty)
        else:
            joined.append((offset, nonempty))
        end = offset + sum(map(len, nonempty))
    return tuple(ShareWrite(number, offset, tuple(pieces)) for offset, pieces in joined)
