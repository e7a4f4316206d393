"""
Looking after everything in a tree: each object once, while the tree is walked.

Directories have to be read to be entered, and what is found in them is looked after at once: reading and
checking overlap, so that a tree takes about as many round trips as it has levels, and one more.

A directory that cannot be read is named, and looked after like any other object; the rest goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import attrs
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from pipegrid.core.caps import Cap, ChkCap, ChkVerifierCap, LitCap, MutableCap
from pipegrid.core.filecaps import keepable
from pipegrid.errors import CapError
from pipegrid.transfer.settings import UpkeepSettings
from pipegrid.transfer.upkeep.summary import UpkeepSummary
from pipegrid.transfer.upkeep.upkeep import Outcome, Todo, Upkeep
from pipegrid.tree.listing import ListingLimits, ReadsFiles
from pipegrid.tree.walk import Met, Path, Unreadable, WalkLimits, identity_of, walk


class LooksAfter(ReadsFiles, Protocol):
    """What it needs of a grid."""

    def upkeep(self, todo: Todo, bounds: UpkeepSettings | None = None) -> Deferred[Upkeep]:
        """Open what looks after objects."""


@attrs.frozen
class FirstMet:
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


Ended = Callable[[int, FirstMet, Outcome], None]
Unread = Callable[[int, FirstMet, Exception], None]


def check_tree(
    grid: LooksAfter,
    cap: str | Cap,
    todo: Todo,
    *,
    bounds: UpkeepSettings | None = None,
    ended: Callable[[FirstMet, Outcome], None] | None = None,
    unreadable: Callable[[FirstMet, Exception], None] | None = None,
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
    return check_trees(
        grid,
        [cap],
        todo,
        bounds=bounds,
        ended=None if ended is None else lambda _, *told: ended(*told),
        unreadable=None if unreadable is None else lambda _, *told: unreadable(*told),
        walk_limits=walk_limits,
        listing_limits=listing_limits,
    )


def check_trees(
    grid: LooksAfter,
    caps: Sequence[str | Cap],
    todo: Todo,
    summary: TreeSummary | None = None,
    *,
    bounds: UpkeepSettings | None = None,
    ended: Ended | None = None,
    unreadable: Unread | None = None,
    walk_limits: WalkLimits | None = None,
    listing_limits: ListingLimits | None = None,
) -> Deferred[TreeSummary]:
    """
    Look after several trees, one behind the other, as one; an object that is in two counts once.

    Args:
        summary: to be counted in as it goes; by default a new one.
        ended, unreadable: as those of ``check_tree``, with the number of the tree in front.
        Others: see ``check_tree``.
    """
    work = _Trees(grid, TreeSummary() if summary is None else summary, ended, unreadable)
    return Deferred.fromCoroutine(work.run(caps, todo, bounds, walk_limits, listing_limits))


@attrs.define
class _Trees:
    _grid: LooksAfter
    _summary: TreeSummary
    _ended: Ended | None
    _unreadable: Unread | None
    _met_before: set[bytes] = attrs.field(factory=set)

    async def run(
        self,
        caps: Sequence[str | Cap],
        todo: Todo,
        bounds: UpkeepSettings | None,
        walk_limits: WalkLimits | None,
        listing_limits: ListingLimits | None,
    ) -> TreeSummary:
        walks = [walk(self._grid, cap, limits=walk_limits, listing=listing_limits) for cap in caps]
        upkeep = await self._grid.upkeep(todo, bounds)
        try:
            for number, tree in enumerate(walks):
                with tree:
                    async for met in tree:
                        await self._look_after(number, met, upkeep)
            await upkeep.finished()
        finally:
            await upkeep.close()
        return self._summary

    async def _look_after(self, number: int, met: Met, upkeep: Upkeep) -> None:
        place = FirstMet(met.path, met.cap)
        best = met.cap if isinstance(met, Unreadable) else met.best or met.cap
        if isinstance(met, Unreadable):
            self._summary.unreadable += 1
            if self._unreadable is not None:
                self._unreadable(number, place, met.error)
        identity = identity_of(met.cap)
        if identity is not None:
            if identity in self._met_before:
                return
            self._met_before.add(identity)
        told = partial(self._note, number, place)
        try:
            cap = _keepable(best)
        except CapError as error:
            told(Failure(error))
            return
        await upkeep.room()
        upkeep.begin(cap, told)

    def _note(self, number: int, place: FirstMet, outcome: Outcome) -> None:
        self._summary.note(outcome)
        if self._ended is not None:
            self._ended(number, place, outcome)


def _keepable(cap: Cap | None) -> ChkCap | ChkVerifierCap | LitCap | MutableCap:
    if cap is None:
        raise CapError(
            "only the cap that writes it is here, encrypted: open the tree by its write cap"
        )
    return keepable(cap)
