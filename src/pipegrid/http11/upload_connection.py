"""The one connection for uploads to a server. Requests are sent in order, and sent again after a loss."""

from __future__ import annotations

import math
from collections.abc import Callable

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.errors import PipegridError, ServerUnreachable, WriteLost
from pipegrid.http11.connection import PipelinedConnection
from pipegrid.http11.connection_limits import Limits
from pipegrid.http11.connection_loss import Loss, Unanswered
from pipegrid.http11.dialer import Dialer, Endpoints, why_not
from pipegrid.http11.exchange import (
    Exchange,
    RawExchange,
    RawRequest,
    RawResponse,
    RequestNotSent,
    WrongServerKey,
    no_connection,
    not_connected,
    too_many_waiting,
)
from pipegrid.reactor.deferreds import Timer

FIRST_WAIT_S = 0.25
MAX_WAIT_S = 4.0
MAX_LOSSES = 4
"""The maximum number of losses in a row, without a response in between."""

Answered = tuple[RawResponse, bool]
"""A response, and whether an earlier attempt of the request may have been processed."""


class AskElsewhere(ServerUnreachable):
    """
    A request that is sent only once was lost with its connection; the caller can send it on another
    connection.
    """


class _Upload:
    """
    A request that has no response yet.

    Attributes:
        attempt: the request on a connection; None while it is on no connection.
        ended: whether the request has a response, or is not wanted any more.
        maybe_done: whether an earlier attempt may have reached the server.
        once: whether the request is never sent again.
    """

    __slots__ = ("attempt", "ended", "maybe_done", "once", "request", "result")

    def __init__(
        self, request: RawRequest, once: bool, cancelled: Callable[[_Upload], None]
    ) -> None:
        self.request = request
        self.once = once
        self.attempt: _Attempt | None = None
        self.ended = False
        self.maybe_done = False
        self.result: Deferred[Answered] = Deferred(lambda _: cancelled(self))


class _Attempt(RawExchange):
    """A request on one connection; each connection that gets the request gets a new object."""

    __slots__ = ("_ended", "upload")

    def __init__(
        self,
        upload: _Upload,
        server: str,
        ended: Callable[[_Upload, RawResponse | PipegridError], None],
    ) -> None:
        super().__init__(upload.request, server)
        self.upload = upload
        self._ended = ended

    def answered(self, answer: RawResponse) -> None:
        self._ended(self.upload, answer)

    def gave_up(self, error: PipegridError) -> None:
        self._ended(self.upload, error)


