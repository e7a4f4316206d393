"""
Looking after everything in a tree: each object once, while the tree is walked.

Directories have to be read to be entered, and what is found in them is looked after at once: reading and
checking overlap, so that a tree takes about as many round trips as it has levels, and one more.

A directory that cannot be read is named, and looked after like any other object; the rest goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import attrs
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from pipegrid.core.caps import Cap, ChkCap, ChkVerifierCap, LitCap
from pipegrid.core.filecaps import checkable
from pipegrid.errors import CapError
from pipegrid.transfer.settings import UpkeepSettings
from pipegrid.transfer.upkeep.summary import UpkeepSummary
from pipegrid.transfer.upkeep.upkeep import Outcome, Todo, Upkeep
from pipegrid.tree.listing import ListingLimits, ReadsFiles
from pipegrid.tree.walk import Path, Unreadable, WalkLimits, identity_of, walk


class LooksAfter(ReadsFiles, Protocol):
    """What it needs of a grid."""

    def upkeep(self, todo: Todo, bounds: UpkeepSettings | None = None) -> Deferred[Upkeep]:
        """Open what looks after objects."""


@attrs.frozen
class Place:
    """
    Where in a tree an object was met first.

    Attributes:
        path: names from the root; empty for the root itself.
        cap: its cap; None if the tree does not tell it.
    """

    path: Path
    cap: Cap | None


@attrs.define
class TreeSummary(UpkeepSummary):
    """
    What came of a tree.

    Attributes:
        unreadable: directories that could not be entered; what is below is not counted.
    """

    unreadable: int = 0


Ended = Callable[[Place, Outcome], None]
Unread = Callable[[Place, Exception], None]


def check_tree(
    grid: LooksAfter,
    cap: str | Cap,
    todo: Todo,
    *,
    bounds: UpkeepSettings | None = None,
    ended: Ended | None = None,
    unreadable: Unread | None = None,
    walk_limits: WalkLimits | None = None,
    listing_limits: ListingLimits | None = None,
) -> Deferred[TreeSummary]:
    """
    Look after everything in a tree; fires with what came of it, in numbers.

    Args:
        grid: an open ``Grid``.
        cap: a directory's; or a file's, which is all that there is then.
        todo: what is to be done with each object.
        bounds: how much at once.
        ended: called with each object's place and outcome, in the order of ending. Objects in their caps are
            healthy; those that cannot be checked, being of an unknown kind, have a failure.
        unreadable: called with each directory that could not be entered, and why. It is looked after, too, as
            far as its own shares go.
        walk_limits, listing_limits: what the walk may take.

    Raises (through the Deferred):
        CapError: it is no well-formed cap.
        UnhappyError: there are no servers.
    """
    return Deferred.fromCoroutine(
        _check_tree(grid, cap, todo, bounds, ended, unreadable, walk_limits, listing_limits)
    )


async def _check_tree(
    grid: LooksAfter,
    cap: str | Cap,
    todo: Todo,
    bounds: UpkeepSettings | None,
    ended: Ended | None,
    unreadable: Unread | None,
    walk_limits: WalkLimits | None,
    listing_limits: ListingLimits | None,
) -> TreeSummary:
    summary = TreeSummary()
    met_before: set[bytes] = set()

    def note(place: Place, outcome: Outcome) -> None:
        summary.note(outcome)
        if ended is not None:
            ended(place, outcome)

    with walk(grid, cap, limits=walk_limits, listing=listing_limits) as tree:
        upkeep = await grid.upkeep(todo, bounds)
        try:
            async for met in tree:
                place = Place(met.path, met.cap)
                if isinstance(met, Unreadable):
                    summary.unreadable += 1
                    if unreadable is not None:
                        unreadable(place, met.error)
                identity = identity_of(met.cap)
                if identity is not None:
                    if identity in met_before:
                        continue
                    met_before.add(identity)
                try:
                    object_cap = _checkable(met.cap)
                except CapError as error:
                    note(place, Failure(error))
                    continue
                await upkeep.room()
                upkeep.begin(object_cap, partial(note, place))
            await upkeep.finished()
        finally:
            await upkeep.close()
    return summary


def _checkable(cap: Cap | None) -> ChkCap | ChkVerifierCap | LitCap:
    if cap is None:
        raise CapError(
            "only the cap that writes it is here, encrypted: open the tree by its write cap"
        )
    return checkable(cap)
