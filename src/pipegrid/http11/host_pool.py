"""The pool of connections to one host, and statistics about the host."""

from __future__ import annotations

import math
from collections import deque

from twisted.internet.defer import Deferred, DeferredList, fail
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from pipegrid.errors import PipegridError, UsageError
from pipegrid.http11.connection import PipelinedConnection
from pipegrid.http11.connection_limits import Limits
from pipegrid.http11.connection_loss import Loss, Unanswered
from pipegrid.http11.dialer import Dialer, Endpoints, why_not
from pipegrid.http11.exchange import (
    AgentClosed,
    Exchange,
    RawCall,
    RawRequest,
    RawResponse,
    RequestMaybeProcessed,
    RequestNotSent,
    WrongServerKey,
    no_connection,
    not_connected,
    too_many_waiting,
)
from pipegrid.reactor.deferreds import check_own_thread

# What the responses of one host show about the host.
#
# **Size of responses.** If no caller knows how long a response will be, the sizes of the host's earlier
# responses give an estimate. A longer response raises the estimate to its size at once, and a shorter one
# lowers it by a sixteenth of the difference. So a host that mixes long and short responses is treated as one
# with long responses, which is slower but correct.
#
# **Pipelining.** Most servers support it. Some do not: they close, drop requests that they have read in
# advance, or confuse responses. Such a host gets one request at a time for a while, longer each time, up to
# ``serial_memory_s``. A single closed connection proves nothing, since servers restart and close idle
# connections. Two closed connections in a row without a success in between are enough; so is garbage or
# silence after pipelined requests.
#
# **Requests per connection.** Servers close a connection after a number of responses: nginx after 1000 (100
# before 1.19.10), Apache httpd after 100. Requests that are written after that number are wasted: of 6,200
# files, 5,273 were requested twice. So ``quota`` begins with the most usual number. If a host closes earlier,
# that number becomes the quota; if it goes on after the quota, there is no quota.
#
# **Outstanding bytes.** Every server can take ``response_budget_bytes``. A host gets a measured window if its
# ``Server`` header names a product that can take more, or if the host has answered ``PROOF`` pipelined
# requests and the header names any product except Twisted. If a connection with a measured window is lost
# once with several unanswered requests, the host gets no measured window again. A caller that knows the
# host's program can raise the budget.

MIN_ASSUMED_BYTES = 256

FIRST_QUOTA = 1000.0
LEAST_QUOTA = 10
"""If a server closes a connection after fewer responses, the reason is not a quota."""

PROOF = 10  # this many pipelined responses prove that pipelining works

BEAR_MORE = (
    b"nginx",
    b"openresty",
    b"apache",
    b"lighttpd",
    b"caddy",
    b"varnish",
    b"h2o",
    b"ats",
    b"litespeed",
)
"""Products that stop reading while they cannot write, by the beginning of ``Server`` in lower case."""

BEAR_LESS = (b"twisted",)
"""Products that drop the connection if a request arrives while they cannot write."""

FIRST_SERIAL_SHARE = 1 / 60
"""The fraction of ``serial_memory_s`` for which a host gets one request at a time after the first failure."""


