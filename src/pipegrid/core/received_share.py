"""
The received bytes of one immutable share, and the verification of each part.

Source: Tahoe-LAFS's ``file-encoding.rst``, and how 1.20 behaves.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import lru_cache

from pipegrid.core import hash_tree, layout, ueb
from pipegrid.core.encoding_parameters import Geometry
from pipegrid.core.hash_tree import BadNode, VerifiedTree, group_end, nodes_to_read
from pipegrid.core.hashes import HASH_BYTES, MERKLE_NODE, UEB, Buffer
from pipegrid.core.layout import CHAIN_ENTRY_BYTES, ShareLayout
from pipegrid.core.spans import Spans

# Only bytes that were requested are kept, each once, until they are released. So no server can make a reader
# hold more than the reader has requested. Large pieces are kept by reference and never joined. Small pieces
# are copied together, since a thousand tiny buffers take far more memory than their bytes.

_SMALL_BYTES = 4096
"""Pieces shorter than this are copied: a reference might keep a much larger buffer in memory."""

_GATHERED_BYTES = 1 << 16
"""Small pieces are copied into one buffer up to this length."""


class ShareBytes:
    """
    The bytes of a share that were requested, in flight or received, addressed by offset.

    Attributes:
        end: no byte at or after this offset exists, according to the server; None if unknown.
        keeps: whether ``release`` does nothing. For readers that need parts twice, and only a little of the
            share.
    """

    __slots__ = ("_have", "_in_flight", "_pieces", "_requested", "_starts", "end", "keeps")

    def __init__(self) -> None:
        self.end: int | None = None
        self.keeps = False
        self._requested = Spans()
        self._in_flight = Spans()
        self._have = Spans()
        # Sorted and disjoint pieces; piece i begins at the share's offset _starts[i].
        self._starts: list[int] = []
        self._pieces: list[memoryview | bytearray] = []

    def ask(self, start: int, end: int) -> list[tuple[int, int]]:
        """Mark [start, end) as requested; return the parts that were not requested before."""
        if self.end is not None:
            end = min(end, self.end)
        fresh = self._requested.gaps(start, end)
        for a, b in fresh:
            self._requested.add(a, b)
            self._in_flight.add(a, b)
        return fresh

    def forget_asked(self) -> None:
        """Forget requests in flight, so that their bytes may be requested again."""
        for a, b in self._in_flight:
            self._requested.remove(a, b)
        self._in_flight = Spans()

    def put(self, offset: int, data: Buffer) -> None:
        """
        Keep the bytes of data that were requested and have not arrived before; ignore the rest.

        The buffer is kept by reference and must not change any more.
        """
        view = memoryview(data).cast("B")
        if not len(view):
            return  # an empty piece would hide the one that begins at its offset
        for start, end in self._in_flight.overlap(offset, offset + len(view)):
            self._in_flight.remove(start, end)
            self._have.add(start, end)
            self._insert(start, view[start - offset : end - offset])

    def _insert(self, start: int, view: memoryview) -> None:
        i = bisect_left(self._starts, start)
        if len(view) >= _SMALL_BYTES:
            self._starts.insert(i, start)
            self._pieces.insert(i, view)
            return
        if i:
            before = self._pieces[i - 1]
            if (
                isinstance(before, bytearray)
                and self._starts[i - 1] + len(before) == start
                and len(before) < _GATHERED_BYTES
            ):
                try:
                    before.extend(view)
                except BufferError:
                    pass  # another thread reads the buffer now, so it cannot be resized
                else:
                    return
        self._starts.insert(i, start)
        self._pieces.insert(i, bytearray(view))

    def set_end(self, offset: int) -> None:
        """Record that the share has no bytes at or after offset, so that they are not waited for."""
        self.end = offset if self.end is None else min(self.end, offset)
        for start, end in self._in_flight:
            self._in_flight.remove(max(start, self.end), end)

    @property
    def held_bytes(self) -> int:
        """How many bytes have arrived and were not released."""
        return self._have.total

    def has(self, start: int, end: int) -> bool:
        """Return whether all bytes [start, end) have arrived and were not released."""
        return self._have.contains(start, end)

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of [start, end) that have not arrived, or were released already."""
        return self._have.gaps(start, end)

    def pieces(self, start: int, end: int) -> list[memoryview]:
        """Return bytes [start, end), all of which must have arrived, as buffers that are not copied."""
        views = []
        i = max(0, bisect_right(self._starts, start) - 1)
        while start < end:
            at = start - self._starts[i]
            view = memoryview(self._pieces[i])[at : at + end - start]
            assert len(view) > 0, "pieces() of bytes that are not here"
            views.append(view)
            start += len(view)
            i += 1
        return views

    def read(self, start: int, end: int) -> bytes:
        """Return a copy of bytes [start, end), all of which must have arrived. For small parts."""
        return b"".join(self.pieces(start, end))

    def release(self, start: int, end: int) -> None:
        """
        Drop bytes [start, end), including those that are still to arrive.

        If a header is wrong, another part may contain the same bytes; these can be requested again.
        """
        if self.keeps:
            return
        self._requested.remove(start, end)
        self._in_flight.remove(start, end)
        for a, b in self._have.overlap(start, end):
            self._have.remove(a, b)
            self._cut_out(a, b)

    def _cut_out(self, start: int, end: int) -> None:
        first = max(0, bisect_right(self._starts, start) - 1)
        last = bisect_left(self._starts, end)
        starts: list[int] = []
        pieces: list[memoryview | bytearray] = []
        for i in range(first, last):
            piece_start, piece = self._starts[i], self._pieces[i]
            piece_end = piece_start + len(piece)
            for a, b in ((piece_start, min(piece_end, start)), (max(piece_start, end), piece_end)):
                if a < b:
                    starts.append(a)
                    pieces.append(memoryview(piece)[a - piece_start : b - piece_start])
        self._starts[first:last] = starts
        self._pieces[first:last] = pieces

    def clear(self) -> None:
        """Drop everything, and accept no more bytes."""
        self._in_flight = Spans()
        self._have = Spans()
        self._starts = []
        self._pieces = []


