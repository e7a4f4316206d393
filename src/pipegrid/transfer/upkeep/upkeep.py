"""
Looking after many objects at once: checks, leases, repairs.

What has to be asked about one object is ``inquiry``'s business; here the questions of many are handed to each
server's ``SurveyBatcher``, which sends them together. An object that is not well is repaired with what was
learnt, without asking again; one that needs all of its bytes read, or a closer look, is looked at by itself.
Those hold memory, and start as far as there is some.

Whoever has objects waits for ``room``, and begins the next: objects come from a walk that is still under way,
or from a list without end. Each one's outcome is told as it comes; one that fails stops nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredList
from twisted.python.failure import Failure

from pipegrid.core.caps import ChkCap, ChkVerifierCap, LitCap, MutableCap
from pipegrid.errors import ServerError
from pipegrid.flow.budget import Budget
from pipegrid.reactor.wakeup import Wakeup
from pipegrid.transfer.peers import Peer, lease_secrets
from pipegrid.transfer.repair import Repair
from pipegrid.transfer.results import CheckResult, RenewResult, RepairResult
from pipegrid.transfer.settings import DownloadSettings, UpkeepSettings
from pipegrid.transfer.upkeep.inquiry import Inquiry
from pipegrid.transfer.upkeep.keeper import Keeper, literal
from pipegrid.transfer.upkeep.surveybatcher import SurveyBatcher
from pipegrid.transport.surveys import Question, Sample, Surveyed

UpkeepOutcome = CheckResult | RenewResult | RepairResult | Failure
OnOutcome = Callable[[UpkeepOutcome], None]

OPEN_QUESTIONS = 32_768
"""Of all objects together; each is some 500 bytes here."""

BEGUN_PER_TURN = 64
"""Objects that begin in one turn of the reactor: as many as fit into one message to each server."""

OBJECT_BYTES = 96 << 10
"""What a repair, or a look at every byte, takes beside the bytes."""

HELD_BYTES = 24 << 20
"""Of a large object's bytes; a small one may be there three times: as shares, as a segment, and coded."""


@attrs.frozen
class Todo:
    """
    What is to be done with each object.

    Attributes:
        verify: fetch all shares and check every byte of them.
        add_lease: add leases to the good shares, or renew them.
        repair: make again what is missing, of objects that are not healthy; with ``verify`` of all that have
            damaged copies, too.
        renew: nothing but leases, everywhere; not together with the others.
        force: with ``repair``: of what can change also where a version is lost by it; see ``Grid.repair``.
    """

    verify: bool = False
    add_lease: bool = False
    repair: bool = False
    renew: bool = False
    force: bool = False


@attrs.define(eq=False)
class _Object:
    cap: ChkCap | ChkVerifierCap | MutableCap
    told: OnOutcome
    inquiry: Inquiry | None = None
    open_questions: int = 0


