"""
Erasure coding of one segment: k primary blocks to parity, and any k blocks back to the segment.

Source: the format reference, section 3; Rizzo, "Effective erasure codes", 1997, as implemented by zfec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pipegrid.core.hashes import Buffer

if TYPE_CHECKING:
    from pipegrid.core.isal import Multiplier

STRIPE_BYTES = 120 * 1024
"""
The longest stripe of a block that is coded in one call.

Every piece acquires the GIL twice, for coding and for hashing: with two threads, stripes of 16 KiB lost a
quarter of the speed, and nothing was gained above 128 KiB. At 128 KiB glibc also begins to map each buffer
separately.
"""

WIDE_STRIPE_BYTES = 512 * 1024
"""
The longest stripe with ISA-L: coding is so fast that the GIL costs more.

See docs/explanation-codec.md, "Stripes".
"""

QUICK_BYTES = 8 * 1024
"""
Blocks of at least this length are coded by ISA-L if installed. Loading it takes a few milliseconds, which
is too long for one small file.
"""

LOADED_BYTES = 2 * 1024
"""The same limit once ISA-L is loaded; it is faster from about 1100 bytes on."""

# Pieces start at multiples of a cache line within their block.
_ALIGNMENT = 64

# zfec's speed varied by a fifth with the memory that its results went to: the C library returned freed
# memory to the kernel, so that the next segment caused a fault for every page, some 500 faults a megabyte.
# glibc raises its thresholds when a large mapping is freed: buffers up to this size are then no longer
# mapped separately, and twice as much free memory is kept. No page is touched, so this takes microseconds
# and no memory; with other allocators it has no effect. Stripes stay below the size that is mapped
# separately. See docs/explanation-codec.md.
_KEPT_BYTES = 16 << 20
bytes(_KEPT_BYTES)


def stripes(block_bytes: int, stripe_bytes: int | None = None) -> Iterator[tuple[int, int]]:
    """
    Yield start and end of each stripe of a block; the stripes are about equally long.

    Args:
        stripe_bytes: the longest stripe; None for the best one for the library in use.
    """
    if stripe_bytes is None:
        wide = block_bytes > STRIPE_BYTES and _has_isal()
        stripe_bytes = WIDE_STRIPE_BYTES if wide else STRIPE_BYTES
    count = -(-block_bytes // stripe_bytes)
    step = -(-block_bytes // count)
    step = min(stripe_bytes, -(-step // _ALIGNMENT) * _ALIGNMENT)
    for start in range(0, block_bytes, step):
        yield start, min(start + step, block_bytes)


def encode_stripe(
    primary: Sequence[Buffer], numbers: tuple[int, ...], required_shares: int, total_shares: int
) -> Sequence[Buffer]:
    """
    Return the parity of one stripe.

    Args:
        primary: the same stripe of blocks 0 to k - 1; equally long buffers, not copied.
        numbers: the parity blocks to make, each in [required_shares, total_shares).

    Returns:
        One piece for each of numbers, in their order, as long as the stripe.
    """
    if required_shares == 1:
        return (primary[0],) * len(numbers)  # every block is the segment itself
    if not numbers:
        return ()
    length = len(primary[0])
    if length >= QUICK_BYTES or (length >= LOADED_BYTES and _encoding.cache_info().currsize):
        multiply = _encoding(numbers, required_shares, total_shares)
        if multiply is not None:
            return multiply(primary)
    # zfec is faster with tuples than with lists.
    pieces: list[bytes] = _encoder(required_shares, total_shares).encode(tuple(primary), numbers)
    return pieces


def decode(
    blocks: Mapping[int, Buffer], required_shares: int, total_shares: int, length: int
) -> list[Buffer]:
    """
    Return a segment from any k of its blocks.

    If all primary blocks are given, nothing is computed and nothing copied; otherwise the missing primary
    blocks are computed, stripe by stripe.

    Args:
        blocks: by share number, all equally long, at least k of them, verified.
        length: bytes of the segment without padding, at most k times the length of a block.

    Returns:
        Pieces that together are the segment, cut to length. They may be the given buffers, or parts of
            them.
    """
    k = required_shares
    chosen = sorted(blocks)[:k]
    assert len(chosen) == k
    assert chosen[-1] < total_shares
    block_bytes = len(blocks[chosen[0]])
    assert all(len(blocks[number]) == block_bytes for number in chosen)
    assert 0 < length <= k * block_bytes
    if k == 1:
        return _cut([blocks[chosen[0]]], length)
    missing = [number for number in range(k) if number not in blocks]
    recovered: dict[int, list[Buffer]] = {number: [] for number in missing}
    if missing:
        # zfec requires every primary block at its own position and parity blocks in the gaps. Given another
        # order, it would rearrange a tuple in place.
        parity = iter(chosen[k - len(missing) :])
        places = tuple(number if number in blocks else next(parity) for number in range(k))
        views = [memoryview(blocks[number]) for number in places]
        decoder = _decoder(k, total_shares)
        quick = block_bytes >= QUICK_BYTES
        multiply = _decoding(places, k, total_shares) if quick else None
        for start, end in stripes(block_bytes):
            stripe = tuple(view[start:end] for view in views)
            if multiply is not None:
                made = multiply(stripe)
            else:
                pieces = decoder.decode(stripe, places)
                made = [pieces[number] for number in missing]
            for number, piece in zip(missing, made, strict=True):
                recovered[number].append(piece)
    segment: list[Buffer] = []
    for number in range(k):
        segment.extend(recovered[number] if number in recovered else [blocks[number]])
    return _cut(segment, length)


def _cut(pieces: list[Buffer], length: int) -> list[Buffer]:
    """Return the first length bytes of pieces."""
    result: list[Buffer] = []
    for piece in pieces:
        if length <= 0:
            break
        result.append(piece if len(piece) <= length else memoryview(piece)[:length])
        length -= len(piece)
    return result


# The matrices do not change, so threads share them.
@lru_cache(maxsize=16)
def _encoder(required_shares: int, total_shares: int) -> Any:
    import zfec  # also imports argparse and more, which is not needed where ISA-L is installed

    return zfec.Encoder(required_shares, total_shares)


@lru_cache(maxsize=16)
def _decoder(required_shares: int, total_shares: int) -> Any:
    import zfec

    return zfec.Decoder(required_shares, total_shares)


# Threads share these, too. A file needs one or two, a grid whose servers fail some more.
@lru_cache(maxsize=64)
def _encoding(
    numbers: tuple[int, ...], required_shares: int, total_shares: int
) -> Multiplier | None:
    """
    Return an ISA-L function that makes these parity blocks from the primary ones, or None if zfec has to.
    """
    from pipegrid.core import isal

    encoder = _encoder(required_shares, total_shares)
    return isal.multiplier(required_shares, lambda blocks: encoder.encode(tuple(blocks), numbers))


@lru_cache(maxsize=64)
def _decoding(
    places: tuple[int, ...], required_shares: int, total_shares: int
) -> Multiplier | None:
    """
    Return an ISA-L function that makes the missing primary blocks from those in ``places``, or None if zfec
    has to.
    """
    from pipegrid.core import isal

    decoder = _decoder(required_shares, total_shares)
    missing = [number for number, place in enumerate(places) if place != number]

    def decode_missing(blocks: Sequence[Buffer]) -> Sequence[Buffer]:
        pieces = decoder.decode(tuple(blocks), places)
        return [pieces[number] for number in missing]

    return isal.multiplier(required_shares, decode_missing)


def library() -> str:
    """Return the name of the library that codes long blocks, for speed comparisons."""
    return "ISA-L" if _has_isal() else "zfec"


def _has_isal() -> bool:
    from pipegrid.core import isal

    return isal.load() is not None
