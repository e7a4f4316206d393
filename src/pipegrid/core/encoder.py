"""
Encodes immutable files into shares: one segment at a time, or a small file in one call.

Source: Tahoe-LAFS's ``file-encoding.rst``, and how 1.20 behaves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from functools import lru_cache
from typing import NamedTuple

from pipegrid.core import hash_tree, hashes, layout, ueb
from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.core.encoding_parameters import Geometry
from pipegrid.core.erasure import STRIPE_BYTES, encode_stripe, stripes, uninitialised
from pipegrid.core.hashes import HASH_BYTES, KEY_BYTES, Buffer
from pipegrid.core.stream_cipher import StreamCipher
from pipegrid.errors import CorruptionError, SourceError

Plaintext = Buffer | Sequence[Buffer]
"""One segment of plaintext, whole or in pieces. The encoder only reads it, and does not keep it."""

# Ciphertext is encrypted and hashed in pieces of this size, so that each is hashed while it is in the CPU's
# cache.
_CIPHER_STEP_BYTES = 64 * 1024


class ShareWrite(NamedTuple):
    """
    Bytes to write to one share.

    Attributes:
        share_number: the share.
        offset: where in the share data the first piece begins.
        pieces: buffers to write one after the other. Their contents do not change any more, and several
            writes may share a buffer. A write keeps its pieces in memory.
    """

    share_number: int
    offset: int
    pieces: tuple[Buffer, ...]

    def __repr__(self) -> str:
        """Return a short form without the pieces, which are long."""
        return f"ShareWrite({self.share_number}, {self.offset}, ...)"

    @property
    def length(self) -> int:
        """Sum of the lengths of the pieces, in bytes."""
        return sum(map(len, self.pieces))


class Segment(NamedTuple):
    """
    One encrypted segment.

    Attributes:
        number: the segment's number in the file, from 0.
        padded: the ciphertext and up to k - 1 zero bytes, so that it divides into k blocks.
        length: the length of the ciphertext, in bytes.
    """

    number: int
    padded: memoryview
    length: int


class CodedSegment(NamedTuple):
    """
    One segment after erasure coding.

    Attributes:
        number: the segment's number in the file, from 0.
        segment_hash: 32 bytes, for the crypttext hash tree.
        block_hashes: 32 bytes for each of the n blocks.
        blocks: by share number, the pieces of each requested block.
    """

    number: int
    segment_hash: bytes
    block_hashes: tuple[bytes, ...]
    blocks: dict[int, tuple[Buffer, ...]]

    def __repr__(self) -> str:
        """Return a short form without the blocks, which are long."""
        return f"CodedSegment({self.number}, ...)"


def convergent_key(convergence: bytes, geometry: Geometry, plaintext: Iterable[Buffer]) -> bytes:
    """
    Return the 16-byte key of a plaintext. All clients with the same secret and geometry get the same key.

    For a plaintext that arrives over time, use ``hashes.convergent_key_hasher`` instead.

    Args:
        convergence: the convergence secret, any bytes.
        plaintext: the whole file in pieces.
    """
    hasher = hashes.convergent_key_hasher(
        convergence, geometry.required_shares, geometry.total_shares, geometry.segment_bytes
    )
    for piece in plaintext:
        hasher.update(piece)
    return hasher.digest()[:KEY_BYTES]


class Encoder:
    """
    Encodes one file. Each segment takes three steps, so that the expensive step can run in any thread and
    order:

    * ``encrypt`` runs in order, since one cipher and one hash run through the whole file;
    * ``code`` does erasure coding and hashing, some four fifths of the work; it does not change the encoder;
    * ``add`` is cheap; it records the hashes and returns the bytes to write to each share.

    ``finish`` then returns the bytes that follow the blocks, and makes the cap known. ``recode`` encodes a
    segment again, for a share that moves to another server: encoding is deterministic, so only the hashes
    have to be kept, 32 bytes for every block and every segment. The caller runs ``encrypt``, ``add`` and
    ``finish`` one at a time.

    Attributes:
        geometry: the file's sizes.
        layout: the offsets in every share.
        share_bytes: the exact length of every share, known from the start.
        ueb: the URI extension block; b"" before ``finish``.
    """

    def __init__(self, geometry: Geometry, key: bytes, *, force_version: int | None = None) -> None:
        """
        Prepare to encode.

        Args:
            key: 16 bytes, from ``convergent_key`` or random.
            force_version: layout version 1 or 2; by default version 1, unless the share is too long for it.
        """
        self.geometry = geometry
        self.layout = layout.for_geometry(geometry, force_version)
        self.share_bytes = layout.share_length(geometry, self.layout)
        self.ueb = b""
        self._key = key
        self._cipher: StreamCipher | None = StreamCipher(key)
        self._crypttext_hasher = hashes.CRYPTTEXT.hasher()
        self._next_segment = 0
        self._added = bytearray(geometry.num_segments)  # 1 for each added segment
        self._segment_hashes = _HashTable(1, geometry.num_segments)
        self._block_hashes = _HashTable(geometry.total_shares, geometry.num_segments)
        # ``finish`` sets these.
        self._crypttext_tree = b""
        self._share_tree = b""

    @property
    def cap(self) -> ChkCap:
        """The file's capability, known after ``finish``."""
        assert self.ueb, "the cap is known after finish()"
        geometry = self.geometry
        k, n = geometry.required_shares, geometry.total_shares
        return ChkCap(self._key, hashes.UEB.hash(self.ueb), k, n, geometry.size)

    def encrypt(self, plaintext: Plaintext) -> Segment:
        """
        Encrypt the next segment; call this in order, one call at a time.

        The ciphertext goes to a new buffer: encrypting in place would save only 0.2 % of the time, and would
        overwrite the caller's plaintext.

        Raises:
            SourceError: plaintext is longer or shorter than this segment.
        """
        index = self._next_segment
        assert index < self.geometry.num_segments, "all segments are encrypted"
        segment = self._encrypt(index, plaintext, self._cipher, self._crypttext_hasher)
        self._next_segment = index + 1
        return segment

    def code(self, segment: Segment, shares: Set[int] | None = None) -> CodedSegment:
        """
        Erasure-code and hash a segment. This may run in any thread and order, since it does not change the
        encoder.

        Args:
            shares: the share numbers whose blocks are kept, by default all. The hashes of all n blocks are
                computed in any case, since the cap depends on them.
        """
        total = self.geometry.total_shares
        blocks, block_hashes = self._blocks(segment, range(total), shares)
        segment_hash = hashes.CRYPTTEXT_SEGMENT.hash(segment.padded[: segment.length])
        return CodedSegment(segment.number, segment_hash, block_hashes, blocks)

    def add(self, coded: CodedSegment) -> list[ShareWrite]:
        """
        Record a coded segment. Call this exactly once for each segment, in any order.

        Returns:
            One write for each share whose block was kept, in share order. The write of segment 0 begins with
                the header, so its offset is 0; the writes of a share follow each other without gaps.
        """
        assert not self._added[coded.number], f"segment {coded.number} was added before"
        self._added[coded.number] = 1
        self._segment_hashes.put(0, coded.number, coded.segment_hash)
        for number, block_hash in enumerate(coded.block_hashes):
            self._block_hashes.put(number, coded.number, block_hash)
        return self._block_writes(coded.number, coded.blocks)

    def finish(self, shares: Set[int] | None = None) -> list[ShareWrite]:
        """
        Return the writes of the bytes that follow the blocks in each share, and make ``cap`` known.

        All segments must have been added. The block hash trees of the requested shares are in memory
        together: 1 MiB each for a file of 10 GB in segments of 1 MiB. Making them takes a third of a second,
        so run this outside the reactor thread. To save the memory, request no shares here and call
        ``trailer`` for each share when it is needed.

        Args:
            shares: the share numbers, by default all.
        """
        assert all(self._added), f"segment {self._added.index(0)} was not added"
        geometry = self.geometry
        kept: dict[int, bytes] = {}
        roots = []
        for number in range(geometry.total_shares):
            tree = self._block_hashes.tree(number)
            roots.append(hash_tree.root(tree))
            if shares is None or number in shares:
                kept[number] = tree
        self._crypttext_tree = self._segment_hashes.tree(0)
        self._share_tree = hash_tree.build(roots)
        trees = hash_tree.root(self._crypttext_tree), hash_tree.root(self._share_tree)
        self.ueb = self._make_ueb(self._crypttext_hasher.digest(), *trees)
        return [self._trailer(number, tree) for number, tree in kept.items()]

    def _make_ueb(
        self, crypttext_hash: bytes, crypttext_root_hash: bytes, share_root_hash: bytes
    ) -> bytes:
        return ueb.pack(self.geometry, crypttext_hash, crypttext_root_hash, share_root_hash)

    def trailer(self, share_number: int) -> ShareWrite:
        """
        Return the write of the bytes that follow the blocks in one share. Call this only after ``finish``.
        """
        assert self.ueb, "trailers are known after finish()"
        return self._trailer(share_number, self._block_hashes.tree(share_number))

    def recode(self, index: int, plaintext: Plaintext, shares: Set[int]) -> list[ShareWrite]:
        """
        Encode a segment again, for shares that move to another server. This may run in any thread and order.

        Args:
            index: the number of a segment that was added before.
            plaintext: the same plaintext as before.
            shares: the shares to make; only their blocks are computed.

        Returns:
            The same writes that ``add`` returns for these shares.

        Raises:
            SourceError: this is not the plaintext that was encoded before.
        """
        assert self._added[index], f"segment {index} was not added yet"
        cipher = StreamCipher(self._key, index * self.geometry.segment_bytes)
        segment = self._encrypt(index, plaintext, cipher, None)
        numbers = sorted(shares)
        blocks, block_hashes = self._blocks(segment, numbers, None)
        for number, block_hash in zip(numbers, block_hashes, strict=True):
            if block_hash != self._block_hashes.get(number, index):
                raise SourceError(
                    "the file changed while it was read: segment "
                    f"{index} is not what it was; store the file again"
                )
        return self._block_writes(index, blocks)

    def _encrypt(
        self,
        index: int,
        plaintext: Plaintext,
        cipher: StreamCipher | None,
        hasher: hashes.TaggedHasher | None,
    ) -> Segment:
        length = self.geometry.segment_length(index)
        pieces = (
            (plaintext,) if isinstance(plaintext, (bytes, bytearray, memoryview)) else plaintext
        )
        given = sum(map(len, pieces))
        if given != length:
            raise SourceError(
                f"the file changed while it was read: segment {index} has {given} bytes "
                f"instead of {length}; store the file again"
            )
        padded_bytes = self.geometry.required_shares * self.geometry.block_length(index)
        return Segment(index, encrypted(pieces, padded_bytes, cipher, hasher), length)

    def _blocks(
        self, segment: Segment, numbers: Collection[int], kept: Set[int] | None
    ) -> tuple[dict[int, tuple[Buffer, ...]], tuple[bytes, ...]]:
        """
        Return the blocks of the shares in ``kept``, and the hashes of the blocks of all ``numbers``.

        Args:
            numbers: share numbers, ascending.
            kept: None for all of ``numbers``.
        """
        k, n = self.geometry.required_shares, self.geometry.total_shares
        block_bytes = self.geometry.block_length(segment.number)
        primary = [segment.padded[j * block_bytes : (j + 1) * block_bytes] for j in range(k)]
        wanted = [number for number in numbers if kept is None or number in kept]
        if k == 1:  # all blocks of the segment are equal
            block_hash = hashes.BLOCK.hash(primary[0])
            return dict.fromkeys(wanted, (primary[0],)), (block_hash,) * len(numbers)
        parity_numbers = tuple(number for number in numbers if number >= k)
        parity: dict[int, list[Buffer]] = {number: [] for number in wanted if number >= k}
        hashers = [hashes.BLOCK.hasher() for _ in parity_numbers]
        for start, end in stripes(block_bytes):
            stripe = tuple(block[start:end] for block in primary)
            coded = encode_stripe(stripe, parity_numbers, k, n)
            for number, piece, hasher in zip(parity_numbers, coded, hashers, strict=True):
                hasher.update(piece)  # hashed while the piece is in the CPU's cache
                if number in parity:
                    parity[number].append(piece)
        blocks = {
            number: (primary[number],) if number < k else tuple(parity[number]) for number in wanted
        }
        return blocks, (
            *(hashes.BLOCK.hash(primary[number]) for number in numbers if number < k),
            *(hasher.digest() for hasher in hashers),
        )

    def _block_writes(self, index: int, blocks: dict[int, tuple[Buffer, ...]]) -> list[ShareWrite]:
        if index == 0:
            header = self.layout.pack_header()
            return [ShareWrite(number, 0, (header, *pieces)) for number, pieces in blocks.items()]
        offset = self.layout.data + index * self.geometry.block_bytes
        return [ShareWrite(number, offset, pieces) for number, pieces in blocks.items()]

    def _trailer(self, number: int, block_tree: bytes) -> ShareWrite:
        total = self.geometry.total_shares
        chain = b"".join(
            node.to_bytes(2, "big") + hash_tree.node(self._share_tree, node)
            for node in hash_tree.chain_order(total, number)
        )
        pieces = (
            bytes(self.geometry.tree_bytes),
            self._crypttext_tree,
            block_tree,
            chain + self.layout.pack_ueb(self.ueb),
        )
        return ShareWrite(number, self.layout.unused, pieces)


