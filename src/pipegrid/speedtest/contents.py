"""
What the speed test stores: fresh random bytes, so that nothing is stored already, and nothing compresses.

What comes back is compared with it, to the last byte.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from pipegrid.errors import CorruptionError


class Contents:
    """
    Files that were never stored before.

    Args:
        seed: the same seed gives the same files, in the same order.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def files(self, sizes: Iterable[int]) -> list[bytes]:
        """Return fresh files of these sizes."""
        return [self._rng.randbytes(size) for size in sizes]


class Comparing:
    """
    A file to write to, in memory that is there already, to be compared with what should be in it.

    So while the clock runs a byte is copied once, as a file would do, and no page is touched for the first
    time.
    """

    name = "the comparison"
    written_in_reactor = True  # it waits for nobody

    def __init__(self, expected: bytes) -> None:
        self._expected = expected
        self._got = memoryview(bytearray(expected[::-1]))
        self._at = 0

    def write(self, data: Any) -> int:
        """
        Keep the next bytes.

        Raises:
            CorruptionError: they are more than there should be.
        """
        size = len(data)
        if self._at + size > len(self._expected):
            raise CorruptionError(f"more than {len(self._expected)} bytes came back")
        self._got[self._at : self._at + size] = data
        self._at += size
        return size

    def flush(self) -> None:
        """There is nothing to flush."""

    def check(self) -> None:
        """
        Compare.

        Raises:
            CorruptionError: what came is not what should have come.
        """
        if self._at != len(self._expected):
            raise CorruptionError(
                f"{self._at} bytes came back instead of {len(self._expected)}; no figure is taken from that"
            )
        if self._got.obj != self._expected:
            raise CorruptionError("other bytes came back than were stored; report this")
