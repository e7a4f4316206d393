"""
The layout of a mutable share: the header's offset table, in both formats.

Source: the format reference for mutable files, sections 3 and 4.
"""

from __future__ import annotations

import itertools
import struct
from typing import NamedTuple

from pipegrid.core.hashes import Buffer
from pipegrid.core.mutable.keys import (
    MAX_PRIVATE_KEY_BYTES,
    MIN_PRIVATE_KEY_BYTES,
    PUBLIC_KEY_BYTES,
    SIGNATURE_BYTES,
)
from pipegrid.core.mutable.versions import Format, MutableGeometry, Version, parse_version
from pipegrid.core.spans import Range

_SDMF = struct.Struct(">LLLLQQ")
_MDMF = struct.Struct(">QQQQQQQQ")
HEADER_BYTES = {Format.SDMF: 107, Format.MDMF: 123}
MAX_HEADER_BYTES = 123

MDMF_DATA_OFFSET = 2167
"""
Where MDMF blocks start: after space for the largest keys and signature, and for the chain of 255 shares.
"""


class Sections(NamedTuple):
    """
    The ranges [start, end) of the parts of one share, in bytes from the start of the share data.

    The table is not signed. But the signed version determines the length of every section except the two
    keys, which are bounded. So an inconsistent table is rejected before any part is read or memory is
    spent.

    Attributes:
        end: the share's end; bytes after it are left over from a longer version.
    """

    public_key: Range
    signature: Range
    chain: Range
    tree: Range
    data: Range
    private_key: Range
    end: int


class Header(NamedTuple):
    """The version that a share claims, and the offsets of its parts; neither is authenticated."""

    version: Version
    sections: Sections

    def pack(self) -> bytes:
        """Return the stored form: 107 or 123 bytes."""
        s = self.sections
        if self.version.format is Format.SDMF:
            offsets = _SDMF.pack(
                s.signature[0], s.chain[0], s.tree[0], s.data[0], s.private_key[0], s.end
            )
        else:
            starts = s.private_key[0], s.chain[0], s.signature[0]
            offsets = _MDMF.pack(*starts, *s.public_key, s.data[0], s.tree[0], s.end)
        return self.version.signed_prefix + offsets


def parse_header(data: Buffer) -> Header | None:
    """
    Return the header, or None while there are fewer bytes than ``header_bytes(data)``.

    Raises:
        ValueError: it is not a header, or its sections do not fit the version; the text continues "it is".
    """
    version = parse_version(data)
    if version is None or len(data) < HEADER_BYTES[version.format]:
        return None
    at = len(version.signed_prefix)
    order: tuple[int, ...]
    if version.format is Format.SDMF:
        signature, chain, tree, blocks, private, end = _SDMF.unpack_from(data, at)
        public, public_end = HEADER_BYTES[Format.SDMF], signature
        private_end, data_end, tree_end = end, private, blocks
        signature_end, chain_end = chain, tree
        order = (public, signature, chain, tree, blocks, private, end)
    else:
        private, chain, signature, public, public_end, blocks, tree, end = _MDMF.unpack_from(
            data, at
        )
        private_end, chain_end, signature_end = chain, signature, public
        data_end, tree_end = tree, end
        first = HEADER_BYTES[Format.MDMF]
        order = (first, private, chain, signature, public, public_end, blocks, tree, end)
    if any(a > b for a, b in itertools.pairwise(order)):
        raise ValueError("one whose header names parts that overlap or are out of order")
    sections = Sections(
        (public, public_end),
        (signature, signature_end),
        (chain, chain_end),
        (tree, tree_end),
        (blocks, data_end),
        (private, private_end),
        end,
    )
    _check_lengths(sections, version.geometry)
    return Header(version, sections)


def header_bytes(data: Buffer) -> int:
    """Return the header's length; the maximum until its first byte is known."""
    return HEADER_BYTES[Format.SDMF] if len(data) and data[0] == 0 else MAX_HEADER_BYTES


def new_sections(
    geometry: MutableGeometry, public_key_bytes: int, private_key_bytes: int
) -> Sections:
    """Return where a writer puts the parts of a new share."""
    chain, tree, data = geometry.chain_bytes, geometry.tree_bytes, geometry.data_bytes
    if geometry.format is Format.SDMF:
        public, signature, chain_at, tree_at, blocks, private = _one_behind_the_other(
            HEADER_BYTES[Format.SDMF],
            (public_key_bytes, SIGNATURE_BYTES, chain, tree, data, private_key_bytes),
        )
        return Sections(public, signature, chain_at, tree_at, blocks, private, private[1])
    private, chain_at, signature, public = _one_behind_the_other(
        MAX_HEADER_BYTES, (private_key_bytes, chain, SIGNATURE_BYTES, public_key_bytes)
    )
    data_at = max(MDMF_DATA_OFFSET, public[1])
    blocks, tree_at = _one_behind_the_other(data_at, (data, tree))
    return Sections(public, signature, chain_at, tree_at, blocks, private, tree_at[1])


def _one_behind_the_other(start: int, lengths: tuple[int, ...]) -> list[Range]:
    ranges = []
    for length in lengths:
        ranges.append((start, start + length))
        start += length
    return ranges


def _check_lengths(sections: Sections, geometry: MutableGeometry) -> None:
    exact = (
        ("signature", sections.signature, SIGNATURE_BYTES),
        ("share hash chain", sections.chain, geometry.chain_bytes),
        ("tree of block hashes", sections.tree, geometry.tree_bytes),
        ("blocks", sections.data, geometry.data_bytes),
    )
    for name, (start, end), length in exact:
        if end - start != length:
            raise ValueError(f"one whose header gives its {name} {end - start} bytes, not {length}")
    public = sections.public_key[1] - sections.public_key[0]
    private = sections.private_key[1] - sections.private_key[0]
    if public not in PUBLIC_KEY_BYTES:
        raise ValueError(f"one whose header gives its public key {public} bytes")
    if not MIN_PRIVATE_KEY_BYTES <= private <= MAX_PRIVATE_KEY_BYTES:
        raise ValueError(f"one whose header gives its private key {private} bytes")
