"""
Copying plaintext that comes through the reactor: from an async iterator, an ``IBodyProducer`` or an
``IResponse``.

A producer is paused while too many of its bytes wait, and stopped when the put is cancelled or fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from twisted.internet.defer import CancelledError
from twisted.internet.interfaces import IConsumer, IReactorTime
from twisted.internet.protocol import Protocol, connectionDone
from twisted.python.failure import Failure
from twisted.web.iweb import UNKNOWN_LENGTH, IBodyProducer, IResponse
from zope.interface import implementer

from pipegrid.errors import PipegridError, SourceError
from pipegrid.reactor.deferreds import Wakeup
from pipegrid.reactor.workers import CpuWorkers
from pipegrid.transfer.put.copied_source import SourceCopy
from pipegrid.transfer.put.source import Source

_AHEAD_BYTES = 1 << 20
"""If more bytes than this have arrived but are not written yet, the producer is paused."""


def is_streamed(given: object) -> bool:
    """Return whether ``copy_streamed`` accepts this object."""
    return (
        isinstance(given, AsyncIterable)
        or IBodyProducer.providedBy(given)
        or IResponse.providedBy(given)
    )


async def copy_streamed(
    given: Any, workers: CpuWorkers, clock: IReactorTime, most_bytes: int | None = None
) -> Source:
    """
    Copy the bytes of an async iterator, an ``IBodyProducer`` or an ``IResponse``.

    Raises:
        SourceError: the source failed, gave something other than bytes, gave another number of bytes than
            announced, or there is no space for the copy.
        UsageError: the source has more than ``most_bytes``.
    """
    name, pieces = _pieces_of(given, clock)
    copy = SourceCopy(name, most_bytes)
    try:
        async for piece in pieces:
            if copy.in_memory:
                copy.add(piece)
            else:
                await workers.run(copy.add, piece)
        return copy.finish()
    except BaseException as error:
        copy.drop()
        close = getattr(pieces, "aclose", None)
        if close is not None:  # an iterator need not have this method
            with suppress(Exception):
                await close()
        if not isinstance(error, Exception) or isinstance(error, (PipegridError, CancelledError)):
            raise
        why = str(error).rstrip(".") or type(error).__name__
        raise SourceError(f"cannot read {name}: {why}; nothing was stored") from error


def _pieces_of(given: Any, clock: IReactorTime) -> tuple[str, AsyncIterator[Any]]:
    if isinstance(given, AsyncIterable):
        return "the async iterator", given.__aiter__()
    if IBodyProducer.providedBy(given):
        return "the body producer", _produced(given, clock)
    return "the response", _received(given, clock)


@implementer(IConsumer)
class _Arrived:
    """
    Pieces that have arrived and were not taken yet, with back-pressure on their producer; also the consumer
    for an ``IBodyProducer``.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._wakeup = Wakeup(clock)
        self._pieces: deque[bytes] = deque()
        self._held_bytes = 0
        self._outcome: Failure | bool = False  # False: more may arrive; True: all has arrived
        self.pause: Callable[[], object] = lambda: None
        self.resume: Callable[[], object] = lambda: None
        self._paused = False
        self.total_bytes = 0

    @property
    def ended(self) -> bool:
        return self._outcome is not False

    def registerProducer(self, producer: object, streaming: bool) -> None:
        """Do nothing: this object pauses the body producer itself."""

    def unregisterProducer(self) -> None:
        """Do nothing: ``_produced`` notices the end."""

    def write(self, data: bytes) -> None:
        data = bytes(data)
        self._pieces.append(data)
        self._held_bytes += len(data)
        self.total_bytes += len(data)
        if self._held_bytes > _AHEAD_BYTES and not self._paused and not self.ended:
            self._paused = True
            self.pause()
        self._wakeup.fire()

    def end(self, outcome: Failure | bool) -> None:
        self._outcome = outcome
        self._wakeup.fire()

    async def all(self) -> AsyncIterator[bytes]:
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                yield piece
                self._held_bytes -= len(piece)
                if self._paused and not self._held_bytes and not self.ended:
                    self._paused = False
                    self.resume()
            if isinstance(self._outcome, Failure):
                self._outcome.raiseException()
            if self._outcome:
                return
            await self._wakeup.wait()


async def _produced(producer: IBodyProducer, clock: IReactorTime) -> AsyncIterator[bytes]:
    arrived = _Arrived(clock)
    arrived.pause, arrived.resume = producer.pauseProducing, producer.resumeProducing
    producer.startProducing(arrived).addCallbacks(lambda _: arrived.end(True), arrived.end)
    try:
        async for piece in arrived.all():
            yield piece
    finally:
        if not arrived.ended:
            with suppress(Exception):
                producer.stopProducing()
    named = producer.length
    if named is not UNKNOWN_LENGTH and named != arrived.total_bytes:
        raise SourceError(
            f"the body producer gave {arrived.total_bytes} bytes in place of the {named} that it named; "
            "nothing was stored"
        )


class _Receiver(Protocol):
    """The protocol to which a response delivers its body."""

    def __init__(self, arrived: _Arrived) -> None:
        self._arrived = arrived

    def connectionMade(self) -> None:
        self._arrived.pause = lambda: self._call_transport("pauseProducing")
        self._arrived.resume = lambda: self._call_transport("resumeProducing")

    def _call_transport(self, method: str) -> None:
        # The transport of a test double or cache, whose body is in memory, may lack these methods.
        getattr(self.transport, method, lambda: None)()

    def dataReceived(self, data: bytes) -> None:
        self._arrived.write(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        # This import also loads TLS, which any program that has a response has loaded already.
        from twisted.web.client import ResponseDone

        self._arrived.end(True if reason.check(ResponseDone) else reason)

    def stop(self) -> None:
        """Stop the delivery of the body, as far as the transport can."""
        transport: Any = self.transport
        for method in ("stopProducing", "abortConnection", "loseConnection"):
            if hasattr(transport, method):
                getattr(transport, method)()
                return


async def _received(response: IResponse, clock: IReactorTime) -> AsyncIterator[bytes]:
    arrived = _Arrived(clock)
    receiver = _Receiver(arrived)
    response.deliverBody(receiver)
    try:
        async for piece in arrived.all():
            yield piece
    finally:
        if not arrived.ended:
            with suppress(Exception):
                receiver.stop()
