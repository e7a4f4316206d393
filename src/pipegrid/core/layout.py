"""
The layout of a share's data: the header with its offset table, in versions 1 and 2.

The container that a server puts around the data is not covered.

Source: Tahoe-LAFS's ``file-encoding.rst``, and how 1.20 behaves.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from pipegrid.core import ueb
from pipegrid.core.encoding_parameters import Geometry

CHAIN_ENTRY_BYTES = 34

_V1 = struct.Struct(">LLLLLLLLL")
_V2 = struct.Struct(">LQQQQQQQQ")
_V1_LIMIT = 1 << 32

MAX_HEADER_BYTES = _V2.size

MAX_OFFSET = 1 << 60
"""No share is longer than this; a header with an offset beyond it is damaged."""


class ShareLayout(NamedTuple):
    """
    Offsets of the sections of one share, in bytes from the start of the share data.

    In shares that PipeGrid writes, the sections follow each other in the order of the attributes.
    """

    version: int
    block_bytes: int
    share_data_bytes: int
    data: int
    unused: int
    crypttext_hash_tree: int
    block_hashes: int
    share_hashes: int
    uri_extension: int

    @property
    def header_bytes(self) -> int:
        """Length of the header: 36 or 68 bytes."""
        return _V1.size if self.version == 1 else _V2.size

    @property
    def ueb_length_bytes(self) -> int:
        """Length of the number that is stored before the UEB: 4 or 8 bytes."""
        return 4 if self.version == 1 else 8

    def pack_header(self) -> bytes:
        """Return the stored header: 36 bytes in version 1, 68 bytes in version 2."""
        return (_V1 if self.version == 1 else _V2).pack(*self)

    def pack_ueb(self, packed: bytes) -> bytes:
        """Return the UEB with its length before it, as it is stored at ``uri_extension``."""
        return len(packed).to_bytes(self.ueb_length_bytes, "big") + packed


def for_geometry(geometry: Geometry, force_version: int | None = None) -> ShareLayout:
    """Return the layout that writers give every share of a file with these sizes."""
    layout = _contiguous(geometry, force_version or 1)
    if force_version is None and (
        max(layout.block_bytes, layout.share_data_bytes, layout.uri_extension) >= _V1_LIMIT
    ):
        return _contiguous(geometry, 2)
    return layout


def _contiguous(geometry: Geometry, version: int) -> ShareLayout:
    data = _V1.size if version == 1 else _V2.size
    unused = data + geometry.share_data_bytes
    crypttext = unused + geometry.tree_bytes
    blocks = crypttext + geometry.tree_bytes
    chain = blocks + geometry.tree_bytes
    offsets = data, unused, crypttext, blocks, chain, chain + geometry.chain_bytes
    return ShareLayout(version, geometry.block_bytes, geometry.share_data_bytes, *offsets)


def share_length(geometry: Geometry, layout: ShareLayout) -> int:
    """Return the exact length of every share of the file, which is known before encoding."""
    return layout.uri_extension + layout.ueb_length_bytes + ueb.packed_length(geometry)


def share_bytes(geometry: Geometry) -> int:
    """Return the length of every share that PipeGrid writes for a file of these sizes."""
    return share_length(geometry, for_geometry(geometry))


def parse_header(data: bytes) -> ShareLayout:
    """
    Return the layout that a share's first bytes describe. A header is not authenticated.

    Raises:
        ValueError: data is too short, the version is unknown, or the offsets give the hash chain or the block
            hash tree an impossible length. The other offsets are not checked.
    """
    version = int.from_bytes(data[:4], "big")
    if version not in (1, 2):
        raise ValueError(f"a share of unknown version {version}")
    form = _V1 if version == 1 else _V2
    if len(data) < form.size:
        raise ValueError("a share that ends within its header")
    layout = ShareLayout(*form.unpack_from(data))
    chain = layout.uri_extension - layout.share_hashes
    if chain < 0 or chain % CHAIN_ENTRY_BYTES:
        raise ValueError("a share whose hash chain has an impossible length")
    blocks = layout.share_hashes - layout.block_hashes
    if blocks < 0 or blocks % 32:
        raise ValueError("a share whose block hash tree has an impossible length")
    return layout
