"""
What is in a tree, counted; pure.

Names and meanings are those of Tahoe-LAFS's statistics.

Source: the reference on trees, section 5.
"""

from __future__ import annotations

from collections import Counter
from math import isqrt
from typing import Any

from pipegrid.core.caps import ChkCap, DirectoryCap, LitCap, MutableCap
from pipegrid.tree.walk import Met, Unreadable


class TreeStats:
    """Counts what a walk meets, each object once; literal ones every time."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._sizes: Counter[str] = Counter()
        self._largest: Counter[str] = Counter()
        self._histogram: Counter[tuple[int, int]] = Counter()

    def count(self, met: Met) -> None:
        """Count one that was met."""
        if isinstance(met, Unreadable):
            self._counts["unreadable-directories"] += 1
            self._counts["directories"] += 1
            return
        cap = met.cap
        if met.again and met.listing is None:
            return
        if isinstance(cap, DirectoryCap):
            # One that was met by its verifier cap before is counted, but not what is in it.
            self._counts["directories"] += not met.again
            if met.listing is not None:
                self._sizes["directories"] += met.listing.size
                self._raise("directory", met.listing.size)
                self._raise("directory-children", len(met.listing.entries))
        elif isinstance(cap, LitCap):
            self._file("literal-files", cap.size)
        elif isinstance(cap, ChkCap):
            self._file("immutable-files", cap.size)
            self._raise("immutable-file", cap.size)
        elif isinstance(cap, MutableCap):
            self._counts["mutable-files"] += 1
            self._counts["files"] += 1
        else:
            self._counts["unknown"] += 1

    def _file(self, kind: str, size: int) -> None:
        self._counts[kind] += 1
        self._counts["files"] += 1
        self._sizes[kind] += size
        self._histogram[bucket(size)] += 1

    def _raise(self, what: str, size: int) -> None:
        self._largest[what] = max(self._largest[what], size)

    def histogram(self) -> list[tuple[int, int, int]]:
        """Return least size, greatest size, and number of files of each class that has any."""
        return [(*limits, files) for limits, files in sorted(self._histogram.items())]

    def fields(self) -> dict[str, Any]:
        """Return all of it, as documented."""
        counted = (
            "files",
            "immutable-files",
            "literal-files",
            "mutable-files",
            "directories",
            "unreadable-directories",
            "unknown",
        )
        return {
            **{f"count-{kind}": self._counts[kind] for kind in counted},
            **{
                f"size-{kind}": self._sizes[kind]
                for kind in ("immutable-files", "literal-files", "directories")
            },
            **{
                f"largest-{what}": self._largest[what]
                for what in ("directory", "directory-children", "immutable-file")
            },
            "size-files-histogram": [list(each) for each in self.histogram()],
        }


def bucket(size: int) -> tuple[int, int]:
    """Return the class of a size: 0, 1 to 3, 4 to 10, 11 to 31, 32 to 100, and so on by the root of ten."""
    if size == 0:
        return 0, 0
    least, exponent = 1, 1
    while True:
        # Exact, however large: the whole part of 10 to the power of half the exponent.
        greatest = isqrt(10**exponent)
        if size <= greatest:
            return least, greatest
        least, exponent = greatest + 1, exponent + 1