class UploadConnection:
    """
    Sends requests to one server in order, over one connection at a time. Also the owner of that connection.

    Allocations and writes are sent in the order of the calls, without waiting: so a put takes one round trip.
    Every request here can be repeated without harm, because upload secrets are derived: a request with the
    same secret continues an upload that was begun on another connection.

    **After a loss** all unanswered requests are sent again on a new connection, in their old order. The
    response to a repeated request can differ from the lost one (a write that completed its share now gets "no
    such upload"). So each response comes with whether an earlier attempt of the request may have been
    processed.

    **Limits.** This class reconnects while the server makes progress: the connection may be lost
    ``MAX_LOSSES`` times in a row without a response in between, and the server may be unreachable for
    ``time_limit_s`` after the first loss, with pauses that double from ``FIRST_WAIT_S``. If the server cannot
    be reached before anything was sent, requests fail at once, since other servers can take its place. They
    also fail at once if the server is silent for too long, or sends garbage.

    **Released bytes** cannot be sent again from here. Writes of released bytes fail with ``WriteLost``
    instead, so that the caller can send the bytes again. Requests that are sent only once fail with
    ``AskElsewhere``.

    **Order.** A connection that accepts no more requests (it is closing, or a body on it was cancelled) keeps
    its unanswered requests until it is lost. New requests wait for that loss, and are sent after the
    unanswered ones on the next connection.

    Requests on a connection are only in that connection's queue; this class keeps the requests that are on no
    connection, and the number of all requests.

    Args:
        connect: makes the endpoint for one more connection.
        server: the server's name for messages.
        time_limit_s: how long the server may be unreachable after a loss.
        crowd_bytes: returns how many bytes of small requests may wait at the server; see ``RequestQueue``.

    Attributes:
        unanswered: how many requests are unanswered, sent or not.
    """

    def __init__(
        self,
        clock: IReactorTime,
        connect: Endpoints,
        server: str,
        limits: Limits,
        time_limit_s: float,
        crowd_bytes: Callable[[], float] | None = None,
    ) -> None:
        self._clock = clock
        self._crowd_bytes = crowd_bytes
        self._dialer = Dialer(clock, limits, server, connect)
        self._server = server
        self._limits = limits
        self._time_limit_s = time_limit_s
        # The requests that are on no connection, in order. They come after all requests on the connection.
        self._waiting: dict[_Upload, None] = {}
        self.unanswered = 0
        self._connection: PipelinedConnection | None = None
        self._connecting: Deferred[PipelinedConnection] | None = None
        self._retry = Timer(clock, self._try_again)
        self._losses = 0
        self._lost_at_s: float | None = None
        self._wait_s = FIRST_WAIT_S
        self._closed = False

    def __repr__(self) -> str:
        return f"<UploadConnection {self.unanswered} unanswered on {self._connection}>"

    @property
    def round_trip_s(self) -> float | None:
        """The shortest round trip measured on the current connection; None if unknown."""
        return None if self._connection is None else self._connection.round_trip_s

    @property
    def last_activity_s(self) -> float:
        """The time when bytes were last received or sent on the current connection, by the clock."""
        return -math.inf if self._connection is None else self._connection.last_activity_s

    @property
    def is_up(self) -> bool:
        """Whether a request would be written at once: the connection is ready, and not closing."""
        connection = self._connection
        return connection is not None and connection.ready and connection.open

    def request(self, request: RawRequest, once: bool = False) -> Deferred[Answered]:
        """
        Send a request after all earlier ones, repeatedly if needed; fires with its response.

        Cancelling withdraws the request and releases its buffers.

        Args:
            once: whether the request is never sent again, since the caller has another connection for it.

        Raises (through the Deferred):
            ServerUnreachable, ServerTimeout: ``may_have_happened`` says whether the request may have been
                carried out.
            WriteLost: the connection was lost after the request's body was released.
            AskElsewhere: the connection was lost, and the request is sent only once.
            ServerProtocolError: the response is invalid.
        """
        upload = _Upload(request, once, self._cancelled)
        if self._closed:
            upload.result.errback(no_connection(self._server, "it was disconnected here"))
        elif self.unanswered >= self._limits.max_waiting:
            upload.result.errback(too_many_waiting(self.unanswered, self._server))
        else:
            self.unanswered += 1
            connection = self._connection
            if connection is not None and connection.open:
                self._send(upload, connection)
            else:
                self._waiting[upload] = None
                if connection is None and self._connecting is None and not self._retry.is_set:
                    self._open()
        return upload.result

    def flush(self) -> None:
        """Send the last requests now, if no response is outstanding; see ``PipelinedConnection.flush``."""
        if self._connection is not None:
            self._connection.flush()

    def close(self, reason: Callable[[], PipegridError] | None = None) -> Deferred[None]:
        """
        Fail the unanswered requests and close the connection; fires when the connection is closed.

        Args:
            reason: makes the error for each request; by default the error says that the client disconnected.
        """
        self._closed = True
        self._retry.stop()
        if self._connecting is not None:
            self._connecting.cancel()
        uploads = self._take_waiting()
        gone = self._dialer.when_gone()
        connection = self._connection
        if connection is not None:
            lost = connection.when_lost()
            gone.addCallback(lambda _: lost)
            for exchange in (*connection.lane.written, *connection.lane.queued):
                if isinstance(exchange, _Attempt) and not exchange.abandoned:
                    uploads.append(exchange.upload)
                    exchange.withdraw()
            self._waiting.clear()  # drop requests that the connection has returned
            connection.close()
        self._fail(
            uploads, reason or (lambda: no_connection(self._server, "it was disconnected here"))
        )
        return gone

    # Connecting.

    def _open(self) -> None:
        self._connecting = self._dialer.dial(self)
        self._connecting.addBoth(self._connected)

    def _connected(self, result: PipelinedConnection | Failure) -> None:
        self._connecting = None
        if isinstance(result, Failure):
            self._no_connection(why_not(result))
        elif self._closed:
            result.abort("it was disconnected here")
        else:
            self._connection = result
            result.lane.crowd_bytes = self._crowd_bytes
            for upload in self._take_waiting():
                self._send(upload, result)

    def _no_connection(self, error: BaseException) -> None:
        if self._closed or not self.unanswered:
            return
        if not isinstance(error, WrongServerKey) and self._retry_later():
            return
        self._give_up({}, not_connected(self._server, error))

    def _retry_later(self) -> bool:
        """
        Schedule a reconnection after a pause; return False if no connection was lost, or the time limit is
        reached.
        """
        if self._lost_at_s is None:
            return False
        wait_s, self._wait_s = self._wait_s, min(2 * self._wait_s, MAX_WAIT_S)
        if self._clock.seconds() + wait_s - self._lost_at_s > self._time_limit_s:
            return False
        self._retry.set(wait_s)
        return True

    def _try_again(self) -> None:
        if self.unanswered:
            self._open()

    def _send(self, upload: _Upload, connection: PipelinedConnection) -> None:
        attempt = upload.attempt = _Attempt(upload, self._server, self._ended)
        connection.submit(attempt)

    # The end of a request: a response, an error, or its cancellation.

    def _ended(self, upload: _Upload, outcome: RawResponse | PipegridError) -> None:
        upload.attempt = None  # break the cycle, which would keep a megabyte of share data
        if upload.ended:
            return
        self._end(upload)
        if isinstance(outcome, RawResponse):
            upload.result.callback((outcome, upload.maybe_done))
        else:
            upload.result.errback(outcome)

    def _end(self, upload: _Upload) -> None:
        upload.ended = True
        self.unanswered -= 1

    def _cancelled(self, upload: _Upload) -> None:
        if upload.ended:
            return
        self._end(upload)
        self._waiting.pop(upload, None)
        attempt, upload.attempt = upload.attempt, None
        if attempt is not None:
            attempt.withdraw()
        if not self.unanswered:
            self._retry.stop()

    def _take_waiting(self) -> list[_Upload]:
        waiting, self._waiting = list(self._waiting), {}
        return waiting

    def _put_back(self, unanswered: list[Unanswered]) -> dict[_Upload, PipegridError]:
        """Put the returned requests before the waiting ones; return the error for each returned request."""
        errors: dict[_Upload, PipegridError] = {}
        for each in unanswered:
            assert isinstance(each.exchange, _Attempt)
            upload = each.exchange.upload
            upload.attempt = None
            errors[upload] = each.error
            if not isinstance(each.error, RequestNotSent):
                upload.maybe_done = True
        self._waiting = {**dict.fromkeys(errors), **self._waiting}
        return errors

    def _take_once(self) -> list[_Upload]:
        """End the waiting requests that are sent only once, and return them."""
        once = [upload for upload in self._waiting if upload.once]
        for upload in once:
            del self._waiting[upload]
            self._end(upload)
        return once

    def _fail(self, uploads: list[_Upload], error: Callable[[], PipegridError]) -> None:
        for upload in uploads:
            self._end(upload)
            upload.attempt = None
        self._fail_ended(uploads, error)

    def _fail_ended(self, uploads: list[_Upload], error: Callable[[], PipegridError]) -> None:
        for upload in uploads:
            if not upload.result.called:  # False if another request's callback has ended it
                upload.result.errback(error())

    def _elsewhere(self) -> AskElsewhere:
        return AskElsewhere(f"The connection to {self._server} was lost.", self._server, True)

    def _error_for(self, upload: _Upload, error: PipegridError) -> PipegridError:
        if not upload.maybe_done or getattr(error, "may_have_happened", False):
            return error
        return ServerUnreachable(
            f"{error} What was sent before may have been carried out.", self._server, True
        )

    def _reset(self) -> None:
        self._losses, self._lost_at_s, self._wait_s = 0, None, FIRST_WAIT_S

    # Methods of the connection's owner; see ``http11.connection_loss``.

    def has_space(self, connection: PipelinedConnection) -> None:
        """Do nothing: while a connection accepts requests, all requests are on the connection."""

    def answered(self, connection: PipelinedConnection, exchange: Exchange) -> None:
        self._reset()

    def blocked(self, connection: PipelinedConnection) -> None:
        """Do nothing: the readers of these responses are not slow."""

    def gave_back(self, unsent: list[Unanswered]) -> None:
        """
        Keep the requests that may be repeated. They are sent with all others when this connection is lost; on
        a new connection they would overtake the requests on this one.
        """
        self._put_back(unsent)
        self._fail_ended(self._take_once(), self._elsewhere)

    def lost(
        self, connection: PipelinedConnection, loss: Loss, unanswered: list[Unanswered]
    ) -> None:
        """Send the unanswered requests again, or fail them."""
        errors = self._put_back(unanswered)
        if connection is not self._connection:
            return  # not the current connection: it was lost during close
        self._connection = None
        once = [] if loss.garbage or loss.timed_out else self._take_once()
        self._go_on(loss, errors)
        self._fail_ended(once, self._elsewhere)

    def _go_on(self, loss: Loss, errors: dict[_Upload, PipegridError]) -> None:
        """Connect again after a loss if requests wait, or fail the requests if a limit is reached."""
        if self._closed or not self.unanswered:
            self._reset()
        elif loss.garbage or loss.timed_out:
            self._give_up(errors, no_connection(self._server, loss.reason))
        else:
            self._losses += not loss.announced
            if self._lost_at_s is None:
                self._lost_at_s = self._clock.seconds()
            at_once = self._losses <= 1
            if self._losses > MAX_LOSSES or not (at_once or self._retry_later()):
                self._give_up(errors, no_connection(self._server, loss.reason))
                return
            gone = [upload for upload in self._waiting if upload.request.is_gone]
            for upload in gone:
                del self._waiting[upload]
            if at_once:
                self._open()
            self._fail(gone, lambda: self._lost_error(loss.reason))

    def _lost_error(self, why: str) -> WriteLost:
        return WriteLost(
            f"The connection to {self._server} was lost during a write ({why}); the write may have been"
            " carried out, and must be repeated.",
            self._server,
            True,
        )

    def _give_up(self, errors: dict[_Upload, PipegridError], otherwise: PipegridError) -> None:
        uploads = self._take_waiting()
        self._reset()
        for upload in uploads:
            self._end(upload)
        for upload in uploads:
            if not upload.result.called:
                upload.result.errback(self._error_for(upload, errors.get(upload, otherwise)))

    def _check_invariants(self) -> None:
        """Check, for tests, that every unanswered request is in exactly one place."""
        lane = () if self._connection is None else self._connection.lane
        on_it = [
            each.upload
            for each in ((*lane.written, *lane.queued) if lane else ())
            if isinstance(each, _Attempt) and not each.abandoned
        ]
        assert len(on_it) + len(self._waiting) == self.unanswered, self
        assert not set(on_it) & self._waiting.keys(), self
        assert not any(upload.ended for upload in (*on_it, *self._waiting)), self
