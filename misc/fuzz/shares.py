"""
Damaged, swapped, cut and forged shares, from servers that answer as they like: whatever comes of it is the
plaintext, or less of it; what is wrong is a CorruptionError that names a share there is; little is read.

The bytes are a program: which small file, what is done to its shares, and how the servers deliver them.
Besides hostile servers there are hostile writers: their cap vouches for the UEB that they made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache

import attrs

from misc.fuzz.choices import Choices
from pipegrid.core import hashes, ueb
from pipegrid.core.caps import ChkCap
from pipegrid.core.decoder import Decoder
from pipegrid.core.encoder import Encoder
from pipegrid.core.encoding_parameters import Params
from pipegrid.core.hashes import netstring
from pipegrid.core.share_verifier import MAX_PROBLEMS, ShareVerifier
from pipegrid.errors import CapMismatch, CorruptionError

# (required, total, size, maximum segment size, layout version)
_FILES = (
    (2, 3, 150, 32, 1),
    (1, 2, 100, 1 << 20, 1),
    (2, 3, 70, 30, 2),
    (3, 4, 130, 130, 1),
    (1, 1, 100, 10, 2),
)
_MAX_STEPS = 400
_METADATA_BYTES = 300_000
"""More than header, chain, UEB, a group of each of two trees, and the gaps between them."""

_UEB_KEYS = (
    b"segment_size",
    b"crypttext_root_hash",
    b"share_root_hash",
    b"size",
    b"num_segments",
    b"x",
)
_NUMBERS = (0, 1, 2, 3, 10, 30, 32, 34, 64, 150, 1 << 16, 1 << 31, (1 << 32) - 1, (1 << 63) + 1)


@attrs.frozen
class _File:
    cap: ChkCap
    shares: tuple[bytes, ...]
    ueb: bytes
    ueb_offset: int
    plaintext: bytes
    crypttext_tree: tuple[int, int]
    segment_bytes: int
    version: int


@cache
def _file(index: int, other: bool = False) -> _File:
    """Return one of the files, or another file of the same shape."""
    k, n, size, most, version = _FILES[index]
    plaintext = hashlib.shake_128(b"other" if other else b"this").digest(size)
    geometry = Params(k, n, most).geometry(size)
    encoder = Encoder(geometry, bytes(range(16)), force_version=version)
    shares = [bytearray(encoder.share_bytes) for _ in range(n)]
    writes = []
    for at in range(0, size, geometry.segment_bytes):
        segment = encoder.encrypt(plaintext[at : at + geometry.segment_bytes])
        writes += encoder.add(encoder.code(segment))
    for write in writes + encoder.finish():
        data = b"".join(write.pieces)
        shares[write.share_number][write.offset : write.offset + len(data)] = data
    where = encoder.layout
    return _File(
        encoder.cap,
        tuple(map(bytes, shares)),
        encoder.ueb,
        where.uri_extension,
        plaintext,
        (where.crypttext_hash_tree, where.block_hashes),
        geometry.segment_bytes,
        version,
    )


@attrs.define
class _Case:
    """
    A file that somebody has tampered with.

    Attributes:
        faithful: the cap still says what the plaintext is.
    """

    index: int
    file: _File
    cap: ChkCap
    shares: list[bytearray]
    faithful: bool = True


def run(data: bytes) -> None:
    """Tamper, verify, restore."""
    choices = Choices(data)
    index = choices.below(len(_FILES))
    file = _file(index)
    case = _Case(index, file, file.cap, [bytearray(share) for share in file.shares])
    for _ in range(choices.below(16)):
        choices.pick(_TAMPERINGS)(case, choices)
    good = _verify(case, choices)
    _restore(case, choices)
    if case.faithful and len(good) >= case.cap.required_shares:
        case.shares = [share if n in good else bytearray() for n, share in enumerate(case.shares)]
        decoder = Decoder(case.cap)
        for number in sorted(good, reverse=True):
            decoder.add_share(number)
        restored = _deliver(case, decoder, Choices(b""))
        assert restored == file.plaintext, "shares without a problem do not restore the file"
        assert not decoder.corrupt, "the decoder finds what the verifier does not"


# What is done to shares.


def _share(case: _Case, choices: Choices) -> bytearray:
    return case.shares[choices.below(len(case.shares))]


def _flip(case: _Case, choices: Choices) -> None:
    share = _share(case, choices)
    if share:
        share[choices.below(len(share))] ^= choices.byte() or 1


def _overwrite(case: _Case, choices: Choices) -> None:
    share = _share(case, choices)
    at = choices.below(len(share) + 1)
    patch = choices.take(choices.below(64))
    share[at : at + len(patch)] = patch


def _lie(case: _Case, choices: Choices) -> None:
    """Change a number of the header to one that means something."""
    share = _share(case, choices)
    width = 4 if case.file.version == 1 else 8
    at = 4 + choices.below(8) * width
    old = int.from_bytes(share[at : at + width], "big")
    places = (0, old + 34, old - 34, old + 32, old - 32, len(share), *case.file.crypttext_tree)
    new = choices.pick((*places, *_NUMBERS, case.file.ueb_offset, choices.number(width)))
    share[at : at + width] = (new % (1 << 8 * width)).to_bytes(width, "big")


def _cut(case: _Case, choices: Choices) -> None:
    share = _share(case, choices)
    del share[choices.below(len(share) + 1) :]


def _remove(case: _Case, choices: Choices) -> None:
    share = _share(case, choices)
    at = choices.below(len(share) + 1)
    del share[at : at + choices.byte()]


def _insert(case: _Case, choices: Choices) -> None:
    share = _share(case, choices)
    at = choices.below(len(share) + 1)
    share[at:at] = choices.take(choices.below(64))


def _swap(case: _Case, choices: Choices) -> None:
    """Give a share part of another one, or of another file."""
    share = _share(case, choices)
    number = choices.below(len(case.shares))
    source = _file(case.index, True).shares[number] if choices.flag() else case.shares[number]
    at, length = choices.below(len(share) + 1), choices.number(2)
    share[at : at + length] = source[at : at + length]


def _forge_ueb(case: _Case, choices: Choices) -> None:
    """Play a writer who seals another UEB."""
    fields = dict(ueb.parse(case.file.ueb).fields)
    for _ in range(1 + choices.below(3)):
        key = choices.pick(_UEB_KEYS)
        number = b"%d" % choices.pick((*_NUMBERS, case.cap.size, choices.number(8)))
        if choices.flag():
            fields[key] = choices.take(32)
        elif choices.flag():
            fields.pop(key, None)
        else:
            fields[key] = number
    packed = b"".join(key + b":" + netstring(fields[key]) for key in sorted(fields))
    _seal(case, packed)


def _forge_tree(case: _Case, choices: Choices) -> None:
    """Play a writer whose tree of segment hashes is sound in itself, but of another file."""
    other = _file(case.index, True)
    start, end = other.crypttext_tree
    fields = dict(ueb.parse(case.file.ueb).fields)
    fields[b"crypttext_root_hash"] = other.shares[0][start : start + 32]
    for share in case.shares:
        share[start:end] = other.shares[0][start:end]
    _seal(case, b"".join(key + b":" + netstring(fields[key]) for key in sorted(fields)))


def _forge_anything(case: _Case, choices: Choices) -> None:
    _seal(case, choices.take(choices.below(2100)))


def _seal(case: _Case, packed: bytes) -> None:
    width = 4 if case.file.version == 1 else 8
    for share in case.shares:
        share[case.file.ueb_offset :] = len(packed).to_bytes(width, "big") + packed
    case.cap = attrs.evolve(case.cap, ueb_hash=hashes.UEB.hash(packed))
    case.faithful = False


def _other_cap(case: _Case, choices: Choices) -> None:
    """Claim that the file has another size, or that other numbers of shares restore it."""
    cap, which = case.cap, choices.below(3)
    if which == 0:
        size = choices.pick((*_NUMBERS[1:], cap.size + 1, cap.size - 1, choices.number(8)))
        cap = attrs.evolve(cap, size=max(size, 1))
    elif which == 1:
        cap = attrs.evolve(cap, required_shares=1 + choices.below(cap.total_shares))
    else:
        total = cap.required_shares + choices.below(257 - cap.required_shares)
        cap = attrs.evolve(cap, total_shares=max(total, len(case.shares)))
    if cap != case.cap:
        case.cap, case.faithful = cap, False


_TAMPERINGS: tuple[Callable[[_Case, Choices], None], ...] = (
    _flip,
    _lie,
    _overwrite,
    _cut,
    _swap,
    _remove,
    _insert,
    _forge_ueb,
    _forge_tree,
    _other_cap,
    _forge_anything,
)


# What is made of it.


def _verify(case: _Case, choices: Choices) -> set[int]:
    """Verify each share, one of them in pieces too; return those that have no problem."""
    segment_bytes = choices.pick((None, case.file.segment_bytes, 1, 1 << 20, 7))
    step, in_pieces = choices.pick((500, 100, 37)), choices.below(len(case.shares))
    good = set()
    cap = case.cap.verifier() if choices.flag() else case.cap
    for number, share in enumerate(case.shares):
        verifier = ShareVerifier(cap, number, segment_bytes)
        verifier.feed(bytes(share))
        problems = verifier.finish()
        _check_errors(problems, case, {number})
        assert len(problems) <= MAX_PROBLEMS + 1
        if not problems:
            good.add(number)
        if number == in_pieces:
            verifier = ShareVerifier(cap, number, segment_bytes)
            for at in range(0, len(share), step):
                verifier.feed(bytes(share[at : at + step]))
            told = [str(problem) for problem in verifier.finish()]
            assert told == [str(problem) for problem in problems], "the split changed the problems"
    return good


def _restore(case: _Case, choices: Choices) -> None:
    """Restore a range from servers that follow the rest of the choices."""
    size = case.cap.size
    start = choices.below(min(size, 1000)) if choices.flag() else 0
    length = choices.number(2) if choices.flag() else None
    decoder = Decoder(
        case.cap,
        start,
        length,
        guess_segment_bytes=choices.pick((1 << 20, case.file.segment_bytes, 7)),
        merge_gap_bytes=choices.pick((8192, 0)),
    )
    without = choices.byte()
    numbers = {n for n in range(len(case.shares)) if not without >> n & 1}
    for number in numbers:
        decoder.add_share(number)
    try:
        restored = _deliver(case, decoder, choices)
    except CorruptionError as error:
        assert not case.faithful, "a good file is said to be inconsistent"
        assert error.share_number is None, "a share is blamed for its writer"
        restored = None
    except CapMismatch:
        assert not case.faithful, "a cap is said not to fit its own file"
        restored = None
    _check_errors(decoder.corrupt, case, numbers)
    for number in decoder.bad_shares:
        assert number in {error.share_number for error in decoder.corrupt}, "condemned in silence"
    if restored is None:
        return
    end = size if length is None else min(start + length, size)
    if decoder.done:
        assert len(restored) == max(end - start, 0), "done too early"
    if case.faithful:
        assert case.file.plaintext[start:end].startswith(restored), "wrong plaintext"


def _check_errors(errors: list[CorruptionError], case: _Case, numbers: set[int]) -> None:
    for error in errors:
        assert type(error) is CorruptionError
        assert error.share_number in numbers, "a share is blamed that is not there"
        assert error.offset is None or error.offset >= 0
        assert len(str(error)) < 1000


def _deliver(case: _Case, decoder: Decoder, choices: Choices) -> bytes:
    """Let decoder and servers do what they do until nothing goes on; return what was restored."""
    restored = bytearray()
    last_resort = False
    for step in range(_MAX_STEPS):
        if decoder.done:
            break
        if step == _MAX_STEPS // 4:
            choices = Choices(b"")  # from here on all servers are good
        moved = False
        for number in decoder.shares_in_use:
            moved |= _serve(case, decoder, number, choices)
        jobs = []
        while (job := decoder.next_job()) is not None:
            jobs.append(job)
        if choices.flag():
            jobs.reverse()
        for job in jobs:
            for piece in decoder.finish(job.run()):
                restored += piece
        if moved or jobs:
            continue
        if last_resort or not decoder.lacking:
            break
        last_resort = True
        decoder.use_damaged_shares()
    else:
        raise AssertionError("it stalls")
    assert decoder.done or decoder.lacking, "it stopped, and lacks nothing"
    return bytes(restored)


def _serve(case: _Case, decoder: Decoder, number: int, choices: Choices) -> bool:
    """Ask one server what is wanted of it; return whether anything was."""
    ahead = choices.pick((1 << 16, 1, 100))
    spans = decoder.wanted(number, ahead)
    geometry = decoder.geometry or decoder.guessed_geometry
    asked = sum(span.length for span in spans)
    block = min(geometry.block_bytes, geometry.share_data_bytes)
    most = _METADATA_BYTES + ahead + max(block, decoder.guessed_geometry.block_bytes)
    assert asked <= most, f"{asked} bytes are asked of a server at once"
    share = case.shares[number]
    pieces: list[tuple[int, bytes]] = []
    for span in spans:
        data = bytes(share[span.offset : span.end])
        step = choices.pick((len(data), 200, 33)) or 1
        pieces += [(span.offset + at, data[at : at + step]) for at in range(0, len(data), step)]
        if len(data) < span.length:
            pieces.append((span.offset + len(data), b""))
    manner = choices.below(16)
    if manner & 1:
        pieces.reverse()
    for offset, data in pieces:
        if data:
            decoder.received(number, offset, data)
        else:
            decoder.ended(number, offset)
    _misbehave(case, decoder, number, choices, manner >> 1)
    assert decoder.held_bytes <= sum(map(len, case.shares)), "more is held than came"
    return bool(spans) or manner > 1


def _misbehave(case: _Case, decoder: Decoder, number: int, choices: Choices, manner: int) -> None:
    """Do what no good server does, or what happens to connections."""
    if manner == 1:
        decoder.ended(number, choices.number(2))
    elif manner == 2:
        decoder.received(number, choices.number(2), choices.take(50))
    elif manner in (3, 4):
        decoder.drop_share(number)
    elif manner == 5:
        decoder.drop_share(number)
        decoder.add_share(number)
    elif manner == 6:
        decoder.use_damaged_shares()


def seeds() -> dict[str, bytes]:
    """Return one tampering of each kind on each file, and servers of several manners."""
    made = {f"file-{index}": bytes([index]) for index in range(len(_FILES))}
    for number, tampering in enumerate(_TAMPERINGS):
        name = tampering.__name__.strip("_").replace("_", "-")
        made[name] = bytes([number % len(_FILES), 1, number, 0, 1, 44, 3, 20, 1, 7, 0, 0, 9])
        made[f"{name}-twice"] = bytes([0, 2, number, 1, 0, 90, number, 0, 0, 9, 0, 0, 1, 0, 2, 1])
    for manner in range(7):
        made[f"manner-{manner}"] = bytes([0, 0, 0, 9, 0, 0, 0, 0, 0, 0]) + bytes(
            [1, 2, manner * 2 + 1, 0, 60, 0] * 6
        )
    return made