class HostStats:
    """
    What is known about one host.

    Attributes:
        assumed_response_bytes: the estimate for a response of unknown size.
        proven: whether the host speaks HTTP/1.1 and keeps connections open, so that even a request that must
            not be repeated may be pipelined.
        takes_larger_budget: whether more than ``response_budget_bytes`` may be outstanding.
        quota: how many requests one connection accepts, as far as known.
        quota_is_reported: whether the host has announced the close after that number.

    Args:
        serial: whether the host always gets one request at a time.
    """

    def __init__(self, limits: Limits, serial: bool = False) -> None:
        self._limits = limits
        self.assumed_response_bytes = limits.assumed_response_bytes
        self.proven = False
        self.takes_larger_budget = False
        self.quota = FIRST_QUOTA
        self.quota_is_reported = False
        self._strikes = 0
        self._behind = 0
        self._product: bytes | None = None
        self._burned = limits.max_response_budget_bytes <= limits.response_budget_bytes
        self._serial_until = float("inf") if serial else 0.0
        self._serial_s = limits.serial_memory_s * FIRST_SERIAL_SHARE

    def __repr__(self) -> str:
        return (
            f"<HostStats {'proven' if self.proven else 'unproven'},"
            f" {self._strikes} strikes, serial until {self._serial_until:g},"
            f" answers of {self.assumed_response_bytes} bytes>"
        )

    def is_serial(self, now: float) -> bool:
        """Return whether this host now gets one request at a time."""
        return now < self._serial_until

    def answered(self, exchange: Exchange, now: float, others_behind: bool) -> None:
        """
        Record a complete response.

        Args:
            others_behind: whether later requests were outstanding when the response arrived.
        """
        size = exchange.received_bytes
        assumed = self.assumed_response_bytes
        if size >= assumed:
            self.assumed_response_bytes = size
        elif assumed > MIN_ASSUMED_BYTES:
            self.assumed_response_bytes = max(
                MIN_ASSUMED_BYTES, assumed - 1 - (assumed - size >> 4)
            )
        if not self.proven:
            head = exchange.response
            assert head is not None
            if head.version == (1, 0):
                self._serial_s = self._limits.serial_memory_s
                self._become_serial(now)
            elif head.keep_alive:
                self.proven = True
        if not (self.takes_larger_budget or self._burned):
            self._judge(exchange, others_behind)

    def outlasted(self, answered: int) -> None:
        """
        Record that a connection stays open after this many responses; if they reach the quota, the host has
        no quota.
        """
        if answered >= self.quota:
            self.quota = float("inf")

    def _judge(self, exchange: Exchange, others_behind: bool) -> None:
        """Decide whether more than ``response_budget_bytes`` may be outstanding."""
        product = self._product
        if product is None:
            head = exchange.response
            assert head is not None
            named = [value for name, value in head.headers if name == b"server"]
            product = self._product = named[0].lower() if named else b""
        self._behind += others_behind
        if not product or product.startswith(BEAR_LESS):
            self._burned = True
        elif self.proven:
            self.takes_larger_budget = product.startswith(BEAR_MORE) or self._behind >= PROOF

    def lost(self, loss: Loss, answered_after: int, now: float) -> bool:
        """
        Record the end of a connection.

        Args:
            answered_after: how many of the connection's responses came while later requests were outstanding.

        Returns:
            Whether pipelining may be the cause, so that a request may succeed if it is repeated without
                pipelining.
        """
        if loss.announced_close and loss.answered >= LEAST_QUOTA:
            self.quota = loss.answered
            self.quota_is_reported = True
        if self.takes_larger_budget and loss.in_flight > 1 and not loss.announced:
            self.takes_larger_budget, self._burned = False, True
        if answered_after >= PROOF:
            self._strikes = 0
            if not loss.garbage:
                return False
        if loss.announced or loss.in_flight < 2 or self.is_serial(now):
            return False
        self._strikes += 2 if loss.garbage or loss.timed_out else 1
        if self._strikes < 2:
            return False
        self._become_serial(now)
        return True

    def _become_serial(self, now: float) -> None:
        self._strikes = 0
        self.proven = False
        self._serial_until = max(self._serial_until, now + self._serial_s)
        self._serial_s = min(2 * self._serial_s, self._limits.serial_memory_s)


# The connections to one host, and the requests that wait for them.
#
# **Decide, then act.** Only ``_assign`` gives requests to connections. It is called after everything that
# could change its outcome. It takes requests from the front of the queue while the first request fits on a
# connection, and opens connections for the rest. No request overtakes another, so none starves. A caller that
# needs responses in order uses one ``PipelinedConnection``.
#
# **After a loss.** Requests that the server cannot have processed, and those that may be repeated, return to
# the front of the queue in their old order; all others fail. The loss counts as an attempt of the request
# whose response was due, or of all requests on the connection if it never received a response. After
# ``max_attempts`` a request fails. So every loss brings a request nearer to its end, and reconnecting ends.
#
# **Silence.** If a server accepts connections and never responds, each of many requests would wait for its
# own timeout. So all waiting requests without a longer timeout fail with the first one. If the host has
# responded before, they fail after ``SECOND_CHANCE`` times as long, since perhaps only pipelining has failed.

SECOND_CHANCE = 2


