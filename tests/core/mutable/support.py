"""One key pair, and what tests make with it: versions, their shares, readers of them."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from pipegrid.core.mutable.decoder import VersionReader
from pipegrid.core.mutable.encoder import EncodedVersion, encode
from pipegrid.core.mutable.keys import SigningKey, load_signing_key
from pipegrid.core.mutable.mutable_share import MutableShare, VerifiedVersions
from pipegrid.core.mutable.versions import Format, MutableGeometry
from tests import vectors


@cache
def key(index: int = 0) -> SigningKey:
    """Return one of the recorded key pairs; making one takes too long."""
    case = [*vectors.load("mutable")["cases"], *vectors.load("trees")["mutable_directories"]]
    recorded = sorted({each["private_key_pkcs8_der"] for each in case})
    return load_signing_key(bytes.fromhex(recorded[index]))


def make(
    content: bytes,
    format: Format = Format.SDMF,
    k: int = 2,
    n: int = 3,
    segment_bytes: int | None = None,
    sequence_number: int = 1,
    seed: object = 1,
    with_key: int = 0,
) -> EncodedVersion:
    """Return a version of these contents, its salts from a seed."""
    rest = () if segment_bytes is None else (segment_bytes,)
    geometry = MutableGeometry(format, len(content), k, n, *rest)
    salts = random.Random(repr(seed))
    return encode(
        content,
        geometry,
        sequence_number,
        key(with_key),
        [salts.randbytes(16) for _ in range(geometry.num_salts)],
    )


def shares_of(encoded: EncodedVersion) -> dict[int, bytes]:
    """Return the whole shares."""
    return {number: encoded.share(number) for number in encoded.writes}


def recorded_shares(case: Mapping[str, Any]) -> dict[int, bytes]:
    """Return the whole shares that a vector holds."""
    return {int(n): base64.b64decode(s) for n, s in case.get("shares_base64", {}).items()}


def book(with_key: int = 0, format: Format = Format.SDMF) -> VerifiedVersions:
    """Return a book that knows only the cap."""
    return VerifiedVersions(key(with_key).cap(format))


def reader_of(
    shares: Mapping[int, bytes],
    numbers: Iterable[int],
    checked: VerifiedVersions,
    readkey: bytes | None,
) -> VersionReader:
    """Return a reader with these shares, all of one version, checked and complete."""
    reader: VersionReader | None = None
    for number in numbers:
        share = MutableShare.of(number, shares[number])
        version = checked.check(share)
        assert version is not None
        reader = reader or VersionReader(version, readkey)
        reader.add_share(share)
    assert reader is not None
    return reader


def write_into(share: bytearray, encoded: EncodedVersion, number: int) -> None:
    """Do to a share what a server does with the writes for it."""
    for write in encoded.writes[number]:
        data = b"".join(write.pieces)
        share.extend(bytes(max(0, write.offset - len(share))))
        share[write.offset : write.offset + len(data)] = data