# Parts are verified against hashes that the caller gives. A wrong part raises ``BadPart``; ``FileShares``
# then decides whether the rest of the share is still used.


class BadPart(Exception):
    """
    A part of a share is wrong.

    Attributes:
        section: the name that ``ShareLayout`` gives the part, or ``header``.
        offset: where in the share data the part, or its wrong block or node, begins.
        what: what is wrong, as text to follow "share 3 is damaged: ".
    """

    def __init__(self, section: str, offset: int, what: str) -> None:
        super().__init__(what)
        self.section = section
        self.offset = offset
        self.what = what


class ForeignUeb(BadPart):
    """
    The UEB of a share is not the one that the cap names.

    Attributes:
        packed: the UEB of the share.
    """

    def __init__(self, offset: int, packed: bytes) -> None:
        super().__init__("uri_extension", offset, "its UEB is not the one that the cap names")
        self.packed = packed


class ShareTree:
    """
    One of the two trees that are stored in a share. Returns which nodes to read, and verifies them when a
    leaf is needed.
    """

    def __init__(self, store: ShareBytes, section: str, offset: int, tree: VerifiedTree) -> None:
        self._store = store
        self._section = section
        self._offset = offset
        self._tree = tree
        self._needed_until = 0
        self._wanted_nodes = Spans()
        self._awaited: list[tuple[int, int]] = []

    def need(self, first_leaf: int, end_leaf: int, last_leaf: int) -> None:
        """
        Declare that leaves [first_leaf, end_leaf) will be needed, and no leaf before them. Repeated calls are
        cheap.

        Args:
            last_leaf: the number after the last leaf that will ever be needed.
        """
        leaves = self._tree.num_leaves
        while self._needed_until < end_leaf:
            start = max(self._needed_until, first_leaf)
            self._needed_until = min(group_end(leaves, start), last_leaf)
            self._tree.forget_before(first_leaf)
            for a, b in nodes_to_read(leaves, start, self._needed_until):
                self._awaited.extend(self._wanted_nodes.gaps(a, b))
                self._wanted_nodes.add(a, b)

    def awaited(self) -> list[tuple[int, int]]:
        """Return the ranges [start, end) of share data that are needed and have not arrived."""
        if self._awaited:
            self._load()
        base = self._offset
        return [(base + a * HASH_BYTES, base + b * HASH_BYTES) for a, b in self._awaited]

    def _load(self) -> None:
        awaited = []
        for first, end in self._awaited:
            a, b = self._offset + first * HASH_BYTES, self._offset + end * HASH_BYTES
            if self._store.has(a, b):
                self._tree.offer(first, self._store.read(a, b))
                self._store.release(a, b)
            else:
                awaited.append((first, end))
        self._awaited = awaited

    def leaf(self, leaf: int) -> bytes | None:
        """
        Return the verified hash of a leaf, or None while nodes are missing.

        Raises:
            BadPart: the stored nodes contradict the root.
        """
        if self._awaited:
            self._load()
        try:
            return self._tree.leaf(leaf)
        except BadNode as bad:
            offset = self._offset + bad.node * HASH_BYTES
            what = f"its {_TREE_NAMES[self._section]} contradicts its root"
            raise BadPart(self._section, offset, what) from None


_TREE_NAMES = {
    "block_hashes": "tree of block hashes",
    "crypttext_hash_tree": "tree of segment hashes",
}


