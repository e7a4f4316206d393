"""Checking, and repairing, every object of a tree."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

import attrs
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from pipegrid.core.caps import Cap, ChkCap, ChkVerifierCap, LitCap, MutableCap, keepable, writes
from pipegrid.errors import CapError, NotEnoughSharesError, UnhappyError
from pipegrid.grid.file_grid import Grid
from pipegrid.reactor.deferreds import Waiters, start_cancellable
from pipegrid.transfer.results import CheckResult, RepairResult
from pipegrid.transfer.settings import UpkeepSettings
from pipegrid.transfer.upkeep import Upkeep, UpkeepOutcome, UpkeepRequest, UpkeepSummary
from pipegrid.tree.retry_queue import MOST, RetryQueue, wants_servers
from pipegrid.tree.walk import Met, TreePath, Unreadable, identity_of, walk

# If a repair failed because servers were unreachable, the object is checked again at the end of the run:
# immediately if other objects have succeeded meanwhile, otherwise when servers are reachable; see
# ``RetryPolicy``.

_SOMETHING_ELSE = -1


def lacking(outcome: UpkeepOutcome) -> Exception | None:
    """Return the error of an outcome if unreachable servers may be its only reason; otherwise None."""
    if isinstance(outcome, Failure):
        error = outcome.value
        return error if isinstance(error, Exception) and wants_servers(error) else None
    if isinstance(outcome, CheckResult) and outcome.unreachable and not outcome.recoverable:
        found, needed = len(outcome.good_shares), outcome.required_shares
        absent = len(outcome.unreachable)
        return NotEnoughSharesError("", found, needed, absent, outcome.total_shares)
    if isinstance(outcome, RepairResult) and not outcome.whole:
        absent = len({*outcome.absent, *outcome.after.unreachable})
        return UnhappyError("", 0, 0, absent) if absent else None
    return None


# The check of a tree checks each object once, while the tree is walked.
#
# A directory must be read before it is entered. What it contains is checked as soon as it is read, so a tree
# takes about one round trip per level, and one more.
#
# A directory that cannot be read is reported, and checked like any other object; the check continues. Objects
# that could not be repaired because servers were unreachable are checked again at the end.
#
# **Write caps.** Repairing a mutable object needs its write cap, and so does checking its private key. But
# the walk may first meet such an object by a read cap. The outcome of its check is held back if a write cap
# could change the outcome. If the walk later meets any object again by its write cap, then at the end the
# mutable directories are walked again by their write caps, until the write caps of all held objects are
# found. A tree without held objects is walked once.

MAX_HELD = 10_000
"""Maximum number of held objects, of about 3 kB each. At this number, trees are walked for write caps."""


class FirstMet(NamedTuple):
    """
    Where in a tree an object was met first.

    Attributes:
        path: the names from the root; empty for the root itself.
        cap: the cap of the object; None if the tree does not reveal it.
        write_cap: its write cap, if it is known at this place.
    """

    path: TreePath
    cap: Cap | None
    write_cap: Cap | None = None

    @property
    def best(self) -> Cap | None:
        """The write cap if it is known, otherwise ``cap``."""
        return self.cap if self.write_cap is None else self.write_cap


@attrs.define
class TreeSummary(UpkeepSummary):
    """
    The outcome of checking a tree, in numbers.

    Attributes:
        unreadable: directories that could not be entered; their content is not counted.
        second_tries: objects whose repair was retried successfully when servers were reachable again.
    """

    unreadable: int = 0
    second_tries: int = 0


Ended = Callable[[int, FirstMet, UpkeepOutcome], None]
OnUnread = Callable[[int, FirstMet, Exception], None]


class CheckReports(NamedTuple):
    """
    Callbacks of a check of several trees; the first argument of ``ended``, ``unreadable`` and ``met`` is the
    number of the tree.

    Attributes:
        ended: called with each object's place and outcome when its check ends. Literal objects are healthy;
            objects of an unknown kind, which cannot be checked, have a failure.
        unreadable: called with each directory that could not be entered, and the error.
        waiting: called with a sentence when a repair waits for servers, and with None when the run continues.
        met: called with everything that the walk meets, including objects that were met before.
        ready: returns when the next check may begin, so that a slow consumer of the reports can delay it.
    """

    ended: Ended | None = None
    unreadable: OnUnread | None = None
    waiting: Callable[[str | None], None] = lambda why: None
    met: Callable[[int, Met], None] | None = None
    ready: Callable[[], Awaitable[None]] | None = None


def check_tree(
    grid: Grid,
    cap: str | Cap,
    todo: UpkeepRequest,
    *,
    bounds: UpkeepSettings | None = None,
    ended: Callable[[FirstMet, UpkeepOutcome], None] | None = None,
    unreadable: Callable[[FirstMet, Exception], None] | None = None,
) -> Deferred[TreeSummary]:
    """
    Check everything in a tree; the Deferred fires with the outcome in numbers.

    Args:
        grid: an open ``Grid``.
        cap: the cap of a directory; or of a file, which is then the only object.
        todo: what to do with each object.
        bounds: limits on how much is done at the same time.
        ended: called with each object's place and outcome when its check ends. Literal objects are healthy;
            objects of an unknown kind, which cannot be checked, have a failure.
        unreadable: called with each directory that could not be entered, and the error. The shares of the
            directory itself are checked as well.

    Raises (through the Deferred):
        CapError: ``cap`` is not a well-formed cap.
        UnhappyError: the grid has no servers.
    """
    reports = CheckReports(
        ended=None if ended is None else lambda _, *details: ended(*details),
        unreadable=None if unreadable is None else lambda _, *details: unreadable(*details),
    )
    return check_trees(grid, [cap], todo, bounds=bounds, reports=reports)


def check_trees(
    grid: Grid,
    caps: Sequence[str | Cap],
    todo: UpkeepRequest,
    summary: TreeSummary | None = None,
    *,
    bounds: UpkeepSettings | None = None,
    reports: CheckReports | None = None,
) -> Deferred[TreeSummary]:
    """
    Check several trees in turn, as if they were one; an object in several of them counts once.

    Args:
        summary: the counts are added to it; None: to a new one.
        Others: see ``check_tree``.
    """
    reports = reports or CheckReports()
    counted = TreeSummary() if summary is None else summary
    return start_cancellable(_Trees(grid, caps, todo, counted, reports).run(bounds), grid.clock)


_Keepable = ChkCap | ChkVerifierCap | LitCap | MutableCap
_Placed = tuple[int, FirstMet, _Keepable]
"""The number of an object's tree, its place, and the cap by which it is checked."""


