"""Check, renew and repair many objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import attrs
from twisted.internet.defer import CancelledError, Deferred, DeferredList
from twisted.python.failure import Failure

from pipegrid.argument_checks import check_callable, shown
from pipegrid.core.caps import Cap, ChkCap, ChkVerifierCap, LitCap, MutableCap, keepable
from pipegrid.errors import CapError, NoSuchShare, ServerError, UsageError
from pipegrid.flow.concurrency_limits import Budget
from pipegrid.reactor.deferreds import Wakeup, few_at_a_time
from pipegrid.transfer.check import Check
from pipegrid.transfer.peers import Peer, TransferContext, lease_secrets, ring
from pipegrid.transfer.repair import Repair
from pipegrid.transfer.results import CheckResult, FileHealth, Progress, RenewResult, RepairResult
from pipegrid.transfer.server_space import Capacity
from pipegrid.transfer.settings import DownloadSettings, UpkeepSettings
from pipegrid.transfer.share_query import ShareQuery, SurveyBatcher
from pipegrid.transfer.time_limits import CallTimeout
from pipegrid.transfer.verification_rotation import VerifiedPart
from pipegrid.transport.surveys import Question, Sample, Surveyed

# Adding or renewing this client's leases on the shares of a file, without reading the shares.
#
# Each server gets the query for its shares and the request for the lease at the same time, so that both
# together take one round trip.

SERVERS_AT_ONCE = 100
"""Number of servers that are asked at once; a query takes little memory, and a response has a few bytes."""


class Renewal:
    """
    Adds or renews the leases on one encoded file (not on a literal one).

    Args:
        silence_s: a server without activity for this many seconds counts as unreachable.

    Attributes:
        renewed: nicknames of servers that gave a lease in ``on``.
        problems: the reasons why servers with shares gave no lease.
    """

    def __init__(
        self, means: TransferContext, cap: ChkCap | ChkVerifierCap, silence_s: float
    ) -> None:
        self._clock = means.clock
        self._given = cap
        self._cap = cap.verifier()
        self._storage_index = self._cap.storage_index
        self._secrets = means.secrets.for_file(self._storage_index)
        self._silence_s = silence_s
        self._leases: dict[int, list[str]] = {}
        self._unreachable: list[str] = []
        self.renewed: list[str] = []
        self.problems: list[str] = []

    async def everywhere(self, peers: Sequence[Peer]) -> RenewResult:
        """Ask all servers for their shares, and renew the leases on every server that has one."""
        in_order = ring(self._storage_index, peers)
        await few_at_a_time(
            SERVERS_AT_ONCE, [partial(self._find_and_renew, one) for one in in_order]
        )
        return RenewResult(
            cap=self._given,
            leases={number: sorted(self._leases[number]) for number in sorted(self._leases)},
            required_shares=self._cap.required_shares,
            total_shares=self._cap.total_shares,
            unreachable=sorted(self._unreachable),
            reasons=sorted(set(self.problems)),
        )

    async def on(self, peers: Iterable[Peer]) -> None:
        """Renew the leases on servers that are known to have shares."""

        async def renew(peer: Peer) -> None:
            try:
                await self._renew(peer)
                self.renewed.append(peer.name)
            except ServerError as error:
                self.problems.append(str(error))

        await few_at_a_time(SERVERS_AT_ONCE, [partial(renew, peer) for peer in peers])

    async def _renew(self, peer: Peer) -> None:
        lease = lease_secrets(self._secrets, peer.identity)
        watch = CallTimeout(self._clock, self._silence_s)
        await watch.answer(peer.server.add_lease(self._storage_index, lease), peer)

    async def _find_and_renew(self, peer: Peer) -> None:
        watch = CallTimeout(self._clock, self._silence_s)
        listing = peer.server.list_shares(self._storage_index)
        renewing = Deferred.fromCoroutine(self._renew(peer))
        try:
            numbers = await watch.answer(listing, peer)
        except BaseException as error:
            renewing.addErrback(lambda _: None)
            renewing.cancel()
            if not isinstance(error, ServerError):
                raise
            self._unreachable.append(peer.name)
            return
        try:
            await renewing
        except NoSuchShare:
            return
        except ServerError as error:
            self.problems.append(str(error))
            return
        for number in numbers:
            if number < self._cap.total_shares:
                self._leases.setdefault(number, []).append(peer.name)


# Checking one object by itself, with ``Check``, and adding leases afterwards.


class KeepsMutable(Protocol):
    """Checks, repairs and renews one mutable file; a read cap suffices except for ``repair``."""

    async def check(self, cap: MutableCap, verify: bool, add_lease: bool) -> CheckResult:
        """Find the shares of the best version and their servers, as ``ObjectUpkeep.check`` does."""

    async def repair(self, cap: MutableCap, force: bool) -> RepairResult:
        """
        Write the best version again, unless the file is healthy; raise ``CapError`` if the cap does not grant
        writing.
        """

    async def renew(self, cap: MutableCap) -> RenewResult:
        """Add or renew the leases on all shares."""


@attrs.frozen
class ObjectUpkeep:
    """
    Checks objects and renews their leases, one at a time; contains what the upkeep of many objects needs.

    Attributes:
        silence_s: a server without activity for this many seconds counts as unreachable.
        mutables: returns the object that maintains mutable files.
        capacity: what servers have reported of their space.
    """

    means: TransferContext
    silence_s: float
    mutables: Callable[[], KeepsMutable]
    capacity: Capacity = attrs.field(init=False)

    @capacity.default
    def _(self) -> Capacity:
        return Capacity(self.means.clock)

    async def check(
        self,
        cap: ChkCap | ChkVerifierCap,
        verify: bool,
        add_lease: bool,
        progress: Progress | None = None,
    ) -> CheckResult:
        """
        Check one object, and add leases to its good shares if wanted.

        Raises:
            CapMismatch: the cap does not match the stored object.
        """
        check = Check(self.means, cap, verify, progress, self.silence_s, capacity=self.capacity)
        result = await check.run()
        if not add_lease:
            return result
        holders = {peer: None for peers in check.found.holders.values() for peer in peers}
        renewal = self.renewal(cap)
        await renewal.on(holders)
        return attrs.evolve(
            result,
            renewed=sorted(renewal.renewed),
            lease_problems=sorted(set(renewal.problems)),
        )

    def renewal(self, cap: ChkCap | ChkVerifierCap) -> Renewal:
        """Return the ``Renewal`` for one object's leases."""
        return Renewal(self.means, cap, self.silence_s)


