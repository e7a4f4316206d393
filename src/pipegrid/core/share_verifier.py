"""
Verifier of every meaningful byte of one share, in one pass from start to end, which needs only a verify cap.

Source: Tahoe-LAFS's ``file-encoding.rst``, and how 1.20 behaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs

from pipegrid.core import hash_tree, layout, ueb
from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.core.encoding_parameters import (
    DEFAULT_SEGMENT_BYTES,
    OLD_SEGMENT_BYTES,
    Geometry,
    Params,
)
from pipegrid.core.hash_tree import BadNode, VerifiedTree
from pipegrid.core.hashes import BLOCK, HASH_BYTES, UEB, Buffer, TaggedHasher
from pipegrid.core.layout import MAX_HEADER_BYTES, ShareLayout
from pipegrid.core.received_share import (
    BadPart,
    blamed_offset,
    parse_ueb_length,
    prove_leaf,
    read_layout,
)
from pipegrid.core.ueb import MAX_UEB_BYTES, Ueb
from pipegrid.errors import CorruptionError

MAX_PROBLEMS = 100
"""How many problems of a share are listed; further ones are only counted."""

MAX_SUGGESTED_SEGMENTS = 1 << 20
"""A header that implies more segments than this is ignored, since a hash would be kept for each segment."""


class _Section:
    """A part of the share that is kept as a whole: its expected range, and the bytes that have arrived."""

    __slots__ = ("data", "end", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self.end = end
        self.data: bytearray = bytearray()

    def feed(self, offset: int, view: memoryview) -> None:
        first = max(self.start - offset, 0)
        self.data += view[first : max(first, self.end - offset)]

    @property
    def whole(self) -> bool:
        return len(self.data) == self.end - self.start


class ShareVerifier:
    """
    Verifies one share: pass all its bytes to ``feed`` in order, then call ``finish``.

    Blocks are hashed and not kept; metadata and hashes are kept, about 100 bytes per segment. The UEB, which
    contains the segment size, comes near the share's end. Until then the segment size is taken from the
    header or from the caller; the UEB then shows whether it was right. Methods do not block, and may run in
    any thread, one at a time.

    Attributes:
        problems: the errors that were found, with share number and offset.
        fed_bytes: how many bytes of the share were fed.
        packed_ueb: the UEB that the cap names, once ``finish`` has found it; else b"".
    """

    def __init__(
        self, cap: ChkVerifierCap | ChkCap, share_number: int, segment_bytes: int | None = None
    ) -> None:
        """
        Prepare to verify.

        Args:
            segment_bytes: the file's segment size, if it is known from a good UEB.
        """
        self._cap = cap
        self._number = share_number
        self._segment_bytes = segment_bytes
        self.problems: list[CorruptionError] = []
        self.fed_bytes = 0
        self.packed_ueb = b""
        self._untold = 0
        self._finished = False
        self._header = bytearray()
        self._layout: ShareLayout | None = None
        self._geometry: Geometry | None = None
        self._ueb: Ueb | None = None
        self._sections: dict[str, _Section] = {}
        self._hasher: TaggedHasher = BLOCK.hasher()
        self._hashed = 0
        self._block_hashes: list[bytes] = []

    def feed(self, data: Buffer) -> None:
        """Accept the next bytes of the share, any number of them."""
        view = memoryview(data).cast("B")
        if self._layout is None and len(self._header) < MAX_HEADER_BYTES:
            # Parse the header only when enough bytes for the longer version have arrived, then process the
            # bytes collected until now.
            missing = MAX_HEADER_BYTES - len(self._header)
            self._header += view[:missing]
            view = view[missing:]
            if len(self._header) < MAX_HEADER_BYTES:
                return
            self._begin()
            self._take(memoryview(bytes(self._header)))
        self._take(view)

    def _take(self, view: memoryview) -> None:
        offset = self.fed_bytes
        self.fed_bytes += len(view)
        if self._layout is None or self._geometry is None:
            return
        for section in self._sections.values():
            section.feed(offset, view)
        self._hash_blocks(self._layout, self._geometry, offset, view)

    def _begin(self) -> None:
        try:
            parsed = read_layout(bytes(self._header), self._cap.total_shares)
        except ValueError as error:
            self._problem(BadPart("header", 0, f"it is {error}"))
            return
        self._layout = parsed
        self._geometry = geometry = self._likely_geometry(parsed)
        tree = geometry.tree_bytes
        self._sections = {
            "crypttext_hash_tree": _Section(
                parsed.crypttext_hash_tree, parsed.crypttext_hash_tree + tree
            ),
            "block_hashes": _Section(parsed.block_hashes, parsed.block_hashes + tree),
            "share_hashes": _Section(parsed.share_hashes, parsed.uri_extension),
            "uri_extension": _Section(
                parsed.uri_extension, parsed.uri_extension + parsed.ueb_length_bytes + MAX_UEB_BYTES
            ),
        }

    def _likely_geometry(self, parsed: ShareLayout) -> Geometry:
        """Return the geometry whose offsets agree with most offsets in the header."""
        k, n, size = self._cap.required_shares, self._cap.total_shares, self._cap.size
        known = self._segment_bytes
        if known is not None and known > 0 and known % k == 0:
            return Geometry(size, k, n, known)
        likely = [
            Params(k, n, most).geometry(size) for most in (DEFAULT_SEGMENT_BYTES, OLD_SEGMENT_BYTES)
        ]
        if parsed.block_bytes:
            suggested = Geometry(size, k, n, parsed.block_bytes * k)
            if suggested.num_segments <= MAX_SUGGESTED_SEGMENTS:
                likely.insert(0, suggested)
        place = parsed[3:]

        def fit(geometry: Geometry) -> int:
            other = layout.for_geometry(geometry, parsed.version)[3:]
            return sum(a == b for a, b in zip(place, other, strict=True))

        return max(likely, key=fit)

    def _hash_blocks(
        self, where: ShareLayout, geometry: Geometry, offset: int, view: memoryview
    ) -> None:
        first = max(where.data - offset, 0)
        view = view[first : max(first, where.data + geometry.share_data_bytes - offset)]
        while len(view):
            segment = len(self._block_hashes)
            piece = view[: geometry.block_length(segment) - self._hashed]
            self._hasher.update(piece)
            self._hashed += len(piece)
            view = view[len(piece) :]
            if self._hashed == geometry.block_length(segment):
                self._block_hashes.append(self._hasher.digest())
                self._hasher = BLOCK.hasher()
                self._hashed = 0

    # The end.

    def finish(self) -> list[CorruptionError]:
        """Finish after the last byte of the share; return all problems that were found."""
        if self._finished:
            return self.problems
        self._finished = True
        if self._layout is None and not self.problems:
            self._begin()  # a short share, which may still contain a whole header
            self._take(memoryview(bytes(self._header)))
        if self._layout is not None and self._geometry is not None:
            self._check_all(self._layout, self._geometry)
        if self._untold:
            more = f"{self._untold} more problems, which are not listed"
            self.problems.append(CorruptionError(f"share {self._number} has {more}", self._number))
        return self.problems

    def _check_all(self, where: ShareLayout, geometry: Geometry) -> None:
        self._attempt(self._check_ueb, where, geometry)
        leaf = self._attempt(self._check_chain, where, geometry)
        if self._ueb is not None and self._ueb.segment_bytes != geometry.segment_bytes:
            what = "its header speaks of another segment size than its UEB, so it cannot be checked"
            self._problem(BadPart("header", 0, what))
            return
        self._check_blocks(where, geometry, leaf)
        root = self._ueb.crypttext_root_hash if self._ueb is not None else None
        self._check_crypttext_tree(where, geometry, root)

    def _attempt(
        self,
        check: Callable[[ShareLayout, Geometry], bytes | None],
        where: ShareLayout,
        geometry: Geometry,
    ) -> bytes | None:
        try:
            return check(where, geometry)
        except BadPart as bad:
            self._problem(bad)
            return None

    def _check_ueb(self, where: ShareLayout, geometry: Geometry) -> None:
        data = bytes(self._sections["uri_extension"].data)
        start, prefix = where.uri_extension, where.ueb_length_bytes
        length = parse_ueb_length(data[:prefix], start)
        packed = data[prefix : prefix + length]
        if len(data) < prefix or len(packed) < length:
            raise self._cut_off("uri_extension", start, "its UEB")
        if UEB.hash(packed) != self._cap.ueb_hash:
            raise BadPart("uri_extension", start, "its UEB is not the one that the cap names")
        k = self._cap.required_shares
        try:
            parsed = ueb.parse(packed)
            if not parsed.segment_bytes or parsed.segment_bytes % k:
                raise ValueError(f"a segment size of {parsed.segment_bytes} for {k} shares")
        except ValueError as error:
            raise BadPart("uri_extension", start, f"its UEB is invalid: {error}") from None
        self._ueb = parsed
        self.packed_ueb = packed
        real = attrs.evolve(geometry, segment_bytes=parsed.segment_bytes)
        wrong = b", ".join(ueb.disagreements(parsed, real)).decode("ascii", "replace")
        if wrong:
            raise BadPart("uri_extension", start, f"its UEB disagrees with the cap on {wrong}")

    def _check_chain(self, where: ShareLayout, geometry: Geometry) -> bytes | None:
        """
        Return the share's leaf that its hash chain proves. None if there is no good UEB, which contains the
        root.
        """
        section = self._sections["share_hashes"]
        if not section.whole:
            raise self._cut_off("share_hashes", where.share_hashes, "its hash chain")
        if self._ueb is None:
            return None
        total, root = self._cap.total_shares, self._ueb.share_root_hash
        return prove_leaf(bytes(section.data), self._number, total, root, where.share_hashes)

    def _check_blocks(self, where: ShareLayout, geometry: Geometry, leaf: bytes | None) -> None:
        """
        Compare the blocks, the tree of block hashes and the share's leaf; report which of the three is wrong.
        """
        section = self._sections["block_hashes"]
        if not section.whole:
            self._problem(self._cut_off("block_hashes", section.start, "its tree of block hashes"))
        if len(self._block_hashes) < geometry.num_segments:
            offset = where.data + len(self._block_hashes) * geometry.block_bytes
            self._problem(self._cut_off("data", offset, "its blocks"))
        elif section.whole:
            computed = hash_tree.build(self._block_hashes)
            if computed == section.data and leaf in (None, hash_tree.root(computed)):
                return
            if leaf == hash_tree.root(computed):
                self._compare_nodes(section, computed)
                return
        if not section.whole:
            return
        # Some block is wrong. The stored tree, as far as it is consistent, shows which block.
        root = leaf if leaf is not None else bytes(section.data[:HASH_BYTES])
        for segment, stored in self._prove_all("block_hashes", section, geometry, root):
            if segment >= len(self._block_hashes) or stored == self._block_hashes[segment]:
                continue
            offset = where.data + segment * geometry.block_bytes
            what = f"its block of segment {segment} does not match its hash"
            self._problem(BadPart("data", offset, what))

    def _compare_nodes(self, section: _Section, computed: bytes) -> None:
        for at in range(0, len(computed), HASH_BYTES):
            if section.data[at : at + HASH_BYTES] != computed[at : at + HASH_BYTES]:
                what = f"its tree of block hashes has a wrong node {at // HASH_BYTES}"
                self._problem(BadPart("block_hashes", section.start + at, what))

    def _check_crypttext_tree(
        self, where: ShareLayout, geometry: Geometry, root: bytes | None
    ) -> None:
        section = self._sections["crypttext_hash_tree"]
        if not section.whole:
            what = "its tree of segment hashes"
            self._problem(self._cut_off("crypttext_hash_tree", section.start, what))
            return
        stored_root = bytes(section.data[:HASH_BYTES])
        if root is not None and stored_root != root:
            what = "its tree of segment hashes has another root than the UEB"
            self._problem(BadPart("crypttext_hash_tree", section.start, what))
        width = hash_tree.padded_leaves(geometry.num_segments)
        leaves = self._prove_all("crypttext_hash_tree", section, geometry, root or stored_root)
        for leaf, stored in leaves:
            if geometry.num_segments <= leaf < width and stored != hash_tree.empty_leaf(leaf):
                offset = section.start + (width - 1 + leaf) * HASH_BYTES
                what = "its tree of segment hashes has a wrong padding leaf"
                self._problem(BadPart("crypttext_hash_tree", offset, what))

    def _prove_all(
        self, name: str, section: _Section, geometry: Geometry, root: bytes
    ) -> Iterator[tuple[int, bytes]]:
        """Yield every leaf of a stored tree that the root proves; report each bad pair of sibling nodes."""
        tree = VerifiedTree(geometry.num_segments, root)
        tree.offer(0, section.data)
        reported = set()
        for leaf in range(hash_tree.padded_leaves(geometry.num_segments)):
            stored, bad = _prove(tree, leaf)
            if stored is not None:
                yield leaf, stored
            elif bad not in reported:
                reported.add(bad)
                what = "one of its trees of hashes contradicts its root"
                self._problem(BadPart(name, section.start + (bad or 0) * HASH_BYTES, what))

    def _cut_off(self, section: str, offset: int, what: str) -> BadPart:
        return BadPart(section, offset, f"it ends at byte {self.fed_bytes}, before or in {what}")

    def _problem(self, bad: BadPart) -> None:
        if len(self.problems) >= MAX_PROBLEMS:
            self._untold += 1
            return
        geometries = [self._geometry] if self._geometry else []
        offset = blamed_offset(bad, self._layout, geometries)
        text = f"share {self._number} is damaged at byte {offset}: {bad.what}; repair the file"
        self.problems.append(CorruptionError(text, self._number, offset))


def _prove(tree: VerifiedTree, leaf: int) -> tuple[bytes | None, int | None]:
    try:
        return tree.leaf(leaf), None
    except BadNode as bad:
        return None, bad.node
