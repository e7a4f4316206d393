"""
One share's stream on its way into its verifier: in order, and held back where verifying takes longer.
"""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.defer import Deferred, execute
from twisted.python.failure import Failure

from pipegrid.core.verifier import ShareVerifier
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.streamed import StreamConsumer
from pipegrid.transfer.worth import StreamWorth

SMALL_SHARE_BYTES = 1 << 18
"""Shares up to this are small: of these more are verified at once."""

_CHUNK_BYTES = 1 << 19
_HELD_BYTES = 1 << 20

_AT_ONCE_BYTES = SMALL_SHARE_BYTES + (1 << 16)
"""
What is no longer is verified where it comes, within a fraction of a millisecond: of a small share all. For
threads hundreds of objects that are looked at together would have more jobs than may wait.
"""


class VerifierFeed(StreamConsumer):
    """Feeds one share's stream to its verifier in a worker, chunk by chunk, in order."""

    def __init__(
        self,
        verifier: ShareVerifier,
        workers: CpuWorkers,
        sign: Callable[[], None],
        worth: StreamWorth,
    ) -> None:
        self._verifier = verifier
        self._workers = workers
        self._sign = sign
        self._worth = worth
        self._paused = False
        self._queue: list[bytes] = []
        self._queued_bytes = 0
        self._running: Deferred[None] | None = None
        self._drained: Deferred[None] | None = None
        self._ended = self._given_up = False
        self._bug: Failure | None = None

    def write(self, data: bytes) -> None:
        self._sign()
        self._worth.came(len(data))
        self._queue.append(data)
        self._queued_bytes += len(data)
        if self._queued_bytes >= _HELD_BYTES and self._producer is not None and not self._paused:
            self._paused = True
            self._worth.hold()
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

    def give_up(self) -> None:
        """Nothing more is verified: what is in a worker ends by itself, and nobody waits for it."""
        self._given_up = True
        self._queue.clear()

    def _feed(self) -> None:
        if self._running is not None or not self._queue or self._given_up:
            return
        size = self._queued_bytes
        chunks, self._queue, self._queued_bytes = self._queue, [], 0
        if size <= _AT_ONCE_BYTES:
            self._running = execute(self._feed_chunks, chunks)
        else:
            self._running = self._workers.run(self._feed_chunks, chunks)
        self._running.addErrback(self._note_bug).addCallback(self._fed)

    def _note_bug(self, failure: Failure) -> None:
        self._bug = failure

    def _feed_chunks(self, chunks: list[bytes]) -> None:
        for chunk in chunks:
            self._verifier.feed(chunk)

    def _fed(self, _result: None) -> None:
        self._running = None
        if self._given_up:
            return
        self._sign()  # while we held it back, the server could give none
        if self._paused and self._producer is not None:
            self._paused = False
            self._worth.go_on()
            self._producer.resumeProducing()
        if self._ended or self._queued_bytes >= _CHUNK_BYTES:
            self._feed()
        if self._drained is not None and self._running is None:
            waiter, self._drained = self._drained, None
            waiter.callback(None)