def literal(cap: LitCap) -> CheckResult:
    """Return the check result of a literal cap, which is healthy: the cap itself contains the object."""
    return CheckResult(
        cap=cap,
        healthy=True,
        recoverable=True,
        good_shares={},
        corrupt=[],
        happiness=0,
        required_shares=0,
        total_shares=0,
        unreachable=[],
    )


# Upkeep of many objects: checks, leases, repairs.
#
# ``ShareQuery`` decides what to ask about one object. The queries of many objects go to each server's
# ``SurveyBatcher``, which sends them together. An object that is not healthy is repaired with the results of
# its queries, so that no further queries are needed. An object of which all bytes must be read, or which
# needs a ``Check``, is handled by itself; this takes memory, and starts when enough memory is free.
#
# The caller awaits ``wait_for_space`` before it begins each object: objects may come from a walk that is
# still running, or from an endless list. Each outcome is reported when it is known; an object that fails does
# not stop the others.

UpkeepOutcome = CheckResult | RenewResult | RepairResult | Failure
OnOutcome = Callable[[UpkeepOutcome], None]

OPEN_QUESTIONS = 32_768
"""Maximum number of pending queries for all objects together; each query takes about 500 bytes."""

BEGUN_PER_TURN = 64
"""Maximum number of objects that begin in one reactor turn: as many as fit into a message to each server."""

OBJECT_BYTES = 96 << 10
"""Memory that a repair or verification takes in addition to the object's bytes."""

HELD_BYTES = 24 << 20
"""Maximum memory for one object; a small one takes three times its size: shares, segments, new shares."""


@attrs.frozen
class UpkeepRequest:
    """
    What to do with each object.

    Attributes:
        verify: read all shares and check every byte of them.
        add_lease: add or renew leases on the good shares.
        repair: repair objects that are not healthy; with ``verify`` also objects with damaged copies.
        renew: only renew leases, on all servers; the other options have no effect.
        force: with ``repair``: repair mutable objects even if that destroys a version; see ``Grid.repair``.
    """

    verify: bool = False
    add_lease: bool = False
    repair: bool = False
    renew: bool = False
    force: bool = False

    def verifies(self, cap: ChkCap | ChkVerifierCap | MutableCap) -> bool:
        """Return whether all shares of an object are read."""
        return self.verify and not self.renew

    def note_verified(self) -> None:
        """Record that all shares of one object were read."""

    def note_summary(self, summary: UpkeepSummary) -> None:
        """Record the outcomes of all objects together."""


