"""
One connection: requests written behind one another, answers taken in the same order.

``Lane`` decides what may be written, ``RequestWriter`` writes it, ``ResponseParser`` understands what
comes back; here they meet the transport, and here is decided what happens when something ends early:

====================================  ====================================================================
a request is taken back               unsent: it is gone. Sent: its answer is read and dropped, up to
                                      ``discard_limit_bytes``; beyond, the connection ends. Its body half
                                      sent: nothing more is written, and the connection ends as soon as
                                      the answers before it are in.
a reader pauses                       the transport is paused; what one read had already brought
                                      (256 KiB) is all that is ever held. Does it go on pausing, the
                                      owner asks elsewhere what is new, and after long what stands
                                      behind it as well; that at once, if nobody has claimed the answer
an answer before the whole body       it counts, nothing more is written, and the connection ends
the last answer (Connection: close)   all that stood behind it is as if never sent
loss, garbage, silence                every unanswered request is handed back to the owner with
                                      the error that is true of it
====================================  ====================================================================

**Patience.** ``timeout_s`` bounds the server's silence while it owes an answer: any byte received, and any
drain of the transport, starts it anew. A caller that wants a deadline cancels.

**TLS.** Nothing is written before the handshake is over, so a request lost with it was not sent.
"""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import (
    IDelayedCall,
    IHandshakeListener,
    IPushProducer,
    IReactorTime,
    ITCPTransport,
)
from twisted.internet.protocol import Protocol, connectionDone
from twisted.logger import Logger
from twisted.python.failure import Failure
from zope.interface import implementer

from pipegrid.errors import PipegridError
from pipegrid.http11.errors import RequestNotSent, ResponseError, TooManyRequests
from pipegrid.http11.exchange import Exchange
from pipegrid.http11.lane import Lane
from pipegrid.http11.limits import Limits
from pipegrid.http11.loss import Loss, NoOwner, Owner, Unanswered, not_answered, not_sent
from pipegrid.http11.parser import END, Event, ResponseHead, ResponseParser
from pipegrid.http11.patience import FOREVER, Patience
from pipegrid.http11.raw import RawCall, RawRequest, RawResponse
from pipegrid.http11.writer import RequestWriter
from pipegrid.reactor.sockets import move_much

_log = Logger()


RECEIVE_BYTES = 512 * 1024
"""Read from the socket at a time. Clients have few connections, and long answers."""


