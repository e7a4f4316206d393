"""
Downloads of large files: they take turns, and only a limited number is fetched at the same time.

A get holds some segments of its file in memory, even if its client reads slowly. So it runs only while the
client reads. If the client stops, the get is cancelled, and other downloads get the turn. A new get continues
at the same position later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import CancelledError, Deferred, DeferredSemaphore
from twisted.internet.interfaces import IConsumer, IPushProducer
from zope.interface import implementer

from pipegrid.core.caps import Cap
from pipegrid.core.mutable.versions import Version
from pipegrid.gateway.http_response import WebError
from pipegrid.reactor.deferreds import Timer, Wakeup
from pipegrid.tree.tree_grid import Grid

SMALL_BYTES = 256 << 10
"""A download of up to this length needs no turn."""

TURN_S = 2.0
"""Minimum duration of a turn while others wait; a client that reads nothing for this long loses its turn."""

LONGEST_TURN_S = 120.0
"""
Maximum of the time that a download keeps its turn while others wait. On a slow network, not even one segment
arrives in ``TURN_S``. So a download that received nothing in a turn gets twice the time in its next turn, up
to this limit.
"""

_LOOK_S = 0.5


@implementer(IConsumer, IPushProducer)
class PacedDownload:
    """
    Writes a file, or a range of it, to one response, with one get or several; large downloads take turns.

    Args:
        http: the response, as a consumer.
        begin: called with the size of the file before the first byte, and again if another version of a
            mutable file is read; returns start and length of the range to write.
        turns: limits how many gets fetch large files at the same time.
    """

    def __init__(
        self,
        grid: Grid,
        cap: Cap,
        http: Any,
        begin: Callable[[int], tuple[int, int]],
        turns: DeferredSemaphore,
    ) -> None:
        self._grid = grid
        self._cap = cap
        self._http = http
        self._begin = begin
        self._turns = turns
        self._range: tuple[int, int] | None = None
        self._version: Version | None = None
        self._sent_bytes = 0
        self._needs_turn = False
        self._has_turn = False  # the running get holds a token of ``turns``
        self._turn_s = TURN_S
        self._producer: Any = None
        self._paused_s: float | None = None
        self._wanted = Wakeup(grid.clock)
        self._timer = Timer(grid.clock, self._look)
        self._fetching: Deferred[Any] | None = None
        self._lost_turn = False  # the get was cancelled, and another one will continue
        self._began_s = 0.0
        self._began_bytes = 0

    async def run(self) -> None:
        """
        Write the range to the response.

        Raises:
            WebError: a mutable file was overwritten after a part of it was sent.
            PipegridError: raised by ``Grid.get``.
        """
        self._http.registerProducer(self, True)
        try:
            await self._take_turn()
            while self._needs_turn or (self._range and self._sent_bytes < self._range[1]):
                while self._paused_s is not None:
                    await self._wanted.wait()
                await self._turns.acquire()
                self._has_turn, self._needs_turn = True, False
                await self._take_turn()
        finally:
            self._http.unregisterProducer()

    async def _take_turn(self) -> None:
        self._lost_turn = False
        try:
            fetching = self._grid.get(
                self._cap, self, range_of=self._range_of, seen=self._check_version
            )
            self._fetching, self._began_s = fetching, self._grid.clock.seconds()
            self._began_bytes = self._sent_bytes
            self._timer.set(_LOOK_S)
            await fetching
        except CancelledError:
            if not self._lost_turn:
                raise
        finally:
            self._timer.stop()
            self._fetching = None
            if self._has_turn:
                self._has_turn = False
                self._turns.release()

    def _look(self) -> None:
        now_s = self._grid.clock.seconds()
        is_stopped = self._paused_s is not None and now_s - self._paused_s >= TURN_S
        is_over = (
            self._has_turn and bool(self._turns.waiting) and now_s - self._began_s >= self._turn_s
        )
        if self._fetching is not None and (is_stopped or is_over):
            self._lost_turn = True
            if not is_stopped and self._sent_bytes == self._began_bytes:
                self._turn_s = min(2 * self._turn_s, LONGEST_TURN_S)
            self._fetching.cancel()
        else:
            self._timer.set(_LOOK_S)

    def _check_version(self, version: Version) -> None:
        if version == self._version:
            return
        if self._sent_bytes:
            raise WebError(500, "the file was overwritten while it was read; read it again")
        self._version, self._range = version, None

    def _range_of(self, size: int) -> tuple[int, int]:
        """Return the range to fetch now: the rest, or an empty one if that needs a turn and none is free."""
        if self._range is None:
            self._range = self._begin(size)
        start, length = self._range
        at, left_bytes = start + self._sent_bytes, length - self._sent_bytes
        if left_bytes > SMALL_BYTES and not self._has_turn:
            if not self._turns.tokens:
                self._needs_turn = True
                return at, 0
            self._turns.acquire()  # succeeds at once, since a turn is free
            self._has_turn = True
        return at, left_bytes

    # The running get calls these methods.

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """Register the producer of a get that begins."""
        self._producer = producer
        if self._paused_s is not None:
            producer.pauseProducing()

    def unregisterProducer(self) -> None:
        """Forget the producer, since its get has ended."""
        self._producer = None

    def write(self, data: bytes) -> None:
        """Write bytes to the response."""
        self._sent_bytes += len(data)
        self._http.write(data)

    # The response calls these methods.

    def pauseProducing(self) -> None:
        """Pause, since the client reads too slowly."""
        if self._paused_s is None:
            self._paused_s = self._grid.clock.seconds()
        if self._producer is not None:
            self._producer.pauseProducing()

    def resumeProducing(self) -> None:
        """Continue, since the client has read enough."""
        self._paused_s = None
        self._wanted.fire()
        if self._producer is not None:
            self._producer.resumeProducing()

    def stopProducing(self) -> None:
        """Stop the get, since the client has disconnected."""
        if self._producer is not None:
            self._producer.stopProducing()