@attrs.frozen(kw_only=True)
class SampledUpkeep(UpkeepRequest):
    """
    An ``UpkeepRequest`` in which ``verify`` applies only to a part of the objects.

    Attributes:
        part: the objects to verify; counts those that were verified.
    """

    part: VerifiedPart

    def verifies(self, cap: ChkCap | ChkVerifierCap | MutableCap) -> bool:
        return super().verifies(cap) and self.part.has(cap.storage_index)

    def note_verified(self) -> None:
        self.part.verified += 1

    def note_summary(self, summary: UpkeepSummary) -> None:
        self.part.was_reached = bool(summary.good_shares) or summary.objects == summary.literal


class _Object:
    __slots__ = ("inquiry", "on_outcome", "open_questions")

    def __init__(self, on_outcome: OnOutcome) -> None:
        self.on_outcome = on_outcome
        self.inquiry: ShareQuery | None = None
        self.open_questions = 0


class Upkeep:
    """
    The upkeep of the objects of one command or call.

    Args:
        keeper: the servers, and what else is needed to check an object.
        settings: settings of the downloads that repairs need.
        bounds: how much runs at the same time.
    """

    def __init__(
        self,
        keeper: ObjectUpkeep,
        settings: DownloadSettings,
        bounds: UpkeepSettings,
        todo: UpkeepRequest,
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

    # Methods for the caller that has the objects.

    async def wait_for_space(self) -> None:
        """
        Return when one more object may begin.

        Only one coroutine at a time is allowed to wait, here or in ``finished``.

        Raises:
            BaseException: any exception that ``on_outcome`` raised.
        """
        while len(self._objects) >= self._bounds.jobs or self._open_questions >= OPEN_QUESTIONS:
            await self._changed.wait()
            self._left_in_turn = BEGUN_PER_TURN
            self._raise_bug()
        self._raise_bug()
        if not self._left_in_turn:
            self._changed.fire()
            await self._changed.wait()
            self._left_in_turn = BEGUN_PER_TURN
            await self.wait_for_space()

    def begin(
        self,
        cap: ChkCap | ChkVerifierCap | LitCap | MutableCap,
        on_outcome: OnOutcome,
        *,
        damaged: bool = False,
    ) -> None:
        """
        Begin the upkeep of an object.

        Args:
            on_outcome: called once with the outcome, perhaps before this method returns.
            damaged: whether a check with a read cap has found that this mutable file needs a repair.
        """
        self._left_in_turn = max(0, self._left_in_turn - 1)
        if isinstance(cap, LitCap):
            on_outcome(RenewResult(cap, {}, 0, 0, [], []) if self._todo.renew else literal(cap))
            return
        one = _Object(on_outcome)
        self._objects.add(one)
        if isinstance(cap, MutableCap):
            held_bytes = HELD_BYTES if self._todo.verifies(cap) or self._todo.repair else 0
            self._start(one, self._keep_mutable(cap, damaged), held_bytes)
        elif self._todo.verifies(cap):
            self._look_at(one, cap)
        else:
            one.inquiry = ShareQuery(cap, self._keeper.means.peers, self._todo.renew)
            self._go_on(one)

    async def finished(self) -> None:
        """
        Return when all objects have ended.

        Raises:
            BaseException: any exception that ``on_outcome`` raised.
        """
        while self._objects:
            await self._changed.wait()
            self._raise_bug()
        self._raise_bug()

    def close(self) -> Deferred[Any]:
        """Cancel everything without calling callbacks; fire when everything has ended."""
        self._objects.clear()
        for batcher in self._batchers.values():
            batcher.close()
        running = list(self._tasks)
        for one in running:
            one.cancel()
        return DeferredList(running, consumeErrors=True)

    def _raise_bug(self) -> None:
        if self._bug is not None:
            self._bug.raiseException()

    def _broken(self, failure: Failure) -> None:
        self._bug = self._bug or failure
        self._changed.fire()

    # Queries.

    def _go_on(self, one: _Object) -> None:
        """Send the next queries, or act on the results if there are none."""
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
        self, one: _Object, inquiry: ShareQuery, asked: list[tuple[Peer, tuple[Sample, ...]]]
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
            return  # the object awaits no response any more
        one.open_questions -= 1
        self._open_questions -= 1
        if isinstance(answer, Surveyed):
            inquiry.answered(peer, answer)
        else:
            inquiry.failed(peer, answer)
        if not inquiry.waits:
            self._go_on(one)

    def _known(self, one: _Object, inquiry: ShareQuery) -> None:
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

    async def _look_for_space(self, inquiry: ShareQuery) -> UpkeepOutcome:
        """
        Find out which servers have space for a share of the object, then repair the object if wanted; return
        the outcome.
        """
        share_bytes = inquiry.cap.size // inquiry.cap.required_shares
        inquiry.found.full |= await self._keeper.capacity.full(
            inquiry.found.answered, share_bytes, self._keeper.silence_s
        )
        result = inquiry.check_result()
        if self._todo.repair and result.recoverable and not result.healthy:
            return await self._repair_after(inquiry, result)
        return result

    async def _repair_after(self, inquiry: ShareQuery, result: CheckResult) -> RepairResult:
        return await self._repairing(inquiry.cap).run_after(
            result, inquiry.found, inquiry.packed_ueb, inquiry.leased
        )

    # Work that takes memory.

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
                outcome.cleanFailure()  # otherwise the failure's frames keep the data in memory
            finally:
                self._memory.give_back(lent)
            self._end(one, outcome)

        task = Deferred.fromCoroutine(run())
        self._tasks.add(task)

        def ended(result: Failure | None) -> None:
            work.close()  # ``work`` may never have begun
            self._tasks.discard(task)
            if isinstance(result, Failure) and not result.check(CancelledError):
                self._broken(result)

        task.addBoth(ended)

    def _look_at(self, one: _Object, cap: ChkCap | ChkVerifierCap) -> None:
        self._start(one, self._look_closely(cap), _held_bytes(cap))

    async def _look_closely(self, cap: ChkCap | ChkVerifierCap) -> UpkeepOutcome:
        todo, verify = self._todo, self._todo.verifies(cap)
        if todo.repair and verify:
            repaired = await self._repairing(cap).run()
            todo.note_verified()
            return repaired
        result = await self._keeper.check(cap, verify, todo.add_lease)
        if verify:
            todo.note_verified()
        if todo.repair and result.recoverable and not result.healthy:
            return await self._repairing(cap).run()
        return result

    def _repairing(self, cap: ChkCap | ChkVerifierCap) -> Repair:
        return Repair(self._keeper.means, cap, self._settings, capacity=self._keeper.capacity)

    async def _keep_mutable(self, cap: MutableCap, damaged: bool) -> UpkeepOutcome:
        todo, keeper = self._todo, self._keeper.mutables()
        if damaged:
            return await keeper.repair(cap, False)
        if todo.renew:
            return await keeper.renew(cap)
        verify = todo.verifies(cap)
        result = await keeper.check(cap, verify, todo.add_lease)
        if verify:
            todo.note_verified()
        if todo.repair and result.recoverable and not result.healthy:
            return await keeper.repair(cap, todo.force)
        return result

    def _end(self, one: _Object, outcome: UpkeepOutcome) -> None:
        if one not in self._objects:
            return
        self._objects.discard(one)
        try:
            one.on_outcome(outcome)
        except BaseException:
            self._broken(Failure())
        self._changed.fire()


def _held_bytes(cap: ChkCap | ChkVerifierCap) -> int:
    return min(3 * cap.size, HELD_BYTES)


# Counting the outcomes of many objects; pure.


@attrs.define
class UpkeepSummary:
    """
    Counts objects by their outcomes.

    Attributes:
        objects: all objects; each is also counted in exactly one of the next eight attributes.
        healthy: nothing is missing; for renewals: all servers responded, and all shares found have a lease.
        repaired: something was missing, and was restored.
        damaged: something is missing, but the object can be restored.
        reachable: the missing shares may all be on unreachable servers, and nothing else is wrong.
        unspread: nothing is missing, but more servers could have shares.
        lost: the object cannot be restored now; for renewals: too few shares have a lease to restore it.
        leaseless: healthy, but some shares got no lease; for renewals: also if some server did not respond.
        failed: nothing is known because of an error.
        literal: healthy objects that are literal caps.
        shares_made: number of shares that repairs have stored.
        good_shares: number of good shares found; for renewals, of shares with a lease.
        wanted_shares: number of shares that all objects together have if nothing is missing.
        unreachable: maps the nickname of an unreachable server to the number of objects about which the
            server was asked.
    """

    objects: int = 0
    healthy: int = 0
    repaired: int = 0
    damaged: int = 0
    reachable: int = 0
    unspread: int = 0
    lost: int = 0
    leaseless: int = 0
    failed: int = 0
    literal: int = 0
    shares_made: int = 0
    good_shares: int = 0
    wanted_shares: int = 0
    unreachable: Counter[str] = attrs.field(factory=Counter)

    def note(self, outcome: UpkeepOutcome) -> None:
        """Count one more object by its outcome; a Failure counts as ``failed``."""
        self.objects += 1
        if isinstance(outcome, Failure):
            self.failed += 1
            return
        found = outcome.after if isinstance(outcome, RepairResult) else outcome
        self.unreachable.update(found.unreachable)
        self.literal += not found.total_shares
        self.wanted_shares += found.total_shares
        if isinstance(outcome, RepairResult):
            self._note_repair(outcome)
        elif isinstance(outcome, CheckResult):
            self._note_check(outcome)
        else:
            self._note_renewal(outcome)

    def _note_check(self, outcome: CheckResult) -> None:
        self.good_shares += len(outcome.good_shares)
        if not self._note_state(outcome.state):
            if outcome.lease_problems:
                self.leaseless += 1
            else:
                self.healthy += 1

    def _note_state(self, state: FileHealth) -> bool:
        """
        Count an object by its state, unless the state is healthy; return whether the object was counted.
        """
        if state == "healthy":
            return False
        counter = "lost" if state == "unavailable" else state
        setattr(self, counter, getattr(self, counter) + 1)
        return True

    def _note_renewal(self, outcome: RenewResult) -> None:
        self.good_shares += len(outcome.leases)
        if not outcome.recoverable:
            self.lost += 1
        elif outcome.reasons or outcome.unreachable:
            self.leaseless += 1
        else:
            self.healthy += 1

    def _note_repair(self, outcome: RepairResult) -> None:
        self.good_shares += len(outcome.after.good_shares)
        self.shares_made += len(outcome.uploaded)
        if not outcome.whole:
            self._note_state(outcome.after.state)
        elif outcome.uploaded:
            self.repaired += 1
        else:
            self.healthy += 1


# Upkeep of many caps; each object is handled once.

Understood = ChkCap | ChkVerifierCap | LitCap | MutableCap


async def maintain(
    opening: Coroutine[Any, Any, Upkeep],
    caps: Sequence[str | Cap],
    ended: Callable[[int, Any], None] | None,
) -> list[Any]:
    """
    Maintain the objects of all caps, and return the outcomes in the order of the caps.

    A read cap and its verify cap are the same object and are handled once. Caps that differ in any other way
    are different objects, even with the same storage index: a wrong cap must not get the outcome of a right
    one.

    Args:
        opening: returns the upkeep, which is closed at the end.
        ended: called with the number of each cap and its outcome, in the order of ending.

    Raises:
        UsageError: ``caps`` is not a list, or ``ended`` is not callable.
    """
    try:
        _check_list(caps)
        check_callable(ended, "ended")
    except UsageError:
        opening.close()
        raise
    outcomes: dict[int, UpkeepOutcome] = {}
    numbers: dict[object, list[tuple[int, Understood]]] = {}

    def note(number: int, outcome: UpkeepOutcome) -> None:
        outcomes[number] = outcome
        if ended is not None:
            ended(number, outcome)

    def on_outcome(key: object, outcome: UpkeepOutcome) -> None:
        for number, cap in numbers[key]:
            note(number, _of(outcome, cap))

    upkeep = await opening
    try:
        for number, given in enumerate(caps):
            cap = _understood(given)
            if isinstance(cap, Failure):
                note(number, cap)
                continue
            key = cap if isinstance(cap, LitCap) else cap.verifier()
            if key in numbers:
                first, _ = numbers[key][0]
                if first in outcomes:
                    note(number, _of(outcomes[first], cap))
                else:
                    numbers[key].append((number, cap))
                continue
            numbers[key] = [(number, cap)]
            await upkeep.wait_for_space()
            upkeep.begin(cap, partial(on_outcome, key))
        await upkeep.finished()
    finally:
        await upkeep.close()
    return [outcomes[number] for number in range(len(caps))]


def _check_list(caps: object) -> None:
    if not isinstance(caps, Sequence) or isinstance(caps, (str, bytes)):
        raise UsageError(f"many objects are named by a list of caps, not {shown(caps)}")


def _understood(given: str | Cap) -> Understood | Failure:
    """Return the parsed cap, or the failure that says why the object cannot be checked or renewed."""
    try:
        return keepable(given)
    except CapError:
        failure = Failure()
        failure.cleanFailure()
        return failure


def _of(outcome: UpkeepOutcome, cap: Understood) -> UpkeepOutcome:
    """Return an equal outcome that contains another cap of the same object."""
    if isinstance(outcome, Failure) or outcome.cap == cap:
        return outcome
    return attrs.evolve(outcome, cap=cap)