@implementer(IHandshakeListener)
class PipelinedConnection(Protocol):
    """
    One HTTP/1.1 connection on which requests do not wait for answers.

    To use one directly, connect it through any endpoint::

        connection = await endpoint.connect(Factory.forProtocol(lambda: PipelinedConnection(reactor)))
        first = connection.request(RawRequest(b"POST /a HTTP/1.1\\r\\nHost: h\\r\\n\\r\\n"))
        second = connection.request(RawRequest(b"GET /b HTTP/1.1\\r\\nHost: h\\r\\n\\r\\n"))

    Requests reach the server in the order of the calls, and are never repeated here: if the connection
    is lost, each unanswered one fails with ``RequestNotSent`` or ``RequestMaybeProcessed``.

    Attributes:
        lane: the requests on it.
        ready: connected, and the TLS handshake (if any) is over.
        open: takes requests. False once it is closing, closed or lost.
        held_up: a reader has paused it for so long that requests had better go elsewhere.
        answered: how many answers it has given.
        answered_behind: answers after which others were still owed: pipelining that worked.
        round_trip_s: the shortest that was seen, from a light request alone on its way to the answer's
            head; None before.
    """

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
        self._owner: Owner[PipelinedConnection] = owner or NoOwner()
        self._parser = ResponseParser(limits.max_header_bytes, limits.max_headers)
        self.lane = Lane(limits)
        self._writer = RequestWriter(
            clock,
            self.lane,
            self._parser,
            server,
            limits.continue_timeout_s,
            self._progress,
            self.cancel,
        )
        self.ready = False
        self.open = True
        self.held_up = False
        self._moves_written = False  # as well as what was not
        self.answered_behind = 0
        self.answered = 0
        self._corked = False  # while a read is worked off; what that causes is done at its end
        self._reading_paused = False
        self._said_close = False  # by the server, with its last answer
        self._closing = False  # close when all that was written is answered
        self._doomed: Exchange | None = None  # its body was broken off: end when its turn comes
        self._loss: Loss | None = None
        self._gone = False  # the transport too
        self._waiting_for_loss: list[Deferred[None]] = []
        self.round_trip_s: float | None = None
        self._patience = Patience(clock, self._how_long_s, self._time_is_up)
        self._closing_call: IDelayedCall | None = None

    def __repr__(self) -> str:
        state = (
            f"lost: {self._loss.reason}"
            if self._loss
            else "closing"
            if not self.open
            else "ready"
            if self.ready
            else "connecting"
        )
        paused = " reading-paused" * self._reading_paused
        return f"<PipelinedConnection to {self._server} {state}{paused} {self.lane} {self._writer}>"

    # For callers.

    def request(self, request: RawRequest) -> Deferred[RawResponse]:
        """
        Send one request behind all those before it; fires with its answer.

        Cancelling takes the request back: see the table above.

        Raises (through the Deferred):
            RequestNotSent: the connection is closing or lost, or was lost before this was sent.
            TooManyRequests: ``max_waiting`` requests are waiting already.
            RequestMaybeProcessed, RequestTimedOut, ResponseError: as they say.
        """
        exchange = RawCall(request, self._server)
        self.submit(exchange)
        return exchange.result

    def submit(self, exchange: Exchange) -> None:
        """Accept a request, or fail it at once."""
        lane = self.lane
        if not self.open:
            reason = self._loss.reason if self._loss else "it is being closed"
            exchange.failed(
                RequestNotSent(
                    f"The connection to {self._server} takes no more requests ({reason});"
                    " connect again.",
                    self._server,
                )
            )
        elif len(lane.queued) >= self._limits.max_waiting:
            exchange.failed(
                TooManyRequests(
                    f"{len(lane.queued)} requests wait for {self._server} already;"
                    " wait for some of them before making more.",
                    self._server,
                )
            )
        else:
            exchange.connection = self
            lane.add(exchange)
            if not self._corked:
                self._writer.schedule()

    def cancel(self, exchange: Exchange, error: PipegridError | None = None) -> None:
        """
        Take a request back. With an error, the exchange fails with it; without, it is told nothing.
        """
        if exchange.abandoned or exchange.connection is not self:
            return
        written = self.lane.written
        # Whether it goes on waiting for the same answer as before.
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
                self._patience.adjust()
            else:
                self._progress()

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for an answer."""
        lane = self.lane
        return not all(each.abandoned for each in (*lane.written, *lane.queued))

    def close(self) -> Deferred[None]:
        """
        Take no more requests, wait for the answers owed, close; fires when the connection is gone.

        What was not yet written is given back.
        """
        gone = self.when_lost()
        if self._loss is None:
            self._refuse_more("it is being closed")
            self._close_if_done()
        return gone

    def abort(self, reason: str = "it was given up") -> None:
        """End it now; the reason is a clause that explains the loss to those who wait for answers."""
        self._end(reason, announced=True)

    def when_lost(self) -> Deferred[None]:
        """Fires once the transport is gone, however it ended."""
        waiting: Deferred[None] = Deferred()
        if self._gone:
            waiting.callback(None)
        else:
            self._waiting_for_loss.append(waiting)
        return waiting

    def move_followers(self) -> list[Exchange]:
        """
        Give up what waits behind the answer that is being read and may be asked anew elsewhere.

        Answers to what was written will come here all the same, and are dropped: that waits until the
        reader has been slow for long, unless there is none yet.
        """
        lane = self.lane
        followers = lane.take_followers() if self._moves_written else lane.take_queued()
        for exchange in followers:
            exchange.connection = None
        return followers

    def pause_changed(self, exchange: Exchange) -> None:
        """``exchange.paused`` changed, through no call of ours to the exchange."""
        if not self._corked and self._loss is None:
            self._progress()
            self._update_reading()

    # From the transport.

    def connectionMade(self) -> None:
        transport: Any = self.transport
        if ITCPTransport.providedBy(transport):
            # Small requests must not wait for the acknowledgement of earlier ones.
            transport.setTcpNoDelay(True)
        move_much(transport, RECEIVE_BYTES)
        self._writer.attach(transport)
        if getattr(transport, "wrappedProtocol", None) is self:  # a TLSMemoryBIOProtocol
            self._progress()
        else:
            self.handshakeCompleted()

    def handshakeCompleted(self) -> None:
        if not self.open or self.ready:
            return
        self.ready = self._writer.enabled = True
        self._progress()
        self._owner.has_room(self)
        if self.lane.queued:
            self._writer.schedule()

    def dataReceived(self, data: bytes) -> None:
        if self._loss is not None:
            return
        parser = self._parser
        self._corked = True
        try:
            self._dispatch(parser.feed(data))
            if self.lane.written:
                self.lane.received()
            if self.open and parser.error is None and not parser.closed:
                self._owner.has_room(self)
        finally:
            self._corked = False
        if parser.error is not None:
            self._end(f"what it sent is not an answer: {parser.error}", garbage=True)
        elif parser.closed:
            self._end("it closes after its last answer", announced=True)
        else:
            self._close_if_done()
            self._update_reading()
            if self.lane.queued:
                self._writer.pump()
            self._progress()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._gone = True
        if self._loss is None:
            clean = reason.check(ConnectionDone) is not None
            if clean:
                self._dispatch(self._parser.end())
            value = reason.value
            self._end(
                "the server closed it" if clean else str(value).rstrip("."),
                error=value if isinstance(value, PipegridError) else None,
                announced=self._parser.closed,
            )
        call, self._closing_call = self._closing_call, None
        if call is not None and call.active():
            call.cancel()
        waiting, self._waiting_for_loss = self._waiting_for_loss, []
        for each in waiting:
            each.callback(None)

    # Answers.

    def _dispatch(self, events: list[Event]) -> None:
        """Hand what was received to whom it is for. Their code may call anything here."""
        written = self.lane.written
        for event in events:
            if self._loss is not None:
                break  # by what an earlier event caused
            exchange = written[0]
            try:
                if type(event) is bytes:
                    exchange.received_bytes += len(event)
                    if not exchange.abandoned:
                        exchange.body_received(event)
                    else:
                        self._discard(exchange)
                elif event is END:
                    self._answer_is_complete(exchange)
                elif type(event) is ResponseHead:
                    if exchange.written_s is not None:
                        self._note_round_trip(self._clock.seconds() - exchange.written_s)
                    exchange.response = event
                    exchange.received_bytes = event.head_bytes
                    if not exchange.abandoned:
                        exchange.head_received(event)
                    else:
                        self._discard(exchange)
                elif exchange.expects_continue:
                    self._writer.send_body()
            except Exception as error:  # of a reader; its neighbours shall not suffer
                _log.failure("A reader of an HTTP answer failed")
                message = f"The reader of an answer of {self._server} failed ({error!r})."
                self.cancel(exchange, ResponseError(message, self._server))

    def _note_round_trip(self, rtt_s: float) -> None:
        if self.round_trip_s is None or rtt_s < self.round_trip_s:
            self.round_trip_s = rtt_s

    def _answer_is_complete(self, exchange: Exchange) -> None:
        head = exchange.response
        assert head is not None
        if not exchange.sent:
            # What is still to be written would be read as another request, or waited for.
            self._writer.break_off()
            self._refuse_more("the server answered before it had the whole request")
        self._said_close = head.says_close
        self.lane.answered(self._clock.seconds())
        exchange.connection = None
        self.answered += 1
        if self.lane.written:
            self.answered_behind += 1
            if self.lane.written[0] is self._doomed:
                self._end("the body of the next request was broken off", announced=True)
        self._owner.answered(self, exchange)
        if not exchange.abandoned:
            exchange.completed()

    def _discard(self, exchange: Exchange) -> None:
        """An answer that nobody wants is read to its end only if that is near."""
        head = exchange.response
        assert head is not None
        answer_bytes = exchange.received_bytes
        if head.length is not None:
            answer_bytes = head.head_bytes + head.length
        limit_bytes = self._limits.discard_limit_bytes
        if answer_bytes - exchange.wanted_bytes > limit_bytes:
            self._end(f"more than {limit_bytes} bytes of an unwanted answer were to come")

    def _update_reading(self) -> None:
        """Read, unless the reader of the answer that is being received has had enough."""
        if self._loss is not None or self._corked:
            return
        written = self.lane.written
        pause = bool(written) and written[0].paused and not written[0].abandoned
        if pause != self._reading_paused:
            self._reading_paused = pause
            self.held_up = self._moves_written = False
            transport = cast(IPushProducer, self.transport)
            if pause:
                transport.pauseProducing()
            else:
                transport.resumeProducing()

    # Ends.

    def _doom(self, exchange: Exchange) -> None:
        """The body of the last request written will never be complete; spare those before it."""
        self._writer.break_off()
        self._refuse_more("the body of a request before it was broken off")
        self._doomed = exchange
        if self.lane.written[0] is exchange:
            self._end("the body of a request was broken off", announced=True)

    def _refuse_more(self, why: str) -> None:
        """Give back what was not begun, and close when the rest is answered."""
        self._closing = True
        if self.open:
            self.open = False
            queued = self.lane.take_queued()
            for exchange in queued:
                exchange.connection = None
            if queued:
                self._owner.gave_back(
                    [Unanswered(e, not_sent(e, self._server, why)) for e in queued]
                )

    def _close_if_done(self) -> None:
        if self._closing and all(exchange.abandoned for exchange in self.lane.written):
            self._end("it was closed here", announced=True)

    def _end(
        self,
        reason: str,
        *,
        error: PipegridError | None = None,
        announced: bool = False,
        garbage: bool = False,
        timed_out: bool = False,
    ) -> None:
        """Give back every request and let the transport go: the one way out of the open state."""
        if self._loss is not None:
            return
        self.open = False
        clean = self._writer.is_clean and self._doomed is None
        written, queued = self.lane.take_all()
        self._loss = loss = Loss(
            reason=reason,
            error=error,
            announced=announced,
            said_close=self._said_close,
            was_ready=self.ready,
            answered=self.answered,
            in_flight=len(written),
            garbage=garbage,
            timed_out=timed_out,
        )
        self._writer.stop()
        self._patience.stop()
        if not self._gone:
            self._let_go(graceful=clean and not written and not garbage)
        server, said_close = self._server, self._said_close
        unanswered = [
            Unanswered(
                e, not_answered(e, server, loss, was_due=e is written[0], said_close=said_close)
            )
            for e in written
            if not e.abandoned
        ]
        unanswered += [Unanswered(e, error or not_sent(e, server, reason)) for e in queued]
        for exchange in (*written, *queued):
            exchange.connection = None
        self._owner.lost(self, loss, unanswered)

    def _let_go(self, graceful: bool) -> None:
        transport = self.transport
        if transport is None:
            return
        self._writer.detach()
        if self._reading_paused:
            self._reading_paused = False
            cast(IPushProducer, transport).resumeProducing()  # to see the other side's end
        if graceful:
            patience_s = self._limits.close_timeout_s
            self._closing_call = self._clock.callLater(patience_s, self._abort_transport)
            transport.loseConnection()
        else:
            self._abort_transport()

    def _abort_transport(self) -> None:
        transport = self.transport
        assert transport is not None
        if not self._gone:
            getattr(transport, "abortConnection", transport.loseConnection)()

    # Time.

    def _progress(self) -> None:
        self._patience.progress()

    def _how_long_s(self) -> float:
        """How long nothing may happen, for the state in which this is now."""
        limits, written = self._limits, self.lane.written
        if not self.ready:
            return limits.connect_timeout_s
        if written:
            first = written[0]
            if first.abandoned:
                return limits.abandoned_timeout_s
            if not first.paused:
                return limits.timeout_s if first.timeout_s is None else first.timeout_s
            if not self.held_up:
                return limits.held_up_after_s
            if not self._moves_written:
                return limits.slow_reader_after_s
            return FOREVER if first.claimed else limits.unclaimed_timeout_s
        if self.lane.queued:
            return FOREVER if self._writer.is_scheduled else limits.timeout_s
        return limits.idle_timeout_s

    def _time_is_up(self, waited_s: float) -> None:
        written = self.lane.written
        if not self.ready:
            self._end(f"it was not usable after {waited_s:g} s", timed_out=True)
        elif not len(self.lane):
            self._end(f"it was not used for {waited_s:g} s", announced=True)
        elif written and written[0].abandoned:
            self._end(f"an unwanted answer did not come for {waited_s:g} s", announced=True)
        elif self._reading_paused and not self._moves_written:
            self._moves_written = self.held_up or not written[0].claimed
            self.held_up = True
            self._patience.adjust()
            self._owner.held_up(self)
        elif self._reading_paused:
            self._end(f"nobody read the answer for {waited_s:g} s", announced=True)
        else:
            self._end(f"it was silent for {waited_s:g} s", timed_out=True)

    def _check_invariants(self) -> None:
        """For tests."""
        self.lane._check_invariants()
        assert self._loss is None or not len(self.lane), "a lost connection has no requests"
        assert self._loss is not None or self.open or self._closing, "no way back"
        for exchange in (*self.lane.queued, *self.lane.written):
            assert exchange.connection is self, exchange