def encrypted(
    pieces: Iterable[Buffer],
    padded_bytes: int,
    cipher: StreamCipher | None,
    hasher: hashes.TaggedHasher | None = None,
) -> memoryview:
    """
    Return the ciphertext of the pieces in a new buffer, padded with zeros.

    Args:
        padded_bytes: the length of the result.
        cipher: None to copy the bytes without encrypting them.
        hasher: gets the ciphertext; None for no hash.
    """
    padded = memoryview(uninitialised(padded_bytes))
    position = 0
    for piece in pieces:
        view = memoryview(piece)
        for start in range(0, len(view), _CIPHER_STEP_BYTES):
            step = view[start : start + _CIPHER_STEP_BYTES]
            output = padded[position : position + len(step)]
            if cipher is not None:
                cipher.apply(step, output)
            else:
                output[:] = step
            if hasher is not None:
                hasher.update(output)
            position += len(step)
    padded[position:] = bytes(padded_bytes - position)
    return padded.toreadonly()


class _HashTable:
    """Rows of hashes in one buffer. A list of bytes objects would take more than twice the memory."""

    __slots__ = ("_columns", "_data")

    def __init__(self, rows: int, columns: int) -> None:
        self._columns = columns
        self._data = bytearray(rows * columns * HASH_BYTES)

    def put(self, row: int, column: int, value: bytes) -> None:
        start = (row * self._columns + column) * HASH_BYTES
        self._data[start : start + HASH_BYTES] = value

    def get(self, row: int, column: int) -> bytes:
        start = (row * self._columns + column) * HASH_BYTES
        return bytes(self._data[start : start + HASH_BYTES])

    def tree(self, row: int) -> bytes:
        """Return the stored form of the Merkle tree over one row."""
        return hash_tree.build([self.get(row, column) for column in range(self._columns)])


