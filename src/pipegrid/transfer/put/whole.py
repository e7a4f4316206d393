"""
A small file in one move: each server is given its shares whole, with the question for room, and has them.

Nearly every small put ends so. What ``Upload`` knows of segments, lanes, windows and placements is
not needed for it, and would take most of its time. Where reality differs (a server refuses, fails, or lets
others wait) all that is known and all that is still on its way goes over to an ``Upload`` (``Begun``), which
continues as if it had begun alone.

``Overdue`` is one timer for all files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import attrs
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

from pipegrid.core import hashes, wholeshares
from pipegrid.core.caps import ChkCap
from pipegrid.core.leases import ClientSecrets
from pipegrid.core.params import Geometry
from pipegrid.core.placement import servers_of_happiness
from pipegrid.transfer.peers import Peer, upload_secrets
from pipegrid.transfer.progress import ProgressReport, PutReports
from pipegrid.transfer.put.elsewhere import Elsewhere
from pipegrid.transfer.results import PutResult
from pipegrid.transfer.settings import UploadSettings
from pipegrid.transfer.silence import last_sign_s
from pipegrid.wire.messages import (
    Allocation,
    Stored,
    WriteResult,
)

_ROUNDING_S = 1e-6


@attrs.frozen(eq=False)
class Begun:
    """
    A put that did not end in one move.

    Attributes:
        started: when it began, by the clock.
        happy_since: when enough was stored, if it was.
        stored: shares that this put has stored, each with its server.
        found: shares that servers had before.
        calls: of each other server the shares that it was sent, and what comes, or came, of it.
    """

    started: float
    happy_since: float | None
    stored: Mapping[int, Peer]
    found: Mapping[Peer, frozenset[int]]
    calls: Mapping[Peer, tuple[Sequence[int], Deferred[Stored]]]


class Timed(Protocol):
    """
    What somebody has to look after at some time.

    Attributes:
        due_s: when, by the clock; it may come nearer, but never within the time after which it is looked at.
    """

    @property
    def due_s(self) -> float:
        """When it has to be looked after, in seconds of the clock."""

    def overdue(self) -> None:
        """The time ``due_s`` has come; called by ``Overdue``, which has forgotten it then."""


class Overdue:
    """
    Tells puts that take too long.

    Args:
        look_s: so often it is looked at them, at least.
    """

    def __init__(self, clock: IReactorTime, look_s: float) -> None:
        self._clock = clock
        self._look_s = look_s
        self._puts: dict[Timed, None] = {}
        self._timer: IDelayedCall | None = None

    def add(self, put: Timed) -> None:
        """Tell this one when it is its time."""
        self._puts[put] = None
        if self._timer is None:
            self._look()

    def discard(self, put: Timed) -> None:
        """Look after this put no more, as it has ended; without any, no timer runs."""
        self._puts.pop(put, None)
        if not self._puts and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        now = self._clock.seconds()
        late = [put for put in self._puts if put.due_s - now <= _ROUNDING_S]
        for put in late:
            self._puts.pop(put, None)
            put.overdue()
        if self._puts and self._timer is None:
            left_s = min(put.due_s for put in self._puts) - now
            self._timer = self._clock.callLater(min(left_s, self._look_s), self._look)


class WholePut:
    """
    One small file on its way to its servers.

    Args:
        order: the servers on the file's ring, no fewer than ``happy``.
        settings: how long stragglers, and silent servers, are waited for.

    Attributes:
        geometry: one that ``wholeshares`` encodes.
    """

    def __init__(
        self,
        clock: IReactorTime,
        order: Sequence[Peer],
        client_secrets: ClientSecrets,
        storage_index: bytes,
        geometry: Geometry,
        happy: int,
        settings: UploadSettings,
        elsewhere: Elsewhere,
        reports: PutReports,
    ) -> None:
        self._clock = clock
        self._order = order
        self._secrets = client_secrets.for_file(storage_index)
        self._storage_index = storage_index
        self._geometry = geometry
        self._happy = happy
        self._there = 0
        self._elsewhere = elsewhere
        self._reports = reports
        self._settings = settings
        self._started = clock.seconds()
        self._happy_since: float | None = None
        self._numbers: dict[Peer, Sequence[int]] = {}
        self._unanswered: dict[Peer, Deferred[Any]] = {}
        self._answers: dict[Peer, Stored | Failure] = {}
        self._relays: dict[Peer, Deferred[Stored]] = {}
        self._soon: IDelayedCall | None = None
        self._done: Deferred[bool] = Deferred()

    async def run(
        self, key: bytes, plaintext: hashes.Buffer, overdue: Overdue
    ) -> PutResult | Begun:
        """Send the file; returns the result, or what there is if it takes more than that."""
        shares, cap = wholeshares.encode(self._geometry, key, plaintext)
        if self._reports.cap_known is not None:
            self._reports.cap_known(cap)
        share_bytes = len(shares[0])
        progress = ProgressReport(self._reports.progress, self._geometry.total_shares * share_bytes)
        overdue.add(self)
        try:
            self._send(shares, share_bytes)
            as_hoped = await self._done
        except BaseException:
            for call in list(self._unanswered.values()):
                call.cancel()
            raise
        finally:
            overdue.discard(self)
            if self._soon is not None and self._soon.active():
                self._soon.cancel()
        if not as_hoped:
            return self._hand_over()
        return self._result(cap, share_bytes, progress)

    @property
    def due_s(self) -> float:
        """When an ``Upload`` is to decide what is waited for: grace is over, or some server is silent."""
        started, silence_s = self._started, self._settings.silence_s
        signs = (last_sign_s(started, peer.last_sign, silence_s) for peer in self._unanswered)
        silent_s = min(signs, default=started) + silence_s
        if self._happy_since is None:
            return silent_s
        grace_s = self._settings.grace(self._happy_since - self._started)
        return min(silent_s, self._happy_since + grace_s)

    def overdue(self) -> None:
        """It takes too long: somebody else has to decide what is waited for."""
        self._end(False)

    def _send(self, shares: list[bytes], share_bytes: int) -> None:
        count = len(self._order)
        for place, peer in enumerate(self._order[: len(shares)]):
            self._numbers[peer] = range(place, len(shares), count)
        # All are known before the first can answer.
        for peer, numbers in self._numbers.items():
            call = peer.server.store_whole(
                self._storage_index,
                {number: shares[number] for number in numbers},
                share_bytes,
                upload_secrets(self._secrets, peer.server.identity),
            )
            self._unanswered[peer] = call
            call.addBoth(self._answered, peer)

    def _answered(self, result: Stored | Failure, peer: Peer) -> None:
        self._unanswered.pop(peer, None)
        relay = self._relays.get(peer)
        if relay is not None:
            _fire(relay, result)
            return
        self._answers[peer] = result
        if isinstance(result, Failure) or not _is_good(result, self._numbers[peer]):
            self._hand_over_soon()
            return
        answered = len(self._answers)
        self._there += len(self._numbers[peer])
        if answered == len(self._numbers):
            if self._soon is None:
                self._end(True)
        elif (
            self._happy_since is None
            and answered >= self._happy
            and self._there >= self._geometry.required_shares
        ):
            self._happy_since = self._clock.seconds()

    def _hand_over_soon(self) -> None:
        """Others may answer in the same turn."""
        if self._soon is None:
            self._soon = self._clock.callLater(0, self._end, False)

    def _end(self, as_hoped: bool) -> None:
        if not self._done.called:
            self._done.callback(as_hoped)

    def _result(self, cap: ChkCap, share_bytes: int, progress: ProgressReport) -> PutResult:
        placed: dict[int, str] = {}
        found: dict[int, list[Peer]] = {}
        for peer, answer in self._answers.items():
            assert isinstance(answer, Stored)
            there = answer.allocation.already_have
            for number in self._numbers[peer]:
                if number not in there:
                    placed[number] = peer.name
            for number in there:
                if number < self._geometry.total_shares:
                    found.setdefault(number, []).append(peer)
        if found:
            whole = ProgressReport(self._reports.found, self._geometry.total_shares * share_bytes)
            whole.report(len(found) * share_bytes)
        at_place = all(
            self._order[number % len(self._order)] in peers for number, peers in found.items()
        )
        self._elsewhere.ended(not at_place)
        progress.finish()
        return PutResult(
            cap=cap,
            size=self._geometry.size,
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
            return len(placed)  # each server has one
        homes = {number: {self._order[number % len(self._order)]} for number in placed}
        for number, peers in found.items():
            homes.setdefault(number, set()).update(peers)
        return servers_of_happiness(homes)

    def _hand_over(self) -> Begun:
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
                relay = self._relays[peer] = Deferred[Stored](_canceller(call))
                calls[peer] = numbers, relay
            else:
                calls[peer] = (
                    numbers,
                    fail(answer) if isinstance(answer, Failure) else succeed(answer),
                )
        return Begun(self._started, self._happy_since, stored, found, calls)


def takes_whole(order: Sequence[Peer], total_shares: int, share_bytes: int) -> bool:
    """Whether all servers that shares would go to take them whole."""
    return all(peer.server.whole_bytes >= share_bytes for peer in order[:total_shares])


def take_apart(
    call: Deferred[Stored], numbers: Sequence[int]
) -> tuple[Deferred[Allocation], dict[int, Deferred[WriteResult]]]:
    """
    Return the outcome of a call as those of an allocation and of writes.

    The call is cancelled when all of them have been.
    """
    left = len(numbers) + 1

    def cancelled(_: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            call.cancel()

    allocation: Deferred[Allocation] = Deferred(cancelled)
    writes: dict[int, Deferred[WriteResult]] = {number: Deferred(cancelled) for number in numbers}

    def told(result: Stored | Failure) -> None:
        if isinstance(result, Failure):
            _fire(allocation, result)
            for write in writes.values():
                _fire(write, result)
            return
        _fire(allocation, result.allocation)
        for number, write in writes.items():
            error = result.failed.get(number)
            _fire(write, WriteResult(True) if error is None else Failure(error))

    call.addBoth(told)
    return allocation, writes


def _canceller(call: Deferred[Any]) -> Callable[[object], None]:
    return lambda _: call.cancel()


def _is_good(answer: Stored, numbers: Sequence[int]) -> bool:
    """Whether all of these are there now."""
    if answer.failed:
        return False
    there = answer.allocation
    return there.allocated.issuperset(numbers) or (there.allocated | there.already_have).issuperset(
        numbers
    )


def _fire(waiting: Deferred[Any], result: Any) -> None:
    if not waiting.called:
        if isinstance(result, Failure):
            waiting.errback(result)
        else:
            waiting.callback(result)
