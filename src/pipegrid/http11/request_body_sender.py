"""Sending a request body that an ``IBodyProducer`` writes, at the pace of the transport."""

from __future__ import annotations

from typing import Any, Protocol

from twisted.internet.defer import maybeDeferred
from twisted.internet.interfaces import IConsumer
from twisted.python.failure import Failure
from twisted.web.iweb import UNKNOWN_LENGTH, IBodyProducer
from zope.interface import implementer

from pipegrid.errors import PipegridError
from pipegrid.http11.exchange import Exchange, RequestBodyError


class BodyWriter(Protocol):
    """Writes a request's body to the transport, and is notified of the body's end."""

    def write_body(self, pieces: list[bytes]) -> None:
        """Write a piece of the body."""

    def body_sent(self, exchange: Exchange) -> None:
        """All of the exchange's body has been passed to ``write_body``."""

    def body_failed(self, exchange: Exchange, error: PipegridError) -> None:
        """The body will never be complete."""


@implementer(IConsumer)
class BodySender:
    """
    Passes a body from its producer to the writer while the producer writes it.

    The sender checks that the producer writes the length that it announced, or frames its output as chunks.
    """

    def __init__(self, writer: BodyWriter, exchange: Exchange, server: str) -> None:
        producer = exchange.producer
        assert producer is not None
        self._writer = writer
        self._exchange = exchange
        self._server = server
        self._producer: IBodyProducer = producer
        self._chunked = exchange.chunked
        self._left: int = 0 if self._chunked else int(producer.length)
        self._over = False
        self._paused = False

    def start(self) -> None:
        """Start the producer. Call this only after the head is written."""
        if self._over or self._exchange.producer_started:
            return
        self._exchange.producer_started = True
        working = maybeDeferred(self._producer.startProducing, self)
        working.addCallbacks(self._finished, self._failed)

    def write(self, data: bytes) -> None:
        """Write a piece from the producer. Bytes beyond the announced length are not sent."""
        if self._over or not data:
            return
        if self._chunked:
            self._writer.write_body([b"%x\r\n" % len(data), data, b"\r\n"])
            return
        if len(data) > self._left:
            self._stop_producer()
            self._give_up(f"it gave more bytes than the {self._producer.length} it named")
            return
        self._left -= len(data)
        self._writer.write_body([data])

    def registerProducer(self, producer: Any, streaming: bool) -> None:
        """Do nothing: an ``IBodyProducer`` needs no further producer."""

    def unregisterProducer(self) -> None:
        """Do nothing: the Deferred of ``startProducing`` fires when the body has ended."""

    def pause(self) -> None:
        """Pause the producer if it is running, since the transport is full."""
        self._paused = True
        if not self._over and self._exchange.producer_started:
            self._producer.pauseProducing()

    def resume(self) -> None:
        """Resume the producer if it was paused and is running, since the transport has space."""
        was_paused, self._paused = self._paused, False
        if was_paused and not self._over and self._exchange.producer_started:
            self._producer.resumeProducing()

    def stop(self) -> None:
        """Stop the producer, since the rest of the body is not needed."""
        if not self._over:
            self._stop_producer()

    def _stop_producer(self) -> None:
        self._over = True
        if self._exchange.producer_started:
            self._producer.stopProducing()

    def _finished(self, _: None) -> None:
        if self._over:
            return
        if self._left:
            self._give_up(
                f"it gave {self._left} bytes less than the {self._producer.length} it named"
            )
            return
        self._over = True
        if self._chunked:
            self._writer.write_body([b"0\r\n\r\n"])
        self._writer.body_sent(self._exchange)

    def _failed(self, failure: Failure) -> None:
        if not self._over:
            self._give_up(failure.getErrorMessage().rstrip("."))

    def _give_up(self, why: str) -> None:
        self._over = True
        self._writer.body_failed(
            self._exchange,
            RequestBodyError(
                f"The source of the body of a {self._exchange.method.decode('latin-1')} to"
                f" {self._server} failed ({why}); the request was interrupted.",
                self._server,
            ),
        )


def framing_of(producer: IBodyProducer) -> tuple[bytes, bool]:
    """Return the header line with a body's framing, and whether the body is chunked."""
    if producer.length is UNKNOWN_LENGTH or producer.length == UNKNOWN_LENGTH:
        return b"Transfer-Encoding: chunked\r\n", True
    return b"Content-Length: %d\r\n" % producer.length, False
