"""
Erasure coding of one segment: k primary blocks in, parity out, and any k blocks back again.

zfec does the arithmetic, one table look-up a byte, at one speed whatever the sizes; or ISA-L does the same
with vector instructions, where the system has it (``isal``). What made zfec's speed vary by a fifth was where
the results go. Parity is fresh memory, and the C library hands back to the kernel
what was freed, so that the next segment faults in every page again: some 500 faults a megabyte.
So the allocator is told once, here, to keep more (``_KEPT_BYTES``), and zfec codes blocks in stripes that
stay below its threshold for mappings of their own. The pieces are kept as they are, never joined.
``docs/explanation-codec.md`` has the figures.

Source: the format reference, section 3; Rizzo, "Effective erasure codes", 1997, as built by zfec.
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
Bytes of each block that are coded in one go, at most.

Every piece costs two turns of the GIL, coding and hashing: with two threads 16 KiB lost a quarter
of the speed, and nothing was gained above 128 KiB. That is also where glibc begins to map each
buffer by itself, hence a little less.
"""

WIDE_STRIPE_BYTES = 512 * 1024
"""
The same where ISA-L does it: coding takes so little that the turns count for more.

See docs/explanation-codec.md, "Stripes".
"""

QUICK_BYTES = 8 * 1024
"""Of longer blocks ISA-L makes others, if it is there. To load it costs a few milliseconds, which one small
file does not need."""

LOADED_BYTES = 2 * 1024
"""The same once it is there: from some 1100 bytes on it is the quicker one."""

# Pieces start at multiples of a cache line within their block.
_ALIGNMENT = 64

# glibc raises its thresholds when a large mapping is freed: above this size buffers are mappings of
# their own, and twice as much free memory is kept before any goes back. Nothing is touched, so this
# costs microseconds and no memory; other allocators are none the worse for it.
_KEPT_BYTES = 16 << 20
bytes(_KEPT_BYTES)


def stripes(block_bytes: int, stripe_bytes: int | None = None) -> Iterator[tuple[int, int]]:
    """
    Yield start and end of each stripe of a block; they are about equal, so none is tiny.

    Args:
        stripe_bytes: that long at most; None: as suits what will code them.
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
        numbers: the parity blocks that are wanted, each in [required_shares, total_shares).

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
    # zfec is quicker with tuples than with lists.
    pieces: list[bytes] = _encoder(required_shares, total_shares).encode(tuple(primary), numbers)
    return pieces


def decode(
    blocks: Mapping[int, Buffer], required_shares: int, total_shares: int, length: int
) -> list[Buffer]:
    """
    Return a segment from any k of its blocks.

    When the primary blocks are all there nothing is computed and nothing copied; otherwise the
    primary blocks that are missing are computed, stripe by stripe.

    Args:
        blocks: by share number, all equally long, at least k of them; their hashes were checked.
        length: bytes of the segment without padding, at most k times the length of a block.

    Returns:
        Pieces that one behind the other are the segment, cut to length. They may be the very
        buffers that were given, or parts of them.
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
        # zfec wants every primary block at its own place and parity in the gaps. It would move
        # them there itself, within a tuple that is not its own to change.
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
    kept: list[Buffer] = []
    for piece in pieces:
        if length <= 0:
            break
        kept.append(piece if len(piece) <= length else memoryview(piece)[:length])
        length -= len(piece)
    return kept


# The matrices are read-only once made, so threads share them.
@lru_cache(maxsize=16)
def _encoder(required_shares: int, total_shares: int) -> Any:
    import zfec  # with argparse and more, which nobody needs where ISA-L is

    return zfec.Encoder(required_shares, total_shares)


@lru_cache(maxsize=16)
def _decoder(required_shares: int, total_shares: int) -> Any:
    import zfec

    return zfec.Decoder(required_shares, total_shares)


# So are these. A file needs one or two, a grid whose servers fail some more.
@lru_cache(maxsize=64)
def _encoding(
    numbers: tuple[int, ...], required_shares: int, total_shares: int
) -> Multiplier | None:
    """Return what makes these parity blocks from all primary ones, unless zfec has to."""
    from pipegrid.core import isal

    encoder = _encoder(required_shares, total_shares)
    return isal.multiplier(required_shares, lambda blocks: encoder.encode(tuple(blocks), numbers))


@lru_cache(maxsize=64)
def _decoding(
    places: tuple[int, ...], required_shares: int, total_shares: int
) -> Multiplier | None:
    """Return what makes the missing primary blocks from those in their places, unless zfec has to."""
    from pipegrid.core import isal

    decoder = _decoder(required_shares, total_shares)
    missing = [number for number, place in enumerate(places) if place != number]

    def decode_missing(blocks: Sequence[Buffer]) -> Sequence[Buffer]:
        pieces = decoder.decode(tuple(blocks), places)
        return [pieces[number] for number in missing]

    return isal.multiplier(required_shares, decode_missing)


def library() -> str:
    """Return the name of what codes long blocks here, for whoever compares speeds."""
    return "ISA-L" if _has_isal() else "zfec"


def _has_isal() -> bool:
    from pipegrid.core import isal

    return isal.load() is not None