class ShareParts:
    """
    The parts of one share that are known: its header, UEB, leaf of the share hash tree, and two trees.

    Attributes:
        store: the share's bytes.
        layout: the share's offset table, once the header has arrived; not authenticated.
        hint: the geometry that the header suggests; not authenticated either.
        leaf: the share's verified leaf of the share hash tree.
        block_tree: set when leaf is known.
        crypttext_tree: set by the caller when it knows the UEB.
        available: whether a server can be asked for the share.
        bad: whether the share's blocks must not be used.
        bad_segments: the segments whose block is wrong.
        bad_ueb: whether the share's UEB is wrong; its blocks may be right.
        bad_crypttext_tree: whether the share's tree of segment hashes is wrong; its blocks may be right.
    """

    def __init__(self, share_number: int, guess: Geometry) -> None:
        self.number = share_number
        self.store = ShareBytes()
        self.layout: ShareLayout | None = None
        self.hint: Geometry = guess
        self.leaf: bytes | None = None
        self.block_tree: ShareTree | None = None
        self.crypttext_tree: ShareTree | None = None
        self.available = True
        self.bad = False
        self.bad_segments: set[int] = set()
        self.bad_ueb = False
        self.bad_crypttext_tree = False

    def read_header(self) -> None:
        """Parse the header if it has arrived. Raises ``BadPart`` if the header is wrong."""
        if self.layout is not None or not self.store.has(0, 4):
            return
        length = self.header_bytes()
        if not self.store.has(0, length):
            return
        try:
            self.layout = read_layout(self.store.read(0, length), self.hint.total_shares)
        except ValueError as error:
            raise BadPart("header", 0, f"it is {error}") from None
        self.store.release(0, length)
        self.hint = suggested_geometry(self.layout, self.hint)

    def header_bytes(self) -> int:
        """Return the length of the header; an estimate until its first bytes are known."""
        if self.store.has(0, 4) and self.store.read(0, 4) == b"\0\0\0\2":
            return layout.MAX_HEADER_BYTES
        return layout.for_geometry(self.hint).header_bytes

    def ueb_end(self, expected_bytes: int, where: ShareLayout) -> int:
        """
        Return where the UEB ends: exact if the UEB's length has arrived, otherwise with ``expected_bytes`` as
        its length.
        """
        start = where.uri_extension
        body = start + where.ueb_length_bytes
        if self.layout is None or not self.store.has(start, body):
            return body + expected_bytes
        return body + parse_ueb_length(self.store.read(start, body), start)

    def read_ueb(self, ueb_hash: bytes) -> bytes | None:
        """
        Return the UEB if it has arrived, checked against ``ueb_hash``. Raises ``BadPart`` if it is wrong.
        """
        if self.layout is None:
            return None
        start = self.layout.uri_extension
        body = start + self.layout.ueb_length_bytes
        if not self.store.has(start, body):
            return None
        end = self.ueb_end(0, self.layout)
        if not self.store.has(body, end):
            return None
        packed = self.store.read(body, end)
        if UEB.hash(packed) != ueb_hash:
            raise ForeignUeb(start, packed)
        return packed

    def read_leaf(self, share_root_hash: bytes, geometry: Geometry) -> None:
        """
        Verify the share's leaf if its hash chain has arrived. Raises ``BadPart`` if the chain is wrong.

        Args:
            share_root_hash: the root of the share hash tree, from the UEB.
        """
        if self.leaf is not None or self.layout is None:
            return
        start, end = self.layout.share_hashes, self.layout.uri_extension
        if not self.store.has(start, end):
            return
        chain = self.store.read(start, end)
        self.leaf = prove_leaf(chain, self.number, self.hint.total_shares, share_root_hash, start)
        ueb_end = end + self.layout.ueb_length_bytes + ueb.packed_length(geometry)
        self.store.release(start, ueb_end)
        tree = VerifiedTree(geometry.num_segments, self.leaf)
        self.block_tree = ShareTree(self.store, "block_hashes", self.layout.block_hashes, tree)


def read_layout(header: bytes, total_shares: int) -> ShareLayout:
    """
    Return the offset table of a header, after checking its limits.

    Raises:
        ValueError: this is not a header, or its offsets are impossible.
    """
    parsed = layout.parse_header(header)
    chain_bytes = parsed.uri_extension - parsed.share_hashes
    # A mistyped cap may give a total of shares that is too low for the chain. The comparison with the UEB
    # reports such a cap, so chains of up to 256 shares are accepted here.
    most_entries = max(hash_tree.num_nodes(total_shares), hash_tree.chain_entries(256))
    if chain_bytes > most_entries * CHAIN_ENTRY_BYTES:
        raise ValueError("a share whose hash chain has more entries than the tree has nodes")
    offsets = (parsed.data, parsed.crypttext_hash_tree, parsed.block_hashes, parsed.uri_extension)
    if max(offsets) > layout.MAX_OFFSET:
        raise ValueError("a share whose header points past the end of any share")
    return parsed


