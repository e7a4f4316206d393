"""
Checking a file: who has which shares, and with ``verify``, whether every byte of them is right.

Servers are asked a bounded number at a time; verification streams a few shares at once through
the verifier, never holding more than a few chunks of each.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

import attrs
from twisted.internet.defer import Deferred, DeferredSemaphore, gatherResults
from twisted.internet.interfaces import IConsumer, IProducer, IPushProducer
from zope.interface import implementer

from pipegrid.core.caps import ChkCap, ChkVerifierCap
from pipegrid.core.placement import servers_of_happiness
from pipegrid.core.verifier import ShareVerifier
from pipegrid.errors import CorruptionError, ServerError
from pipegrid.flow.workers import CpuWorkers
from pipegrid.transfer.peers import Peer, ring
from pipegrid.transfer.progress import Progress
from pipegrid.transfer.results import CheckResult
from pipegrid.transfer.search import MAX_QUESTIONS

_SHARES_AT_ONCE = 3
_CHUNK_BYTES = 1 << 18
_HELD_BYTES = 1 << 20


def _longest_share(size: int, required_shares: int) -> int:
    """Return what no honest share exceeds: each block may bring three hashes of 32 bytes, doubled."""
    return 200 * (size // required_shares + 1) + (1 << 20)


@attrs.define
class _Found:
    """What the servers said."""

    holders: dict[int, list[Peer]] = attrs.field(factory=dict)
    unreachable: list[str] = attrs.field(factory=list)
    corrupt: list[CorruptionError] = attrs.field(factory=list)


class Check:
    """
    The check of one encoded file (not of a literal one).

    Args:
        verify: read every share and check every byte of it.
        progress: called with shares verified and shares found.
    """

    def __init__(
        self,
        *,
        workers: CpuWorkers,
        peers: Sequence[Peer],
        cap: ChkCap | ChkVerifierCap,
        verify: bool,
        progress: Progress | None = None,
    ) -> None:
        self._workers = workers
        self._cap = cap.verifier()
        self._given = cap
        self._verify = verify
        self._progress = progress
        self._ring = ring(self._cap.storage_index, peers)
        self._found = _Found()
        self._running: list[Deferred[None]] = []

    async def run(self) -> CheckResult:
        """Ask every server, verify if wanted, and judge."""
        await self._all(MAX_QUESTIONS, [self._ask(peer) for peer in self._ring])
        if self._verify:
            copies = [
                (number, peer)
                for number, peers in sorted(self._found.holders.items())
                for peer in list(peers)
            ]
            self._total, self._done = len(copies), 0
            await self._all(
                _SHARES_AT_ONCE, [self._verify_share(number, peer) for number, peer in copies]
            )
        return self._judge()

    async def _all(self, at_once: int, steps: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Run coroutines, a few at a time; a failure or cancellation ends them all."""
        gate = DeferredSemaphore(at_once)
        running = [gate.run(Deferred.fromCoroutine, step) for step in steps]
        try:
            await gatherResults(running, consumeErrors=True)
        except BaseException:
            for step in running:
                step.addErrback(lambda _failure: None)
                step.cancel()
            raise

    async def _ask(self, peer: Peer) -> None:
        try:
            numbers = await peer.server.list_shares(self._cap.storage_index)
        except ServerError:
            self._found.unreachable.append(peer.name)
            return
        for number in numbers:
            if number < self._cap.total_shares:
                self._found.holders.setdefault(number, []).append(peer)

    async def _verify_share(self, number: int, peer: Peer) -> None:
        verifier = ShareVerifier(self._cap, number)
        feeder = _Feeder(verifier, self._workers)
        try:
            longest = _longest_share(self._cap.size, self._cap.required_shares)
            await peer.server.stream(self._cap.storage_index, number, 0, longest, feeder)
            await feeder.drained()
            problems = await self._workers.run(verifier.finish)
        except ServerError as error:
            self._found.unreachable.append(peer.name)
            self._found.holders[number].remove(peer)
            error.server = peer.name
            return
        if problems:
            for problem in problems:
                problem.server = peer.name
            self._found.corrupt.extend(problems)
            self._found.holders[number].remove(peer)
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _judge(self) -> CheckResult:
        good = {number: peers for number, peers in self._found.holders.items() if peers}
        return CheckResult(
            cap=self._given,
            healthy=len(good) == self._cap.total_shares and not self._found.corrupt,
            recoverable=len(good) >= self._cap.required_shares,
            good_shares={n: sorted(peer.name for peer in good[n]) for n in sorted(good)},
            corrupt=self._found.corrupt,
            happiness=servers_of_happiness({n: set(peers) for n, peers in good.items()}),
            required_shares=self._cap.required_shares,
            total_shares=self._cap.total_shares,
            unreachable=sorted(set(self._found.unreachable)),
        )


@implementer(IConsumer)
class _Feeder:
    """Feeds one share's stream to its verifier in a worker, chunk by chunk, in order."""

    def __init__(self, verifier: ShareVerifier, workers: CpuWorkers) -> None:
        self._verifier = verifier
        self._workers = workers
        self._producer: IPushProducer | None = None
        self._paused = False
        self._queue: list[bytes] = []
        self._queued_bytes = 0
        self._running: Deferred[None] | None = None
        self._drained: Deferred[None] | None = None
        self._ended = False

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        """The stream begins."""
        assert streaming, "servers stream through push producers"
        self._producer = producer  # type: ignore[assignment]

    def unregisterProducer(self) -> None:
        """The stream has ended."""
        self._producer = None

    def write(self, data: bytes) -> None:
        """Bytes have come."""
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

    def _feed(self) -> None:
        if self._running is not None or not self._queue:
            return
        chunks, self._queue, self._queued_bytes = self._queue, [], 0
        self._running = self._workers.run(self._feed_chunks, chunks)
        self._running.addBoth(self._fed)

    def _feed_chunks(self, chunks: list[bytes]) -> None:
        for chunk in chunks:
            self._verifier.feed(chunk)

    def _fed(self, result: object) -> None:
        self._running = None
        if self._paused and self._producer is not None:
            self._paused = False
            self._producer.resumeProducing()
        if self._ended or self._queued_bytes >= _CHUNK_BYTES:
            self._feed()
        if self._drained is not None and self._running is None:
            waiter, self._drained = self._drained, None
            waiter.callback(None)
