"""
Reading one share from one server, for a decoder.

Short spans are asked with ``read``; long ones come as one ``stream`` each, paused while the decoder
holds more of this share than it should, so that memory stays bounded and the wire stays full. Only what
can wait is paused: blocks of which the decoder could do nothing without what comes behind them cannot, nor
can whatever the next segment waits for. For a share may hold all that it should of later segments, and then
have to give the earlier ones as well, in the place of a share that failed.
"""

from __future__ import annotations

from collections.abc import Callable

from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.interfaces import IConsumer, IProducer, IPushProducer
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.core.decoder import Decoder
from pipegrid.core.spans import Span
from pipegrid.errors import NoSuchShare, ServerError
from pipegrid.transfer.peers import Peer

STREAM_BYTES = 1 << 18
"""Longer spans are streamed: their bytes can be used, and held back, while they come."""


class ShareFeed:
    """
    The bytes of one share, from one server to the decoder.

    Args:
        ahead_bytes: how much of the share the decoder may hold before the server is paused.
        changed: called after every event that may let the download go on.

    Attributes:
        state: ``open``, then ``missing`` (the server has no such share), ``failed`` (the server
            cannot be used) or ``closed``.
        received_bytes: of the share, so far.
        period_bytes: of the share, since ``start_period``.
        error: why it is missing or has failed.
        bug: what was raised that no server may raise; the download passes it on.
    """

    def __init__(
        self,
        decoder: Decoder,
        peer: Peer,
        share_number: int,
        storage_index: bytes,
        ahead_bytes: int,
        changed: Callable[[], None],
    ) -> None:
        self.peer = peer
        self.share_number = share_number
        self.state = "open"
        self.error: ServerError | None = None
        self.bug: Failure | None = None
        self.received_bytes = 0
        self.period_bytes = 0
        self._decoder = decoder
        self._storage_index = storage_index
        self._ahead_bytes = ahead_bytes
        self.changed = changed
        self._calls: set[Deferred[object]] = set()
        self._streams: set[_SpanConsumer] = set()

    def __repr__(self) -> str:
        return f"<ShareFeed share {self.share_number} from {self.peer.name}: {self.state}>"

    @property
    def waiting(self) -> bool:
        """Whether bytes have been asked for that have not all come."""
        return bool(self._calls)

    @property
    def paused(self) -> bool:
        """Whether all that has not come is held back because this share is far enough ahead."""
        held_back = sum(stream.paused for stream in self._streams)
        return held_back > 0 and held_back == len(self._calls)

    def start_period(self) -> None:
        """Count ``period_bytes`` anew, from 0."""
        self.period_bytes = 0

    def ask(self, spans: list[Span]) -> None:
        """Ask the server for these spans, all at once."""
        for span in spans:
            if self.state != "open":
                return
            if span.length > STREAM_BYTES:
                self._stream(span)
            else:
                self._read(span)

    def _read(self, span: Span) -> None:
        call = self.peer.server.read(
            self._storage_index, self.share_number, span.offset, span.length
        )
        self._track(call.addCallback(self._got_all, span))

    def _got_all(self, data: bytes, span: Span) -> None:
        self.take(span.offset, data)
        if len(data) < span.length and self.state == "open":
            self._decoder.ended(self.share_number, span.offset + len(data))

    def _stream(self, span: Span) -> None:
        consumer = _SpanConsumer(self, span)
        self._streams.add(consumer)
        call = self.peer.server.stream(
            self._storage_index, self.share_number, span.offset, span.length, consumer
        )
        self._track(call.addBoth(self._stream_ended, consumer, span))

    def _stream_ended(
        self, result: int | Failure, consumer: _SpanConsumer, span: Span
    ) -> Failure | None:
        self._streams.discard(consumer)
        if isinstance(result, Failure):
            return result
        if result < span.length and self.state == "open":
            self._decoder.ended(self.share_number, span.offset + result)
        return None

    def _track(self, call: Deferred[object]) -> None:
        self._calls.add(call)
        call.addErrback(self._failed)
        call.addBoth(self._answered, call)

    def _answered(self, result: object, call: Deferred[object]) -> object:
        self._calls.discard(call)
        self.changed()
        return result

    def _failed(self, failure: Failure) -> None:
        if not failure.check(ServerError, CancelledError):
            self.bug = failure
            self.close("failed")
        elif self.state == "open" and isinstance(failure.value, ServerError):
            self.error = failure.value
            self.close("missing" if failure.check(NoSuchShare) else "failed")

    def take(self, offset: int, data: bytes) -> None:
        """Hand bytes to the decoder."""
        if self.state == "open" and data:
            self.received_bytes += len(data)
            self.period_bytes += len(data)
            self._decoder.received(self.share_number, offset, data)

    def balance(self) -> None:
        """Pause or resume the server, by what the decoder holds of this share."""
        if not self._streams:
            return
        held = self._decoder.held_of(self.share_number)
        geometry = self._decoder.geometry or self._decoder.guessed_geometry
        # Less than a block would never become a segment, and hashes alone neither.
        limit = max(self._ahead_bytes, 2 * geometry.block_bytes) + self._decoder.metadata_bytes
        for stream in list(self._streams):  # one that is resumed may end at once
            stream.balance(held, limit)

    def awaits(self, start: int, end: int) -> bool:
        """Whether the decoder cannot go on without some of the bytes [start, end)."""
        return self._decoder.awaits(self.share_number, start, end)

    def close(self, state: str = "closed") -> None:
        """End in this state and give up what has not come."""
        if self.state != "open":
            return
        self.state = state
        for call in list(self._calls):
            call.cancel()


@implementer(IConsumer)
class _SpanConsumer:
    """Takes one stream's bytes for the decoder, and paces their producer."""

    def __init__(self, reader: ShareFeed, span: Span) -> None:
        self._reader = reader
        self._offset = span.offset
        self._end = span.end
        self._can_wait = span.can_wait
        self._producer: IPushProducer | None = None
        self.paused = False

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        assert streaming, "servers stream through push producers"
        self._producer = producer  # type: ignore[assignment]

    def unregisterProducer(self) -> None:
        self._producer = None

    def write(self, data: bytes) -> None:
        offset = self._offset
        self._offset += len(data)
        reader = self._reader
        reader.take(offset, data)
        reader.balance()
        reader.changed()

    def balance(self, held: int, ahead_bytes: int) -> None:
        """Pause above the mark, resume below half of it, or when everybody waits for what is missing."""
        if self._producer is None or not self._can_wait:
            return
        if not self.paused:
            if held >= ahead_bytes and not self._is_awaited():
                self.paused = True
                self._producer.pauseProducing()
        elif held <= ahead_bytes // 2 or self._is_awaited():
            self.paused = False
            self._producer.resumeProducing()

    def _is_awaited(self) -> bool:
        return self._reader.awaits(self._offset, self._end)
