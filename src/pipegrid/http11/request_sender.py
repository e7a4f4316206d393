"""Writing requests to a connection's transport, with back-pressure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from twisted.internet.interfaces import IDelayedCall, IPushProducer, IReactorTime
from zope.interface import implementer

from pipegrid.errors import PipegridError
from pipegrid.http11.exchange import Exchange
from pipegrid.http11.request_queue import RequestQueue
from pipegrid.http11.response_parser import ResponseParser
from pipegrid.reactor.deferreds import Timer
from pipegrid.reactor.tcp_transport import Buffer, send_now, socket_of

if TYPE_CHECKING:
    from pipegrid.http11.request_body_sender import BodySender

PIECE_BYTES = 112 * 1024
"""The size of one write: whole TLS records, and at most 128 KiB together with a request's head."""

LARGEST_PIECE_BYTES = 120 * 1024
"""Pieces of a body that are not longer than this are written whole."""

LIGHT_REQUEST_BYTES = 4096
"""If a request of at most this size is alone on the connection, its response measures the round trip."""


@implementer(IPushProducer)
class RequestWriter:
    """
    The sending half of a connection, and the push producer of its transport.

    Requests submitted in one turn of the reactor are sent in one write: at the end of the turn, or at the end
    of the read that caused them, or when ``flush`` is called.

    While the transport is full nothing is written: no request begins, a body in memory stops after a piece of
    112 KiB, and a body producer is paused. So no bytes accumulate, large buffers are not joined, and each
    drain of the transport is progress.

    While a body is being written, no other request is written: bytes of two requests must not mix.

    Args:
        progress: called when a request begins to wait for its response, and whenever the transport has
            accepted bytes.

    Attributes:
        body_failed: called when a request's body will never be complete.
        enabled: whether requests may be written: from the time the connection is ready until it ends.
    """

    def __init__(
        self,
        clock: IReactorTime,
        lane: RequestQueue,
        parser: ResponseParser,
        server: str,
        continue_timeout_s: float,
        progress: Callable[[], None],
        body_failed: Callable[[Exchange, PipegridError], None],
    ) -> None:
        self._clock = clock
        self._lane = lane
        self._parser = parser
        self._server = server
        self._continue_timeout_s = continue_timeout_s
        self._continue_timer = Timer(clock, self.send_body)
        self._progress = progress
        self.body_failed = body_failed
        self._transport: Any = None
        self._write_pieces: Callable[[list[Buffer]], None] | None = None
        self._socket: Any = None
        self.enabled = False
        self._full = False
        self._pumping = False
        self._call: IDelayedCall | None = None
        self._pieces: Iterator[Buffer] | None = None
        self._sender: BodySender | None = None

    def __repr__(self) -> str:
        body = "producer" if self._sender else "pieces" if self._pieces else "no"
        return f"<RequestWriter {'full' if self._full else 'free'}, {body} body>"

    @property
    def is_scheduled(self) -> bool:
        """Whether ``pump`` will be called at the end of this turn of the reactor."""
        return self._call is not None

    @property
    def is_clean(self) -> bool:
        """Whether the transport has accepted all bytes of the begun requests."""
        return not (self._full or self._pieces or self._sender)

    def attach(self, transport: Any) -> None:
        """Use the transport of a connection that is made; nothing is written before ``enabled`` is set."""
        self._transport = transport
        self._write_pieces = getattr(transport, "write_pieces", None)
        self._socket = socket_of(transport)
        transport.registerProducer(self, True)

    def schedule(self) -> None:
        """Schedule a write for the end of this turn of the reactor."""
        if self._call is None and self.enabled:
            self._call = self._clock.callLater(0, self._scheduled)

    def flush(self) -> None:
        """Write now what is scheduled for the end of this turn."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
            self.pump()

    def _scheduled(self) -> None:
        self._call = None
        self.pump()

    def pump(self) -> None:
        """Write all bytes that may be written now, in as few calls as possible."""
        if self._pumping:
            return
        self._pumping = True
        now_s = self._clock.seconds()
        out: list[Buffer] = []
        size = 0
        ended: list[Exchange] = []  # with long bodies; callbacks may submit or cancel requests
        try:
            while self.enabled and not self._full:
                if self._pieces is not None:
                    piece = next(self._pieces, None)
                    if piece is None:
                        self._pieces = None
                        ended.append(self._lane.written[-1])
                        ended[-1].sent = True
                        continue
                    out.append(piece)
                    size += len(piece)
                elif self._sender is not None:
                    break  # the producer writes the body; then ``body_sent`` calls ``pump``
                else:
                    exchange = self._lane.start_next()
                    if exchange is None:
                        break
                    self._begin(exchange, now_s)
                    out.append(exchange.head)
                    if exchange.producer is not None:
                        self._write(out)
                        out, size = [], 0
                        self._begin_body(exchange)
                        continue
                    if exchange.sent:
                        out.extend(exchange.body)
                        size += exchange.request_bytes
                    else:
                        size += len(exchange.head)
                if size >= PIECE_BYTES:
                    self._write(out)
                    out, size = [], 0
            if out:
                self._write(out)
        finally:
            self._pumping = False
        for exchange in ended:
            if not exchange.abandoned:
                exchange.handed_over()

    def _write(self, pieces: list[Buffer]) -> None:
        if self._write_pieces is not None:
            self._write_pieces(pieces)
        elif self._socket is not None:
            # Write now, without asking the reactor whether the socket is writable: that saves three system
            # calls.
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            sent = send_now(self._socket, data)
            if sent < len(data):
                self._transport.write(bytes(memoryview(data)[sent:]))
        else:
            self._transport.writeSequence(
                [piece if isinstance(piece, bytes) else bytes(piece) for piece in pieces]
            )

    def _begin(self, exchange: Exchange, now_s: float) -> None:
        alone = len(self._lane.written) == 1
        light = alone and exchange.request_bytes <= LIGHT_REQUEST_BYTES
        exchange.written_s = now_s if light else None
        if alone:
            self._progress()
        self._lane.asked(exchange, now_s)
        self._parser.expect(exchange.is_head)
        if exchange.producer is None:
            if exchange.request_bytes > PIECE_BYTES:
                self._pieces = _in_pieces(exchange)
            else:
                exchange.sent = True  # this call writes all of it before it returns

    def _begin_body(self, exchange: Exchange) -> None:
        # Imported here: storage servers get no such body, and the module imports more of Twisted.
        from pipegrid.http11.request_body_sender import BodySender

        self._sender = BodySender(self, exchange, self._server)
        if exchange.expects_continue:
            self._continue_timer.set(self._continue_timeout_s)
        else:
            self._sender.start()

    def send_body(self) -> None:
        """Start the body that waits for "100 Continue", if there is one."""
        self._continue_timer.stop()
        if self._sender is not None:
            self._sender.start()

    def break_off(self) -> None:
        """Stop writing the current body, if there is one; it stays incomplete."""
        self._pieces = None
        sender, self._sender = self._sender, None
        self._continue_timer.stop()
        if sender is not None:
            sender.stop()

    def stop(self) -> None:
        self.enabled = False
        self.break_off()
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    # Methods that the body sender calls.

    def write_body(self, pieces: list[bytes]) -> None:
        """Write a piece of the body."""
        self._progress()
        self._transport.writeSequence(pieces)

    def body_sent(self, exchange: Exchange) -> None:
        """Record that the body is complete: the next request may follow."""
        exchange.sent = True
        self._sender = None
        self.pump()

    # Methods that the transport calls.

    def pauseProducing(self) -> None:
        self._full = True
        if self._sender is not None:
            self._sender.pause()

    def resumeProducing(self) -> None:
        self._progress()
        self._full = False
        if self._sender is not None:
            self._sender.resume()
        self.pump()

    def stopProducing(self) -> None:
        """Do nothing: ``connectionLost`` follows, with the reason."""


def _in_pieces(exchange: Exchange) -> Iterator[Buffer]:
    """
    Yield a body in pieces. A part that is split has no small last piece, which would cost a TLS record and a
    call.
    """
    for part in exchange.body:
        length = len(part)
        if length <= LARGEST_PIECE_BYTES:
            yield part
            continue
        view = memoryview(part)
        start = 0
        while length - start > LARGEST_PIECE_BYTES:
            yield view[start : start + PIECE_BYTES]
            start += PIECE_BYTES
        yield view[start:]