class Reencoder(Encoder):
    """
    Makes the original shares of a file again from its ciphertext, without its key; its ``cap`` cannot be
    known.

    Encoding is deterministic, and the root hashes in the original UEB verify the result.

    Args:
        packed_ueb: the UEB that the cap names.
    """

    def __init__(self, cap: ChkVerifierCap, packed_ueb: bytes) -> None:
        self._original_ueb = ueb.parse(packed_ueb)
        self._packed_ueb = packed_ueb
        geometry = Geometry(
            cap.size, cap.required_shares, cap.total_shares, self._original_ueb.segment_bytes
        )
        super().__init__(geometry, bytes(KEY_BYTES))
        self._cipher = None

    def _make_ueb(
        self, crypttext_hash: bytes, crypttext_root_hash: bytes, share_root_hash: bytes
    ) -> bytes:
        """
        Return the original UEB, which may have fields that only its writer knew.

        Raises:
            CorruptionError: the UEB does not belong to these shares.
        """
        original = self._original_ueb
        flat_hash = original.fields.get(b"crypttext_hash", crypttext_hash)
        if (flat_hash, original.crypttext_root_hash, original.share_root_hash) != (
            crypttext_hash,
            crypttext_root_hash,
            share_root_hash,
        ):
            raise CorruptionError(
                "this file was stored damaged, by a faulty or malicious writer: its shares restore it, but "
                "encoding it gives other shares; store it again from the original"
            )
        return self._packed_ueb


