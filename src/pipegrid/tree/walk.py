"""Walking a tree with an asynchronous iterator, and counting what a tree contains."""

from __future__ import annotations

from collections import Counter
from math import isqrt
from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure

from pipegrid.core.caps import Cap, ChkCap, DirectoryCap, LitCap, MutableCap, as_cap
from pipegrid.errors import PipegridError
from pipegrid.tree.directory_reading import (
    Listing,
    ListingLimits,
    ReadsFiles,
    check_listing_limits,
    read_listing,
)
from pipegrid.tree.walk_order import (
    Found,
    Met,
    ReadAheadDirectory,
    TreePath,
    Unreadable,
    WalkLimits,
    WalkOrder,
    identity_of,
)

# A walk yields everything in a tree, in order, while directories are read in advance:
#
#     with walk(grid, cap) as tree:
#         async for met in tree:
#             ...
#
# ``WalkOrder`` decides what comes next, and what is read in advance.

__all__ = ["Found", "Met", "TreePath", "Unreadable", "Walk", "WalkLimits", "identity_of", "walk"]


class Walk:
    """
    An asynchronous iterator over a tree, for one consumer; also a context manager, which ends the walk.

    A directory comes before its children, and children come in ascending order of their names. A directory
    that cannot be read comes as ``Unreadable``, and the walk continues. Limits apply to what was read in
    advance, even if the consumer is slow.
    """

    def __init__(self, grid: ReadsFiles, order: WalkOrder, listing: ListingLimits) -> None:
        self._grid = grid
        self._order = order
        self._listing = listing
        self._running: dict[ReadAheadDirectory, Deferred[Any]] = {}
        self._waiter: Deferred[None] | None = None
        self._bug: Failure | None = None
        self._closed = False

    def __aiter__(self) -> Walk:
        return self

    async def __anext__(self) -> Met:
        try:
            while not self._closed:
                met = self._order.next_met()
                if met is not None:
                    self._read_ahead()
                    return met
                if self._order.done:
                    break
                if self._read_ahead():
                    continue  # a literal directory needs no request
                self._waiter = Deferred()
                await self._waiter
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopAsyncIteration

    def close(self) -> None:
        """End the walk, and all its reads."""
        self._closed = True
        self._waiter = None
        for running in list(self._running.values()):
            running.cancel()
        self._running.clear()

    def __enter__(self) -> Walk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_ahead(self) -> bool:
        """Begin the reads that are due; return whether one of them ended immediately."""
        arrived = False
        while not self._closed:
            directory = self._order.next_read()
            if directory is None:
                break
            reading = Deferred.fromCoroutine(read_listing(self._grid, directory.cap, self._listing))
            self._running[directory] = reading
            reading.addBoth(self._arrived, directory)
            arrived = arrived or directory not in self._running
        if self._bug is not None:
            self._bug.raiseException()
        return arrived

    def _arrived(self, outcome: Listing | Failure, directory: ReadAheadDirectory) -> None:
        self._running.pop(directory, None)
        if self._closed:
            return
        if isinstance(outcome, Failure):
            error = outcome.value
            if not isinstance(error, PipegridError):
                # A cancelled read, or an unexpected error, does not mean that the directory is damaged.
                self._bug = self._bug or outcome
                error = CancelledError()
            self._order.arrived(directory, error)
        else:
            self._order.arrived(directory, outcome)
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter.callback(None)


def walk(
    grid: ReadsFiles,
    cap: str | Cap,
    *,
    all_paths: bool = False,
    by_write_caps: bool = False,
    metadata_json: bytes = b"{}",
    limits: WalkLimits | None = None,
    listing: ListingLimits | None = None,
) -> Walk:
    """
    Return a walk from a directory, which comes first, or over a single file.

    Nothing is read before the first step.

    Args:
        grid: an open ``Grid``.
        cap: the cap of the root.
        all_paths: enter a directory at each of its paths, not only at the first.
        by_write_caps: enter only mutable directories, by their write caps.
        metadata_json: the metadata of the root's entry, if it has one.
        limits: limits of the walk.
        listing: limits of each directory.

    Raises:
        CapError: ``cap`` is not a well-formed cap.
    """
    parsed = as_cap(cap)
    check_listing_limits(listing)
    order = WalkOrder(
        parsed,
        limits,
        metadata_json=metadata_json,
        all_paths=all_paths,
        by_write_caps=by_write_caps,
    )
    return Walk(grid, order, listing or ListingLimits())


# Counts of what a tree contains, with the names and meanings of Tahoe-LAFS's ``deep-stats``.


class TreeStats:
    """Counts what a walk meets: each object once, but literal objects every time."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._sizes: Counter[str] = Counter()
        self._largest: Counter[str] = Counter()
        self._histogram: Counter[tuple[int, int]] = Counter()

    def count(self, met: Met) -> None:
        """Count an object that the walk has met."""
        if isinstance(met, Unreadable):
            self._counts["unreadable-directories"] += 1
            self._counts["directories"] += 1
            return
        cap = met.cap
        if met.again and met.listing is None:
            return
        if isinstance(cap, DirectoryCap):
            # If the directory was met before by its verify cap, it is counted already, but its content is
            # not.
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
        """
        Return the smallest size, the largest size, and the number of files for each class that has files.
        """
        return [(*limits, files) for limits, files in sorted(self._histogram.items())]

    def fields(self) -> dict[str, Any]:
        """Return all counts, under the names of ``deep-stats``."""
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
    """
    Return the limits of the class of a size: 0, 1 to 3, 4 to 10, 11 to 31, 32 to 100, and so on in steps of a
    factor of the square root of ten.
    """
    if size == 0:
        return 0, 0
    least, exponent = 1, 1
    while True:
        # This is exact for any size: ``greatest`` is the integer part of 10 to the power of half the
        # exponent.
        greatest = isqrt(10**exponent)
        if size <= greatest:
            return least, greatest
        least, exponent = greatest + 1, exponent + 1
