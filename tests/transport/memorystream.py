"""A stream of bytes that are there already, for the server in memory."""

from __future__ import annotations

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IConsumer, IPushProducer
from zope.interface import implementer

MEMORY_CHUNK_BYTES = 64 * 1024


@implementer(IPushProducer)
class MemoryStream:
    """Hands bytes to a consumer in chunks, for as long as it wants them."""

    def __init__(self, data: bytes, consumer: IConsumer, done: Deferred[int]) -> None:
        self._data = data
        self._consumer = consumer
        self._done = done
        self._at = 0
        self._paused = False
        self._pumping = False
        self._ended = False

    def begin(self) -> None:
        """Register with the consumer and hand over as much as it takes."""
        self._consumer.registerProducer(self, True)
        self.resumeProducing()

    def pauseProducing(self) -> None:
        """Hand over nothing more for now."""
        self._paused = True

    def resumeProducing(self) -> None:
        """Go on."""
        self._paused = False
        if self._pumping:
            return
        self._pumping = True
        while not (self._paused or self._ended) and self._at < len(self._data):
            chunk = self._data[self._at : self._at + MEMORY_CHUNK_BYTES]
            self._at += len(chunk)
            self._consumer.write(chunk)
        self._pumping = False
        if self._at == len(self._data) and not (self._ended or self._paused):
            self.end()
            self._done.callback(self._at)

    def stopProducing(self) -> None:
        """Hand over nothing more at all: the stream fails as if it had been cancelled."""
        if not self._ended:
            self._done.cancel()

    def end(self) -> None:
        """Let go of the consumer."""
        if not self._ended:
            self._ended = True
            self._consumer.unregisterProducer()
