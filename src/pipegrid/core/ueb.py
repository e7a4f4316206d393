"""
The URI extension block: the one record that the cap's hash vouches for.

Source: the format reference, section 5.
"""

from __future__ import annotations

from functools import lru_cache

import attrs

from pipegrid.core.hashes import HASH_BYTES, netstring
from pipegrid.core.params import Geometry

MAX_UEB_BYTES = 1999
"""A longer one is corrupt, whatever it says."""


@attrs.frozen
class Ueb:
    """What a reader takes from a UEB; sizes and counts come from the cap instead."""

    segment_bytes: int
    crypttext_root_hash: bytes
    share_root_hash: bytes
    fields: dict[bytes, bytes] = attrs.field(repr=False)
    """Every field as stored, for verifiers."""


def pack(
    geometry: Geometry, crypttext_hash: bytes, crypttext_root_hash: bytes, share_root_hash: bytes
) -> bytes:
    """Return the record, fields sorted by key."""
    fields = _numbers(geometry) | {
        b"crypttext_hash": crypttext_hash,
        b"crypttext_root_hash": crypttext_root_hash,
        b"share_root_hash": share_root_hash,
    }
    return b"".join(key + b":" + netstring(fields[key]) for key in sorted(fields))


def _numbers(geometry: Geometry) -> dict[bytes, bytes]:
    k, n = geometry.required_shares, geometry.total_shares
    return {
        b"codec_name": b"crs",
        b"codec_params": b"%d-%d-%d" % (geometry.segment_bytes, k, n),
        b"needed_shares": b"%d" % k,
        b"num_segments": b"%d" % geometry.num_segments,
        b"segment_size": b"%d" % geometry.segment_bytes,
        b"size": b"%d" % geometry.size,
        b"tail_codec_params": b"%d-%d-%d" % (geometry.padded_tail_bytes, k, n),
        b"total_shares": b"%d" % n,
    }


@lru_cache(maxsize=256)  # asked for each piece of a share that comes
def packed_length(geometry: Geometry) -> int:
    """Return the length of the record before a single hash is known."""
    return len(pack(geometry, *(bytes(HASH_BYTES),) * 3))


def disagreements(ueb: Ueb, geometry: Geometry) -> list[bytes]:
    """Return the keys whose numbers are not those that the cap implies; a verifier reports them."""
    return sorted(key for key, value in _numbers(geometry).items() if ueb.fields.get(key) != value)


def parse(data: bytes) -> Ueb:
    """
    Return the record in data, tolerating fields that it does not know.

    Raises:
        ValueError: not a UEB, or one without the fields that a reader needs.
    """
    if len(data) > MAX_UEB_BYTES:
        raise ValueError(f"a UEB of {len(data)} bytes, more than any file has")
    fields = _parse_fields(data)
    try:
        segment_size = fields[b"segment_size"]
        crypttext_root_hash = fields[b"crypttext_root_hash"]
        share_root_hash = fields[b"share_root_hash"]
    except KeyError as missing:
        raise ValueError(f"a UEB lacks {missing.args[0]!r}") from None
    if not segment_size.isdigit() or len(segment_size) > 20 or not int(segment_size):
        raise ValueError("a UEB's segment size is not a positive number")
    if len(crypttext_root_hash) != HASH_BYTES or len(share_root_hash) != HASH_BYTES:
        raise ValueError("a UEB's root hash is not 32 bytes long")
    return Ueb(int(segment_size), crypttext_root_hash, share_root_hash, fields)


def _parse_fields(data: bytes) -> dict[bytes, bytes]:
    fields: dict[bytes, bytes] = {}
    position = 0
    while position < len(data):
        colon = data.find(b":", position)
        colon2 = data.find(b":", colon + 1)
        digits = data[colon + 1 : colon2]
        if colon < 0 or colon2 < 0 or not digits.isdigit() or len(digits) > 4:
            raise ValueError("a UEB field has no length")
        start, end = colon2 + 1, colon2 + 1 + int(digits)
        if data[end : end + 1] != b",":
            raise ValueError("a UEB field does not end where it says")
        fields[data[position:colon]] = data[start:end]
        position = end + 1
    return fields
