"""Query servers about many objects: the queries about each object, and their batches per server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import attrs
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.core.layout import MAX_OFFSET
from pipegrid.core.ueb import CapCheck
from pipegrid.errors import ServerError, ServerTimeout, ServerUnreachable
from pipegrid.transfer.check import FoundShares, judge, ueb_in, ueb_place
from pipegrid.transfer.get.share_search_policy import MORE_QUESTIONS, QueryBatches
from pipegrid.transfer.peers import Peer, ring
from pipegrid.transfer.results import CheckResult, RenewResult
from pipegrid.transport import surveys
from pipegrid.transport.surveys import MAX_QUESTIONS, Question, Sample, Surveyed

# Deciding what to ask about one object and which servers to ask, and evaluating their responses.
#
# This works like ``Check``, but one query per server covers everything: which shares the server has, a lease
# if wanted, and from two servers the UEB of the share that they should have (a sample). A healthy object is
# recognized when the servers that should have its shares have responded; otherwise all servers are asked, in
# growing batches. If the samples do not prove that the cap is right, the UEBs of two copies that were found
# are read. If these do not prove it either, the object needs a ``Check`` of its own.
#
# Pure: the caller reports responses, and gets the next queries.

SAMPLES = 2
"""Number of servers that are asked for a UEB; see ``Check``."""


class ShareQuery:
    """
    The queries about one encoded object (not about a literal one).

    Args:
        given: the object's cap as the caller gave it, which results contain.
        peers: servers that may be asked, in any order.
        renewing: whether only leases matter: all servers are asked, and no samples are read.

    Attributes:
        cap: the object's verify cap.
        found: what is known of the shares.
        leased: the servers that gave a lease.
        packed_ueb: the UEB of a share that matches the cap; b"" if none was read.
        needs_a_closer_look: whether the samples neither proved nor disproved the cap, so that a ``Check`` is
            needed.
        sampling_copies: whether the current queries read samples of shares that were found.
    """

    __slots__ = (
        "_batches",
        "_fit",
        "_given",
        "_leases",
        "_no_lease",
        "_open",
        "_place",
        "_renewing",
        "_ring",
        "_sampled",
        "cap",
        "found",
        "leased",
        "needs_a_closer_look",
        "packed_ueb",
        "sampling_copies",
    )

    def __init__(
        self, given: ChkCap | ChkVerifierCap, peers: Sequence[Peer], renewing: bool = False
    ) -> None:
        self._given = given
        self.cap = given.verifier()
        self._renewing = renewing
        self._ring = ring(self.cap.storage_index, peers)
        few = len(self._ring) if renewing else self.cap.total_shares
        self._batches: QueryBatches[Peer] = QueryBatches(self._ring, few, MORE_QUESTIONS)
        self._fit = CapCheck(self.cap)
        self._place = ueb_place(self.cap)
        self._open: dict[Peer, tuple[Sample, ...]] = {}
        self._sampled: set[tuple[int, Peer]] = set()
        self.sampling_copies = False
        self.leased: list[Peer] = []
        self._leases: dict[int, list[str]] = {}
        self._no_lease: list[str] = []
        self.found = FoundShares()
        self.packed_ueb = b""
        self.needs_a_closer_look = False

    @property
    def ended(self) -> bool:
        """Whether no query is outstanding and none is left to send; call ``next`` before reading this."""
        return not self._open

    @property
    def waits(self) -> bool:
        """Whether ``next`` would return nothing until another outstanding query is answered."""
        if not self._open:
            return False
        too_few = len(self.found.answered) < self.cap.total_shares
        return self.sampling_copies or (too_few and self._batches.all_asked)

    def next(self) -> list[tuple[Peer, tuple[Sample, ...]]]:
        """
        Return the servers to ask now, each with the samples to read. The caller must report one outcome for
        each server.
        """
        asked: list[tuple[Peer, tuple[Sample, ...]]] = []
        if self.sampling_copies:
            return asked
        # whether every server was asked for its shares, and has responded or failed
        is_known = self._batches.exhausted
        if is_known or (not self._renewing and self.found.is_whole(self.cap.total_shares)):
            return self._next_samples()
        for peer in self._batches.next():
            samples: tuple[Sample, ...] = ()
            number = len(self._sampled)
            if number < min(SAMPLES, self.cap.total_shares) and not self._renewing:
                samples = self._sample(number, peer)
            self._batches.asked(peer)
            self._open[peer] = samples
            asked.append((peer, samples))
        return asked

    def _next_samples(self) -> list[tuple[Peer, tuple[Sample, ...]]]:
        """
        Return queries for the UEBs of copies that were found, if the samples of expected shares proved
        nothing.
        """
        if self._fit.fits or self._renewing or not self.found.holders:
            self._open.clear()  # outstanding responses are not needed any more
            return []
        self.sampling_copies = True
        self._open.clear()
        asked: list[tuple[Peer, tuple[Sample, ...]]] = []
        for number, peer in self.found.copies():
            is_new = peer not in self._open and (number, peer) not in self._sampled
            if len(asked) < SAMPLES and is_new:
                self._open[peer] = self._sample(number, peer)
                asked.append((peer, self._open[peer]))
        self.needs_a_closer_look = not asked
        return asked

    def _sample(self, number: int, peer: Peer) -> tuple[Sample, ...]:
        self._sampled.add((number, peer))
        if self._place.offset >= MAX_OFFSET:
            return ()
        return (Sample(number, self._place.offset, self._place.length),)

    # Responses.

    def answered(self, peer: Peer, answer: Surveyed) -> None:
        """Process a server's response; ignore it if no query to this server is outstanding."""
        if self._open.pop(peer, None) is None:
            return  # no response of this server is awaited
        for data in answer.samples:
            packed = ueb_in(data, self._place.length_bytes)
            if packed and not self.packed_ueb:
                self._fit.record(peer, packed)
                self.packed_ueb = packed if self._fit.fits else b""
        if not self.sampling_copies:
            numbers = [number for number in answer.numbers if number < self.cap.total_shares]
            self._batches.ended(peer, without_effect=not numbers)
            self._note(peer, answer, numbers)
        elif not self._open:
            self.needs_a_closer_look = not self._fit.fits

    def failed(self, peer: Peer, error: ServerError) -> None:
        """Record that a server could not be asked."""
        if self._open.pop(peer, None) is None:
            return
        if self.sampling_copies:
            self.needs_a_closer_look = not (self._open or self._fit.fits)
            return
        self._batches.ended(peer)
        self.found.unreachable.append(peer.name)
        self.found.reasons.setdefault(peer.name, str(error))

    def _note(self, peer: Peer, answer: Surveyed, numbers: list[int]) -> None:
        self.found.answered.append(peer)
        for number in numbers:
            self.found.holders.setdefault(number, []).append(peer)
        if not numbers:
            return
        if answer.leased:
            self.leased.append(peer)
            for number in numbers:
                self._leases.setdefault(number, []).append(peer.name)
        elif answer.no_lease is not None:
            self._no_lease.append(str(answer.no_lease))

    def check_result(self) -> CheckResult:
        """Return the check result of the object."""
        result = judge(self._given, self.found)
        if self.leased or self._no_lease:
            result = attrs.evolve(
                result,
                renewed=sorted([peer.name for peer in self.leased]),
                lease_problems=sorted(set(self._no_lease)),
            )
        return result

    def renew_result(self) -> RenewResult:
        """Return the result of a renewal: which shares have a lease now."""
        return RenewResult(
            cap=self._given,
            leases={number: sorted(self._leases[number]) for number in sorted(self._leases)},
            required_shares=self.cap.required_shares,
            total_shares=self.cap.total_shares,
            unreachable=sorted(self.found.unreachable),
            reasons=sorted(set(self._no_lease)),
        )


