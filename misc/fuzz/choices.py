"""
Any bytes as a sequence of decisions.

Decisions are taken from the front, so that a fuzzer which changes a byte changes one of them, and all of
them are defined: behind the end there are zeros, and 0 should mean what is most ordinary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Decisions, from the bytes that a fuzzer made."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def more(self) -> bool:
        """Whether there are bytes left; what ends a loop over decisions."""
        return self._at < len(self._data)

    def byte(self) -> int:
        """Return 0 to 255."""
        return self.number(1)

    def number(self, width: int) -> int:
        """Return a number of so many bytes, the first the highest."""
        return int.from_bytes(self.take(width).ljust(width, b"\0"), "big")

    def below(self, limit: int) -> int:
        """Return 0 to limit - 1, limit at most 65536."""
        return self.number(1 if limit <= 256 else 2) % limit

    def pick(self, options: Sequence[T]) -> T:
        """Return one of the options; at the end, the first."""
        return options[self.below(len(options))]

    def flag(self) -> bool:
        """Return yes or no; at the end, no."""
        return bool(self.byte() & 1)

    def take(self, length: int) -> bytes:
        """Return so many bytes, or as many as there are."""
        taken = self._data[self._at : self._at + length]
        self._at += len(taken)
        return taken

    def rest(self) -> bytes:
        """Return all that is left."""
        return self.take(len(self._data))
