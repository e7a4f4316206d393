"""
Erasure coding of one segment: k primary blocks to parity blocks, and any k blocks back to the segment. It
uses ISA-L through ``ctypes`` if that library is installed, otherwise zfec. Also the uninitialised buffers for
the results.

Source: Tahoe-LAFS's ``file-encoding.rst``, and how 1.20 behaves; Rizzo, "Effective erasure codes", 1997, as
implemented by zfec; ISA-L's ``erasure_code.h``; Python's C API, ``PyByteArray_FromStringAndSize``.
"""

from __future__ import annotations

import ctypes
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from pipegrid.core.hashes import Buffer

# ``bytearray(n)`` writes n zeros: 333 MB for a file of 100 MB, to memory that is not in the CPU's cache. The
# function of the C API leaves a new buffer uninitialised if it is given no bytes to copy.

_make: Any = getattr(getattr(ctypes, "pythonapi", None), "PyByteArray_FromStringAndSize", None)
if _make is not None:
    _make.restype = ctypes.py_object
    _make.argtypes = (ctypes.c_char_p, ctypes.c_ssize_t)


def uninitialised(size_bytes: int) -> bytearray:
    """
    Return a buffer of ``size_bytes`` with arbitrary contents, which the caller must overwrite completely.

    Bytes that are not overwritten may be anything that this process had in memory, including passwords.
    """
    if _make is None:
        return bytearray(size_bytes)
    buffer: bytearray = _make(None, size_bytes)
    return buffer


# ISA-L multiplies matrices over the same field GF(2^8) as zfec (both reduce by 0x11d), 32 or 64 bytes at a
# time instead of one, and is some fifteen times as fast. ISA-L gets zfec's matrix, which is found by coding
# blocks of one byte with zfec. Before ISA-L uses a matrix, its results are compared with zfec's.
#
# Without ISA-L (Debian: ``libisal2``), or if its results differed, zfec is used.

_NAMES = ("libisal.so.2", "libisal.2.dylib")
_TABLE_BYTES = 32  # ISA-L's table has 32 bytes for each coefficient
_TRIAL = bytes(range(256)) * 5 + b"tail"

Coder = Callable[[Sequence[Buffer]], Sequence[Buffer]]
"""Makes blocks from k other blocks of the same length."""


class Multiplier:
    """
    Multiplies k blocks by one matrix, with ISA-L.

    Args:
        library: ISA-L.
        rows: the coefficients: for each block of the product, a row of k bytes.
    """

    def __init__(self, library: Any, rows: Sequence[bytes]) -> None:
        self._library = library
        self._inputs = len(rows[0])
        self._outputs = len(rows)
        self._tables = ctypes.create_string_buffer(_TABLE_BYTES * self._inputs * self._outputs)
        library.ec_init_tables(self._inputs, self._outputs, b"".join(rows), self._tables)

    def __call__(self, blocks: Sequence[Buffer]) -> list[Buffer]:
        """Return the blocks of the product. All given and returned blocks have one length."""
        assert len(blocks) == self._inputs
        length = len(blocks[0])
        made = [uninitialised(length) for _ in range(self._outputs)]
        borrowed: list[_Borrowed] = []
        try:
            borrowed.extend(_Borrowed(block, length) for block in (*blocks, *made))
            addresses = (ctypes.c_void_p * len(borrowed))(*(each.address for each in borrowed))
            outputs = ctypes.byref(addresses, self._inputs * ctypes.sizeof(ctypes.c_void_p))
            self._library.ec_encode_data(
                length, self._inputs, self._outputs, self._tables, addresses, outputs
            )
        finally:
            for each in borrowed:
                each.give_back()
            _clear_upper_halves()
        return list(made)