# The queries to one server: batched into few messages, limited in number, with a time limit.
#
# Queries of one reactor turn are sent at its end, in messages of up to ``MAX_QUESTIONS`` queries. Until the
# first response, queries for only one message are pending, since it is not known which form of query the
# server supports.
#
# A server that was silent for too long, or unreachable, is not asked again for a while: queries to it fail at
# once with the same error, so that a thousand objects do not wait for it one after another.

QUESTIONS_AT_ONCE = 1024
"""Maximum pending queries to one server: 5 MB/s at a round-trip time of 100 ms and 500 bytes per response."""

REST_S = 30.0
"""For how many seconds an unreachable server is not asked again."""

OnResponse = Callable[[Surveyed | ServerError], None]


class SurveyBatcher:
    """
    Collects the queries to one server, and sends those of one reactor turn together.

    Args:
        silence_s: a server that responds to none of its queries for this many seconds is given up.
        broken: called with exceptions that are no server errors.
    """

    def __init__(
        self,
        clock: IReactorTime,
        peer: Peer,
        silence_s: float,
        broken: Callable[[Failure], None],
    ) -> None:
        self._clock = clock
        self._peer = peer
        self._silence_s = silence_s
        self._broken = broken
        self._waiting: deque[tuple[Question, OnResponse]] = deque()
        self._sent: set[Deferred[None]] = set()
        self._unanswered = 0
        self._has_answered = False
        self._last_activity = clock.seconds()
        self._turn: IDelayedCall | None = None
        self._timer: IDelayedCall | None = None
        self._resting: ServerError | None = None
        self._rests_until = 0.0

    def __repr__(self) -> str:
        counts = f"{len(self._waiting)} wait, {self._unanswered} unanswered"
        return f"<SurveyBatcher for {self._peer.name}: {counts}>"

    def ask(self, question: Question, on_response: OnResponse) -> None:
        """
        Add a query, which is sent at the end of this reactor turn.

        Args:
            on_response: called once with the response or the error, but not before this method returns.
        """
        self._waiting.append((question, on_response))
        if self._turn is None:
            self._turn = self._clock.callLater(0, self._turn_is_over)

    def close(self) -> None:
        """Cancel all queries; none of their callbacks is called afterwards."""
        self._waiting.clear()
        for timer in (self._turn, self._timer):
            if timer is not None and timer.active():
                timer.cancel()
        for sent in list(self._sent):
            sent.cancel()

    def _turn_is_over(self) -> None:
        self._turn = None
        error = self._resting
        if error is not None and self._clock.seconds() < self._rests_until:
            waiting, self._waiting = self._waiting, deque()
            for _, call in waiting:
                call(error)
            return
        self._send()

    def _send(self) -> None:
        sure = self._has_answered or surveys.takes(self._peer.server)
        most = QUESTIONS_AT_ONCE if sure else MAX_QUESTIONS
        while self._waiting and self._unanswered < most:
            batch = [
                self._waiting.popleft()
                for _ in range(min(MAX_QUESTIONS, len(self._waiting), most - self._unanswered))
            ]
            self._send_batch(batch)

    def _send_batch(self, batch: Sequence[tuple[Question, OnResponse]]) -> None:
        if not self._unanswered:
            self._last_activity = self._clock.seconds()
        on_response: list[OnResponse | None] = [call for _, call in batch]
        self._unanswered += len(batch)

        def answered(number: int, answer: Surveyed | ServerError) -> None:
            call, on_response[number] = on_response[number], None
            if call is not None:
                self._answered(call, answer)

        def ended(result: Failure | None) -> None:
            self._sent.remove(sent)
            error: ServerError | None = None
            if isinstance(result, Failure):
                if result.check(CancelledError):
                    error = self._resting
                else:
                    self._broken(result)
            for call in on_response:
                if call is not None:
                    self._unanswered -= 1
                    if error is not None:
                        call(error)
            self._continue()

        sent = surveys.survey(self._peer.server, [question for question, _ in batch], answered)
        self._sent.add(sent)
        sent.addBoth(ended)
        if self._timer is None or not self._timer.active():
            self._timer = self._clock.callLater(self._silence_s, self._look)

    def _answered(self, call: OnResponse, answer: Surveyed | ServerError) -> None:
        self._unanswered -= 1
        if isinstance(answer, (ServerUnreachable, ServerTimeout)):
            self._rest(answer)
        else:
            self._last_activity = self._clock.seconds()
            self._has_answered = True
            self._resting = None
        call(answer)
        if self._waiting:
            self._continue()

    def _continue(self) -> None:
        """Send more of the waiting queries, in the next reactor turn."""
        if self._waiting and self._turn is None:
            self._turn = self._clock.callLater(0, self._turn_is_over)

    # Time limits.

    def _rest(self, error: ServerError) -> None:
        self._resting = error
        self._rests_until = self._clock.seconds() + REST_S
        self._has_answered = False

    def _look(self) -> None:
        if not self._unanswered:
            return
        left_s = self._last_activity + self._silence_s - self._clock.seconds()
        if left_s > 0:
            self._timer = self._clock.callLater(left_s, self._look)
            return
        name = self._peer.name
        self._rest(ServerTimeout(f"{name} was silent for {self._silence_s:g} s", name, True))
        for sent in list(self._sent):
            sent.cancel()
