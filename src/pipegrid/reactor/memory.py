"""
Giving memory back to the system.

glibc keeps up to 64 MiB of what was freed at the end of its heap once a program has used large pieces, for
the next time. A server that had one large request would be as large for good.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any


def give_back() -> None:
    """Return what was freed to the system, in about a millisecond; where that is not glibc's, do nothing."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@lru_cache(maxsize=1)
def _malloc_trim() -> Any:
    import ctypes  # costs a millisecond that most commands need not spend

    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
