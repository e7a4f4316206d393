"""
A download's bytes, handed on as whole segments to a coroutine that asks for them.

Holds at most a few segments: then the download is paused.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IConsumer, IProducer, IPushProducer
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.core.params import Geometry

_HELD_SEGMENTS = 2


@implementer(IConsumer)
class SegmentFeed:
    """The sink of a download of a whole file, whose segments are taken one by one."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._producer: IPushProducer | None = None
        self._paused = False
        self._whole: deque[list[memoryview]] = deque()
        self._completed = 0
        self._pieces: list[memoryview] = []
        self._piece_bytes = 0
        self._failure: Failure | None = None
        self._waiter: Deferred[None] | None = None

    async def take(self) -> list[memoryview]:
        """
        Return the pieces of the next segment; one call at a time.

        Raises:
            Whatever ended the download before it.
        """
        while not self._whole:
            if self._failure is not None:
                self._failure.raiseException()
            self._waiter = Deferred()
            await self._waiter
        pieces = self._whole.popleft()
        if self._paused and self._producer is not None:
            self._paused = False
            self._producer.resumeProducing()
        return pieces

    def ended(self, result: Any) -> None:
        """The download has ended, well or not; fit to be a callback, and the last one."""
        if isinstance(result, Failure):
            self._failure = result
            self._wake()

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        assert streaming, "downloads are push producers"
        self._producer = producer  # type: ignore[assignment]

    def unregisterProducer(self) -> None:
        self._producer = None

    def write(self, data: bytes) -> None:
        """Some more of the file, of one segment or several."""
        view = memoryview(data)
        while view:
            missing = self._geometry.segment_length(self._completed) - self._piece_bytes
            piece, view = view[:missing], view[missing:]
            self._pieces.append(piece)
            self._piece_bytes += len(piece)
            if len(piece) == missing:
                self._whole.append(self._pieces)
                self._completed += 1
                self._pieces, self._piece_bytes = [], 0
        if len(self._whole) >= _HELD_SEGMENTS and not self._paused and self._producer is not None:
            self._paused = True
            self._producer.pauseProducing()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and (self._whole or self._failure is not None):
            waiter, self._waiter = self._waiter, None
            waiter.callback(None)