def multiplier(inputs: int, coder: Coder) -> Multiplier | None:
    """
    Return a multiplier that makes the same blocks as ``coder``. Return None if ISA-L is not installed, or if
    its results differ from those of ``coder``.

    Args:
        inputs: how many blocks the coder takes.
        coder: a linear function over GF(2^8). It is called with blocks of one byte to find its matrix, and
            with longer blocks to compare the results.
    """
    library = load_isal()
    if library is None:
        return None
    columns = [
        b"".join(bytes(made) for made in coder([bytes((i == j,)) for i in range(inputs)]))
        for j in range(inputs)
    ]
    rows = [bytes(column[row] for column in columns) for row in range(len(columns[0]))]
    if not rows:
        return None
    found = Multiplier(library, rows)
    trial = [_TRIAL[j:] + _TRIAL[:j] for j in range(inputs)]
    if [bytes(made) for made in found(trial)] != [bytes(made) for made in coder(trial)]:
        warnings.warn(
            "ISA-L computes other blocks than zfec, so zfec is used; update ISA-L",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return found


@lru_cache(maxsize=1)
def load_isal() -> Any:
    """Return ISA-L, or None if it is not installed or this Python lacks ``pythonapi``."""
    for name in _NAMES if hasattr(ctypes, "pythonapi") else ():
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(name)
            number, pointer = ctypes.c_int, ctypes.c_void_p
            library.ec_init_tables.argtypes = (number, number, ctypes.c_char_p, pointer)
            library.ec_init_tables.restype = None
            library.ec_encode_data.argtypes = (number, number, number, pointer, pointer, pointer)
            library.ec_encode_data.restype = None
            return library
    return None


def _clear_upper_halves() -> None:
    """
    Clear the upper halves of the vector registers, by computing a SHA-512.

    ISA-L's functions end without ``vzeroupper``. This slows older vector instructions in the calling thread
    and in threads that it starts: SHA-256 made 1310 MB/s instead of 1790, zfec 130 instead of 310. OpenSSL's
    SHA-512 uses AVX and ends with ``vzeroupper``; it takes half a microsecond.
    """
    hashlib.sha512().digest()


class _PyBuffer(ctypes.Structure):
    """Python's C structure for a borrowed buffer."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


class _Borrowed:
    """The address of a buffer, which may be read-only. The buffer cannot move until ``give_back``."""

    def __init__(self, buffer: Buffer, length: int) -> None:
        self._view = _PyBuffer()
        # This raises BufferError unless the buffer is contiguous.
        ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(self._view), 0)
        if self._view.len != length:
            self.give_back()
            raise ValueError(f"a block of {self._view.len} bytes, and another one of {length}")
        self.address = self._view.buf

    def give_back(self) -> None:
        """Allow the buffer to move and be resized again; the address must not be used after this."""
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(self._view))


STRIPE_BYTES = 120 * 1024
"""
The longest stripe of a block that zfec codes in one call.

Every stripe acquires the GIL twice, for coding and for hashing: with two threads, stripes of 16 KiB lost a
quarter of the speed, and stripes above 128 KiB gained nothing. From 128 KiB on, glibc also maps each buffer
separately.
"""

WIDE_STRIPE_BYTES = 512 * 1024
"""
The longest stripe that ISA-L codes in one call. ISA-L is so fast that acquiring the GIL costs more than with
zfec.

See docs/explanation-codec.md, "Stripes".
"""

QUICK_BYTES = 8 * 1024
"""
Blocks of at least this length are coded by ISA-L if it is installed. Loading ISA-L takes a few milliseconds,
which is too long for one small file.
"""

LOADED_BYTES = 2 * 1024
"""The limit for encoding once ISA-L is loaded: ISA-L is faster than zfec from about 1100 bytes on."""

# Stripes start at multiples of a cache line within their block.
_ALIGNMENT = 64

# zfec's speed varied by a fifth with the memory that got its results: the C library returned freed memory to
# the kernel, so the next segment caused a page fault for every page, some 500 faults per megabyte. glibc
# raises its thresholds when a large mapping is freed: it then no longer maps buffers up to this size
# separately, and keeps twice as much free memory. So a buffer of ``_KEPT_BYTES`` is allocated here and freed
# at once. No page of it is touched, so this takes microseconds and no memory; with other allocators it has no
# effect. Stripes stay below the size that is mapped separately. See docs/explanation-codec.md.
_KEPT_BYTES = 16 << 20
bytes(_KEPT_BYTES)


def stripes(block_bytes: int, stripe_bytes: int | None = None) -> Iterator[tuple[int, int]]:
    """
    Yield the start and end of each stripe of a block; the stripes are about equally long.

    Args:
        stripe_bytes: the length of the longest stripe; None for the best length for the library in use.
    """
    if stripe_bytes is None:
        wide = block_bytes > STRIPE_BYTES and load_isal() is not None
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
    Return the parity pieces of one stripe.

    Args:
        primary: this stripe of blocks 0 to k - 1; equally long buffers, which are not copied.
        numbers: the numbers of the parity blocks to make, each in [required_shares, total_shares).

    Returns:
        One piece for each of numbers, in their order; each is as long as the stripe.
    """
    if required_shares == 1:
        return (primary[0],) * len(numbers)  # every block is a copy of the segment
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

    If all primary blocks are given, nothing is computed and nothing copied. Otherwise the missing primary
    blocks are computed, stripe by stripe.

    Args:
        blocks: by share number, at least k verified blocks, all equally long.
        length: the length of the segment without padding, in bytes; at most k times the length of a block.

    Returns:
        Pieces that together are the segment, cut to length. They may be the given buffers, or parts of them.
    """
    k = required_shares
    chosen = sorted(blocks)[:k]
    assert len(chosen) == k
    assert chosen[-1] < total_shares
    block_bytes = len(blocks[chosen[0]])
    assert all(len(blocks[number]) == block_bytes for number in chosen)
    assert 0 < length <= k * block_bytes
    if k == 1:
        return cut([blocks[chosen[0]]], 0, length)
    missing = [number for number in range(k) if number not in blocks]
    recovered: dict[int, list[Buffer]] = {number: [] for number in missing}
    if missing:
        # zfec requires each given primary block at the position of its number, and parity blocks at the other
        # positions. If a tuple has another order, zfec would rearrange the tuple in place.
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
        segment += recovered.get(number) or [blocks[number]]
    return cut(segment, 0, length)


def cut(pieces: Iterable[Buffer], start: int, end: int) -> list[Buffer]:
    """Return bytes [start, end) of the joined pieces, as pieces, without copying."""
    result: list[Buffer] = []
    position = 0
    for piece in pieces:
        if position >= end:
            break
        first, last = max(start - position, 0), min(end - position, len(piece))
        if first < last:
            whole = last - first == len(piece)
            result.append(piece if whole else memoryview(piece)[first:last])
        position += len(piece)
    return result


# zfec's matrices do not change, so threads share its coders.
@lru_cache(maxsize=16)
def _encoder(required_shares: int, total_shares: int) -> Any:
    import zfec  # zfec also imports argparse and more, which is not needed where ISA-L is installed

    return zfec.Encoder(required_shares, total_shares)


@lru_cache(maxsize=16)
def _decoder(required_shares: int, total_shares: int) -> Any:
    import zfec

    return zfec.Decoder(required_shares, total_shares)


# Threads share ISA-L's functions, too. A file needs one or two of them, and some more if servers fail.
@lru_cache(maxsize=64)
def _encoding(
    numbers: tuple[int, ...], required_shares: int, total_shares: int
) -> Multiplier | None:
    """
    Return an ISA-L function that makes these parity blocks from the primary blocks, or None if zfec must make
    them.
    """
    encoder = _encoder(required_shares, total_shares)
    return multiplier(required_shares, lambda blocks: encoder.encode(tuple(blocks), numbers))


@lru_cache(maxsize=64)
def _decoding(
    places: tuple[int, ...], required_shares: int, total_shares: int
) -> Multiplier | None:
    """
    Return an ISA-L function that makes the missing primary blocks from the blocks in ``places``, or None if
    zfec must make them.
    """
    decoder = _decoder(required_shares, total_shares)
    missing = [number for number, place in enumerate(places) if place != number]

    def decode_missing(blocks: Sequence[Buffer]) -> Sequence[Buffer]:
        pieces = decoder.decode(tuple(blocks), places)
        return [pieces[number] for number in missing]

    return multiplier(required_shares, decode_missing)


def library() -> str:
    """Return the name of the library that codes long blocks, for speed comparisons."""
    return "zfec" if load_isal() is None else "ISA-L"
