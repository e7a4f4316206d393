"""
Walking a tree: everything in it, in order, while its directories are read far ahead.

    with walk(grid, cap) as tree:
        async for met in tree:
            ...

What comes next, and what is read ahead, is ``order``'s decision.
"""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import CancelledError, Deferred
from twisted.python.failure import Failure

from pipegrid.core.caps import Cap, as_cap
from pipegrid.errors import PipegridError
from pipegrid.tree.listing import (
    Listing,
    ListingLimits,
    ReadsFiles,
    check_listing_limits,
    read_listing,
)
from pipegrid.tree.met import Found, Met, TreePath, Unreadable, WalkLimits, identity_of
from pipegrid.tree.order import AheadDirectory, WalkOrder

__all__ = ["Found", "Met", "TreePath", "Unreadable", "Walk", "WalkLimits", "identity_of", "walk"]


class Walk:
    """
    An asynchronous iterator over a tree, for one consumer; also a context manager, which ends it.

    A directory comes before its children, these in ascending order of their names; one that cannot be read
    comes as ``Unreadable`` in its place, and the walk goes on. While the consumer takes its time, what is
    ahead of it stays within the bounds of ``order``.
    """

    def __init__(self, grid: ReadsFiles, order: WalkOrder, listing: ListingLimits) -> None:
        self._grid = grid
        self._order = order
        self._listing = listing
        self._running: dict[AheadDirectory, Deferred[Any]] = {}
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
                    continue  # literal directories are there at once
                self._waiter = Deferred()
                await self._waiter
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopAsyncIteration

    def close(self) -> None:
        """End the walk, and all reading for it."""
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
        """Begin to read what is to be read now; returns whether any of it is there already."""
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

    def _arrived(self, outcome: Listing | Failure, directory: AheadDirectory) -> None:
        self._running.pop(directory, None)
        if self._closed:
            return
        if isinstance(outcome, Failure):
            error = outcome.value
            if not isinstance(error, PipegridError):
                # Neither is a cancelled read a damaged directory, nor is a mistake of ours.
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
        cap: where to begin.
        all_paths: enter a directory under each of its paths, and not only under the first.
        by_write_caps: enter only directories that can be changed, by their write caps.
        metadata_json: what the entry of ``cap`` says, if it has one.
        limits: what the walk may take.
        listing: what a directory may have.

    Raises:
        CapError: it is no well-formed cap.
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
