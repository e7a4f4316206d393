"""
Mutable shares, damaged, swapped, cut or of other versions, from servers that answer as they like.

Whatever comes of it is the plaintext of a version that its author signed, or nothing; what is wrong is a
CorruptionError that names a share there is; no more is asked of a server than a share has and a group of its
tree; a change of a range never takes over what a server made up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache

import attrs

from misc import fuzz
from misc.fuzz.choices import Choices
from pipegrid.core.mutable.decoder import VersionReader
from pipegrid.core.mutable.encoder import EncodedVersion, encode
from pipegrid.core.mutable.keys import SigningKey, load_signing_key
from pipegrid.core.mutable.mutable_share import MutableShare, VerifiedVersions
from pipegrid.core.mutable.range_update import RangeUpdate
from pipegrid.core.mutable.versions import Format, Holding, MutableGeometry, Version, choose
from pipegrid.core.spans import Range
from pipegrid.errors import CorruptionError

# (format, required, total, size, segment size)
_FILES = (
    (Format.SDMF, 2, 3, 100, None),
    (Format.MDMF, 2, 3, 100, 20),
    (Format.MDMF, 1, 2, 64, 8),
    (Format.SDMF, 1, 1, 0, None),
    (Format.MDMF, 1, 1, 5, 131072),
    (Format.MDMF, 2, 2, 0, 10),
)
_NUMBERS = (0, 1, 107, 123, 2167, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 60, 1 << 63, (1 << 64) - 1)
_MAX_READS = 200
_OLD, _NEW = 1, 2


@cache
def _key() -> SigningKey:
    recorded = fuzz.CORPUS.parent / "vectors" / "exponent17.json"
    return load_signing_key(
        bytes.fromhex(json.loads(recorded.read_text())["private_key_pkcs8_der"])
    )


def _content(index: int, number: int) -> bytes:
    return hashlib.shake_128(bytes([index, number])).digest(_FILES[index][3])


def _salts(count: int, number: int) -> list[bytes]:
    return [bytes([number, index]) * 8 for index in range(count)]


@cache
def _encoded(index: int, number: int) -> EncodedVersion:
    """Return one of two versions of a file."""
    format, k, n, size, segment = _FILES[index]
    geometry = MutableGeometry(format, size, k, n, *([] if segment is None else [segment]))
    return encode(
        _content(index, number), geometry, number, _key(), _salts(geometry.num_salts, number)
    )


@cache
def _share(index: int, number: int, share_number: int) -> bytes:
    return _encoded(index, number).share(share_number)


@attrs.define
class _Case:
    index: int
    shares: list[bytearray]

    @property
    def total(self) -> int:
        return len(self.shares)


def run(data: bytes) -> None:
    """Tamper with the shares of a version, map what there is, read it, change a range of it."""
    choices = Choices(data)
    index = choices.below(len(_FILES))
    total = _FILES[index][2]
    case = _Case(index, [bytearray(_share(index, _NEW, number)) for number in range(total)])
    for _ in range(choices.below(8)):
        choices.pick(_TAMPERINGS)(case, choices)
    book = VerifiedVersions(_key().cap(_FILES[index][0]))
    found = _map(case, book, choices)
    signed = {_encoded(index, number).version: number for number in (_OLD, _NEW)}
    for share in found:
        assert share.header is not None
        assert share.header.version in signed, "a version is believed that nobody signed"
        _open_key(book, share)
    holdings = [Holding(s.number, s.number, s.header.version) for s in found if s.header]
    best = choose(holdings).best
    if best is None:
        return
    shares = [s for s in found if s.header is not None and s.header.version == best]
    if best.format is Format.MDMF and choices.flag():
        _change(case, best, shares, signed[best], choices)
    else:
        _read(case, best, shares, _content(index, signed[best]), choices)


# What is done to shares.


def _flip(case: _Case, choices: Choices) -> None:
    share = case.shares[choices.below(case.total)]
    if share:
        share[choices.below(len(share))] ^= choices.byte() or 1


def _overwrite(case: _Case, choices: Choices) -> None:
    share = case.shares[choices.below(case.total)]
    at = choices.below(len(share) + 1)
    patch = choices.take(choices.below(64))
    share[at : at + len(patch)] = patch


def _lie(case: _Case, choices: Choices) -> None:
    """Change an offset or a count of the header to one that means something."""
    share = case.shares[choices.below(case.total)]
    at, width = choices.below(123), choices.pick((8, 4, 1))
    value = choices.pick(_NUMBERS) + choices.below(3) - 1
    share[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "big")


def _cut(case: _Case, choices: Choices) -> None:
    share = case.shares[choices.below(case.total)]
    del share[choices.below(len(share) + 1) :]


def _older(case: _Case, choices: Choices) -> None:
    """Give a share of the older version back, or the end of it."""
    number = choices.below(case.total)
    old = _share(case.index, _OLD, number)
    at = choices.below(len(old)) if choices.flag() else 0
    case.shares[number][at:] = old[at:]


def _swap(case: _Case, choices: Choices) -> None:
    a, b = choices.below(case.total), choices.below(case.total)
    at, length = choices.number(2), choices.number(2)
    part = case.shares[b][at : at + length]
    case.shares[a][at : at + len(part)] = part


def _extend(case: _Case, choices: Choices) -> None:
    case.shares[choices.below(case.total)] += choices.take(choices.below(32)) or b"\0"


_TAMPERINGS: tuple[Callable[[_Case, Choices], None], ...] = (
    _flip,
    _overwrite,
    _lie,
    _cut,
    _older,
    _swap,
    _extend,
)


# How they are read.


def _map(case: _Case, book: VerifiedVersions, choices: Choices) -> list[MutableShare]:
    """Return the shares whose version is proven."""
    found = []
    first = choices.pick((4000, 1, 123, 500))
    for number, data in enumerate(case.shares):
        share = MutableShare(number)
        try:
            share.answered(0, first, bytes(data[:first]))
            for _ in range(_MAX_READS):
                gaps = book.missing(share)
                if not gaps:
                    break
                _answer(share, data, gaps, choices)
            if book.check(share) is not None:
                found.append(share)
        except CorruptionError as error:
            _check(error, {number})
    return found


def _open_key(book: VerifiedVersions, share: MutableShare) -> None:
    try:
        opened = book.open_signing_key(share)
    except CorruptionError as error:
        _check(error, {share.number})
        return
    assert opened is None or opened.der == _key().der, "another key is believed"


def _answer(share: MutableShare, data: bytearray, gaps: list[Range], choices: Choices) -> None:
    """Answer what is asked of a share, in pieces."""
    asked = sum(end - start for start, end in gaps)
    assert asked <= 4000, f"{asked} bytes are asked at once"
    for start, end in reversed(gaps) if choices.flag() else gaps:
        middle = start + choices.below(end - start + 1) if choices.flag() else end
        for a, b in ((start, middle), (middle, end)):
            if a < b:
                share.answered(a, b - a, bytes(data[a:b]))


def _try_to_answer(
    share: MutableShare, data: bytearray, gaps: list[Range], choices: Choices
) -> bool:
    try:
        _answer(share, data, gaps, choices)
    except CorruptionError as error:
        _check(error, {share.number})
        return False
    return True


def _read(
    case: _Case, best: Version, shares: list[MutableShare], content: bytes, choices: Choices
) -> None:
    reader = VersionReader(best, _key().readkey)
    for share in shares:
        reader.add_share(share)
    restored = b""
    for segment in range(best.geometry.num_segments):
        for _ in range(_MAX_READS):
            _fetch(case, reader, shares, segment, choices)
            job = reader.job(segment)
            pieces = None if job is None else reader.finish(job.run())
            if pieces is not None:
                restored += b"".join(pieces)
                break
            if reader.lacking:
                break
        else:
            raise AssertionError("it stalls")
        if reader.lacking:
            break
    for error in reader.corrupt:
        _check(error, {share.number for share in shares})
    assert content.startswith(restored), "wrong plaintext"
    assert reader.lacking or restored == content, "it stopped, and lacks nothing"


def _fetch(
    case: _Case, reader: VersionReader, shares: list[MutableShare], segment: int, choices: Choices
) -> None:
    for share in shares:
        for _ in range(_MAX_READS):
            gaps = reader.missing(share.number, segment, segment + 1)
            if not gaps:
                break
            if not _try_to_answer(share, case.shares[share.number], gaps, choices):
                reader.drop_share(share.number)


def _change(
    case: _Case, best: Version, shares: list[MutableShare], number: int, choices: Choices
) -> None:
    """Change a range; if that succeeds, the version is the one that honest servers would have led to."""
    offset = choices.below(best.size + 1)
    data = choices.take(1 + choices.below(60)) or b"new"
    made = []
    honest = [MutableShare.of(n, _share(case.index, number, n)) for n in range(best.total_shares)]
    for given, bytes_of in (
        (shares, case.shares),
        (honest, [bytearray(_share(case.index, number, n)) for n in range(best.total_shares)]),
    ):
        update = RangeUpdate(best, offset, len(data), _key().readkey)
        for share in given:
            update.add_share(share)
        for _ in range(_MAX_READS):
            for share in given:
                gaps = update.missing(share.number)
                _try_to_answer(share, bytes_of[share.number], gaps, choices)
            job = update.next_job()
            if job is not None:
                update.finish(job.run())
            elif update.lacking_shares or update.is_ready:
                break
        for error in update.corrupt:
            _check(error, {share.number for share in given})
        if update.lacking_shares:
            continue
        try:
            salts = _salts(len(update.touched), 9)
            made.append((given, update.encode(data, number + 1, _key(), salts).version))
        except CorruptionError as error:
            _check(error, {share.number for share in given})
    assert made, "honest servers cannot be written"
    assert made[-1][0] is honest, "honest servers cannot be written"
    assert all(version == made[-1][1] for _, version in made), "a server's lie is signed"


def _check(error: CorruptionError, numbers: set[int]) -> None:
    assert type(error) is CorruptionError
    assert error.share_number in numbers, "a share is blamed that is not there"
    assert len(str(error)) < 500
    assert "\n" not in str(error)


def seeds() -> dict[str, bytes]:
    """Return each file untouched, and one tampering of each kind."""
    made = {f"file-{index}": bytes([index]) for index in range(len(_FILES))}
    for number, tampering in enumerate(_TAMPERINGS):
        name = tampering.__name__.strip("_")
        made[name] = bytes([1, 1, number, 1, 8, 120, 2, 1, 4, 0, 0, 0, 1, 0, 12, 9])
        made[f"{name}-twice"] = bytes([0, 2, number, 0, 1, 3, number, 1, 0, 200, 5, 1, 0, 3])
        made[f"{name}-change"] = bytes([2, 1, number, 1, 9, 0, 9, 1, 0, 0, 0, 1, 0, 1, 1, 1, 5, 3])
    made["change"] = bytes([1, 0, 0, 0, 0, 0, 0, 1, 0, 55, 30]) + b"what is new here, and old"
    made["header"] = bytes([0, 1, 1, 0, 0, 60]) + _share(0, _NEW, 0)[:60]
    return made
