"""
Erasure coding with ISA-L through ``ctypes``, and the uninitialised buffers for its results.

Source: ISA-L's ``erasure_code.h``; Python's C API, ``PyByteArray_FromStringAndSize`` and ``Py_buffer``.
"""

from __future__ import annotations

import ctypes
import hashlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from pipegrid.core.hashes import Buffer

# ``bytearray(n)`` writes n zeros: 333 MB for a file of 100 MB, to memory that is not in the cache. The C
# API leaves the bytes as they are if it is given none.

_make: Any = getattr(getattr(ctypes, "pythonapi", None), "PyByteArray_FromStringAndSize", None)
if _make is not None:
    _make.restype = ctypes.py_object
    _make.argtypes = (ctypes.c_char_p, ctypes.c_ssize_t)


def uninitialised(size_bytes: int) -> bytearray:
    """
    Return a buffer of ``size_bytes`` with arbitrary contents, which the caller must overwrite completely.

    Until then it may contain anything that this process has had in memory, passwords included.
    """
    if _make is None:
        return bytearray(size_bytes)
    buffer: bytearray = _make(None, size_bytes)
    return buffer


# ISA-L multiplies matrices over the same field GF(2^8) as zfec (both reduce by 0x11d), 32 or 64 bytes at a
# time instead of one, and is some fifteen times as fast. It gets zfec's matrix, which is read from zfec's
# own coder by coding blocks of one byte; before a matrix is used, its results are compared with zfec's.
#
# Without ISA-L (Debian: ``libisal2``), or if it ever differed, zfec is used.

_NAMES = ("libisal.so.2", "libisal.2.dylib")
_TABLE_BYTES = 32  # for each coefficient
_TRIAL = bytes(range(256)) * 5 + b"tail"

Coder = Callable[[Sequence[Buffer]], Sequence[Buffer]]
"""Makes blocks from k other blocks of the same length."""


class Multiplier:
    """
    Multiplies k blocks by one matrix.

    Args:
        library: ISA-L.
        rows: the coefficients: one row of k for each block of the product.
    """

    def __init__(self, library: Any, rows: Sequence[bytes]) -> None:
        self._library = library
        self._inputs = len(rows[0])
        self._outputs = len(rows)
        self._tables = ctypes.create_string_buffer(_TABLE_BYTES * self._inputs * self._outputs)
        library.ec_init_tables(self._inputs, self._outputs, b"".join(rows), self._tables)

    def __call__(self, blocks: Sequence[Buffer]) -> list[Buffer]:
        """Return the products; all blocks, given and returned, have one length."""
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
    Return a multiplier that makes the same blocks as ``coder``, or None if there is no library or it
    differs.

    Args:
        inputs: how many blocks the coder takes.
        coder: a linear function over GF(2^8); it is tried with blocks of one byte, and with a longer one.
    """
    library = load()
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
def load() -> Any:
    """Return the library, or None if it is not installed or this Python lacks ``pythonapi``."""
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
    Clear the upper halves of the vector registers.

    ISA-L's functions end without ``vzeroupper``, after which older vector instructions in that thread and
    its new threads are slower: SHA-256 made 1310 MB/s instead of 1790, zfec 130 instead of 310. OpenSSL's
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
    """The address of a buffer, which may be read-only; the buffer cannot move until ``give_back``."""

    def __init__(self, buffer: Buffer, length: int) -> None:
        self._view = _PyBuffer()
        # Raises BufferError unless the buffer is contiguous.
        ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(self._view), 0)
        if self._view.len != length:
            self.give_back()
            raise ValueError(f"a block of {self._view.len} bytes, and another one of {length}")
        self.address = self._view.buf

    def give_back(self) -> None:
        """Allow the buffer to move and be resized again; the address must not be used after this."""
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(self._view))
