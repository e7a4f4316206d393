"""How much an index may hold, be it a Debian archive's or an RPM repository's, and what is in it."""

from __future__ import annotations

from collections.abc import Iterator

from pipegrid.mirror.unpacking import PatchError, unpacked
from pipegrid.mirror.wanted import BadEntry

MAX_INDEX_BYTES = 4 << 30
"""Packed or unpacked; the largest known has a quarter of a gigabyte."""


def check_index_bytes(name: str, size: int) -> None:
    """
    Make sure that a size which is said of an index is one that an index may have.

    Raises:
        BadEntry: it is not.
    """
    if size > MAX_INDEX_BYTES:
        raise BadEntry(f"{name} is said to have {size} bytes, which no index has")


def index_blocks(path: str, name: str, size: int | None) -> Iterator[bytes]:
    """
    Yield what is in an index, unpacked, and no more than it should have.

    Args:
        path: of the file.
        name: of the index, for errors.
        size: unpacked, in bytes, as it is told; None: it is not.

    Raises:
        BadEntry: it has more, or cannot be read.
    """
    most = MAX_INDEX_BYTES if size is None else size
    found = 0
    try:
        for block in unpacked(path):
            found += len(block)
            if found > most:
                raise BadEntry(f"{name} has more than {most} bytes, unpacked; it is not used")
            yield block
    except PatchError as error:
        raise BadEntry(f"the index {name} cannot be read: {error}") from error