class HostPool:
    """
    Requests to one host, over as many connections as they need and the limits allow.

    Args:
        clock: for all timeouts.
        connect: makes the endpoint for one more connection.
        server: the host's name for error messages.
        serial: always one request at a time on each connection.
        cautious: no request is pipelined before the host has sent a complete response.
    """

    def __init__(
        self,
        clock: IReactorTime,
        connect: Endpoints,
        server: str,
        limits: Limits | None = None,
        *,
        serial: bool = False,
        cautious: bool = False,
    ) -> None:
        self._clock = clock
        self._server = server
        self._limits = limits or Limits()
        self._dialer = Dialer(clock, self._limits, server, connect)
        self.record = HostStats(self._limits, serial)
        self._budget_bytes = self._limits.response_budget_bytes
        self._unknown = cautious
        self._waiting: deque[Exchange] = deque()
        self._connections: list[PipelinedConnection] = []  # ready ones
        self._connecting: set[Deferred[PipelinedConnection]] = set()
        self._may_grow = True  # False from a failed attempt to the next response
        self._assigning = False
        self._dropping = False
        self._closed = False
        self._leaving: list[PipelinedConnection] = []
        self._heard = False
        self._silent_since_s: float | None = None

    def __repr__(self) -> str:
        return (
            f"<HostPool {self._server}: {len(self._waiting)} waiting, {self._connections},"
            f" {len(self._connecting)} connecting, {self.record}>"
        )

    @property
    def is_idle(self) -> bool:
        """Whether dropping the pool would lose only its statistics."""
        return not (self._waiting or self._connections or self._connecting)

    @property
    def is_connected(self) -> bool:
        """Whether at least one connection exists, so that a request need not wait for one."""
        return bool(self._connections)

    @property
    def last_activity_s(self) -> float:
        """The time when bytes were last received or sent on any of the pool's connections, by the clock."""
        return max((each.last_activity_s for each in self._connections), default=-math.inf)

    def request(self, request: RawRequest) -> Deferred[RawResponse]:
        """
        Send a raw request on any connection with capacity; fires with its response.

        Cancelling withdraws the request. Errors are those of ``PipelinedConnection.request``, after
        repeatable requests were repeated; UsageError in another thread than the reactor's.
        """
        try:
            check_own_thread("A pool of connections")
        except UsageError as error:
            return fail(error)
        exchange = RawCall(request, self._server)
        self.submit(exchange)
        return exchange.result

    def connect(self) -> None:
        """
        Make a connection for later requests, unless there is one. If connecting fails, later requests connect
        again.
        """
        if not (self._connections or self._connecting or self._closed):
            self._open_connection()

    def raise_budget(self, response_bytes: int) -> None:
        """Let at least this many bytes of responses be outstanding on each connection from now on."""
        if response_bytes > self._budget_bytes:
            self._budget_bytes = response_bytes
            for connection in self._connections:
                connection.lane.raise_budget(response_bytes)

    def submit(self, exchange: Exchange) -> None:
        """Accept a request, or fail the request at once."""
        if self._closed:
            exchange.failed(self._refused())
        elif len(self._waiting) >= self._limits.max_waiting:
            exchange.failed(too_many_waiting(len(self._waiting), self._server))
        else:
            self._waiting.append(exchange)
            self._assign()

    def close(self) -> Deferred[None]:
        """
        Fail all requests, even sent ones; fires when all connections are closed.

        Wait for responses before you call this. A second call fires at the same time as the first.
        """
        self._closed = True
        waiting, self._waiting = self._waiting, deque()
        for exchange in waiting:
            _fail(exchange, self._refused())
        for attempt in list(self._connecting):
            attempt.cancel()
        self._leaving += self._connections
        for connection in list(self._connections):
            if connection.is_wanted:
                connection.abort("the agent was closed")
            else:
                connection.close()
        leaving = [connection.when_lost() for connection in self._leaving]
        leaving.append(self._dialer.when_gone())
        gone: Deferred[None] = DeferredList(leaving).addCallback(lambda _: None)
        return gone

    def drop(self, reason: str) -> None:
        """
        Abort all connections; requests on connections and waiting requests fail and are not repeated.

        Requests submitted later get new connections, even if the callback of a failure submits them.

        Args:
            reason: a clause for the errors.
        """
        waiting, self._waiting = self._waiting, deque()
        assigning, self._assigning = self._assigning, True
        self._dropping = True
        try:
            for attempt in list(self._connecting):
                attempt.cancel()
            for connection in list(self._connections):
                connection.abort(reason)
            for exchange in waiting:
                _fail(exchange, no_connection(self._server, reason))
        finally:
            self._dropping, self._assigning = False, assigning
        self._may_grow = True
        self._assign()

    def _refused(self) -> AgentClosed:
        return AgentClosed(
            f"The agent was closed, so nothing more is sent to {self._server}; make another one.",
            self._server,
        )

    # Decisions.

    def _assign(self) -> None:
        """Give waiting requests to connections with capacity, and open connections for the rest."""
        if self._assigning:
            return  # the outer call will repeat the check
        self._assigning = True
        try:
            while not self._place_waiting() and self._wants_connection():
                self._open_connection()
        finally:
            self._assigning = False

    def _place_waiting(self) -> bool:
        """
        Assign waiting requests while the first one fits on a connection; return True if no request is left.
        """
        waiting = self._waiting
        while waiting:
            exchange = waiting[0]
            if not exchange.abandoned:
                connection = self._best_for(exchange)
                if connection is None:
                    return False
                connection.submit(exchange)
            waiting.popleft()
        return True

    def _best_for(self, exchange: Exchange) -> PipelinedConnection | None:
        """
        Return the connection with the fewest requests on which this request could be written at once; None if
        there is none.
        """
        record = self.record
        serial = record.is_serial(self._clock.seconds())
        needs_proof = self._unknown or (not exchange.idempotent and not record.proven)
        best, best_load = None, 0
        for connection in self._connections:
            if not connection.open or connection.blocked:
                continue
            lane = connection.lane
            lane.serial = serial
            lane.assumed_response_bytes = record.assumed_response_bytes
            load = len(lane)
            if load and (needs_proof or not lane.has_space(exchange)):
                continue
            if best is None or load < best_load:
                best, best_load = connection, load
        return best

    def _wants_connection(self) -> bool:
        """Return whether the waiting requests need one more connection than those that are being made."""
        limits = self._limits
        coming = len(self._connecting)
        have = len(self._connections) + coming
        if have >= limits.max_connections or not self._may_grow or self._closed:
            return False
        serial = self.record.is_serial(self._clock.seconds())
        assumed = self.record.assumed_response_bytes
        lanes = count = charged = 0
        for exchange in self._waiting:
            if (
                not lanes
                or serial
                or count == limits.max_requests_in_flight
                or charged > self._budget_bytes
            ):
                if lanes == coming:
                    return True
                lanes, count, charged = lanes + 1, 0, 0
            count += 1
            expected = exchange.expected_response_bytes
            charged += assumed if expected is None else expected
        return False

    # New connections.

    def _open_connection(self) -> None:
        attempt = self._dialer.dial(self)
        self._connecting.add(attempt)
        attempt.addBoth(self._connected, attempt)

    def _connected(
        self, result: PipelinedConnection | Failure, attempt: Deferred[PipelinedConnection]
    ) -> None:
        self._connecting.discard(attempt)
        if isinstance(result, Failure):
            self._no_connection(why_not(result))
        elif self._closed:
            result.abort("the agent was closed")
        else:
            result.lane.raise_budget(self._budget_bytes)
            self._connections.append(result)
            self._assign()

    def _no_connection(self, error: BaseException) -> None:
        """Handle a failed attempt to connect: if no connection is left, all waiting requests fail."""
        self._may_grow = self._has_no_hope()
        if not self._may_grow:
            return
        sentence = not_connected(self._server, error)
        waiting, self._waiting = self._waiting, deque()
        for exchange in waiting:
            _fail(exchange, sentence)

    def _has_no_hope(self) -> bool:
        """Return whether no connection is made or being made that can answer waiting requests."""
        # A connection that a reader delays does not count: the reader may delay it for any time.
        return not self._connecting and all(each.blocked for each in self._connections)

    # Notifications from the connections.

    def has_space(self, connection: PipelinedConnection) -> None:
        if connection in self._connections:  # not in the list while it is being made
            self._heard, self._silent_since_s = True, None
        if self._waiting:
            self._assign()

    def answered(self, connection: PipelinedConnection, exchange: Exchange) -> None:
        self._may_grow = True
        self._unknown = False
        record, lane = self.record, connection.lane
        record.answered(exchange, self._clock.seconds(), bool(lane.written))
        if record.takes_larger_budget:
            lane.measure()

    def blocked(self, connection: PipelinedConnection) -> None:
        self._waiting.extendleft(reversed(connection.move_followers()))
        self._may_grow = True  # it may be blocked for long: allow another connection
        self._assign()

    def gave_back(self, unsent: list[Unanswered]) -> None:
        self._repeat_or_fail(unsent)

    def lost(
        self, connection: PipelinedConnection, loss: Loss, unanswered: list[Unanswered]
    ) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
        if self._has_no_hope():
            self._may_grow = True  # so that waiting requests get a connection
        now = self._clock.seconds()
        pipelining_failed = self.record.lost(loss, connection.answered_after, now)
        if not loss.announced:
            for each in unanswered if not loss.answered else unanswered[:1]:
                each.exchange.attempts += 1
        # With many connections on a slow link, one connection may receive nothing for long although the
        # server is not silent.
        starved = loss.timed_out and self.last_activity_s > now - self._limits.timeout_s
        if loss.timed_out:
            unanswered = self._fail_what_waits_too_long(connection, loss, unanswered)
        self._repeat_or_fail(unanswered, pipelining_failed or starved, loss.timed_out)

    def _fail_what_waits_too_long(
        self, connection: PipelinedConnection, loss: Loss, unanswered: list[Unanswered]
    ) -> list[Unanswered]:
        """
        Fail the requests whose timeout the host's silence has reached; return the other unanswered ones.
        """
        since_s = self._silent_since_s
        if since_s is None:
            since_s = self._silent_since_s = connection.last_activity_s
        silent_s = self._clock.seconds() - since_s
        chances = SECOND_CHANCE if self._heard else 1

        def is_over(exchange: Exchange) -> bool:
            own_s = exchange.timeout_s
            return chances * (self._limits.timeout_s if own_s is None else own_s) <= silent_s

        late = [each for each in self._waiting if is_over(each)]
        self._waiting = deque(each for each in self._waiting if not is_over(each))
        failed = [each for each in unanswered if is_over(each.exchange)]
        for each in failed:
            _fail(each.exchange, each.error)
        for exchange in late:
            _fail(exchange, no_connection(self._server, loss.reason))
        return [each for each in unanswered if each not in failed]

    def _repeat_or_fail(
        self,
        unanswered: list[Unanswered],
        not_its_fault: bool = False,
        was_silent: bool = False,
    ) -> None:
        again = [
            each
            for each in unanswered
            if self._can_repeat(each, not_its_fault)
            and not (was_silent and not each.exchange.again_after_silence)
        ]
        self._waiting.extendleft(each.exchange for each in reversed(again))
        for each in unanswered:
            if not isinstance(each.error, RequestNotSent):
                each.exchange.maybe_processed = True
            if each not in again:
                _fail(each.exchange, each.error)
        self._assign()

    def _can_repeat(self, each: Unanswered, not_its_fault: bool) -> bool:
        exchange, error = each.exchange, each.error
        if (
            self._closed
            or self._dropping
            or not exchange.can_be_repeated
            or exchange.attempts >= self._limits.max_attempts
        ):
            return False
        if isinstance(error, RequestNotSent):
            return not isinstance(error, WrongServerKey)
        # After garbage or silence no request is repeated, unless pipelining or a slow link may be the cause.
        return exchange.idempotent and (not_its_fault or isinstance(error, RequestMaybeProcessed))

    def _check_invariants(self) -> None:
        assert len(self._connections) + len(self._connecting) <= self._limits.max_connections, self
        for connection in self._connections:
            connection._check_invariants()
        for exchange in self._waiting:
            assert exchange.connection is None, exchange


def _fail(exchange: Exchange, error: PipegridError) -> None:
    """Fail an exchange with an error that considers all attempts, not only the last one."""
    if exchange.abandoned:
        return
    if exchange.maybe_processed and isinstance(error, RequestNotSent):
        error = RequestMaybeProcessed(
            f"{error} It had been sent before, and may have been processed then.", error.server
        )
    exchange.failed(error)
