"""URI extension block; check of a cap against it."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache

import attrs

from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.core.hashes import HASH_BYTES, UEB, netstring
from pipegrid.core.params import Geometry
from pipegrid.errors import CapMismatch

# The URI extension block: the one record that the cap's hash vouches for.
#
# Source: the format reference, section 5.

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


# Whether a cap fits the file that is stored: a digit that was copied wrongly is not a server's fault.
#
# A cap ends in the UEB's hash, k, n and the size. The UEB that has this hash tells the same numbers; if it
# tells others, the cap contradicts itself. If no share has a UEB of this hash, and servers agree on another
# one, then it is the cap's hash that is wrong: that several servers' copies have been damaged alike is out
# of the question. One that stands alone proves nothing, and as soon as any share has the right one those
# that have not are damaged.
#
# A wrong character in the key is another matter: it leads to other places, where nothing is.
#
# Pure: told of records.

WITNESSES = 2
"""So many servers have to agree."""


class CapCheck:
    """
    What the shares of a file tell of the cap.

    Attributes:
        fits: some share has the UEB that the cap names, and it tells the cap's numbers.
    """

    def __init__(self, cap: ChkCap | ChkVerifierCap) -> None:
        self._cap = cap
        self.fits = False
        self._contradiction: CapMismatch | None = None
        self._others: dict[bytes, set[Hashable]] = {}

    def told(self, server: Hashable, packed: bytes) -> None:
        """A share on this server has this UEB."""
        try:
            parsed = parse(packed)
        except ValueError:
            return
        if UEB.hash(packed) != self._cap.ueb_hash:
            if numbers(parsed) is not None:  # other bytes are no UEB of any file
                self._others.setdefault(packed, set()).add(server)
            return
        self._contradiction = contradiction(self._cap, parsed)
        self.fits = self._contradiction is None

    @property
    def mismatch(self) -> CapMismatch | None:
        """The error, if the cap does not fit what is stored, as far as servers were asked."""
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
            f"{_described(*stored)} whose hash is not the cap's, which is for {_described(*_of(self._cap))}; "
            "a character of the cap is wrong, so copy it again"
        )


def contradiction(cap: ChkCap | ChkVerifierCap, parsed: Ueb) -> CapMismatch | None:
    """Return the error if the UEB that the cap names tells other numbers than the cap."""
    stored = numbers(parsed)
    if stored is None or stored == _of(cap):
        return None
    return CapMismatch(
        f"this cap does not fit the file that is stored: it is for {_described(*_of(cap))}, and what is "
        f"stored is {_described(*stored)}; a digit of the cap is wrong, so copy it again"
    )


def numbers(parsed: Ueb) -> tuple[int, int, int] | None:
    """Return k, n and the size as a UEB tells them; None if it does not."""
    told = [parsed.fields.get(key, b"") for key in (b"needed_shares", b"total_shares", b"size")]
    if not all(each.isdigit() and len(each) <= 20 for each in told):
        return None
    k, n, size = map(int, told)
    return k, n, size


def _of(cap: ChkCap | ChkVerifierCap) -> tuple[int, int, int]:
    return cap.required_shares, cap.total_shares, cap.size


def _described(k: int, n: int, size: int) -> str:
    return f"{size} bytes in {k} of {n} shares"
