"""One pipelined connection: requests in order, the responses to them, and an orderly shutdown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
from twisted.internet.defer import Deferred, succeed
from twisted.internet.error import ConnectionDone, ConnectionLost
from twisted.internet.interfaces import IHandshakeListener, INegotiated, IReactorTime
from twisted.internet.protocol import Protocol, connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.errors import PipegridError
from pipegrid.http11.connection_limits import Limits
from pipegrid.http11.connection_loss import Loss, NoOwner, Owner, closed, given_back
from pipegrid.http11.connection_states_timeouts import (
    LIFE,
    TAKES_NO_MORE,
    TAKES_REQUESTS,
    LifeEvent,
    Phase,
    ReaderState,
    ReadPause,
    WaitTimer,
)
from pipegrid.http11.exchange import (
    Exchange,
    RawCall,
    RawRequest,
    RawResponse,
    ResponseError,
    takes_no_more,
    too_many_waiting,
    why_refused,
)
from pipegrid.http11.request_queue import RequestQueue
from pipegrid.http11.request_sender import RequestWriter
from pipegrid.http11.response_parser import END, Event, ResponseHead, ResponseParser
from pipegrid.reactor.deferreds import Timer, Waiters
from pipegrid.reactor.tcp_transport import be_prompt, set_bulk_buffers

_log = Logger()


# One connection: requests are written one after the other, and responses arrive in the same order.
#
# ``RequestQueue`` decides what may be written, ``RequestWriter`` writes it, ``ResponseParser`` parses the
# bytes that arrive, and ``ReadPause`` stops reading while a reader is paused. This class connects these parts
# with the transport, and passes parsed events to the requests. ``Phase`` in ``connection_states_timeouts``
# lists the phases of a connection and what happens to its requests; only ``_move`` changes the phase.
#
# **Timeout.** ``timeout_s`` bounds the server's silence while a response is outstanding. Any received byte,
# and any drain of the transport, restarts the timeout. A caller that wants a deadline cancels.
#
# **TLS.** Nothing is written before the handshake is over, so a request that is lost during the handshake was
# not sent.

RECEIVE_BYTES = 512 * 1024
"""Maximum number of bytes in one read from the socket: clients have few connections, and long responses."""


@implementer(IHandshakeListener)
class PipelinedConnection(Protocol):
    """
    One HTTP/1.1 connection on which requests do not wait for the responses to earlier ones.

    To use a connection directly, connect it through any endpoint::

        connection = await endpoint.connect(Factory.forProtocol(lambda: PipelinedConnection(reactor)))
        first = connection.request(RawRequest(b"POST /a HTTP/1.1\\r\\nHost: h\\r\\n\\r\\n"))
        second = connection.request(RawRequest(b"GET /b HTTP/1.1\\r\\nHost: h\\r\\n\\r\\n"))

    Requests reach the server in the order of the calls. A connection never repeats requests: if it is lost,
    each unanswered request fails with ``RequestNotSent`` or ``RequestMaybeProcessed``.

    Attributes:
        lane: the requests on the connection.
        owner: is notified of the connection's end and of requests to repeat; may be replaced before the first
            request.
        ready: whether the connection is made and the TLS handshake (if any) is complete.
        open: whether the connection accepts requests. False once it is closing, closed or lost.
        answered: how many responses were received.
        answered_after: how many responses came while others were outstanding, which shows that pipelining
            works.
        round_trip_s: the shortest time from a small request, alone on the connection, to its response's
            head; None if there was no such request.
    """

    transport: Any

    def __init__(
        self,
        clock: IReactorTime,
        limits: Limits | None = None,
        server: str = "the server",
        owner: Owner[PipelinedConnection] | None = None,
    ) -> None:
        self._clock = clock
        self._limits = limits = limits or Limits()
        self._server = server
        self.owner: Owner[PipelinedConnection] = owner or NoOwner()
        self._parser = parser = ResponseParser(limits.max_header_bytes, limits.max_headers)
        self.lane = lane = RequestQueue(limits)
        self._read_pause = ReadPause()
        self._wait_timer = timer = WaitTimer(
            clock,
            limits,
            lane,
            self._read_pause,
            lambda: self._writer.is_scheduled,
            self._end,
            lambda: self.owner.blocked(self),
        )
        self._progress = progress = timer.progress
        wait_s = limits.continue_timeout_s
        self._writer = RequestWriter(clock, lane, parser, server, wait_s, progress, self.cancel)
        self._phase = Phase.CONNECTING
        self.ready = False
        self.open = True
        self.answered_after = 0
        self.answered = 0
        self.round_trip_s: float | None = None
        self._corked = False  # True while a read is processed; writes wait for its end
        self._announced_close = False  # whether the last response had Connection: close
        self._loss: Loss | None = None  # how the connection has ended; None before that
        # An orderly close delivers the written bytes and sends TLS's close_notify. If the server does not
        # close its side in time, the connection is aborted.
        self._close_timer = Timer(clock, self._abort_transport)
        self._gone: Waiters[None] | None = Waiters()  # None once the transport is closed

    def __repr__(self) -> str:
        phase = self._phase.name.lower() + (f" ({self._loss.reason})" if self._loss else "")
        reader = f"its reader {self._read_pause.reader.value}"
        return (
            f"<PipelinedConnection to {self._server} {phase}, {reader} {self.lane} {self._writer}>"
        )

    def _move(self, happening: LifeEvent) -> None:
        """Change the phase of the connection as the table ``LIFE`` says for an event."""
        self._phase = phase = LIFE.after(self._phase, happening)
        self.open = phase in TAKES_REQUESTS
        self.ready = self.ready or phase is Phase.READY

    # For callers.

    def request(self, request: RawRequest) -> Deferred[RawResponse]:
        """
        Send one request after all earlier ones; fires with its response.

        Cancelling withdraws the request: see ``connection_states_timeouts``.

        Raises (through the Deferred):
            RequestNotSent: the connection is closing or lost, or was lost before this request was sent.
            TooManyRequests: ``max_waiting`` requests are waiting already.
            RequestMaybeProcessed, RequestTimedOut, ResponseError: see their classes.
        """
        exchange = RawCall(request, self._server)
        self.submit(exchange)
        return exchange.result

    def submit(self, exchange: Exchange) -> None:
        """Accept a request, or fail the request at once."""
        lane = self.lane
        if not self.open:
            reason = self._loss.reason if self._loss else "it is being closed"
            exchange.failed(takes_no_more(self._server, reason))
        elif len(lane.queued) >= self._limits.max_waiting:
            exchange.failed(too_many_waiting(len(lane.queued), self._server))
        else:
            exchange.connection = self
            lane.add(exchange)
            if not self._corked:
                self._writer.schedule()

    def flush(self) -> None:
        """
        Write the submitted requests now instead of at the end of this turn, if no response is outstanding.

        So the server begins with these requests earlier. On a busy connection they wait, so that more of them
        are written at the same time.
        """
        if not (self._corked or self.lane.written):
            self._writer.flush()

    def cancel(self, exchange: Exchange, error: PipegridError | None = None) -> None:
        """
        Withdraw a request. If an error is given, the exchange fails with the error; otherwise the exchange is
        not notified.
        """
        if exchange.abandoned or exchange.connection is not self:
            return
        written = self.lane.written
        # Whether the connection waits for the same response after this withdrawal as before.
        waits = bool(written) and written[0] is not exchange
        exchange.abandoned = True
        exchange.wanted_bytes = exchange.received_bytes
        if error is not None:
            exchange.failed(error)
        if self.lane.withdraw(exchange):
            exchange.connection = None
        elif not exchange.sent:
            self._doom(exchange)
        elif exchange.response is not None:
            self._discard(exchange)
        if self._loss is None:
            self._close_if_done()
            self._update_reading()
            if waits:
                self._wait_timer.adjust()
            else:
                self._progress()

    @property
    def blocked(self) -> bool:
        """
        Whether a reader has paused the connection for long, so that new requests should use another
        connection.
        """
        return self._read_pause.blocked

    @property
    def last_activity_s(self) -> float:
        """
        The time when bytes were last received or sent, or when a request began to wait without others before
        it.
        """
        return self._wait_timer.since_s

    @property
    def is_wanted(self) -> bool:
        """Whether a caller waits for the response to any request on this connection."""
        return not all(each.abandoned for each in (*self.lane.written, *self.lane.queued))

    def close(self) -> Deferred[None]:
        """
        Accept no more requests, wait for the outstanding responses, and close; fires when the connection is
        closed.

        Requests that are not written yet are returned to the owner.
        """
        gone = self.when_lost()
        if self._loss is None:
            self._refuse_more(LifeEvent.REFUSES, "it is being closed")
            self._close_if_done()
        return gone

    def abort(self, reason: str = "it was given up") -> None:
        """
        Abort the connection; the reason is a clause for the errors of the connection's unanswered requests.
        """
        self._end(closed(reason))

    def when_lost(self) -> Deferred[None]:
        """Return a Deferred that fires when the transport is closed, by either side."""
        return succeed(None) if self._gone is None else self._gone.wait()

    def move_followers(self) -> list[Exchange]:
        """
        Withdraw and return the requests that follow the current response and may be repeated on another
        connection.

        Some of these requests may be written already: their responses still arrive here and are discarded. So
        written requests are moved only if the reader has been slow for long, or there is no reader yet.
        """
        lane = self.lane
        overtaken = self._read_pause.reader is ReaderState.OVERTAKEN
        followers = lane.take_followers() if overtaken else lane.take_queued()
        for exchange in followers:
            exchange.connection = None
        return followers

    def pause_changed(self, exchange: Exchange) -> None:
        """React to a change of ``exchange.paused`` by the reader."""
        if not self._corked and self._loss is None:
            self._progress()
            self._update_reading()

    # Methods that the transport calls.

    def connectionMade(self) -> None:
        transport = self.transport
        self._stalls = be_prompt(transport, self._clock)
        set_bulk_buffers(transport, RECEIVE_BYTES)
        self._read_pause.transport = transport
        self._writer.attach(transport)
        # The class is tested, since wrappers around TLS provide the same interfaces but do not report the
        # handshake.
        if INegotiated.implementedBy(type(transport)):
            self._progress()
        else:
            self.handshakeCompleted()

    def handshakeCompleted(self) -> None:
        if self._phase is not Phase.CONNECTING:
            return
        self._move(LifeEvent.USABLE)
        self._wait_timer.usable = self._writer.enabled = True
        self._progress()
        self.owner.has_space(self)
        if self.lane.queued:
            self._writer.schedule()

    def dataReceived(self, data: bytes) -> None:
        if self._loss is not None:
            return
        parser = self._parser
        self._corked = True
        try:
            self._hand_out(parser.feed(data))
            if self.lane.written:
                self.lane.received()
            if self.open and parser.error is None and not parser.closed:
                self.owner.has_space(self)
        finally:
            self._corked = False
        if parser.error is not None:
            self._end(Loss(reason=f"what it sent is not a response: {parser.error}", garbage=True))
        elif parser.closed:
            self._end(closed("it closes after its last response"))
        else:
            self._close_if_done()
            self._update_reading()
            if self.lane.queued:
                self._writer.pump()
            self._progress()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._stalls.stop()
        self._move(LifeEvent.LOST)
        if self._loss is None:
            clean = reason.check(ConnectionDone) is not None
            if clean:
                self._hand_out(self._parser.end())
            value = reason.value
            self._end(
                Loss(
                    reason="the server closed it" if clean else str(value).rstrip("."),
                    error=why_refused(value, self._server),
                    announced=self._parser.closed,
                    cut=clean or isinstance(value, ConnectionLost),
                )
            )
        self._close_timer.stop()
        gone, self._gone = self._gone, None
        assert gone is not None
        gone.fire(None)

    # Each received event is passed to the first unanswered request on the connection, to which it belongs.
    #
    # The response to a withdrawn request is read to its end if little of it is left; otherwise the connection
    # ends. If a reader raises an error, only its own request fails.

    def _hand_out(self, events: Iterable[Event]) -> None:
        """
        Pass events to the requests to which they belong. The requests' code may call any method of the
        connection.
        """
        written = self.lane.written
        for event in events:
            if self._loss is not None:
                break  # an earlier event has ended the connection
            exchange = written[0]
            try:
                if type(event) is bytes:
                    exchange.received_bytes += len(event)
                    if not exchange.abandoned:
                        exchange.body_received(event)
                    else:
                        self._discard(exchange)
                elif event is END:
                    self._response_is_complete(exchange)
                elif type(event) is ResponseHead:
                    self._note_round_trip(exchange)
                    exchange.response = event
                    exchange.received_bytes = event.head_bytes
                    if not exchange.abandoned:
                        exchange.head_received(event)
                    else:
                        self._discard(exchange)
                elif exchange.expects_continue:
                    self._writer.send_body()
            except Exception as error:  # an error that a reader has raised
                _log.failure("The reader of an HTTP response failed")
                message = f"The reader of a response of {self._server} failed ({error!r})."
                self.cancel(exchange, ResponseError(message, self._server))

    def _discard(self, exchange: Exchange) -> None:
        """End the connection if the unwanted response is too long to read and discard the rest."""
        head = exchange.response
        assert head is not None
        answer_bytes = exchange.received_bytes
        if head.length is not None:
            answer_bytes = head.head_bytes + head.length
        limit_bytes = self._limits.discard_limit_bytes
        if answer_bytes - exchange.wanted_bytes > limit_bytes:
            reason = f"more than {limit_bytes} bytes of an unwanted response were outstanding"
            self._end(Loss(reason=reason))

    def _note_round_trip(self, exchange: Exchange) -> None:
        if exchange.written_s is not None:
            round_trip_s = self._clock.seconds() - exchange.written_s
            if self.round_trip_s is None or round_trip_s < self.round_trip_s:
                self.round_trip_s = round_trip_s

    def _response_is_complete(self, exchange: Exchange) -> None:
        head = exchange.response
        assert head is not None
        if not exchange.sent:
            # The server would read the rest of this request as another request, or wait for the rest.
            self._writer.break_off()
            self._refuse_more(
                LifeEvent.REFUSES, "the server responded before it had the whole request"
            )
        self._announced_close = head.says_close
        self.lane.answered(self._clock.seconds())
        exchange.connection = None
        self.answered += 1
        if self.lane.written:
            self.answered_after += 1
            if self._phase is Phase.BROKEN and len(self.lane.written) == 1:
                self._end(closed("the body of the next request was interrupted"))
        self.owner.answered(self, exchange)
        if not exchange.abandoned:
            exchange.completed()

    def _update_reading(self) -> None:
        if self._loss is None and not self._corked:
            self._read_pause.update(self.lane.written)

    # Ends.

    def _doom(self, exchange: Exchange) -> None:
        """
        End the connection after the earlier responses, since the body that is being written will never be
        complete.
        """
        self._writer.break_off()
        if self._loss is not None:
            return  # ``break_off`` has already ended the connection
        self._refuse_more(LifeEvent.BREAKS_OFF, "the body of a request before it was interrupted")
        if self._loss is None and self.lane.written[0] is exchange:
            self._end(closed("the body of a request was interrupted"))

    def _refuse_more(self, happening: LifeEvent, why: str) -> None:
        """Return unwritten requests to the owner, and accept no more requests."""
        queued = self.lane.take_queued() if self.open else []
        self._move(happening)
        if queued:
            self.owner.gave_back(given_back((), queued, Loss(reason=why), self._server))

    def _close_if_done(self) -> None:
        if self._phase in TAKES_NO_MORE and all(e.abandoned for e in self.lane.written):
            self._end(closed("it was closed here"))

    def _end(self, how: Loss) -> None:
        """
        Return every request to the owner, and close the transport if it is open. Only this method sets
        ``_loss``.
        """
        if self._loss is not None:
            return
        clean = self._writer.is_clean and self._phase is not Phase.BROKEN
        self._move(LifeEvent.ENDS)
        written, queued = self.lane.take_all()
        self._loss = loss = attrs.evolve(
            how,
            announced_close=self._announced_close,
            answered=self.answered,
            in_flight=len(written),
        )
        self._writer.stop()
        self._wait_timer.stop()
        if self._phase is Phase.LEAVING and self.transport is not None:
            self.transport.unregisterProducer()
            self._read_pause.open()  # so that the server's close is seen
            if clean and not written and not how.garbage:
                self._close_timer.set(self._limits.close_timeout_s)
                self.transport.loseConnection()
            else:
                self._abort_transport()
        self.owner.lost(self, loss, given_back(written, queued, loss, self._server))

    def _abort_transport(self) -> None:
        getattr(self.transport, "abortConnection", self.transport.loseConnection)()

    def _check_invariants(self) -> None:
        self.lane._check_invariants()
        assert self.open == (self._phase in TAKES_REQUESTS), self
        ended = self._phase in (Phase.LEAVING, Phase.GONE)
        assert ended == (self._loss is not None), "an ended connection has a reason"
        assert not ended or not len(self.lane), "a lost connection has no requests"
        assert self.ready or not self.lane.written, "requests are written only when it is ready"
        if self._phase in TAKES_NO_MORE:
            assert not self.lane.queued, "a closing connection has no unwritten requests"
        if self._phase is Phase.BROKEN:
            assert not self.lane.written[-1].sent, "the interrupted request is the last one"
        if not ended:
            self._read_pause._check_invariants(self.lane.written)
        for exchange in (*self.lane.queued, *self.lane.written):
            assert exchange.connection is self, exchange
