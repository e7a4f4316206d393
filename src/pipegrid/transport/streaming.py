"""
What the consumer of a stream holds, to pause it, to go on, to stop; for who reads shares piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IConsumer, IPushProducer
from zope.interface import implementer

T = TypeVar("T")


@implementer(IPushProducer)
class PausableStream:
    """What the consumer of a stream holds to pause, resume and stop it."""

    def __init__(self) -> None:
        self._paused = False
        self._stopped = False
        self._reason: Exception | None = None
        self._resumed: Deferred[None] = Deferred()
        self._awaited: Deferred[Any] | None = None

    def pauseProducing(self) -> None:
        """Hand over nothing more for now."""
        self._paused = True

    def resumeProducing(self) -> None:
        self._paused = False
        if self._awaited is self._resumed and not self._resumed.called:
            self._resumed.callback(None)

    def stopProducing(self) -> None:
        """Hand over nothing more at all: the stream fails as if it had been cancelled."""
        self._stopped = True
        if self._awaited is not None:
            self._awaited.cancel()

    def give_up(self, reason: Exception) -> None:
        """Let the stream fail with that error."""
        self._reason = reason
        self.stopProducing()

    async def flowing(self) -> None:
        """Wait while paused; CancelledError, or what it was given up for, once stopped."""
        while self._paused and not self._stopped:
            self._resumed = Deferred()
            await self.unless_stopped(self._resumed)
        if self._stopped:
            raise self._reason or CancelledError()

    async def unless_stopped(self, awaited: Deferred[T]) -> T:
        """Await something that ``stopProducing`` cancels."""
        self._awaited = awaited
        try:
            return await awaited
        except CancelledError:
            raise self._reason or CancelledError() from None
        finally:
            self._awaited = None


@contextmanager
def streaming(streams: set[PausableStream], consumer: IConsumer) -> Iterator[PausableStream]:
    """Give a consumer a stream as its producer, and let it be among the others, until it ends."""
    stream = PausableStream()
    streams.add(stream)
    try:
        consumer.registerProducer(stream, True)
        try:
            yield stream
        finally:
            consumer.unregisterProducer()
    finally:
        streams.discard(stream)
