"""
Checking a file: who has which shares, and with ``verify``, whether every byte of them is right.

Servers are asked a bounded number at a time; verification streams a few shares at once through
the verifier, never holding more than a few chunks of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IConsumer, IProducer, IPushProducer, IReactorTime
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.core.placement import servers_of_happiness
from pipegrid.core.verifier import ShareVerifier
from pipegrid.errors import CorruptionError, NoSuchShare, ServerError, ServerRefused
from pipegrid.reactor.together import few_at_a_time
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.get.search import MAX_QUESTIONS
from pipegrid.transfer.peers import Peer, ring
from pipegrid.transfer.progress import Progress, ProgressReport
from pipegrid.transfer.results import CheckResult
from pipegrid.transfer.watch import Watch

_SHARES_AT_ONCE = 3
_SMALL_SHARE_BYTES = 1 << 18
"""Of small shares as many are read at once as servers are asked: they cost round trips, not memory."""

_CHUNK_BYTES = 1 << 18
_HELD_BYTES = 1 << 20


def _longest_share(size: int, required_shares: int) -> int:
    """Return what no honest share exceeds: each block may bring three hashes of 32 bytes, doubled."""
    return 200 * (size // required_shares + 1) + (1 << 20)


@attrs.define
class Found:
    """
    What the servers said.

    Attributes:
        holders: share number to the servers with a copy that is not known to be bad.
        answered: the servers that gave a list of shares, and none of them failed later.
        bad: copies that are damaged, each as share number and server.
        unreachable: nicknames of servers that could not be asked.
        corrupt: what is wrong with the bad copies.
        packed_ueb: of a good share; b"" if none was verified.
    """

    holders: dict[int, list[Peer]] = attrs.field(factory=dict)
    answered: list[Peer] = attrs.field(factory=list)
    bad: set[tuple[int, Peer]] = attrs.field(factory=set)
    unreachable: list[str] = attrs.field(factory=list)
    corrupt: list[CorruptionError] = attrs.field(factory=list)
    packed_ueb: bytes = b""


class Check:
    """
    The check of one encoded file (not of a literal one).

    Args:
        verify: read every share and check every byte of it.
        progress: called with shares verified and shares found.
        silence_s: a server that gives no sign of life for so long counts as unreachable.

    Attributes:
        found: what is known of the shares.
    """

    def __init__(
        self,
        *,
        clock: IReactorTime,
        workers: CpuWorkers,
        peers: Sequence[Peer],
        cap: ChkCap | ChkVerifierCap,
        verify: bool,
        progress: Progress | None = None,
        silence_s: float = 60.0,
    ) -> None:
        self._clock = clock
        self._workers = workers
        self._cap = cap.verifier()
        self._given = cap
        self._verify = verify
        self._progress = progress
        self._silence_s = silence_s
        self._verified = 0
        self._ring = ring(self._cap.storage_index, peers)
        self.found = Found()

    async def run(self) -> CheckResult:
        """Ask every server, verify if wanted, and judge."""
        await few_at_a_time(MAX_QUESTIONS, [partial(self._ask, peer) for peer in self._ring])
        if self._verify:
            copies = [
                (number, peer)
                for number, peers in sorted(self.found.holders.items())
                for peer in peers
            ]
            report = ProgressReport(self._progress, len(copies))
            small = self._cap.size // self._cap.required_shares <= _SMALL_SHARE_BYTES
            await few_at_a_time(
                MAX_QUESTIONS if small else _SHARES_AT_ONCE,
                [partial(self._verify_copy, number, peer, report) for number, peer in copies],
            )
        return self.judge()

    async def _ask(self, peer: Peer) -> None:
        watch = Watch(self._clock, self._silence_s)
        try:
            numbers = await watch.answer(
                peer.server.list_shares(self._cap.storage_index), peer.name
            )
        except ServerError:
            self.found.unreachable.append(peer.name)
            return
        self.found.answered.append(peer)
        for number in numbers:
            if number < self._cap.total_shares:
                self.found.holders.setdefault(number, []).append(peer)

    async def _verify_copy(self, number: int, peer: Peer, report: ProgressReport) -> None:
        try:
            problems = await self._verify_share(number, peer)
        except NoSuchShare:
            self.found.holders[number].remove(peer)  # it was listed by mistake, or has gone
        except ServerRefused as error:  # it is there, and says that its share is not in order
            what = f"share {number} cannot be read: {error}"
            self.found.corrupt.append(CorruptionError(what, number, None, peer.name))
            self.found.bad.add((number, peer))
            self.found.holders[number].remove(peer)
        except ServerError:
            self.found.unreachable.append(peer.name)
            self.found.holders[number].remove(peer)
            if peer in self.found.answered:
                self.found.answered.remove(peer)
        else:
            for problem in problems:
                problem.server = peer.name
            self.found.corrupt.extend(problems)
            if problems:
                self.found.bad.add((number, peer))
                self.found.holders[number].remove(peer)
        self._verified += 1
        report.report(self._verified)

    async def _verify_share(self, number: int, peer: Peer) -> list[CorruptionError]:
        """Return what is wrong with one share."""
        verifier = ShareVerifier(self._cap, number)
        watch = Watch(self._clock, self._silence_s)
        feeder = _Feeder(verifier, self._workers, watch.sign)
        longest = _longest_share(self._cap.size, self._cap.required_shares)
        stream = peer.server.stream(self._cap.storage_index, number, 0, longest, feeder)
        await watch.answer(stream, peer.name)
        await feeder.drained()
        problems = await self._workers.run(verifier.finish)
        if not problems:
            self.found.packed_ueb = verifier.packed_ueb
        return problems

    def judge(self) -> CheckResult:
        """Return what follows from what was found."""
        good = {number: peers for number, peers in self.found.holders.items() if peers}
        return CheckResult(
            cap=self._given,
            healthy=len(good) == self._cap.total_shares and not self.found.corrupt,
            recoverable=len(good) >= self._cap.required_shares,
            good_shares={n: sorted(peer.name for peer in good[n]) for n in sorted(good)},
            corrupt=self.found.corrupt,
            happiness=servers_of_happiness({n: set(peers) for n, peers in good.items()}),
            required_shares=self._cap.required_shares,
            total_shares=self._cap.total_shares,
            unreachable=sorted(set(self.found.unreachable)),
        )


@implementer(IConsumer)
class _Feeder:
    """Feeds one share's stream to its verifier in a worker, chunk by chunk, in order."""

    def __init__(
        self, verifier: ShareVerifier, workers: CpuWorkers, sign: Callable[[], None]
    ) -> None:
        self._verifier = verifier
        self._workers = workers
        self._sign = sign
        self._producer: IPushProducer | None = None
        self._paused = False
        self._queue: list[bytes] = []
        self._queued_bytes = 0
        self._running: Deferred[None] | None = None
        self._drained: Deferred[None] | None = None
        self._ended = False
        self._bug: Failure | None = None

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        """The stream begins."""
        assert streaming, "servers stream through push producers"
        self._producer = producer  # type: ignore[assignment]

    def unregisterProducer(self) -> None:
        """The stream has ended."""
        self._producer = None

    def write(self, data: bytes) -> None:
        """Bytes have come."""
        self._sign()
        self._queue.append(data)
        self._queued_bytes += len(data)
        if self._queued_bytes >= _HELD_BYTES and self._producer is not None and not self._paused:
            self._paused = True
            self._producer.pauseProducing()
        if self._queued_bytes >= _CHUNK_BYTES:
            self._feed()

    async def drained(self) -> None:
        """Return when the verifier has seen every byte of the stream."""
        self._ended = True
        self._feed()
        while self._running is not None:
            self._drained = Deferred()
            await self._drained
        if self._bug is not None:
            self._bug.raiseException()

    def _feed(self) -> None:
        if self._running is not None or not self._queue:
            return
        chunks, self._queue, self._queued_bytes = self._queue, [], 0
        self._running = self._workers.run(self._feed_chunks, chunks)
        self._running.addErrback(self._note_bug).addCallback(self._fed)

    def _note_bug(self, failure: Failure) -> None:
        self._bug = failure

    def _feed_chunks(self, chunks: list[bytes]) -> None:
        for chunk in chunks:
            self._verifier.feed(chunk)

    def _fed(self, _result: None) -> None:
        self._running = None
        self._sign()  # while we held it back, the server could give none
        if self._paused and self._producer is not None:
            self._paused = False
            self._producer.resumeProducing()
        if self._ended or self._queued_bytes >= _CHUNK_BYTES:
            self._feed()
        if self._drained is not None and self._running is None:
            waiter, self._drained = self._drained, None
            waiter.callback(None)