class Upkeep:
    """
    Looks after objects, those of one command or call.

    Args:
        keeper: the servers, and what else it takes.
        settings: of the downloads that repairs need.
        bounds: how much at once.
    """

    def __init__(
        self, keeper: Keeper, settings: DownloadSettings, bounds: UpkeepSettings, todo: Todo
    ) -> None:
        self._keeper = keeper
        self._settings = settings
        self._bounds = bounds
        self._todo = todo
        self._batchers: dict[Peer, SurveyBatcher] = {}
        self._objects: set[_Object] = set()
        self._open_questions = 0
        self._memory = Budget(bounds.memory_bytes)
        self._tasks: set[Deferred[None]] = set()
        self._changed = Wakeup(keeper.means.clock)
        self._bug: Failure | None = None
        self._left_in_turn = BEGUN_PER_TURN

    def __repr__(self) -> str:
        return f"<Upkeep: {len(self._objects)} objects, {self._open_questions} open questions>"

    # For whoever has objects.

    async def room(self) -> None:
        """
        Return when one more object may begin.

        One coroutine may wait here, or in ``finished``.

        Raises:
            BaseException: what ``told`` raised.
        """
        while not self._has_room():
            await self._changed.wait()
            self._left_in_turn = BEGUN_PER_TURN
            self._raise_bug()
        self._raise_bug()
        if not self._left_in_turn:
            self._changed.fire()
            await self._changed.wait()
            self._left_in_turn = BEGUN_PER_TURN
            await self.room()

    def begin(
        self,
        cap: ChkCap | ChkVerifierCap | LitCap | MutableCap,
        told: OnOutcome,
        *,
        damaged: bool = False,
    ) -> None:
        """
        Look after an object.

        Args:
            told: called once with what came of it, perhaps before this returns.
            damaged: a check by a cap that does not write has found that this mutable file needs a repair.
        """
        self._left_in_turn = max(0, self._left_in_turn - 1)
        if isinstance(cap, LitCap):
            told(RenewResult(cap, {}, 0, 0, [], []) if self._todo.renew else literal(cap))
            return
        one = _Object(cap, told)
        self._objects.add(one)
        if isinstance(cap, MutableCap):
            held_bytes = HELD_BYTES if self._todo.verify or self._todo.repair else 0
            self._start(one, self._keep_mutable(cap, damaged), held_bytes)
            return
        if self._todo.verify:
            self._look_at(one, cap)
            return
        one.inquiry = Inquiry(cap, self._keeper.means.peers, self._todo.renew)
        self._go_on(one)

    async def finished(self) -> None:
        """
        Return when all objects have ended.

        Raises:
            BaseException: what ``told`` raised.
        """
        while self._objects:
            await self._changed.wait()
            self._raise_bug()
        self._raise_bug()

    def close(self) -> Deferred[Any]:
        """Give up what is under way; nobody is told. Fires when all is let go of."""
        self._objects.clear()
        for batcher in self._batchers.values():
            batcher.close()
        running = list(self._tasks)
        for one in running:
            one.cancel()
        return DeferredList(running, consumeErrors=True)

    def _has_room(self) -> bool:
        jobs = self._bounds.jobs
        return len(self._objects) < jobs and self._open_questions < OPEN_QUESTIONS

    def _raise_bug(self) -> None:
        if self._bug is not None:
            self._bug.raiseException()

    def _broken(self, failure: Failure) -> None:
        self._bug = self._bug or failure
        self._changed.fire()

    # Questions.

    def _go_on(self, one: _Object) -> None:
        """Ask what is to be asked next, or do what follows from what is known."""
        inquiry = one.inquiry
        assert inquiry is not None
        asked = inquiry.next()
        if asked:
            self._ask(one, inquiry, asked)
        elif inquiry.ended:
            self._open_questions -= one.open_questions
            one.open_questions = 0
            self._known(one, inquiry)

    def _ask(
        self, one: _Object, inquiry: Inquiry, asked: list[tuple[Peer, tuple[Sample, ...]]]
    ) -> None:
        index = inquiry.cap.storage_index
        todo = self._todo
        secrets = None
        if (todo.add_lease or todo.renew) and not inquiry.sampling_copies:
            secrets = self._keeper.means.secrets.for_file(index)
        one.open_questions += len(asked)
        self._open_questions += len(asked)
        for peer, samples in asked:
            lease = None if secrets is None else lease_secrets(secrets, peer.identity)
            batcher = self._batchers.get(peer)
            if batcher is None:
                silence_s = self._keeper.silence_s
                batcher = SurveyBatcher(self._keeper.means.clock, peer, silence_s, self._broken)
                self._batchers[peer] = batcher
            batcher.ask(Question(index, lease, samples), partial(self._answered, one, peer))

    def _answered(self, one: _Object, peer: Peer, answer: Surveyed | ServerError) -> None:
        inquiry = one.inquiry
        if inquiry is None or one not in self._objects or not one.open_questions:
            return  # it is not waited for any more
        one.open_questions -= 1
        self._open_questions -= 1
        if isinstance(answer, Surveyed):
            inquiry.answered(peer, answer)
        else:
            inquiry.failed(peer, answer)
        self._go_on(one)

    def _known(self, one: _Object, inquiry: Inquiry) -> None:
        one.inquiry = None
        if self._todo.renew:
            self._end(one, inquiry.renew_result())
        elif inquiry.needs_a_closer_look:
            self._look_at(one, inquiry.cap)
        elif inquiry.found.could_spread(inquiry.cap.total_shares):
            held_bytes = _held_bytes(inquiry.cap) if self._todo.repair else 0
            self._start(one, self._look_for_space(inquiry), held_bytes)
        else:
            result = inquiry.check_result()
            if self._todo.repair and result.recoverable and not result.healthy:
                self._start(one, self._repair_after(inquiry, result), _held_bytes(inquiry.cap))
            else:
                self._end(one, result)

    async def _look_for_space(self, inquiry: Inquiry) -> UpkeepOutcome:
        """Find out whether servers that could have a share have space for it."""
        share_bytes = inquiry.cap.size // inquiry.cap.required_shares
        inquiry.found.full |= await self._keeper.capacity.full(
            inquiry.found.answered, share_bytes, self._keeper.silence_s
        )
        result = inquiry.check_result()
        if self._todo.repair and result.recoverable and not result.healthy:
            return await self._repair_after(inquiry, result)
        return result

    async def _repair_after(self, inquiry: Inquiry, result: CheckResult) -> RepairResult:
        return await self._repairing(inquiry.cap).run_after(
            result, inquiry.found, inquiry.packed_ueb, inquiry.leased
        )

    # What takes memory.

    def _start(
        self, one: _Object, work: Coroutine[Any, Any, UpkeepOutcome], held_bytes: int
    ) -> None:
        async def run() -> None:
            lent = await self._memory.borrow(OBJECT_BYTES + held_bytes)
            try:
                outcome: UpkeepOutcome = await work
            except (CancelledError, GeneratorExit):
                raise
            except Exception:
                outcome = Failure()
                outcome.cleanFailure()  # its frames would keep what was held
            finally:
                self._memory.give_back(lent)
            self._end(one, outcome)

        task = Deferred.fromCoroutine(run())
        self._tasks.add(task)

        def ended(result: Failure | None) -> None:
            work.close()  # if it never began
            self._tasks.discard(task)
            if isinstance(result, Failure) and not result.check(CancelledError):
                self._broken(result)

        task.addBoth(ended)

    def _look_at(self, one: _Object, cap: ChkCap | ChkVerifierCap) -> None:
        self._start(one, self._look_closely(cap), _held_bytes(cap))

    async def _look_closely(self, cap: ChkCap | ChkVerifierCap) -> UpkeepOutcome:
        todo = self._todo
        if todo.repair and todo.verify:
            return await self._repairing(cap).run()
        result = await self._keeper.check(cap, todo.verify, todo.add_lease)
        if todo.repair and result.recoverable and not result.healthy:
            return await self._repairing(cap).run()
        return result

    def _repairing(self, cap: ChkCap | ChkVerifierCap) -> Repair:
        capacity = self._keeper.capacity
        return Repair(self._keeper.means, cap, self._settings, capacity=capacity)

    async def _keep_mutable(self, cap: MutableCap, damaged: bool) -> UpkeepOutcome:
        todo, keeper = self._todo, self._keeper.mutables()
        if damaged:
            return await keeper.repair(cap, False)
        if todo.renew:
            return await keeper.renew(cap)
        result = await keeper.check(cap, todo.verify, todo.add_lease)
        if todo.repair and result.recoverable and not result.healthy:
            return await keeper.repair(cap, todo.force)
        return result

    def _end(self, one: _Object, outcome: UpkeepOutcome) -> None:
        if one not in self._objects:
            return
        self._objects.discard(one)
        try:
            one.told(outcome)
        except BaseException:
            self._broken(Failure())
        self._changed.fire()


def _held_bytes(cap: ChkCap | ChkVerifierCap) -> int:
    return min(3 * cap.size, HELD_BYTES)