# Encoding of a small file. A file of one segment that is in memory is encoded in one call, and each share is
# one piece. The shares have the same bytes as those of ``Encoder``, but take half the time.

MAX_BLOCK_BYTES = STRIPE_BYTES
"""The longest block that is coded in one call; ``Encoder`` codes longer blocks in stripes."""


def is_single_segment(geometry: Geometry) -> bool:
    """Return whether ``encode_whole`` can encode a file of these sizes."""
    return geometry.num_segments == 1 and geometry.block_bytes <= MAX_BLOCK_BYTES


def encode_whole(geometry: Geometry, key: bytes, plaintext: Buffer) -> tuple[list[bytes], ChkCap]:
    """
    Return all shares in the order of their numbers, and the cap.

    Args:
        geometry: one for which ``is_single_segment`` holds.
        key: 16 bytes, from ``convergent_key`` or random.
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
    # The crypttext hash tree and the block hash trees of one segment consist of one leaf.
    leaves = [hashes.BLOCK.hash(block) for block in blocks]
    share_tree = hash_tree.build(leaves)
    packed = ueb.pack(
        geometry, hashes.CRYPTTEXT.hash(ciphertext), segment_hash, hash_tree.root(share_tree)
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
    """
    Return the nodes of a share's hash chain: each node's number, and the same number as the share stores it.
    """
    order = hash_tree.chain_order(total_shares, number)
    return tuple((node, node.to_bytes(2, "big")) for node in order)
