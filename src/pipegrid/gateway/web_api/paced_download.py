"""
Downloads of large immutable files: a bounded number is fetched at a time, and in turns.

A get holds some segments of its file in memory, however slowly they are read. So it runs only while its
reader wants more: one that has stopped reading loses its turn, and the get starts again from where it was. A
slow reader loses its turn to others that wait.
"""

from __future__ import annotations

import gc
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore
from twisted.internet.interfaces import IConsumer, IPushProducer, IReactorTime
from zope.interface import implementer

from pipegrid.core.caps import ChkCap
from pipegrid.reactor.deferreds import Timer, Wakeup
from pipegrid.tree.public_grid import Grid

SMALL_BYTES = 256 << 10
"""Up to this length a download takes no turn."""

TURN_S = 2.0
"""How long a turn lasts at least while others wait, and how long a reader may want nothing in it."""

_LOOK_S = 0.5


class DownloadTurns(DeferredSemaphore):
    """
    The turns of large downloads.

    Args:
        count: how many may fetch at a time.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._collected_s = -TURN_S

    def lost(self, now_s: float) -> None:
        """
        Give the memory of an interrupted get back.

        Its segments are in cycles with the error that ended it, which Python does not look for by itself
        until there are millions of objects.
        """
        if now_s - self._collected_s >= TURN_S:
            self._collected_s = now_s
            gc.collect()


@implementer(IConsumer, IPushProducer)
class PacedConsumer:
    """
    Between gets, one after the other, and a response.

    Args:
        http: the response, as a consumer.
        turns: who may fetch.

    Attributes:
        sent_bytes: handed to the response.
        lost_turn: the get that runs was cancelled, to be started again.
    """

    def __init__(self, http: Any, turns: DownloadTurns, clock: IReactorTime) -> None:
        self.sent_bytes = 0
        self.lost_turn = False
        self._http = http
        self._turns = turns
        self._clock = clock
        self._producer: Any = None
        self._paused_s: float | None = None
        self._wanted = Wakeup(clock)
        self._timer = Timer(clock, self._look)
        self._fetching: Deferred[Any] | None = None
        self._began_s = 0.0

    async def wait_wanted(self) -> None:
        """Return when the reader wants more."""
        while self._paused_s is not None:
            await self._wanted.wait()

    async def follow(self, fetching: Deferred[Any]) -> None:
        """Wait for a get that writes here; ``lost_turn`` tells if it was interrupted."""
        self.lost_turn = False
        self._fetching, self._began_s = fetching, self._clock.seconds()
        self._timer.set(_LOOK_S)
        try:
            await fetching
        except CancelledError:
            if not self.lost_turn:
                raise
        finally:
            self._timer.stop()
            self._fetching = None

    def _look(self) -> None:
        now_s = self._clock.seconds()
        is_stopped = self._paused_s is not None and now_s - self._paused_s >= TURN_S
        is_over = bool(self._turns.waiting) and now_s - self._began_s >= TURN_S
        if self._fetching is not None and (is_stopped or is_over):
            self.lost_turn = True
            self._fetching.cancel()
        else:
            self._timer.set(_LOOK_S)

    # What a get sees.

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """Take the producer of a get that begins."""
        self._producer = producer
        if self._paused_s is not None:
            producer.pauseProducing()

    def unregisterProducer(self) -> None:
        """Forget a get's producer, which has ended."""
        self._producer = None

    def write(self, data: bytes) -> None:
        """Hand bytes on to the response."""
        self.sent_bytes += len(data)
        self._http.write(data)

    # What the response sees.

    def pauseProducing(self) -> None:
        """The reader has enough for now."""
        if self._paused_s is None:
            self._paused_s = self._clock.seconds()
        if self._producer is not None:
            self._producer.pauseProducing()

    def resumeProducing(self) -> None:
        """The reader wants more again."""
        self._paused_s = None
        self._wanted.fire()
        if self._producer is not None:
            self._producer.resumeProducing()

    def stopProducing(self) -> None:
        """The reader has gone; the request is cancelled, and with it the get."""
        if self._producer is not None:
            self._producer.stopProducing()


async def fetch_in_turns(
    grid: Grid, cap: ChkCap, http: Any, start: int, length: int, turns: DownloadTurns
) -> None:
    """
    Write a range of a file to a response.

    Args:
        turns: as many as may fetch at a time.

    Raises:
        PipegridError: as ``Grid.get`` does.
    """
    consumer = PacedConsumer(http, turns, grid.clock)
    http.registerProducer(consumer, True)
    try:
        while consumer.sent_bytes < length:
            await consumer.wait_wanted()
            await turns.acquire()
            try:
                done = consumer.sent_bytes
                await consumer.follow(
                    grid.get(cap, consumer, start=start + done, length=length - done)
                )
            finally:
                turns.release()
            if consumer.lost_turn:
                turns.lost(grid.clock.seconds())
    finally:
        http.unregisterProducer()