def suggested_geometry(parsed: ShareLayout, guess: Geometry) -> Geometry:
    """Return the geometry that a header suggests, or ``guess`` if it suggests none."""
    segment_bytes = parsed.block_bytes * guess.required_shares
    if not segment_bytes:
        return guess
    return Geometry(guess.size, guess.required_shares, guess.total_shares, segment_bytes)


def parse_ueb_length(prefix: bytes, offset: int) -> int:
    """Return the length of the UEB. Raises ``BadPart`` if the UEB is too long."""
    length = int.from_bytes(prefix, "big")
    if length > ueb.MAX_UEB_BYTES:
        raise BadPart("uri_extension", offset, f"its UEB claims to be {length} bytes long")
    return length


def prove_leaf(
    chain: bytes,
    share_number: int,
    total_shares: int,
    share_root_hash: bytes,
    offset: int,
    proven: dict[int, bytes] | None = None,
) -> bytes:
    """
    Return a share's own leaf of the share hash tree, verified with the share's hash chain.

    Args:
        chain: the stored entries, in any order: 2 bytes node number, 32 bytes hash.
        offset: where the chain begins in the share, for the error.
        proven: nodes of the tree that chains of other shares have proven; this chain adds its nodes. If a
            node is proven, so are its sibling and the nodes above it. None if no other share is known.

    Raises:
        BadPart: the leaf or a sibling on its path is missing, an entry is outside the tree or contradicts
            another, or the nodes do not lead to the root.
    """
    leaf_key, end_key, path = _path_to_root(total_shares, share_number)
    nodes: dict[bytes, bytes] = {}  # keys are node numbers, as the chain stores them
    for at in range(0, len(chain), CHAIN_ENTRY_BYTES):
        key, value = chain[at : at + 2], chain[at + 2 : at + CHAIN_ENTRY_BYTES]
        if key >= end_key or nodes.setdefault(key, value) != value:
            raise BadPart("share_hashes", offset + at, _wrong_entry(key, end_key))
    leaf = nodes.get(leaf_key)
    if leaf is None:
        raise BadPart("share_hashes", offset, "its hash chain lacks its own leaf")
    value = leaf
    known = {} if proven is None else proven
    fresh: dict[int, bytes] = {}
    for number, sibling, sibling_key in path:
        other = nodes.get(sibling_key)
        if other is None:
            raise BadPart("share_hashes", offset, f"its hash chain lacks node {sibling}")
        if number not in known:
            fresh[number], fresh[sibling] = value, other
            pair = (other, value) if sibling & 1 else (value, other)
            value = MERKLE_NODE.hash_pair(*pair)
        elif known[number] == value and known[sibling] == other:
            value = known.get((number - 1) // 2, share_root_hash)
        else:
            value = b""  # not a hash, so the comparison below fails
            break
    if value != share_root_hash:
        raise BadPart("share_hashes", offset, "its hash chain does not lead to the file's root")
    known.update(fresh)
    return leaf


@lru_cache(maxsize=1024)
def _path_to_root(
    total_shares: int, share_number: int
) -> tuple[bytes, bytes, tuple[tuple[int, int, bytes], ...]]:
    """
    Return what ``prove_leaf`` needs to know of the tree: a share's leaf number and the number after the last
    node, both as a chain stores them; and for each node from the leaf up to the root, its number, its
    sibling's number, and the latter as a chain stores it.
    """
    leaf = hash_tree.leaf_node(total_shares, share_number)
    end = min(hash_tree.num_nodes(total_shares), 0xFFFF)
    path, number = [], leaf
    for sibling in hash_tree.sibling_path(total_shares, share_number):
        path.append((number, sibling, _stored(sibling)))
        number = (number - 1) // 2
    return _stored(leaf), _stored(end), tuple(path)


def _stored(node: int) -> bytes:
    return node.to_bytes(CHAIN_ENTRY_BYTES - HASH_BYTES, "big")


def _wrong_entry(key: bytes, end_key: bytes) -> str:
    number = int.from_bytes(key, "big")
    if key >= end_key:
        return f"its hash chain names node {number}, which is outside the tree"
    return f"its hash chain gives node {number} twice, differently"


def blamed_offset(bad: BadPart, parsed: ShareLayout | None, geometries: list[Geometry]) -> int:
    """
    Return the offset of what is most likely damaged: that of the bad part, or 0, the offset of the header.

    A header is not authenticated. If the header places a part where no writer puts it, and the part is wrong,
    the header is at fault.
    """
    if parsed is None or bad.section == "header":
        return bad.offset
    usual = [layout.for_geometry(geometry, parsed.version) for geometry in geometries]
    places = [getattr(each, bad.section) for each in usual]
    return bad.offset if getattr(parsed, bad.section) in places else 0
