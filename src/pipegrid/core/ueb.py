"""
The URI extension block (UEB), and the check whether a cap fits the UEBs that servers store.

Source: Tahoe-LAFS's ``file-encoding.rst``, and how 1.20 behaves.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import NamedTuple

from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.core.encoding_parameters import Geometry
from pipegrid.core.hashes import HASH_BYTES, UEB, netstring
from pipegrid.errors import CapMismatch

MAX_UEB_BYTES = 1999
"""A UEB longer than this is corrupt."""


class Ueb(NamedTuple):
    """
    The fields of a UEB that a reader uses. Sizes and counts are not among them, since a reader takes these
    from the cap.
    """

    segment_bytes: int
    crypttext_root_hash: bytes
    share_root_hash: bytes
    fields: dict[bytes, bytes]
    """Every field as stored, by key, for verifiers."""


def pack(
    geometry: Geometry, crypttext_hash: bytes, crypttext_root_hash: bytes, share_root_hash: bytes
) -> bytes:
    """Return the stored form of a UEB; its fields are sorted by key."""
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


@lru_cache(maxsize=256)  # called for each piece of a share that arrives
def packed_length(geometry: Geometry) -> int:
    """Return the length of the stored UEB, which does not depend on the hashes."""
    return len(pack(geometry, *(bytes(HASH_BYTES),) * 3))


def disagreements(ueb: Ueb, geometry: Geometry) -> list[bytes]:
    """
    Return the keys whose numbers differ from those that follow from ``geometry``; a verifier reports them.
    """
    return sorted(key for key, value in _numbers(geometry).items() if ueb.fields.get(key) != value)


def parse(data: bytes) -> Ueb:
    """
    Parse a UEB; unknown fields are allowed.

    Raises:
        ValueError: data is not a UEB, or lacks fields that a reader needs.
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


# A cap contains the UEB's hash, k, n and the size. If the UEB with that hash has other numbers, the cap
# contradicts itself. If no share has a UEB with that hash, and several servers have one and the same other
# UEB, then the cap's hash is wrong: damage would not give the same bytes on several servers. A UEB on one
# server proves nothing, and once any share has the UEB that the cap names, shares with other UEBs are
# damaged. A wrong character in the key leads to another storage index, where no share exists.

WITNESSES = 2
"""How many servers must have the same UEB to show that the cap is wrong."""


class CapCheck:
    """
    Compares the UEBs of a file's shares with the file's cap.

    Attributes:
        fits: whether some share has the UEB that the cap names, with the cap's numbers.
    """

    def __init__(self, cap: ChkCap | ChkVerifierCap) -> None:
        self._cap = cap
        self.fits = False
        self._contradiction: CapMismatch | None = None
        self._others: dict[bytes, set[Hashable]] = {}

    def record(self, server: Hashable, packed: bytes) -> None:
        """Record which UEB a share on this server has."""
        try:
            parsed = parse(packed)
        except ValueError:
            return
        if UEB.hash(packed) != self._cap.ueb_hash:
            if numbers(parsed) is not None:  # else it is not the UEB of any file
                self._others.setdefault(packed, set()).add(server)
            return
        self._contradiction = contradiction(self._cap, parsed)
        self.fits = self._contradiction is None

    @property
    def mismatch(self) -> CapMismatch | None:
        """
        The error if the cap contradicts the UEBs on the servers that have responded; None if the cap may be
        right.
        """
        if self.fits or self._contradiction is not None:
            return self._contradiction
        packed, servers = max(
            self._others.items(), key=lambda item: len(item[1]), default=(b"", set[Hashable]())
        )
        if len(servers) < WITNESSES:
            return None
        stored = numbers(parse(packed))
        assert stored is not None
        return CapMismatch(
            f"this cap does not fit the file that is stored: {len(servers)} servers agree on a file of "
            f"{_described(*stored)} whose hash is not the cap's, which is for "
            f"{_described(*_counts(self._cap))}; a character of the cap is wrong, so copy it again"
        )


def contradiction(cap: ChkCap | ChkVerifierCap, parsed: Ueb) -> CapMismatch | None:
    """
    Return the error if the UEB that the cap names has other numbers than the cap; None if the numbers agree.
    """
    stored = numbers(parsed)
    if stored is None or stored == _counts(cap):
        return None
    return CapMismatch(
        f"this cap does not fit the file that is stored: it is for {_described(*_counts(cap))}, and the "
        f"stored one is {_described(*stored)}; a digit of the cap is wrong, so copy it again"
    )


def numbers(parsed: Ueb) -> tuple[int, int, int] | None:
    """Return k, n and the size from a UEB; None if the UEB lacks one of them."""
    values = [parsed.fields.get(key, b"") for key in (b"needed_shares", b"total_shares", b"size")]
    if not all(each.isdigit() and len(each) <= 20 for each in values):
        return None
    k, n, size = map(int, values)
    return k, n, size


def _counts(cap: ChkCap | ChkVerifierCap) -> tuple[int, int, int]:
    return cap.required_shares, cap.total_shares, cap.size


def _described(k: int, n: int, size: int) -> str:
    return f"{size} bytes in {k} of {n} shares"
