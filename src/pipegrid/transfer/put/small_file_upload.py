"""Upload a small file as whole shares, with one request per server."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IDelayedCall
from twisted.python.failure import Failure

from pipegrid.core import encoder
from pipegrid.core.caps import ChkCap
from pipegrid.core.placement import servers_of_happiness
from pipegrid.transfer.peers import Peer, ring
from pipegrid.transfer.put.client_put_state import PutContext
from pipegrid.transfer.put.file_key import KeyedFile
from pipegrid.transfer.results import ProgressReport, PutReports, PutResult, Traffic
from pipegrid.transfer.time_limits import last_activity_s
from pipegrid.wire.storage_messages import Allocation, Stored, WriteAnswer

# The state of a put that needs more than one request per server, passed to the ``Upload`` that continues the
# put.
#
# Nothing that was sent is sent again: for each server that has not responded as hoped, there is a call of
# ``SmallFileUpload``, which combines the allocation and all writes. ``split_call`` splits its result into an
# allocation and writes.


class Handover(NamedTuple):
    """
    The state of a put that needs more than one request per server.

    Attributes:
        started: when the put began, by the clock.
        happy_since: when enough shares were stored; None: not yet.
        stored: the shares that this put has stored; maps each share number to its server.
        found: the servers that have responded as hoped; maps each to the shares that it had before the put.
        calls: all other servers; maps each to the shares that it was sent, and to the call, pending or ended.
    """

    started: float
    happy_since: float | None
    stored: Mapping[int, Peer]
    found: Mapping[Peer, frozenset[int]]
    calls: Mapping[Peer, tuple[Sequence[int], Deferred[Stored]]]


def split_call(
    call: Deferred[Stored], numbers: Sequence[int]
) -> tuple[Deferred[Allocation], dict[int, Deferred[WriteAnswer]]]:
    """
    Return the result of one call as separate results of an allocation and of writes.

    The call is cancelled when all of the returned Deferreds have been cancelled.
    """
    left = len(numbers) + 1

    def cancelled(_: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            call.cancel()

    allocation: Deferred[Allocation] = Deferred(cancelled)
    writes: dict[int, Deferred[WriteAnswer]] = {number: Deferred(cancelled) for number in numbers}

    def allocated(result: Stored | Failure) -> None:
        if isinstance(result, Failure):
            pass_on(allocation, result)
            for write in writes.values():
                pass_on(write, result)
            return
        pass_on(allocation, result.allocation)
        for number, write in writes.items():
            error = result.failed.get(number)
            pass_on(write, WriteAnswer(True) if error is None else Failure(error))

    call.addBoth(allocated)
    return allocation, writes


def pass_on(waiting: Deferred[Any], result: Any) -> None:
    """Fire ``waiting`` with a result or a failure, unless its caller has cancelled it."""
    if not waiting.called:
        if isinstance(result, Failure):
            waiting.errback(result)
        else:
            waiting.callback(result)


# Uploading a small file with one request per server: each server gets its shares whole, together with the
# allocation.
#
# Nearly every small put succeeds this way. It does not need the segments, share uploads, windows and
# placements of ``Upload``, which would take most of the time. If a server refuses, fails or is slow,
# everything that is known and all pending calls are passed to an ``Upload`` (as a ``Handover``), which
# continues as if it had begun the put.


async def put_whole(
    means: PutContext, file: KeyedFile, reports: PutReports
) -> PutResult | Handover | None:
    """
    Store a file with one request per server, if the file is small, its servers accept whole shares, and they
    need not be asked for existing shares first.

    Returns:
        The result; a ``Handover`` if an ``Upload`` must continue the put; None if nothing was sent.
    """
    if not encoder.is_single_segment(file.geometry) or means.history.must_ask:
        return None
    order = ring(file.shares.storage_index, means.grid.takers)
    homes, share_bytes = order[: file.geometry.total_shares], file.shares.share_bytes
    if len(order) < file.happy or any(each.server.whole_bytes < share_bytes for each in homes):
        return None
    return await SmallFileUpload(means, order, file, reports).run()


class SmallFileUpload:
    """
    The upload of one small file with one request per server.

    Args:
        order: the servers in the order of the file's ring, at least as many as happiness needs.
        file: a file of a single segment, which ``encode_whole`` can encode.
    """

    def __init__(
        self, means: PutContext, order: Sequence[Peer], file: KeyedFile, reports: PutReports
    ) -> None:
        clock = self._clock = means.grid.clock
        self._means = means
        self._order = order
        self._file = file
        self._share_bytes = file.shares.share_bytes
        self._reports = reports
        self._there = 0
        self._started = clock.seconds()
        self._happy_since: float | None = None
        self._numbers: dict[Peer, Sequence[int]] = {}
        self._unanswered: dict[Peer, Deferred[Any]] = {}
        self._answers: dict[Peer, Stored | Failure] = {}
        self._relays: dict[Peer, Deferred[Stored]] = {}
        self._soon: IDelayedCall | None = None
        self._done: Deferred[bool] = Deferred()

    async def run(self) -> PutResult | Handover:
        """Send the file; return the result, or a ``Handover`` if an ``Upload`` must continue."""
        file, overdue = self._file, self._means.overdue
        plaintext = file.source.read_at(0, file.geometry.size)
        shares, cap = encoder.encode_whole(file.geometry, file.key, plaintext)
        if self._reports.cap_known is not None:
            self._reports.cap_known(cap)
        progress = ProgressReport(self._reports.progress, len(shares) * self._share_bytes)
        overdue.add(self)
        try:
            self._send(shares)
            as_hoped = await self._done
        except BaseException:
            for call in list(self._unanswered.values()):
                call.cancel()
            raise
        finally:
            overdue.discard(self)
            if self._soon is not None and self._soon.active():
                self._soon.cancel()
        return self._result(cap, progress) if as_hoped else self._hand_over()

    @property
    def due_s(self) -> float:
        """When an ``Upload`` must take over: the grace is over, or some server is silent."""
        started, settings = self._started, self._means.settings
        silence_s = settings.silence_s
        signs = (
            last_activity_s(started, peer.last_activity, silence_s) for peer in self._unanswered
        )
        silent_s = min(signs, default=started) + silence_s
        if self._happy_since is None:
            return silent_s
        return min(silent_s, self._happy_since + settings.grace(self._happy_since - started))

    def overdue(self) -> None:
        """End this upload because it takes too long; an ``Upload`` then decides what to wait for."""
        self._end(False)

    def _send(self, shares: list[bytes]) -> None:
        count, of_file = len(self._order), self._file.shares
        for place, peer in enumerate(self._order[: len(shares)]):
            self._numbers[peer] = range(place, len(shares), count)
        # All servers are registered before the first can respond.
        for peer, numbers in self._numbers.items():
            call = peer.server.store_whole(
                of_file.storage_index,
                {number: shares[number] for number in numbers},
                of_file.share_bytes,
                of_file.secrets_for(peer),
            )
            self._unanswered[peer] = call
            call.addBoth(self._answered, peer)

    def _answered(self, result: Stored | Failure, peer: Peer) -> None:
        self._unanswered.pop(peer, None)
        relay = self._relays.get(peer)
        if relay is not None:
            pass_on(relay, result)
            return
        self._answers[peer] = result
        if isinstance(result, Failure) or not _is_good(result, self._numbers[peer]):
            self._hand_over_soon()
            return
        answered = len(self._answers)
        self._there += len(self._numbers[peer])
        if self._reports.traffic is not None:
            self._report(self._reports.traffic, peer, result)
        if answered == len(self._numbers):
            if self._soon is None:
                self._end(True)
        elif (
            self._happy_since is None
            and answered >= self._file.happy
            and self._there >= self._file.geometry.required_shares
        ):
            self._happy_since = self._clock.seconds()

    def _report(self, traffic: Traffic, peer: Peer, result: Stored) -> None:
        """Report the shares that a server has taken, except those that it had before."""
        taken = len(set(self._numbers[peer]) - result.allocation.already_have)
        if not taken:
            return
        try:
            traffic(peer.identity, self._started, self._clock.seconds(), taken * self._share_bytes)
        except Exception:
            if not self._done.called:
                self._done.errback(Failure())

    def _hand_over_soon(self) -> None:
        """Hand over after this turn of the reactor, since other servers may respond in the same turn."""
        if self._soon is None:
            self._soon = self._clock.callLater(0, self._end, False)

    def _end(self, as_hoped: bool) -> None:
        if not self._done.called:
            self._done.callback(as_hoped)

    def _result(self, cap: ChkCap, progress: ProgressReport) -> PutResult:
        total, share_bytes = self._file.geometry.total_shares, self._share_bytes
        placed: dict[int, str] = {}
        found: dict[int, list[Peer]] = {}
        for peer, answer in self._answers.items():
            assert isinstance(answer, Stored)
            there = answer.allocation.already_have
            for number in self._numbers[peer]:
                if number not in there:
                    placed[number] = peer.name
            for number in there:
                if number < total:
                    found.setdefault(number, []).append(peer)
        if found:
            whole = ProgressReport(self._reports.found, total * share_bytes)
            whole.report(len(found) * share_bytes)
        at_place = all(
            self._order[number % len(self._order)] in peers for number, peers in found.items()
        )
        self._means.history.ended(not at_place)
        progress.finish()
        return PutResult(
            cap=cap,
            size=self._file.geometry.size,
            share_bytes=share_bytes,
            shares_placed=dict(sorted(placed.items())),
            shares_found={
                number: sorted(peer.name for peer in peers)
                for number, peers in sorted(found.items())
            },
            happiness=self._happiness(placed, found),
            elapsed_s=self._clock.seconds() - self._started,
        )

    def _happiness(self, placed: Collection[int], found: Mapping[int, Sequence[Peer]]) -> int:
        if not found and len(self._numbers) == len(placed):
            return len(placed)  # each server has one share
        homes = {number: {self._order[number % len(self._order)]} for number in placed}
        for number, peers in found.items():
            homes.setdefault(number, set()).update(peers)
        return servers_of_happiness(homes)

    def _hand_over(self) -> Handover:
        stored: dict[int, Peer] = {}
        found: dict[Peer, frozenset[int]] = {}
        calls: dict[Peer, tuple[Sequence[int], Deferred[Stored]]] = {}
        for peer, numbers in self._numbers.items():
            answer = self._answers.get(peer)
            if isinstance(answer, Stored) and _is_good(answer, numbers):
                there = answer.allocation.already_have
                found[peer] = there
                stored.update(dict.fromkeys(set(numbers) - there, peer))
            elif answer is None:
                call = self._unanswered[peer]
                relay = self._relays[peer] = Deferred[Stored](partial(_cancel, call))
                calls[peer] = numbers, relay
            else:
                calls[peer] = (
                    numbers,
                    fail(answer) if isinstance(answer, Failure) else succeed(answer),
                )
        return Handover(self._started, self._happy_since, stored, found, calls)


def _cancel(call: Deferred[Any], _waiting: object) -> None:
    call.cancel()


def _is_good(answer: Stored, numbers: Sequence[int]) -> bool:
    """Return whether the server has all of these shares now."""
    if answer.failed:
        return False
    there = answer.allocation
    return there.allocated.issuperset(numbers) or (there.allocated | there.already_have).issuperset(
        numbers
    )