class _Trees:
    __slots__ = (
        "_caps",
        "_grid",
        "_held",
        "_later",
        "_met_before",
        "_met_stronger",
        "_reports",
        "_summary",
        "_todo",
        "_unrepaired",
        "_woken",
    )

    def __init__(
        self,
        grid: Grid,
        caps: Sequence[str | Cap],
        todo: UpkeepRequest,
        summary: TreeSummary,
        reports: CheckReports,
    ) -> None:
        self._grid = grid
        self._caps = caps
        self._todo = todo
        self._summary = summary
        self._reports = reports
        self._woken: Waiters[None] = Waiters()
        self._unrepaired: list[tuple[_Placed, UpkeepOutcome, Exception]] = []
        self._later: RetryQueue[int, tuple[_Placed, UpkeepOutcome]] = RetryQueue(
            grid.clock, lambda: self._woken.fire(None), reports.waiting
        )
        self._met_before: set[bytes] = set()
        self._met_stronger = False
        self._held: dict[bytes, tuple[_Placed, UpkeepOutcome]] = {}

    async def run(self, bounds: UpkeepSettings | None) -> TreeSummary:
        walks = [walk(self._grid, cap) for cap in self._caps]
        upkeep = await self._grid.upkeep(self._todo, bounds)
        try:
            for number, tree in enumerate(walks):
                with tree:
                    async for met in tree:
                        await self._maintain(number, met, upkeep)
                        if len(self._held) >= MAX_HELD:
                            await self._find_write_caps(upkeep)
            await upkeep.finished()
            if self._met_stronger and self._held:
                await self._find_write_caps(upkeep)
                await upkeep.finished()
            self._give_up(self._held)
            await self._look_again(upkeep)
        finally:
            await upkeep.close()
        return self._summary

    async def _maintain(self, number: int, met: Met, upkeep: Upkeep) -> None:
        best = met.best or met.cap
        place = FirstMet(met.path, met.cap, best if writes(best) else None)
        if self._reports.met is not None:
            self._reports.met(number, met)
        if self._reports.ready is not None:
            await self._reports.ready()
        if isinstance(met, Unreadable):
            self._summary.unreadable += 1
            if self._reports.unreadable is not None:
                self._reports.unreadable(number, place, met.error)
        identity = identity_of(met.cap)
        if identity is not None:
            if identity in self._met_before:
                self._met_stronger = self._met_stronger or writes(best)
                return
            self._met_before.add(identity)
        try:
            cap = _keepable(best)
        except CapError as error:
            self._note((number, place, None), Failure(error))
            return
        await upkeep.wait_for_space()
        if identity is None or not isinstance(cap, MutableCap) or writes(cap):
            upkeep.begin(cap, partial(self._came, (number, place, cap)))
        else:
            upkeep.begin(cap, partial(self._note_read, identity, (number, place, cap)))

    async def _look_again(self, upkeep: Upkeep) -> None:
        """Retry the objects that were not repaired because servers were unreachable."""
        for number, (what, outcome, error) in enumerate(self._unrepaired):
            if not self._later.keeps(number, (what, outcome), error, -math.inf):
                self._note(what, outcome)
        self._unrepaired.clear()
        in_flight = helped = 0

        def on_outcome(number: int, what: _Placed, began_s: float, outcome: UpkeepOutcome) -> None:
            nonlocal in_flight, helped
            in_flight -= 1
            error = lacking(outcome)
            if error is None:
                helped += self._later.succeeded(number)
            elif self._later.keeps(number, (what, outcome), error, began_s):
                return
            self._note(what, outcome)

        try:
            while True:
                again = self._later.next(at_end=not in_flight)
                for _, lost in self._later.take_lost():
                    self._note(*lost)
                if again is not None:
                    number, (what, _) = again
                    in_flight += 1
                    began_s = self._grid.clock.seconds()
                    await upkeep.wait_for_space()
                    upkeep.begin(what[2], partial(on_outcome, number, what, began_s))
                elif in_flight:
                    await upkeep.finished()
                elif self._later.has_any:
                    await self._woken.wait()
                else:
                    break
        finally:
            self._later.close()
        self._summary.second_tries += helped

    def _came(self, what: _Placed, outcome: UpkeepOutcome) -> None:
        """Record an outcome, unless the repair must be retried because servers were unreachable."""
        if self._todo.repair:
            error = lacking(outcome)
            if error is None:
                self._later.succeeded(_SOMETHING_ELSE)
            elif len(self._unrepaired) < MOST:
                self._unrepaired.append((what, outcome, error))
                return
        self._note(what, outcome)

    def _note(self, what: tuple[int, FirstMet, object], outcome: UpkeepOutcome) -> None:
        self._summary.note(outcome)
        if self._reports.ended is not None:
            self._reports.ended(what[0], what[1], outcome)

    # The methods below find write caps for objects that were first met by a read cap.

    def _note_read(self, identity: bytes, what: _Placed, outcome: UpkeepOutcome) -> None:
        """Hold back the outcome of a mutable object if a write cap could change it."""
        if isinstance(outcome, Failure):
            wants_more = self._todo.repair and outcome.check(CapError) is not None
        else:
            # Without a write cap, the private key was not checked.
            cap = what[2]
            verified = isinstance(cap, MutableCap) and self._todo.verifies(cap)
            wants_more = verified and isinstance(outcome, CheckResult) and outcome.healthy
        if wants_more:
            self._held[identity] = what, outcome
        else:
            self._came(what, outcome)

    async def _find_write_caps(self, upkeep: Upkeep) -> None:
        """
        Check held objects again by the write caps that the trees reveal; report those whose write cap was not
        found.
        """
        held, self._held = self._held, {}
        for cap in self._caps:
            with walk(self._grid, cap, by_write_caps=True) as tree:
                async for met in tree:
                    best = met.best or met.cap
                    one = held.pop(identity_of(best) or b"", None) if writes(best) else None
                    if one is not None:
                        await upkeep.wait_for_space()
                        (number, place, _), outcome = one
                        cap = _keepable(best)
                        on_outcome = partial(self._came, (number, place, cap))
                        upkeep.begin(cap, on_outcome, damaged=isinstance(outcome, Failure))
                    if not held:
                        return
        self._give_up(held)

    def _give_up(self, held: dict[bytes, tuple[_Placed, UpkeepOutcome]]) -> None:
        for what, outcome in held.values():
            self._note(what, outcome)


def _keepable(cap: Cap | None) -> _Keepable:
    if cap is None:
        raise CapError(
            "only the cap that writes it is here, encrypted: open the tree by its write cap"
        )
    return keepable(cap)
