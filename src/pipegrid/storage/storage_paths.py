"""
Paths in a storage directory, in the layout of Tahoe-LAFS except for ``incoming``.

Source: how Tahoe-LAFS 1.20 behaves.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from functools import lru_cache
from pathlib import Path

from pipegrid.core import base32
from pipegrid.core.hashes import STORAGE_INDEX_BYTES
from pipegrid.errors import UsageError

MAX_SHARE_NUMBER = 255

SHARE_NUMBERS = {str(number): number for number in range(MAX_SHARE_NUMBER + 1)}
"""Share numbers by their file names; files with other names are not shares."""

_POSSIBLE = frozenset(range(MAX_SHARE_NUMBER + 1))

ShareKey = tuple[bytes, int]
"""The storage index and the share number."""


class Paths:
    """
    The paths below one storage directory. They are made only from 16-byte indexes and numbers from 0 to 255,
    never from text that a client sent.

    Attributes:
        shares, incoming, advisories: directories, which may be missing.
    """

    __slots__ = ("advisories", "incoming", "shares")

    def __init__(self, root: Path) -> None:
        self.shares = str(root / "shares")
        self.incoming = str(root / "shares" / "incoming")
        self.advisories = str(root / "corruption-advisories")

    def directory(self, storage_index: bytes) -> str:
        """
        Return the directory of all complete shares of a storage index.

        Raises (and so do ``final`` and ``unfinished``):
            UsageError: the storage index is malformed.
        """
        name = _name(storage_index)
        return f"{self.shares}/{name[:2]}/{name}"

    def final(self, storage_index: bytes, share_number: int) -> str:
        """Return the path of a complete share."""
        name = _name(storage_index)
        return f"{self.shares}/{name[:2]}/{name}/{share_number:d}"

    def unfinished(self, storage_index: bytes, share_number: int) -> str:
        """Return the path of the file of an unfinished upload."""
        return f"{self.incoming}/{_name(storage_index)}.{share_number:d}"


def check_number(share_number: int) -> None:
    """Raise UsageError unless ``share_number`` is 0 to 255."""
    if not (isinstance(share_number, int) and 0 <= share_number <= MAX_SHARE_NUMBER):
        raise UsageError(f"a share number is 0 to {MAX_SHARE_NUMBER}, not {share_number!r}")


def possible_numbers(share_numbers: Iterable[int]) -> AbstractSet[int]:
    """
    Return the valid share numbers. Servers ignore other numbers, as if there were no space for these shares.
    """
    if isinstance(share_numbers, frozenset) and share_numbers <= _POSSIBLE:
        return share_numbers
    return {number for number in share_numbers if 0 <= number <= MAX_SHARE_NUMBER}


def check_key(storage_index: bytes, share_number: int) -> ShareKey:
    """Return storage index and share number as a key, after checking the number."""
    if type(share_number) is not int or not 0 <= share_number <= MAX_SHARE_NUMBER:
        check_number(share_number)
    return bytes(storage_index), share_number


@lru_cache(maxsize=1024)
def _name(storage_index: bytes) -> str:
    if len(storage_index) != STORAGE_INDEX_BYTES:
        raise UsageError(
            f"a storage index is 16 bytes long, not {len(storage_index)}; take it from a cap"
        )
    return base32.encode(storage_index)
