"""Erasure code (ISA-L), uninitialised buffers."""

from __future__ import annotations

import ctypes
import hashlib
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from pipegrid.core.hashes import Buffer

# Buffers for results that are written whole.
#
# ``bytearray(n)`` is n zeros: 333 MB of them for a file of 100 MB, each written for nothing, and to
# memory that is not in the cache. Here nothing is written: such a buffer may hold anything that this
# process has had in its memory, passwords too, so **all of it is to be filled before anyone else sees
# it**.
#
# Source: Python's C API, ``PyByteArray_FromStringAndSize``, which leaves the bytes alone if it is given none.

_make: Any = getattr(getattr(ctypes, "pythonapi", None), "PyByteArray_FromStringAndSize", None)
if _make is not None:
    _make.restype = ctypes.py_object
    _make.argtypes = (ctypes.c_char_p, ctypes.c_ssize_t)


def uninitialised(size_bytes: int) -> bytearray:
    """Return a buffer of so many bytes, with anything in it; for the caller to fill, all of it."""
    if _make is None:
        return bytearray(size_bytes)
    buffer: bytearray = _make(None, size_bytes)
    return buffer


# zfec's arithmetic, done by ISA-L where the system has it: the same bytes, some fifteen times as fast.
#
# A code over GF(2^8) is a matrix: each block that is made is a sum of multiples of k blocks that are there.
# zfec looks up one product a byte; ISA-L, Intel's storage library, does 32 or 64 at a time with whatever
# vector instructions the processor has. It takes any matrix over the same field (both reduce by 0x11d),
# so it is given zfec's: a matrix is read off its own coder, from blocks of one byte of which one is 1.
# Nothing here knows how zfec makes its matrices, and before a matrix is used its results are compared
# with zfec's.
#
# The library is used through ``ctypes``, which lets go of the GIL meanwhile, and only if it is installed
# (Debian: ``libisal2``). Without it, or should it ever differ, there is zfec.
#
# It leaves something behind. Its functions end without ``vzeroupper``, so the upper halves of the vector
# registers stay in use, and older vector instructions are slower: from then on SHA-256, by the processor's
# instructions for it, made 1310 MB/s instead of 1790 in that thread and in all that it started, and zfec 130
# instead of 310. Somebody has to clear them (``_clear_upper_halves``).
#
# Source: ISA-L's ``erasure_code.h``; the structure ``Py_buffer`` of Python's C API.

_NAMES = ("libisal.so.2", "libisal.2.dylib")
_TABLE_BYTES = 32  # of one coefficient
_TRIAL = bytes(range(256)) * 5 + b"tail"

Coder = Callable[[Sequence[Buffer]], Sequence[Buffer]]
"""Makes some blocks from k others, all of one length."""


class Multiplier:
    """
    One matrix: multiplies k blocks by it.

    Args:
        library: ISA-L.
        rows: of coefficients, one row for each block that is to be made, k in each.
    """

    def __init__(self, library: Any, rows: Sequence[bytes]) -> None:
        self._library = library
        self._inputs = len(rows[0])
        self._outputs = len(rows)
        self._tables = ctypes.create_string_buffer(_TABLE_BYTES * self._inputs * self._outputs)
        library.ec_init_tables(self._inputs, self._outputs, b"".join(rows), self._tables)

    def __call__(self, blocks: Sequence[Buffer]) -> list[Buffer]:
        """Return the products, each as long as the blocks are, all of which are equally long."""
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
    Return what makes the same blocks as a coder does, or None if that cannot be had.

    Args:
        inputs: how many blocks the coder takes.
        coder: any linear one over GF(2^8); it is tried with blocks of one byte, and a longer one.
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
    """Return the library, or None if the system has none, or this Python no such buffers."""
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
    Have the vector registers' upper halves cleared, by somebody who cleans up after himself.

    OpenSSL's SHA-512 uses AVX wherever ISA-L does, and ends with the instruction that does this; it takes
    half a microsecond.
    """
    hashlib.sha512().digest()


class _PyBuffer(ctypes.Structure):
    """Python's own record of a borrowed buffer."""

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
    """The address of a buffer, read-only ones too; it cannot move until it is given back."""

    def __init__(self, buffer: Buffer, length: int) -> None:
        self._view = _PyBuffer()
        # It raises BufferError unless it is in one piece.
        ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), ctypes.byref(self._view), 0)
        if self._view.len != length:
            self.give_back()
            raise ValueError(f"a block of {self._view.len} bytes, and another one of {length}")
        self.address = self._view.buf

    def give_back(self) -> None:
        """Let the buffer move and be resized again; the address is of no use after this."""
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(self._view))
