"""
Buffers for results that are written whole.

``bytearray(n)`` is n zeros: 333 MB of them for a file of 100 MB, each written for nothing, and to memory that
is not in the cache. Here nothing is written: such a buffer may hold anything that this process has had in its
memory, passwords too, so **all of it is to be filled before anyone else sees it**.

Source: Python's C API, ``PyByteArray_FromStringAndSize``, which leaves the bytes alone if it is given none.
"""

from __future__ import annotations

import ctypes
from typing import Any

_make: Any = getattr(getattr(ctypes, "pythonapi", None), "PyByteArray_FromStringAndSize", None)
if _make is not None:
    _make.restype = ctypes.py_object
    _make.argtypes = (ctypes.c_char_p, ctypes.c_ssize_t)


def fresh(size_bytes: int) -> bytearray:
    """Return a buffer of so many bytes, with anything in it; for the caller to fill, all of it."""
    if _make is None:
        return bytearray(size_bytes)
    buffer: bytearray = _make(None, size_bytes)
    return buffer
